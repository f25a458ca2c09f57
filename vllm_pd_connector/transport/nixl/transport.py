"""NIXL over UCX, spoken to through its bindings.

Runs become (n, 3) descriptor arrays and one request each (`createXferReq`). Prepared lists per peer were measured and
gain nothing for runs that the binder merged already: see docs/design/transports.md for this and every other figure.

What the library does not do, and this module does:
- **Idle costs nothing.** NIXL's Python agent starts a progress thread that never sleeps. The bindings take the
  thread's interval; nothing of the library is patched, so another NIXL user in the process is not affected.
- **Who posts has no progress thread.** Beside one, posted reads and writes were seen to stand still for seconds, and
  three times for ever, with every later one to that peer. So there are two agents: one with a thread, which peers know
  and which posts nothing, and one without, whose transfers are moved by being polled. Each exists where it is needed.
- **A call is bounded.** On one host UCX copies inside the call that posts, over TCP inside the call that looks, which
  does not return while bytes come. So a transfer is posted in batches, of which with one peer no more run than calls
  were found to copy in some milliseconds (`window`).
- **Nothing running is released.** NIXL's release returns at once and data still lands. A handle is released when it
  is terminal; `disconnect` only marks a peer that has running transfers, and the last of them removes it. Handles
  that failed in an unknown way live until `settle` has seen the peer's end, or `close`, which destroys the agent.
- **There is a way out.** When transfers with a healthy peer stand still all the same, another agent takes the place of
  the one that posts, for new connections (`replace_endpoint`). The old one ends when its last transfer has: ended
  earlier, over TCP, it kills a peer that still answers it. Both happen in threads of their own: registering the memory
  of a device takes seconds.
- **A failure tells little.** A request is many operations, posted one after the other, over several devices where there
  are several. The call that posts raises when some have begun, and the one that looks when the last of them failed.
  Only a disconnect ends them all, when UCX has been polled for a while (`Settling`). Of writes it ends what this side
  does: what the kernel holds may still arrive.
- **Peers are removed.** After a death NIXL still believes in a peer and refuses it for ever; `disconnect` removes it.

Source of the library's behaviour: NIXL 1.5.1 with UCX 1.23.0, observed and read (docs/design/transports.md).
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from vllm_pd_connector.errors import PeerLost, TransferError
from vllm_pd_connector.transport.base import Transfer, TransferStatus, TransportPeer, Use, follow, options_of
from vllm_pd_connector.transport.endpoint import Endpoint, seal, unseal
from vllm_pd_connector.transport.nixl.agents import Agent, Library, Preparation, may_arrive, ours, unexpected
from vllm_pd_connector.transport.nixl.bindings import NixlOptions, check, described  # noqa: F401  # see `registry.check`
from vllm_pd_connector.transport.nixl.transfer import Ended, NixlPeer, NixlTransfer, Settling
from vllm_pd_connector.transport.nixl.ways import ways  # noqa: F401  # see `registry.ways`
from vllm_pd_connector.transport.nixl.window import EMPTY_S, LEAST
from vllm_pd_connector.transport.ranges import Ranges, batches, cut, few

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_pd_connector.geometry.manifest import Segment
    from vllm_pd_connector.geometry.runs import Addresses, Runs

logger = logging.getLogger(__name__)

NAME = "nixl"

# What one descriptor costs: 2 us on one host and 7 over TCP (measured), as much as so many bytes at 9 and 4.5 GB/s.
_DESCRIPTOR_COST_BYTES = 32 << 10

_CALL_S = 0.001  # a call of ours does nothing more when it took this long

_AHEAD = 4  # requests that are made together where posts copy

_MAX_OLDER = 3  # agents that were replaced and still run transfers; each holds the registrations of all memory


class NixlTransport:
    """See `base.Transport`. Memory that is to be moved from here is registered for that at once, which takes seconds on
    a device.

    Raises:
        InvalidConfig: NIXL is not installed, or an option is out of range.
        TransferError: NIXL cannot start its backend.
    """

    name = NAME

    def __init__(self, options: NixlOptions | None = None, use: Use | None = None) -> None:
        use, self._options = use or Use(), options or NixlOptions()
        self._library = Library(self._options, use.prepare_thread)
        self.over = described(self._options, os.environ)
        self._nixl, self._errors = self._library.nixl, self._library.errors
        self._kinds = (self._nixl.DRAM_SEG, self._nixl.VRAM_SEG)
        self._ranges = Ranges.of((), "this worker")
        self._target = self._library.start(threaded=True) if use.serves else None
        self._poster = self._library.start(threaded=False) if use.posts or not use.serves else None
        self._next: Preparation | None = None
        self._older: list[Agent] = []

    def register(self, segments: Sequence[Segment]) -> None:
        ranges = Ranges.of(segments, "this worker")
        for agent in filter(None, (self._target, self._poster)):
            self._library.register(agent, ranges)
        self._ranges = ranges

    def describe(self) -> bytes:
        agent = self._target or self._posting()
        with self._library.translated("describing this agent"):
            return seal(NAME, agent.name, agent.library.getLocalMD())

    def _posting(self) -> Agent:
        """The agent that posts; one that was not to post is joined by it when it first connects."""
        if self._poster is None:
            agent = self._library.start(threaded=False)
            self._library.register(agent, self._ranges)
            self._poster = agent
        return self._poster

    def meet(self, endpoint: bytes) -> bool:  # see `base.is_met`
        made = self._unseal(endpoint)
        return self._library.meet(self._posting(), made.name, made.metadata)

    def connect(self, endpoint: bytes, segments: Sequence[Segment]) -> TransportPeer:
        made, ranges, agent = self._unseal(endpoint), Ranges.of(segments, "the peer"), self._posting()
        self._library.join(agent, made.name, made.metadata)
        return NixlPeer(agent, made.name, ranges)

    def _unseal(self, endpoint: bytes) -> Endpoint:
        made = unseal(NAME, endpoint)
        if any(made.name == agent.name for agent in filter(None, (self._target, self._poster))):
            raise TransferError(f"agent {made.name} is this worker's own")
        # The library takes the name out of the metadata: it must not be able to replace another peer.
        if made.name.encode() not in made.metadata:
            raise TransferError(f"endpoint says agent {made.name}, its metadata another; fetch the manifest again")
        return made

    def disconnect(self, peer: TransportPeer) -> None:
        assert isinstance(peer, NixlPeer) and not peer.leaving
        peer.leaving = True
        if not peer.transfers:
            self._forget(peer.agent, peer.name)

    def read(self, peer: TransportPeer, runs: Runs) -> Transfer:
        assert isinstance(peer, NixlPeer) and not peer.leaving
        theirs, ours = peer.ranges, self._ranges
        return self._at_once(peer, True, runs, theirs, ours) or self._start(peer, True, runs, theirs, ours)

    def write(self, peer: TransportPeer, runs: Runs) -> Transfer:
        assert isinstance(peer, NixlPeer) and not peer.leaving
        ours, theirs = self._ranges, peer.ranges
        return self._at_once(peer, False, runs, ours, theirs) or self._start(peer, False, runs, ours, theirs)

    def poll(self, transfer: Transfer) -> TransferStatus:
        if isinstance(transfer, Ended):
            assert not transfer.reported, "polled after its end"
            transfer.reported = True
            return TransferStatus.DONE
        assert isinstance(transfer, NixlTransfer)
        return follow(transfer, self._advance)

    def settle(self, peer: TransportPeer) -> bool:  # see `base.has_settled`
        assert isinstance(peer, NixlPeer)
        peer.settling = peer.settling or Settling()
        if over := peer.settling.poll(peer.agent, self._errors):
            for transfer in tuple(peer.transfers):  # which nobody may look at any more, and the library may never end
                self._drop(transfer, transfer.outcome or PeerLost(f"the process of agent {peer.name} has ended"))
        return over

    def replace_endpoint(self, peer: TransportPeer) -> None:
        assert isinstance(peer, NixlPeer)
        if peer.agent is not self._poster:
            return
        if len(self._older) >= _MAX_OLDER:
            raise TransferError(f"{len(self._older)} replaced agents still run transfers, no other starts")
        if self._next is None:
            self._next = self._library.prepare(self._ranges)
        try:
            agent = self._next.agent()
        except TransferError:
            self._next = None
            raise
        if agent is None:
            raise TransferError("another NIXL agent is being made: its memory is registered", retryable=True)
        self._next = None
        self._older.append(self._poster)
        self._poster = agent

    def close(self) -> None:
        """Destroys all agents, which ends running transfers: nothing lands after this returns."""
        if self._next is not None:
            self._next.close()
        self._library.close()
        for agent in filter(None, (*self._older, self._poster, self._target)):
            agent.library = None

    def _at_once(
        self, peer: NixlPeer, reads: bool, runs: Runs, source: Ranges, destination: Ranges
    ) -> NixlTransfer | Ended | None:
        """A transfer that is one post, and on one host has ended then; of a short one the window learns nothing. None
        if nothing was posted: it is longer, or fails, which `_start` says. One function: each costs a microsecond."""
        window = peer.window
        if window.running or runs.length.size > window.descriptors:
            return None
        limit = min(self._options.batch_bytes, window.size)
        if (short := few(runs, source, destination, window.longest, limit, _DESCRIPTOR_COST_BYTES)) is None:
            return None
        rows, cuda, cost = short
        try:
            handle = self._request(peer, reads, rows, cuda)
        except Exception:
            return None
        began, failure = window.begin() if cost > max(LEAST, window.size // 4) else None, None
        try:
            if peer.agent.library.postXferReq(handle, b"") != self._nixl.NIXL_IN_PROG:
                if began is not None:
                    window.posted(cost, began, runs=False, writes=not reads)
                self._release(peer, handle)
                return Ended(rows.shape[1])
        except self._errors as error:
            failure = ours(error, f"posting a transfer with agent {peer.name}", started=True)
        except Exception as error:
            failure = unexpected(error, peer.name)
        transfer = NixlTransfer(peer, reads, [], rows.shape[1], few=began is None)
        peer.transfers.add(transfer)
        window.posted(cost, began, runs=True, writes=not reads)
        transfer.posted[handle] = cost, rows.shape[1]
        if failure is not None:  # some of it may be posted: who asked is told with the next look
            transfer.fail(failure)
            self._conclude(transfer)
        return transfer

    def _start(self, peer: NixlPeer, reads: bool, runs: Runs, source: Ranges, destination: Ranges) -> NixlTransfer:
        runs = cut(runs, source, destination, min(self._options.batch_bytes, peer.window.longest))
        waiting = batches(runs, source, destination, _DESCRIPTOR_COST_BYTES)
        transfer = NixlTransfer(peer, reads, waiting, runs.length.size)
        peer.transfers.add(transfer)
        try:
            self._advance(transfer)
        except Exception as error:
            transfer.fail(unexpected(error, peer.name))
        return transfer

    def _advance(self, transfer: NixlTransfer) -> None:
        """Look at what was posted and post more for a short while; a look that took as long leaves that to the next
        turn, which then does not begin with a look."""
        peer = transfer.peer
        if transfer.settling is not None:
            if transfer.settling.poll(peer.agent, self._errors):  # the library has ended what the connection left
                assert transfer.failure is not None
                self._drop(transfer, transfer.failure if transfer.reads else may_arrive(transfer.failure))
            return
        until = (now := time.monotonic()) + _CALL_S
        owed, transfer.owed, posting, posted = transfer.owed, False, False, False
        moved = bool(transfer.posted) and not owed and self._look(transfer, until)
        if transfer.unposted and peer.leaving and transfer.failure is None:
            transfer.failure = TransferError(f"agent {peer.name} was disconnected before the whole transfer was posted")
        while transfer.unposted and transfer.failure is None and (room := peer.window.room(now)):
            posting = True
            if (now := time.monotonic()) >= until and (posted or not owed):
                transfer.owed = not posted
                break
            self._post(transfer, room)
            posted = True
        transfer.status = TransferStatus.MOVING if moved or transfer.copied else TransferStatus.RUNNING
        if posting and transfer.unposted:
            transfer.status = TransferStatus.POSTING
        self._conclude(transfer)

    def _conclude(self, transfer: NixlTransfer) -> None:
        """Set the outcome, if that is known."""
        failure = transfer.failure
        if failure is not None:
            for handle in transfer.withdraw():
                self._release(transfer.peer, handle)
            transfer.status = TransferStatus.RUNNING
            if not failure.terminal:
                transfer.outcome = failure
                transfer.peer.window.forget(transfer.runs)
                return  # bytes may still move: the handles and the peer's metadata stay
            if isinstance(failure, PeerLost) and transfer.posted:
                transfer.settling = Settling()
                return
        if not transfer.posted and not transfer.unposted:
            self._end(transfer, failure or TransferStatus.DONE)

    def _end(self, transfer: NixlTransfer, outcome: TransferStatus | TransferError) -> None:
        """Nothing of it runs any more. A leaving peer is removed with the last: sooner would hide the others' end."""
        transfer.outcome, peer = outcome, transfer.peer
        peer.transfers.discard(transfer)
        if peer.leaving and not peer.transfers:
            self._forget(peer.agent, peer.name)

    def _drop(self, transfer: NixlTransfer, outcome: TransferStatus | TransferError) -> None:
        """End a transfer of which nothing lands any more, whatever the library says of it."""
        for handle in transfer.let_go():
            self._release(transfer.peer, handle)
        self._end(transfer, outcome)

    def _look(self, transfer: NixlTransfer, until: float) -> bool:
        """Take out the batches that have ended, as far as there is time; whether bytes came. They end in about the
        order of their posts, so none is looked at behind one that runs on, for each of whose descriptors the library
        polls. That one is looked at until nothing has come for a moment: a peer stops whose bytes nobody takes."""
        window, ended, began = transfer.peer.window, 0, transfer.peer.window.begin()
        now = began[0]
        came, transfer.copied = now if transfer.copied else 0.0, False
        while (handle := next(iter(transfer.posted), None)) is not None:
            runs_on, before, now = self._runs_on(transfer, handle), now, time.monotonic()
            came = now if now - before > EMPTY_S else came
            if not runs_on:
                ended += transfer.posted.pop(handle)[0]
            elif now - came > EMPTY_S or transfer.failure is not None:
                break
            if now >= until:
                break
        if transfer.few:
            window.forget(ended)
        else:
            window.looked(ended, began)
        return came > began[0]

    def _runs_on(self, transfer: NixlTransfer, handle: int) -> bool:
        """Whether a posted batch may move bytes; given back when it arrived, for one part's failure says little."""
        if isinstance(transfer.failure, PeerLost):
            return True
        try:
            if transfer.peer.agent.library.getXferStatus(handle) == self._nixl.NIXL_IN_PROG:
                return True
        except self._errors as error:
            transfer.fail(ours(error, f"transfer with agent {transfer.peer.name}", started=True))
            return True
        self._release(transfer.peer, handle)
        return False

    def _request(self, peer: NixlPeer, reads: bool, rows: Addresses, cuda: tuple[bool, bool]) -> int:
        """The library's handle of a transfer of such rows (see `Batches`), not posted."""
        nixl, operation = self._nixl, self._nixl.NIXL_WRITE
        local = nixl.nixlXferDList(self._kinds[cuda[0]], rows[0])
        remote = nixl.nixlXferDList(self._kinds[cuda[1]], rows[1])
        if reads:
            operation, local, remote = nixl.NIXL_READ, remote, local
        handle: int = peer.agent.library.createXferReq(operation, local, remote, peer.name, b"", [])
        return handle

    def _prepare(self, transfer: NixlTransfer, room: int) -> None:
        """Make the request of the next batch, which costs so much at most."""
        waiting, peer = transfer.waiting[0], transfer.peer
        rows, cost = waiting.take(min(self._options.batch_bytes, room), peer.window.descriptors)
        if not waiting.rest:
            del transfer.waiting[0]
        try:
            transfer.ready[self._request(peer, transfer.reads, rows, waiting.cuda)] = cost, rows.shape[1]
        except self._errors as error:
            # Where the library has forgotten the peer, all others that are connected to it are to connect anew.
            gone = peer.name in peer.agent.lost
            transfer.fail(ours(error, f"preparing a transfer with agent {peer.name}", started=gone))

    def _post(self, transfer: NixlTransfer, room: int) -> None:
        """Post the next batch. Where posts copy, the requests of several are made together: after a copy all code is
        cold, and that of one takes 60 us more. They are posted as they were made, also if posts copy no longer."""
        peer = transfer.peer
        if not transfer.ready:
            for _ in range(_AHEAD if peer.window.copies else 1):
                if transfer.waiting:
                    self._prepare(transfer, room)
                if transfer.failure is not None:
                    return
        handle = next(iter(transfer.ready))
        cost, count = transfer.ready.pop(handle)
        began = peer.window.begin()
        try:
            runs = peer.agent.library.postXferReq(handle, b"") == self._nixl.NIXL_IN_PROG
        except self._errors as error:
            transfer.fail(ours(error, f"posting a transfer with agent {peer.name}", started=True))
            runs = True  # the library posts one descriptor after the other: some may have begun
        peer.window.posted(cost, began, runs=runs, writes=not transfer.reads)
        if runs:
            transfer.posted[handle] = cost, count
            transfer.copied = not transfer.reads and time.monotonic() - began[0] > EMPTY_S
        else:
            self._release(peer, handle)

    def _release(self, peer: NixlPeer, handle: int) -> None:
        """Give a terminal handle back. A refusal leaves it to `close`; the transfer has ended all the same."""
        try:
            peer.agent.library.releaseXferReq(handle)
        except self._errors as error:
            logger.warning("NIXL keeps a finished transfer: %s", error)

    def _forget(self, agent: Agent, name: str) -> None:
        self._library.leave(agent, name)
        if agent in self._older and not agent.peers:
            self._older.remove(agent)
            self._library.end_in_background(agent)


def create(options: Mapping[str, object], use: Use) -> NixlTransport:
    """Entry point; see `registry`."""
    return NixlTransport(options_of(NAME, options, NixlOptions), use)
