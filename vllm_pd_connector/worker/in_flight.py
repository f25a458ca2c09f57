"""What one request has under way on one link: direct transfers, and those that go by way of the staging buffer.

Receives and pushes differ in which way the bytes go and in what an end means; looking at transfers, what may still be
written after a failure, and what the link is told are one. A transfer has an index, by which its owner's machine knows
it. It ends by one event. If it failed and may still write, a second one follows: when the rest of it has ended, or the
worker that it goes to or comes from (`peers.process_watch`). Of the latter also what the transport still calls running
hears: libraries have transfers that never end.

A direct transfer is given to the transport in slices (`geometry.spans`), a few at a time, so that a turn of the
transfer thread is short however long the request is. It is over when all of its slices are, and done if none failed;
after a failure, or when it is given up, no other is begun.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.spans import Slices
from vllm_pd_connector.protocol.transfers import TransferDone, TransferFailed
from vllm_pd_connector.protocol.wire.push_messages import Moved
from vllm_pd_connector.transport.base import Transfer, TransferStatus, Transport, TransportPeer
from vllm_pd_connector.worker.peers.process_watch import LOOK_S, ProcessWatch, has_ended
from vllm_pd_connector.worker.poll_interval import FIRST_S, pause

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_pd_connector.geometry.runs import Runs
    from vllm_pd_connector.geometry.staging.chunks import Chunk
    from vllm_pd_connector.protocol.transfers import TransferEnd
    from vllm_pd_connector.worker.peers.link import PeerLink
    from vllm_pd_connector.worker.peers.pool import Links
    from vllm_pd_connector.worker.staging.stager import Stager
    from vllm_pd_connector.worker.staging.stream import Stream

logger = init_logger(__name__)

POLL_DRAINING_S = 0.05
_DRAINING_SHARE = 1 / 20
"""Nobody waits for what drains. It is looked at as often as anything while it moves, because some transports move
bytes only then, and the less the longer nothing has."""

_LONG_S = 0.0003
"""A slice that takes longer to be made is a long request's."""

SLICES_UNDER_WAY = 4
"""Of one transfer: enough that the transport does not run dry between two turns, few enough that a look at them is
short, and that what others begin need not wait for a long request's end."""


@dataclass(eq=False, slots=True)
class _Slice:
    """A slice under way, and how many parts the transport made of it. `looked_at`: since it was begun."""

    transfer: Transfer
    parts: int
    looked_at: bool = False


@dataclass(eq=False, slots=True)
class _Direct:
    """A direct transfer. `rest` are the slices that were not begun, None when no other will be; of these the next is
    `made` already where that took the rest of a turn; `single`: there is one in all. `posting`: one that was begun
    wants time of this thread; `moving`: bytes of one came in the last look. `failure` is the first reason why it
    failed; `blamed`: a slice's error was told; `stuck`: one failed and may still write."""

    peer: TransportPeer
    rest: Iterator[Runs] | None
    single: bool = False
    made: Runs | None = None
    running: list[_Slice] = field(default_factory=list)
    posting: bool = False
    moving: bool = False
    failure: str = ""
    blamed: bool = False
    stuck: bool = False

    @property
    def begins(self) -> bool:
        """Whether another slice is to be begun now."""
        return self.rest is not None and not self.posting and len(self.running) < SLICES_UNDER_WAY

    @property
    def due(self) -> bool:
        """Whether a look changes something now: also where the transport was done when it had posted a slice."""
        over = any(not (slice_.looked_at or slice_.transfer.left) for slice_ in self.running)
        return self.begins or self.posting or over or not self.running

    @property
    def may_write(self) -> bool:
        return bool(self.running) or self.stuck

    @property
    def drains(self) -> bool:
        """Whether it failed or was given up, and runs on."""
        return bool(self.running and self.failure)

    def fail(self, error: TransferError) -> TransferError:
        """A slice of it has failed so: no other begins, and it cannot end well."""
        self.rest, self.failure = None, self.failure or str(error)
        self.stuck |= not error.terminal
        return error


