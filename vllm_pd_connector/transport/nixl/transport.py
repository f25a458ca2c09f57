"""NIXL over UCX, spoken to through its bindings.

Runs become (n, 3) descriptor arrays and one request each (`createXferReq`). Prepared lists per peer were measured and
gain nothing for runs that the binder merged already: see docs/design/transports.md for this and every other figure.

What the library does not do, and this module does:
- **Idle costs nothing.** NIXL's Python agent starts a progress thread that never sleeps. The bindings take the
  thread's interval; nothing of the library is patched, so another NIXL user in the process is not affected.
- **Who posts has no progress thread.** Beside one, posted reads and writes were seen to stand still for seconds, and
  three times for ever, with every later one to that peer. So there are two agents: one with a thread, which peers know
  and which posts nothing, and one without, whose transfers are moved by being polled. Each exists where it is needed.
- **A call is bounded.** On one host UCX copies inside the call that posts. A transfer is posted in batches, and a call
  that has spent its few milliseconds leaves the rest to `poll`, so that the thread which owns the transport stays
  responsive. Where posting only queues work (TCP, RDMA), all batches are posted at once and run together.
- **Nothing running is released.** NIXL's release returns at once and data still lands. A handle is released when it
  is terminal; `disconnect` only marks a peer that has running transfers, and the last of them removes it. Handles
  that failed in an unknown way live until `close`, which ends all by destroying the agent.
- **There is a way out.** When transfers with a healthy peer stand still all the same, another agent takes the place of
  the one that posts, for new connections (`replace_endpoint`). The old one ends when its last transfer has: ended
  earlier, over TCP, it kills a peer that still answers it.
- **Peers are removed.** After a death NIXL still believes in a peer and refuses it for ever; `disconnect` removes it.

Source of the library's behaviour: NIXL 1.5.1 with UCX 1.23.0, observed (docs/design/transports.md).
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_pd_connector.errors import InvalidConfig, TransferError
from vllm_pd_connector.transport.base import Transfer, TransferStatus, TransportPeer, follow, options_of
from vllm_pd_connector.transport.endpoint import seal, unseal
from vllm_pd_connector.transport.nixl.bindings import NixlOptions, backend_parameters, bindings, translate
from vllm_pd_connector.transport.ranges import Descriptors, Ranges, batches, cut

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from vllm_pd_connector.geometry.manifest import Segment
    from vllm_pd_connector.geometry.runs import Addresses, Runs

logger = logging.getLogger(__name__)

NAME = "nixl"

# A batch is bounded in time: one descriptor costs 2 us on one host (measured), as much as this many bytes at 9 GB/s.
_DESCRIPTOR_COST_BYTES = 16 << 10

# No new batch is posted in a call that took this long.
_POST_S = 0.005

# Agents that were replaced and still run transfers; each holds the registrations of all memory.
_MAX_OLDER = 3


@dataclass(eq=False, slots=True)
class _Agent:
    """An agent of ours: the library's object, and how often each peer is connected."""

    name: str
    library: Any
    peers: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False, slots=True)
class _Peer:
    """`agent` is ours that posts to it."""

    agent: _Agent
    name: str
    ranges: Ranges
    running: int = 0
    leaving: bool = False


@dataclass(eq=False, slots=True)
class _Transfer:
    """`waiting` batches are not posted yet, `posted` are the handles of those that run; `outcome` is set at the end."""

    peer: _Peer
    operation: Any
    waiting: deque[Descriptors]
    descriptors: int
    posted: list[int] = field(default_factory=list)
    failure: TransferError | None = None
    outcome: TransferStatus | TransferError | None = None
    reported: bool = False

    @property
    def left(self) -> int:
        return len(self.waiting) + len(self.posted)


