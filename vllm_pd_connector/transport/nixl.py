"""NIXL over UCX, spoken to through its bindings.

Runs become (n, 3) descriptor arrays and one request each (`createXferReq`). Prepared lists per peer were measured and
gain nothing for runs that the binder merged already: see docs/design/transports.md for this and every other figure.

What the library does not do, and this module does:
- **Idle costs nothing.** NIXL's Python agent starts a progress thread that never sleeps. The bindings take the
  thread's interval; nothing of the library is patched, so another NIXL user in the process is not affected.
- **One thread where one is enough.** An agent that nobody reads from or writes into needs no progress thread: polling
  its own transfers moves them. Beside a progress thread, posted reads were seen to stand still for seconds, and twice
  for ever, with every later one to that peer.
- **A call is bounded.** On one host UCX copies inside the call that posts. A transfer is posted in batches, and a call
  that has spent its few milliseconds leaves the rest to `poll`, so that the thread which owns the transport stays
  responsive. Where posting only queues work (TCP, RDMA), all batches are posted at once and run together.
- **Nothing running is released.** NIXL's release returns at once and data still lands. A handle is released when it
  is terminal; `disconnect` only marks a peer that has running transfers, and the last of them removes it. Handles
  that failed in an unknown way live until `close`, which ends all by destroying the agent.
- **There is a way out.** UCX was seen to leave reads of a healthy peer unfinished, and every later one on that
  connection. Beside an agent that nobody targets there can be a second one for new connections (`renew`). The first
  ends when its last transfer has: ended earlier, over TCP, it kills a peer that still answers it.
- **Peers are removed.** After a death NIXL still believes in a peer and refuses it for ever; `disconnect` removes it.

Source of the library's behaviour: NIXL 1.5.1 with UCX 1.23.0, observed (docs/design/transports.md).
"""

from __future__ import annotations

import importlib
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_pd_connector.errors import InvalidConfig, PeerLost, TransferError
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.geometry.runs import Addresses, Runs
from vllm_pd_connector.transport.base import Peer, Status, Transfer, follow
from vllm_pd_connector.transport.endpoint import seal, unseal
from vllm_pd_connector.transport.ranges import Descriptors, Ranges, batches, cut

logger = logging.getLogger(__name__)

NAME = "nixl"
INSTALL_HINT = "install it with `pip install nixl`, or choose another transport"

# A batch is bounded in time: one descriptor costs 2 us on one host (measured), as much as this many bytes at 9 GB/s.
_DESCRIPTOR_COST_BYTES = 16 << 10

# No new batch is posted in a call that took this long.
_POST_SECONDS = 0.005

# Agents that were replaced and still run transfers; each holds the registrations of all memory.
_MAX_OLDER = 3

_REFUSALS = frozenset(
    f"nixl{name}Error"
    for name in ("NotFound", "InvalidParam", "NotAllowed", "Mismatch", "NotSupported", "NotPosted", "RepostActive")
)


class NixlOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of one agent; the defaults suit one host, TCP and RDMA.

    `backend` and `backend_options` go to NIXL's createBackend as they are. `ucx` are UCX settings without the `UCX_`
    prefix ({"TLS": "tcp,self"}), for this agent only. `tcp_segment_size` is UCX's TCP segment size in both directions
    ("" leaves UCX's default; a UCX_TCP_*_SEG_SIZE in the environment or in `ucx` wins). `progress_interval_us` is the
    longest sleep of the progress thread in microseconds, which events cut short. `batch_bytes` bounds what one call of
    the library is given.
    """

    backend: str = "UCX"
    backend_options: dict[str, str] = {}
    ucx: dict[str, str] = {}
    tcp_segment_size: str = "256k"
    progress_interval_us: int = 2000
    batch_bytes: int = 16 << 20


@dataclass(eq=False, slots=True)
class _Agent:
    """An agent of ours: the library's object, and the names of its peers."""

    name: str
    library: Any
    peers: set[str] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class _Peer:
    """`agent` is ours that connected it."""

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
    notification: bytes
    descriptors: int
    posted: list[int] = field(default_factory=list)
    failure: TransferError | None = None
    outcome: Status | TransferError | None = None
    reported: bool = False


class NixlTransport:
    """See `base.Transport`. `serves`: whether peers may read or write what is registered here.

    Raises:
        InvalidConfig: NIXL is not installed, or an option is out of range.
        TransferError: NIXL cannot start its backend.
    """

    name = NAME

    def __init__(self, options: NixlOptions | None = None, *, serves: bool = True) -> None:
        self._options = options or NixlOptions()
        self._nixl = _bindings()
        self._errors = tuple(
            kind
            for kind in vars(self._nixl).values()
            if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception
        )
        self._ranges = Ranges.of((), "this worker")
        if self._options.progress_interval_us < 1 or self._options.batch_bytes < 1:
            raise InvalidConfig("progress_interval_us and batch_bytes must be at least 1")
        self._serves = serves
        self._agent = self._start_agent()
        self._older: list[_Agent] = []

    def _start_agent(self) -> _Agent:
        name = f"pd-{uuid.uuid4().hex}"
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = self._serves
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = self._options.progress_interval_us
        with self._translated(f"starting NIXL with backend {self._options.backend}"):
            agent = self._nixl.nixlAgent(name, config)
            agent.createBackend(self._options.backend, backend_parameters(self._options, os.environ))
        return _Agent(name, agent)

    def register(self, segments: Sequence[Segment]) -> None:
        ranges = Ranges.of(segments, "this worker")
        self._register(self._agent, ranges)
        self._ranges = ranges

    def _register(self, agent: _Agent, ranges: Ranges) -> None:
        for kind, cuda in ((self._nixl.DRAM_SEG, False), (self._nixl.VRAM_SEG, True)):
            index = np.flatnonzero(ranges.cuda == cuda)
            rows = _rows(ranges.start[index], ranges.stop[index] - ranges.start[index], ranges.device[index])
            if len(rows):
                with self._translated(f"registering {len(rows)} segments of {'cuda' if cuda else 'cpu'} memory"):
                    described = [(address, length, device, b"") for address, length, device in rows.tolist()]
                    agent.library.registerMem(self._nixl.nixlRegDList(kind, described), [])

    def describe(self) -> bytes:
        with self._translated("describing this agent"):
            return seal(NAME, self._agent.name, self._agent.library.getLocalMD())

    def connect(self, endpoint: bytes, segments: Sequence[Segment]) -> Peer:
        made = unseal(NAME, endpoint)
        ranges = Ranges.of(segments, "the peer")
        if made.name in self._agent.peers or made.name == self._agent.name:
            raise TransferError(f"agent {made.name} is connected already; disconnect it first")
        # The library takes the name out of the metadata: it must not be able to replace another peer.
        if made.name.encode() not in made.metadata:
            raise TransferError(f"endpoint says agent {made.name}, its metadata another; fetch the manifest again")
        peer = _Peer(self._agent, made.name, ranges)
        try:
            self._agent.library.loadRemoteMD(made.metadata)
        except self._errors as error:
            self._forget(peer)
            raise TransferError(
                f"adding agent {made.name}: {error}; its process ended, it cannot be reached from here, or the two "
                "sides run different versions of NIXL or different UCX settings",
                retryable=isinstance(error, self._nixl.nixlBackendError),
            ) from error
        self._agent.peers.add(made.name)
        return peer

    def disconnect(self, peer: Peer) -> None:
        assert isinstance(peer, _Peer) and not peer.leaving
        peer.leaving = True
        self._forget_when_idle(peer)

    def read(self, peer: Peer, runs: Runs) -> Transfer:
        assert isinstance(peer, _Peer) and not peer.leaving
        return self._start(peer, self._nixl.NIXL_READ, runs, peer.ranges, self._ranges, b"")

    def write(self, peer: Peer, runs: Runs, notification: bytes = b"") -> Transfer:
        assert isinstance(peer, _Peer) and not peer.leaving
        return self._start(peer, self._nixl.NIXL_WRITE, runs, self._ranges, peer.ranges, notification)

    def poll(self, transfer: Transfer) -> Status:
        assert isinstance(transfer, _Transfer)
        return follow(transfer, self._advance)

    def notify(self, peer: Peer, payload: bytes) -> None:
        assert isinstance(peer, _Peer) and not peer.leaving
        with self._translated(f"notifying agent {peer.name}"):
            peer.agent.library.genNotif(peer.name, payload, [])

    def notifications(self) -> list[bytes]:
        with self._translated("fetching notifications"):
            by_agent: dict[str, list[bytes]] = self._agent.library.getNotifs({}, [])
        return [payload for payloads in by_agent.values() for payload in payloads]

    def renew(self, peer: Peer) -> None:
        assert isinstance(peer, _Peer)
        if self._serves:
            raise TransferError("peers read from this NIXL agent or write into it; it is not replaced")
        if peer.agent is not self._agent:
            return
        if len(self._older) >= _MAX_OLDER:
            raise TransferError(f"{len(self._older)} replaced agents still run transfers, no other starts")
        agent = self._start_agent()
        self._register(agent, self._ranges)
        self._older.append(self._agent)
        self._agent = agent

    def close(self) -> None:
        """Destroys all agents, which ends running transfers: nothing lands after this returns."""
        for agent in (*self._older, self._agent):
            agent.library = None

    def _start(
        self, peer: _Peer, operation: Any, runs: Runs, source: Ranges, destination: Ranges, notification: bytes
    ) -> _Transfer:
        limit = self._options.batch_bytes
        work = cut(runs, source, destination, limit)
        waiting = deque(batches(work, source, destination, limit, _DESCRIPTOR_COST_BYTES))
        if notification and not waiting:
            self.notify(peer, notification)
        transfer = _Transfer(peer, operation, waiting, notification, len(work.runs))
        peer.running += 1
        self._advance(transfer)
        return transfer

    def _advance(self, transfer: _Transfer) -> None:
        """Look at what was posted, post more for a short while, and set the outcome at the end."""
        peer = transfer.peer
        transfer.posted = [handle for handle in transfer.posted if self._runs_on(transfer, handle)]
        if transfer.waiting and peer.leaving and transfer.failure is None:
            transfer.failure = TransferError(f"agent {peer.name} was disconnected before the whole transfer was posted")
        until = time.monotonic() + _POST_SECONDS
        while transfer.waiting and transfer.failure is None and time.monotonic() < until:
            if len(transfer.waiting) == 1 and transfer.notification and transfer.posted:
                break  # the batch that carries the notification starts when all others have arrived
            self._post(transfer)
        if transfer.failure is not None:
            transfer.waiting.clear()
            if not transfer.failure.terminal:
                transfer.outcome = transfer.failure
                return  # bytes may still move: the handles and the peer's metadata stay until `close`
        if not transfer.posted and not transfer.waiting:
            transfer.outcome = transfer.failure or Status.DONE
            peer.running -= 1
            self._forget_when_idle(peer)

    def _runs_on(self, transfer: _Transfer, handle: int) -> bool:
        """Whether a posted batch has not ended. Its failure is kept in the transfer, its handle given back."""
        try:
            with self._translated(f"transfer with agent {transfer.peer.name}", started=True):
                if transfer.peer.agent.library.getXferStatus(handle) == self._nixl.NIXL_IN_PROG:
                    return True
        except TransferError as error:
            return self._failed(transfer, error, handle)
        self._release(transfer.peer, handle)
        return False

    def _post(self, transfer: _Transfer) -> None:
        """Post the next batch, the last one with the notification."""
        batch, peer = transfer.waiting.popleft(), transfer.peer
        agent, name = peer.agent.library, peer.name
        notification = b"" if transfer.waiting else transfer.notification
        handle: int | None = None
        try:
            with self._translated(f"preparing a transfer with agent {name}"):
                handle = agent.createXferReq(transfer.operation, *self._lists(transfer, batch), name, b"", [])
            with self._translated(f"posting a transfer with agent {name}", started=True):
                status = agent.postXferReq(handle, notification)
        except TransferError as error:
            if self._failed(transfer, error, handle) and handle is not None:
                transfer.posted.append(handle)
            return
        assert handle is not None
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
        return self._nixl.nixlXferDList(kind, _rows(address, length, ranges.device[index]))

    def _release(self, peer: _Peer, handle: int) -> None:
        """Give a handle back that is terminal. A refusal leaves it to `close`; the transfer has ended all the same."""
        try:
            peer.agent.library.releaseXferReq(handle)
        except self._errors as error:
            logger.warning("NIXL keeps a finished transfer: %s", error)

    def _forget_when_idle(self, peer: _Peer) -> None:
        """Remove a peer that is leaving once nothing runs with it: an earlier removal would hide its transfers' end."""
        if peer.leaving and not peer.running:
            self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        agent = peer.agent
        agent.peers.discard(peer.name)
        try:
            agent.library.invalidateRemoteMD(peer.name)
        except self._errors as error:
            logger.debug("NIXL forgot agent %s before: %s", peer.name, error)
        if agent in self._older and not agent.peers:
            self._older.remove(agent)
            agent.library = None

    @contextmanager
    def _translated(self, action: str, started: bool = False) -> Iterator[None]:
        """Raise the library's exceptions as ours. `started`: bytes may be moving when one comes."""
        try:
            yield
        except self._errors as error:
            raise translate(type(error).__name__, f"{action}: {error}", started) from error


def translate(kind: str, message: str, started: bool) -> TransferError:
    """The error to raise for a NIXL exception of type name `kind`.

    A lost connection ends every operation on it. Refusals (not found, invalid, not allowed …) come before anything
    moves. Any other failure of a started transfer may leave parts of it running.
    """
    if kind == "nixlRemoteDisconnectError":
        return PeerLost(f"{message}; the peer's process ended or the network broke, connect to its new incarnation")
    if kind in _REFUSALS:
        return TransferError(message)
    return TransferError(message, terminal=not started)


def backend_parameters(options: NixlOptions, environment: Mapping[str, str]) -> dict[str, str]:
    """Parameters for createBackend: `backend_options`, with `ucx` and the TCP segment size as UCX's engine_config.

    Raises:
        InvalidConfig: `ucx` given for another backend, or twice.
    """
    settings = dict(options.ucx)
    if options.backend != "UCX":
        if settings:
            raise InvalidConfig(f"ucx: {settings} given, but backend is {options.backend}; use backend_options")
        return dict(options.backend_options)
    if settings and "engine_config" in options.backend_options:
        raise InvalidConfig("ucx and backend_options.engine_config are both given; use ucx alone")
    for key in ("TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE"):
        if options.tcp_segment_size and f"UCX_{key}" not in environment:
            settings.setdefault(key, options.tcp_segment_size)
    parameters = {"engine_config": ",".join(f"{key}={value}" for key, value in settings.items())} if settings else {}
    return parameters | options.backend_options


def _rows(address: Addresses, length: Addresses, device: Addresses) -> NDArray[np.int64]:
    """Array of shape (n, 3), C order: address, length, device."""
    return np.stack((address, length, device), axis=1)


def _bindings() -> Any:
    """NIXL's bindings, for the CUDA of this machine or for none.

    Raises:
        InvalidConfig: the library is missing or does not load.
    """
    try:
        return importlib.import_module("nixl")._bindings
    except (ImportError, AttributeError) as error:
        raise InvalidConfig(f"transport: nixl cannot be imported ({error}); {INSTALL_HINT}") from error