@dataclass(eq=False, slots=True)
class InFlight:
    """See the module. Lives in the transfer thread.

    `owner` is known to the stager. `connection` is the link's when the latest transfers began; `over` is how many parts
    of slices that have ended; `stuck` are indices of transfers of which nothing is heard any more and that may still
    write, `peers` and `watches` the workers at the other end, by index; `moved` is what the transport was given,
    `posting_s` the seconds that took. `seen` is how far it was at the last look, since `moved_at`.
    """

    owner: object
    links: Links[Any]
    link: PeerLink
    transport: Transport
    stager: Stager
    writes: bool
    connection: object = None
    posted_at: float = 0.0
    moved_at: float = 0.0
    seen: int = 0
    posting_s: float = 0.0
    transfers: dict[int, _Direct] = field(default_factory=dict)
    over: int = 0
    staged: dict[int, Stream] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)
    peers: dict[int, TransportPeer] = field(default_factory=dict)
    watches: dict[int, ProcessWatch | None] = field(default_factory=dict)
    moved: Moved = Moved()

    def start(self, index: int, peer: TransportPeer, work: Slices | Iterator[Chunk]) -> None:
        """Begin a transfer: of runs, or of chunks by way of the staging buffer. `poll` and the stager carry it out."""
        self.connection, self.peers[index] = self.link.connection, peer
        try:
            watch = self.watches[index] = self.link.watch_of(peer)
            if watch is not None:  # its line is let go of where nobody has looked for long; this may be the time for it
                watch.look(time.monotonic())
            if isinstance(work, Slices):
                self.posted_at = self.moved_at = time.monotonic()
                self.transfers[index] = _Direct(peer, iter(work), work.single)
            else:
                self.staged[index] = self.stager.start(self.owner, index, self.link, peer, work, watch)
        except Exception as error:  # a defect of ours: what was not begun must not be waited for, nor cost the others
            logger.exception("a transfer could not begin")
            self.transfers[index] = _Direct(peer, None, failure=f"unexpected {type(error).__name__}: {error}")

    def poll(self, now: float, until: float) -> Iterator[tuple[TransferEnd, TransferError | None]]:
        """Look at what runs, and begin slices until the monotonic clock says `until`; what has ended, with the
        transport's error for `blame`, if there is one. One direct transfer at least has its turn, also where `until`
        is over, and those that had none go first the next time."""
        for index, direct in list(self.transfers.items()):
            self.transfers[index] = self.transfers.pop(index)
            came_late = time.monotonic() >= until
            errors = self._look(direct, until)
            while direct.begins and (came_late or time.monotonic() < until):
                errors += self._begin_slice(direct, until)
                if time.monotonic() >= until:
                    break
            if direct.drains and self._has_ended(index, now):
                self.over += sum(slice_.parts + 1 for slice_ in direct.running)
                direct.running.clear()
            for error in errors:
                blame = None if direct.blamed and error.terminal else error  # one cause, however many slices met it
                direct.blamed = True
                yield TransferFailed(index, str(error), terminal=not direct.may_write), blame
            if direct.rest is None and not direct.running:
                del self.transfers[index]
                if direct.stuck:
                    self.stuck.add(index)
                elif not direct.failure:
                    yield TransferDone(index), None
                elif not errors:
                    yield TransferFailed(index, direct.failure, terminal=True), None
            if time.monotonic() >= until:
                break
        if (arrived := self.arrived) != self.seen:
            self.seen, self.moved_at = arrived, now
        if self.staged and not self.stager.holds(self.owner):  # it was given up, and nothing of it is left
            for index in self._over_staged():
                yield TransferFailed(index, "it was given up", terminal=index not in self.stuck), None
        for index in sorted(self.stuck):
            if self._has_ended(index, now):
                self.stuck.discard(index)
                yield TransferFailed(index, str(self.watches[index]), terminal=True), None

    def _has_ended(self, index: int, now: float) -> bool:
        """Whether the worker at the other end of a transfer has ended, and nothing of it lands any more."""
        watch = self.watches[index]
        return watch is not None and has_ended(watch, self.transport, self.peers[index], now)

    def _look(self, direct: _Direct, until: float) -> list[TransferError]:
        """Take out the slices that have ended, as far as there is time, the oldest first; what failed of them."""
        errors = []
        direct.posting = direct.moving = False
        for number, slice_ in enumerate(list(direct.running)):
            if number and time.monotonic() >= until:
                break
            errors += self._look_at(direct, slice_)
        return errors

    def _look_at(self, direct: _Direct, slice_: _Slice) -> list[TransferError]:
        """Take a slice out if it has ended; what failed of it."""
        errors = []
        try:
            slice_.looked_at = True
            status = self.transport.poll(slice_.transfer)
            direct.posting |= status is TransferStatus.POSTING
            direct.moving |= status is TransferStatus.MOVING
            if status is not TransferStatus.DONE:
                return []
        except Exception as error:
            # At once, and of all slices before one is told: by that it is decided whether the blocks are kept.
            errors.append(direct.fail(_of_transport(error)))
        direct.running.remove(slice_)
        self.over += slice_.parts + 1
        return errors

    def _begin_slice(self, direct: _Direct, until: float) -> list[TransferError]:
        """Make the next slice, if there is one, and give it to the transport, as far as there is time; why that
        failed."""
        began = time.monotonic()
        try:
            runs = self._next_slice(direct, began, until)
        except Exception as error:  # ours: what was not begun must not be waited for
            return [direct.fail(_unexpected(error, terminal=True))]
        if runs is None:
            return []
        try:
            transfer = (self.transport.write if self.writes else self.transport.read)(direct.peer, runs)
            slice_ = _Slice(transfer, transfer.left)
            direct.running.append(slice_)
            self.moved += Moved(runs.total_bytes, len(runs), transfer.descriptors)
        except Exception as error:
            return [direct.fail(_of_transport(error))]
        self.posting_s += time.monotonic() - began
        # Over already, as on one host: what follows need not wait for the next turn.
        return [] if transfer.left else self._look_at(direct, slice_)

    def _next_slice(self, direct: _Direct, began: float, until: float) -> Runs | None:
        """The next slice, if there is one and its making did not take the rest of a turn that began then."""
        assert direct.rest is not None
        if direct.made is None:
            direct.made = next(direct.rest, None)
            if direct.made is None:
                direct.rest = None
            elif (now := time.monotonic()) >= until and now - began > _LONG_S:
                return None
        runs, direct.made = direct.made, None
        if direct.single:
            direct.rest = None
        return runs

    def staged_ended(self, stream: Stream, error: TransferError | None) -> TransferEnd:
        """What became of a transfer by way of the staging buffer. What one that writes has begun may go on."""
        if stream.may_write:
            self.stuck.add(stream.index)
        if error is not None and self.writes and self.stager.holds(self.owner):
            return TransferFailed(stream.index, str(error), terminal=False)
        self.staged.pop(stream.index, None)
        self.over += stream.landed
        if error is not None:
            return TransferFailed(stream.index, str(error), terminal=stream.index not in self.stuck)
        self.moved += Moved(stream.bytes, stream.runs, stream.descriptors)
        return TransferDone(stream.index)

    def blame(self, error: TransferError, now: float) -> None:
        """Tell the link of a transfer's failure."""
        what = f"a {'write' if self.writes else 'read'} failed and may still go on"
        self.links.failed(self.link, self.connection, error, what, now)

    def cancel(self) -> None:
        """Nothing more is begun; the end of what is left shows in `poll`."""
        for direct in self.transfers.values():
            direct.rest, direct.failure = None, direct.failure or "it was given up"
        self.stager.cancel(self.owner)
        if not self.stager.holds(self.owner):
            self._over_staged()

    def _over_staged(self) -> list[int]:
        """Wait for no staged transfer any more. One that the stager has let go of may still write though its result was
        not handled yet: others', which came with it, may have ended this."""
        over, self.staged = self.staged, {}
        self.stuck |= {index for index, stream in over.items() if stream.may_write}
        return list(over)

    def give_up(self, now: float) -> None:
        """Whoever waited for this waits no longer: the link is told if it never ends."""
        if self.moves:
            self.links.give_up(self.link, self._progress, now)

    def _progress(self) -> int | None:
        """What grows as long as anything of it moves, also once it was given up; None when nothing is left to."""
        return self.arrived - self.stager.outstanding(self.owner) if self.moves else None

    @property
    def may_write(self) -> frozenset[int]:
        """Indices of the transfers that were begun and have not ended."""
        direct = (index for index, direct in self.transfers.items() if direct.may_write)
        return frozenset({*direct, *self.staged, *self.stuck})

    @property
    def posts(self) -> bool:
        """Whether slices are to be begun that were not."""
        return any(direct.rest is not None for direct in self.transfers.values())

    @property
    def ended(self) -> bool:
        """Whether nothing of it is left to be looked at."""
        return not (self.transfers or self.staged or self.stuck)

    @property
    def moves(self) -> bool:
        """Whether the transport still works on any of it."""
        return any(direct.running for direct in self.transfers.values()) or self.stager.moves(self.owner)

    @property
    def unheard(self) -> bool:
        """Whether something of it may still write, and of that nobody but the other worker's end would tell."""
        return bool(self.stuck) and not (self.transfers or self.staged)

    @property
    def arrived(self) -> int:
        """How far it is: it grows when a part of a transfer has ended, and only then."""
        slices = (slice_ for direct in self.transfers.values() for slice_ in direct.running)
        running = sum(slice_.parts - slice_.transfer.left for slice_ in slices)
        return self.over + running + self.stager.landed(self.owner)

    def next_look(self, now: float, draining: bool) -> list[float]:
        """When a `poll` is due; `draining`: nobody waits for the bytes."""
        over = any((watch := self.watches[index]) is not None and watch.over for index in self.stuck)
        moments = [now + (POLL_DRAINING_S if over else LOOK_S)] if self.stuck else []
        if any(direct.due for direct in self.transfers.values()):
            moments.append(now)
        elif self.transfers:
            rarely = min((now - self.moved_at) * _DRAINING_SHARE, POLL_DRAINING_S) if draining else 0.0
            moving = any(direct.moving for direct in self.transfers.values())
            moments.append(now + max(rarely, FIRST_S if moving else pause(now - self.posted_at, self.moved.bytes)))
        if draining and self.staged:  # nobody says when the stager holds nothing of it any more
            moments.append(now + POLL_DRAINING_S)
        return moments


def _of_transport(error: Exception) -> TransferError:
    """An error out of a call of the transport. After one that is none of ours nobody knows what was begun and goes on,
    and nobody else's transfers are to wait for it."""
    return error if isinstance(error, TransferError) else _unexpected(error, terminal=False)


def _unexpected(error: Exception, *, terminal: bool) -> TransferError:
    logger.error("a slice of a transfer", exc_info=error)
    return TransferError(f"unexpected {type(error).__name__}: {error}", terminal=terminal)