class NixlTransport:
    """See `base.Transport`. `serves`: whether peers may read or write what is registered here.

    Raises:
        InvalidConfig: NIXL is not installed, or an option is out of range.
        TransferError: NIXL cannot start its backend.
    """

    name = NAME

    def __init__(self, options: NixlOptions | None = None, *, serves: bool = True) -> None:
        self._options = options or NixlOptions()
        self._nixl = bindings()
        self._errors = tuple(
            kind
            for kind in vars(self._nixl).values()
            if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception
        )
        self._ranges = Ranges.of((), "this worker")
        if self._options.progress_interval_us < 1 or self._options.batch_bytes < 1:
            raise InvalidConfig("progress_interval_us and batch_bytes must be at least 1")
        self._target = self._start_agent(threaded=True) if serves else None
        self._poster = None if serves else self._start_agent(threaded=False)
        self._older: list[_Agent] = []

    def _start_agent(self, *, threaded: bool) -> _Agent:
        name = f"pd-{uuid.uuid4().hex}"
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = threaded
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = self._options.progress_interval_us
        with self._translated(f"starting NIXL with backend {self._options.backend}"):
            agent = self._nixl.nixlAgent(name, config)
            agent.createBackend(self._options.backend, backend_parameters(self._options, os.environ))
        return _Agent(name, agent)

    def register(self, segments: Sequence[Segment]) -> None:
        ranges = Ranges.of(segments, "this worker")
        for agent in (self._target, self._poster):
            if agent is not None:
                self._register(agent, ranges)
        self._ranges = ranges

    def _register(self, agent: _Agent, ranges: Ranges) -> None:
        for kind, cuda in ((self._nixl.DRAM_SEG, False), (self._nixl.VRAM_SEG, True)):
            index = np.flatnonzero(ranges.cuda == cuda)
            columns = (ranges.start[index], (ranges.stop - ranges.start)[index], ranges.device[index])
            described = [(*row, b"") for row in zip(*(column.tolist() for column in columns), strict=True)]
            if described:
                with self._translated(f"registering {len(described)} segments of {'cuda' if cuda else 'cpu'} memory"):
                    agent.library.registerMem(self._nixl.nixlRegDList(kind, described), [])

    def describe(self) -> bytes:
        agent = self._target or self._posting()
        with self._translated("describing this agent"):
            return seal(NAME, agent.name, agent.library.getLocalMD())

    def _posting(self) -> _Agent:
        """The agent that posts; one that is a target besides is joined by it when it first connects."""
        if self._poster is None:
            agent = self._start_agent(threaded=False)
            self._register(agent, self._ranges)
            self._poster = agent
        return self._poster

    def connect(self, endpoint: bytes, segments: Sequence[Segment]) -> TransportPeer:
        made = unseal(NAME, endpoint)
        ranges = Ranges.of(segments, "the peer")
        if any(agent is not None and made.name == agent.name for agent in (self._target, self._poster)):
            raise TransferError(f"agent {made.name} is this worker's own")
        # The library takes the name out of the metadata: it must not be able to replace another peer.
        if made.name.encode() not in made.metadata:
            raise TransferError(f"endpoint says agent {made.name}, its metadata another; fetch the manifest again")
        agent = self._posting()
        self._meet(agent, made.name, made.metadata)
        return _Peer(agent, made.name, ranges)

    def _meet(self, agent: _Agent, name: str, metadata: bytes) -> None:
        """Load a peer into an agent of ours, if it is not there yet, and count the connection."""
        if not agent.peers[name]:
            try:
                agent.library.loadRemoteMD(metadata)
            except self._errors as error:
                self._forget(agent, name)
                raise TransferError(
                    f"adding agent {name}: {error}; its process ended, it cannot be reached from here, or the two "
                    "sides run different versions of NIXL or different UCX settings",
                    retryable=isinstance(error, self._nixl.nixlBackendError),
                ) from error
        agent.peers[name] += 1

    def disconnect(self, peer: TransportPeer) -> None:
        assert isinstance(peer, _Peer) and not peer.leaving
        peer.leaving = True
        self._forget_when_idle(peer)

    def read(self, peer: TransportPeer, runs: Runs) -> Transfer:
        assert isinstance(peer, _Peer) and not peer.leaving
        return self._start(peer, self._nixl.NIXL_READ, runs, peer.ranges, self._ranges)

    def write(self, peer: TransportPeer, runs: Runs) -> Transfer:
        assert isinstance(peer, _Peer) and not peer.leaving
        return self._start(peer, self._nixl.NIXL_WRITE, runs, self._ranges, peer.ranges)

    def poll(self, transfer: Transfer) -> TransferStatus:
        assert isinstance(transfer, _Transfer)
        return follow(transfer, self._advance)

    def replace_endpoint(self, peer: TransportPeer) -> None:
        assert isinstance(peer, _Peer)
        if peer.agent is not self._poster:
            return
        if len(self._older) >= _MAX_OLDER:
            raise TransferError(f"{len(self._older)} replaced agents still run transfers, no other starts")
        agent = self._start_agent(threaded=False)
        self._register(agent, self._ranges)
        self._older.append(self._poster)
        self._poster = agent

    def close(self) -> None:
        """Destroys all agents, which ends running transfers: nothing lands after this returns."""
        for agent in (*self._older, self._poster, self._target):
            if agent is not None:
                agent.library = None

    def _start(self, peer: _Peer, operation: Any, runs: Runs, source: Ranges, destination: Ranges) -> _Transfer:
        limit = self._options.batch_bytes
        work = cut(runs, source, destination, limit)
        waiting = deque(batches(work, source, destination, limit, _DESCRIPTOR_COST_BYTES))
        transfer = _Transfer(peer, operation, waiting, len(work.runs))
        peer.running += 1
        self._advance(transfer)
        return transfer

    def _advance(self, transfer: _Transfer) -> None:
        """Look at what was posted, post more for a short while, and set the outcome at the end."""
        peer = transfer.peer
        transfer.posted = [handle for handle in transfer.posted if self._runs_on(transfer, handle)]
        if transfer.waiting and peer.leaving and transfer.failure is None:
            transfer.failure = TransferError(f"agent {peer.name} was disconnected before the whole transfer was posted")
        until = time.monotonic() + _POST_S
        while transfer.waiting and transfer.failure is None and time.monotonic() < until:
            self._post(transfer)
        if transfer.failure is not None:
            transfer.waiting.clear()
            if not transfer.failure.terminal:
                transfer.outcome = transfer.failure
                return  # bytes may still move: the handles and the peer's metadata stay until `close`
        if not transfer.posted and not transfer.waiting:
            transfer.outcome = transfer.failure or TransferStatus.DONE
            peer.running -= 1
            self._forget_when_idle(peer)

    def _runs_on(self, transfer: _Transfer, handle: int) -> bool:
        """Whether a posted batch has not ended. Its failure is kept in the transfer, its handle given back."""
        try:
            if transfer.peer.agent.library.getXferStatus(handle) == self._nixl.NIXL_IN_PROG:
                return True
        except self._errors as error:
            what = f"transfer with agent {transfer.peer.name}"
            return self._failed(transfer, _ours(error, what, started=True), handle)
        self._release(transfer.peer, handle)
        return False

    def _post(self, transfer: _Transfer) -> None:
        """Post the next batch."""
        batch, peer = transfer.waiting.popleft(), transfer.peer
        agent, name = peer.agent.library, peer.name
        try:
            handle = agent.createXferReq(transfer.operation, *self._lists(transfer, batch), name, b"", [])
        except self._errors as error:
            self._failed(transfer, _ours(error, f"preparing a transfer with agent {name}"), None)
            return
        try:
            status = agent.postXferReq(handle, b"")
        except self._errors as error:
            if self._failed(transfer, _ours(error, f"posting a transfer with agent {name}", started=True), handle):
                transfer.posted.append(handle)
            return
        if status == self._nixl.NIXL_IN_PROG:
            transfer.posted.append(handle)
        else:
            self._release(peer, handle)

    def _failed(self, transfer: _Transfer, error: TransferError, handle: int | None) -> bool:
        """Keep the failure of a batch, the worst if there are several; whether the batch may still move bytes."""
        if transfer.failure is None or not error.terminal:
            transfer.failure = error
        if error.terminal and handle is not None:
            self._release(transfer.peer, handle)
        return not error.terminal

    def _lists(self, transfer: _Transfer, batch: Descriptors) -> tuple[Any, Any]:
        """NIXL's local and remote descriptor list of a batch."""
        runs = batch.runs
        source = (runs.source, batch.source_range)
        destination = (runs.destination, batch.destination_range)
        reads = transfer.operation == self._nixl.NIXL_READ
        local, remote = (destination, source) if reads else (source, destination)
        return self._list(self._ranges, *local, runs.length), self._list(transfer.peer.ranges, *remote, runs.length)

    def _list(self, ranges: Ranges, address: Addresses, index: NDArray[np.intp], length: Addresses) -> Any:
        """NIXL's descriptor list of one side of a batch, which lies in one kind of memory."""
        kind = self._nixl.VRAM_SEG if ranges.cuda[index[0]] else self._nixl.DRAM_SEG
        rows = np.empty((len(address), 3), dtype=np.int64)
        rows[:, 0], rows[:, 1] = address, length
        rows[:, 2] = ranges.device[0] if ranges.alike else ranges.device[index]
        return self._nixl.nixlXferDList(kind, rows)

    def _release(self, peer: _Peer, handle: int) -> None:
        """Give a handle back that is terminal. A refusal leaves it to `close`; the transfer has ended all the same."""
        try:
            peer.agent.library.releaseXferReq(handle)
        except self._errors as error:
            logger.warning("NIXL keeps a finished transfer: %s", error)

    def _forget_when_idle(self, peer: _Peer) -> None:
        """Remove a peer that is leaving once nothing runs with it: an earlier removal would hide its transfers' end."""
        if peer.leaving and not peer.running:
            self._forget(peer.agent, peer.name)

    def _forget(self, agent: _Agent, name: str) -> None:
        agent.peers[name] -= 1
        if agent.peers[name] > 0:
            return  # it is known under another address too
        del agent.peers[name]
        try:
            agent.library.invalidateRemoteMD(name)
        except self._errors as error:
            logger.debug("NIXL forgot agent %s before: %s", name, error)
        if agent in self._older and not agent.peers:
            self._older.remove(agent)
            agent.library = None

    @contextmanager
    def _translated(self, action: str) -> Iterator[None]:
        """Raise the library's exceptions as ours; for calls that move nothing."""
        try:
            yield
        except self._errors as error:
            raise _ours(error, action) from error


def create(options: Mapping[str, object], *, serves: bool, memory: str) -> NixlTransport:
    """Entry point; see `registry`."""
    return NixlTransport(options_of(NAME, options, NixlOptions), serves=serves)


def _ours(error: Exception, action: str, *, started: bool = False) -> TransferError:
    """The library's exception as ours. `started`: bytes may be moving when it comes."""
    ours = translate(type(error).__name__, f"{action}: {error}", started)
    ours.__cause__ = error.with_traceback(None)  # its frames hold the library's agent, which `close` must end
    return ours
