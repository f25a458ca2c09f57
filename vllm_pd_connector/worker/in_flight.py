"""What one request has under way on one link: direct transfers, and those that go by way of the staging buffer.

Receives and pushes differ in which way the bytes go and in what an end means; looking at transfers, what may still be
written after a failure, and what the link is told are one. A transfer has an index, by which its owner's machine knows
it. It ends by one event. If it failed and may still write, a second one follows when the worker that it goes to or
comes from has ended (`peers.process_watch`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.runs import Runs
from vllm_pd_connector.protocol.transfers import TransferDone, TransferFailed
from vllm_pd_connector.protocol.wire.push_messages import Moved
from vllm_pd_connector.transport.base import Transfer, TransferStatus, Transport, TransportPeer
from vllm_pd_connector.worker.peers.process_watch import LOOK_S, ProcessWatch
from vllm_pd_connector.worker.poll_interval import pause

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_pd_connector.geometry.staging.chunks import Chunk
    from vllm_pd_connector.protocol.transfers import TransferEnd
    from vllm_pd_connector.worker.peers.link import PeerLink
    from vllm_pd_connector.worker.peers.pool import Links
    from vllm_pd_connector.worker.staging.stager import Stager, Stream

POLL_DRAINING_S = 0.05


@dataclass(eq=False, slots=True)
class InFlight:
    """See the module. Lives in the transfer thread.

    `owner` is known to the stager. `connection` is the link's when the latest transfers began; `parts` are those of
    `transfers` when they were begun, `over` how many parts of others have ended; `stuck` are indices of transfers that
    failed and may still write, `watches` those of the workers at the other end, by index; `moved` is what the transport
    was given.
    """

    owner: object
    links: Links[Any]
    link: PeerLink
    transport: Transport
    stager: Stager
    writes: bool
    connection: object = None
    posted_at: float = 0.0
    transfers: dict[int, Transfer] = field(default_factory=dict)
    parts: dict[int, int] = field(default_factory=dict)
    over: int = 0
    staged: set[int] = field(default_factory=set)
    stuck: set[int] = field(default_factory=set)
    watches: dict[int, ProcessWatch | None] = field(default_factory=dict)
    moved: Moved = Moved()

    def start(self, index: int, peer: TransportPeer, work: Runs | Iterator[Chunk]) -> None:
        """Begin a transfer: of runs, or of chunks by way of the staging buffer.

        Raises:
            TransferError: it was not begun; hand it to `ended`.
        """
        self.connection = self.link.connection
        watch = self.watches[index] = self.link.watch_of(peer)
        if not isinstance(work, Runs):
            self.stager.start(self.owner, index, self.link, peer, work, watch)
            self.staged.add(index)
            return
        self.posted_at = time.monotonic()
        transfer = self.transfers[index] = (self.transport.write if self.writes else self.transport.read)(peer, work)
        self.parts[index] = transfer.left
        self.moved += Moved(work.total_bytes, len(work), transfer.descriptors)

    def poll(self, now: float) -> Iterator[tuple[TransferEnd, TransferError | None]]:
        """What has ended, with the transport's error for `blame`, if there is one."""
        for index, transfer in list(self.transfers.items()):
            error = None
            try:
                if self.transport.poll(transfer) is TransferStatus.RUNNING:
                    continue
            except TransferError as found:
                error = found
            del self.transfers[index]
            self.over += self.parts.pop(index) + 1
            yield self.ended(index, error), error
        if self.staged and not self.stager.holds(self.owner):  # it was given up, and nothing of it is left
            over, self.staged = self.staged, set()
            for index in over:
                yield TransferFailed(index, "it was given up", terminal=True), None
        for index in sorted(self.stuck):
            if (watch := self.watches[index]) is None:
                continue
            watch.look(now)
            if watch.over:
                self.stuck.discard(index)
                yield TransferFailed(index, str(watch), terminal=True), None

    def staged_ended(self, stream: Stream, error: TransferError | None) -> TransferEnd:
        """What became of a transfer by way of the staging buffer. What one that writes has begun may go on."""
        if error is not None and self.writes and self.stager.holds(self.owner):
            return TransferFailed(stream.index, str(error), terminal=False)
        self.staged.discard(stream.index)
        self.over += stream.landed
        if error is not None:
            return TransferFailed(stream.index, str(error), terminal=True)
        self.moved += Moved(stream.bytes, stream.runs, stream.descriptors)
        return TransferDone(stream.index)

    def ended(self, index: int, error: TransferError | None) -> TransferEnd:
        """The event for a direct transfer that is over, failed, or was not begun."""
        if error is None:
            return TransferDone(index)
        if not error.terminal:
            self.stuck.add(index)
        return TransferFailed(index, str(error), error.terminal)

    def blame(self, error: TransferError, now: float) -> None:
        """Tell the link of a transfer's failure."""
        what = f"a {'write' if self.writes else 'read'} failed and may still go on"
        self.links.failed(self.link, self.connection, error, what, now)

    def cancel(self) -> None:
        """Nothing more is begun by way of the staging buffer; the end of what is left of it shows in `poll`."""
        self.stager.cancel(self.owner)
        if not self.stager.holds(self.owner):
            self.staged.clear()

    def give_up(self, now: float) -> None:
        """Whoever waited for this waits no longer: the link is told if it never ends."""
        if self.moves:
            self.links.give_up(self.link, lambda: not self.moves, now)

    @property
    def may_write(self) -> frozenset[int]:
        """Indices of the transfers that were begun and have not ended."""
        return frozenset({*self.transfers, *self.staged, *self.stuck})

    @property
    def moves(self) -> bool:
        """Whether the transport still works on any of it."""
        return bool(self.transfers) or self.stager.holds(self.owner)

    @property
    def arrived(self) -> int:
        """How far it is: it grows when a part of a transfer has ended, and only then."""
        running = sum(self.parts[index] - transfer.left for index, transfer in self.transfers.items())
        return self.over + running + self.stager.landed(self.owner)

    def next_look(self, now: float, draining: bool) -> list[float]:
        """When a `poll` is due; `draining`: nobody waits for the bytes."""
        moments = [now + LOOK_S] if self.stuck else []
        if self.transfers:
            moments.append(now + (POLL_DRAINING_S if draining else pause(now - self.posted_at)))
        return moments
