"""Staged transfers: reads into the slab, strided copies from there into the caches.

The *slab* is memory of this worker that the transport registered beside the caches; no peer is told of it. A staged
transfer is a `Stream` of chunks (`geometry.stage`): each takes a slot of the slab, is read into it, is copied to where
its bytes belong, and gives its slot back. A stream has at most four chunks under way, so that some are read while
another is copied, and streams with fewer go first. When the slab is full, streams wait; their receives' deadlines
run on. One instance never holds more than half of the slab, so that a frozen one does not stop the others.

Nothing but our own copies writes to the destination of a staged transfer, so giving it up (`cancel`) takes effect at
once. What may still be written to is the slot: it stays out until its read is terminal, or, if the transport cannot
tell, until the peer is gone.

All of it runs in the transfer thread, in slices of a few milliseconds. Figures: docs/design/conversion.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.geometry.runs import Runs
from vllm_pd_connector.geometry.stage import CHUNKS_PER_SLAB, Chunk
from vllm_pd_connector.geometry.strided import Copy
from vllm_pd_connector.transport.base import Peer, Status, Transfer, Transport
from vllm_pd_connector.worker.copies import Copier, copier_for

SLICE_SECONDS = 0.005
CHUNKS_UNDER_WAY = 4
_ALIGNMENT = 64

Owner = TypeVar("Owner")


class Slab:
    """Slots of one stretch of memory of `length` bytes: first fit, in bytes from its start."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._slots: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Bytes that no slot holds, not necessarily in one piece."""
        return self.length - sum(self._slots.values())

    def take(self, size: int) -> int | None:
        """A slot of at least `size` bytes, or None while there is no room for it."""
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        start = 0
        for slot, length in sorted(self._slots.items()):
            if slot - start >= size:
                break
            start = slot + length
        if start + size > self.length:
            return None
        self._slots[start] = size
        return start

    def give(self, slot: int) -> None:
        del self._slots[slot]

    def size_of(self, slot: int) -> int:
        return self._slots[slot]


@dataclass(eq=False, slots=True)
class _Flight:
    """A chunk in its slot: while `transfer` is set it is read, afterwards `copies` are left to do."""

    instance: object
    peer: Peer
    slot: int
    transfer: Transfer | None
    copies: Iterator[Copy]


@dataclass(eq=False, slots=True)
class Stream(Generic[Owner]):
    """One staged transfer of `owner` from a rank of `instance`; counts are of what the transport was given so far."""

    owner: Owner
    index: int
    instance: object
    peer: Peer
    rest: Iterator[Chunk]
    waiting: Chunk | None = None
    flights: list[_Flight] = field(default_factory=list)
    bytes: int = 0
    runs: int = 0
    descriptors: int = 0


class Stager(Generic[Owner]):
    """See the module.

    Args:
        segments: of the caches; the slab lies on their device.
        length: bytes of the slab, 0 for none.

    Raises:
        TransferError: the device has no memory for the slab.
    """

    def __init__(self, transport: Transport, segments: Sequence[Segment], length: int) -> None:
        self._transport = transport
        self._copier: Copier = copier_for(segments)
        # A chunk of the largest size must fit beside the gaps that smaller ones leave.
        self.chunk_bytes = length // CHUNKS_PER_SLAB // _ALIGNMENT * _ALIGNMENT
        self._memory = self._copier.allocate(length) if self.chunk_bytes else None
        self.slab = Slab(length if self._memory else 0)
        self._streams: list[Stream[Owner]] = []
        self._orphans: list[_Flight] = []
        self._stuck: list[_Flight] = []
        self._posted = False

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What to register with the transport."""
        return (self._memory.segment,) if self._memory else ()

    @property
    def converting(self) -> bool:
        """Whether there may be work that does not wait for anything."""
        return self._posted or any(flight.transfer is None for stream in self._streams for flight in stream.flights)

    @property
    def active(self) -> bool:
        """Whether there are streams."""
        return bool(self._streams)

    @property
    def draining(self) -> bool:
        """Whether slots are out only because of streams that were given up."""
        return bool(self._orphans)

    def start(self, owner: Owner, index: int, instance: object, peer: Peer, chunks: Iterable[Chunk]) -> None:
        """Begin a staged transfer from `peer`, a rank of `instance`; `poll` names it when it has ended."""
        self._streams.append(Stream(owner, index, instance, peer, iter(chunks)))

    def poll(self) -> list[tuple[Stream[Owner], TransferError | None]]:
        """Go on for a few milliseconds. Returns the streams that ended, with what failed them.

        Their destinations are not written to any more, so the errors are `terminal`, whatever the transport said.
        """
        self._poll_orphans()
        failed: dict[Stream[Owner], TransferError] = {}
        until = time.monotonic() + SLICE_SECONDS
        while True:
            for stream in self._streams:
                self._look(stream, failed)
            self._convert(until)
            # On one host a read is often over when it was posted: what it brought is then copied before the next is
            # started, while it is still in the processor's cache.
            self._posted = self._refill(failed)
            if not self._posted or time.monotonic() >= until:
                break
        ended: list[tuple[Stream[Owner], TransferError | None]] = list(failed.items())
        for stream in failed:
            self._abandon(stream)
        for stream in [s for s in self._streams if not s.flights and not self._next(s)]:
            self._streams.remove(stream)
            ended.append((stream, None))
        return ended

    def cancel(self, owner: Owner) -> None:
        """Give up the streams of `owner`: nothing is written to their destinations when this returns."""
        for stream in [s for s in self._streams if s.owner == owner]:
            self._abandon(stream)

    def account(self, owner: Owner) -> str:
        """How far the streams of `owner` are, in words for a log; empty if there are none."""
        streams = [stream for stream in self._streams if stream.owner == owner]
        if not streams:
            return ""
        flights = [flight for stream in streams for flight in stream.flights]
        reading = sum(flight.transfer is not None for flight in flights)
        waiting = sum(stream.waiting is not None for stream in streams)
        return (
            f"{sum(stream.bytes for stream in streams)} bytes were asked for; {reading} chunks being read, "
            f"{len(flights) - reading} being copied, {waiting} waiting for room; {self.slab.free} of "
            f"{self.slab.length} bytes of the slab are free"
        )

    def peer_gone(self, peer: Peer) -> None:
        """Nothing that this peer was asked for can land any more, though the transport could not tell."""
        for flight in [f for f in self._stuck if f.peer is peer]:
            self._stuck.remove(flight)
            self.slab.give(flight.slot)

    def _abandon(self, stream: Stream[Owner]) -> None:
        self._streams.remove(stream)
        for flight in stream.flights:
            if flight.transfer is None:
                self.slab.give(flight.slot)
            else:
                self._orphans.append(flight)
        stream.flights = []

    def _poll_orphans(self) -> None:
        for flight in list(self._orphans):
            try:
                if self._arrived(flight):
                    self._orphans.remove(flight)
                    self.slab.give(flight.slot)
            except TransferError as error:
                self._orphans.remove(flight)
                self._slot_after(flight, error)

    def _look(self, stream: Stream[Owner], failed: dict[Stream[Owner], TransferError]) -> None:
        for flight in list(stream.flights):
            try:
                self._arrived(flight)
            except TransferError as error:
                stream.flights.remove(flight)
                self._slot_after(flight, error)
                failed[stream] = _ended(error)

    def _arrived(self, flight: _Flight) -> bool:
        if flight.transfer is not None and self._transport.poll(flight.transfer) is Status.DONE:
            flight.transfer = None
        return flight.transfer is None

    def _slot_after(self, flight: _Flight, error: TransferError) -> None:
        if error.terminal:
            self.slab.give(flight.slot)
        else:
            self._stuck.append(flight)

    def _convert(self, until: float) -> None:
        """Copy what has arrived, stream by stream, while there is time."""
        for stream in self._streams:
            for flight in [f for f in stream.flights if f.transfer is None]:
                assert self._memory is not None
                base = self._memory.segment.address + flight.slot
                for copy in flight.copies:
                    self._copier.copy(base, copy)
                    if time.monotonic() >= until:
                        self._copier.finish()
                        return
                self._copier.finish()
                stream.flights.remove(flight)
                self.slab.give(flight.slot)

    def _refill(self, failed: dict[Stream[Owner], TransferError]) -> bool:
        """Start one read if there is room; whether it did. The first that does not fit keeps its turn."""
        ready = [
            s
            for s in self._streams
            if len(s.flights) < CHUNKS_UNDER_WAY and s not in failed and self._next(s) and self._may_take(s)
        ]
        stream = min(ready, key=lambda s: len(s.flights), default=None)
        if stream is None or stream.waiting is None or (slot := self.slab.take(stream.waiting.size)) is None:
            return False
        chunk, stream.waiting = stream.waiting, None
        try:
            self._read(stream, chunk, slot)
        except TransferError as error:
            self.slab.give(slot)
            failed[stream] = _ended(error)
        return True

    def _read(self, stream: Stream[Owner], chunk: Chunk, slot: int) -> None:
        assert self._memory is not None
        into = self._memory.segment.address + slot
        runs = Runs(chunk.reads.source, chunk.reads.destination + into, chunk.reads.length)
        transfer = self._transport.read(stream.peer, runs)
        stream.flights.append(_Flight(stream.instance, stream.peer, slot, transfer, iter(chunk.copies)))
        stream.bytes += runs.total_bytes
        stream.runs += len(runs)
        stream.descriptors += transfer.descriptors

    def _next(self, stream: Stream[Owner]) -> bool:
        """Whether a stream has a chunk to start; it is then in `waiting`."""
        if stream.waiting is None:
            stream.waiting = next(stream.rest, None)
        return stream.waiting is not None

    def _may_take(self, stream: Stream[Owner]) -> bool:
        flights = [*self._orphans, *self._stuck, *(f for s in self._streams for f in s.flights)]
        held = sum(self.slab.size_of(flight.slot) for flight in flights if flight.instance is stream.instance)
        assert stream.waiting is not None
        return held + stream.waiting.size <= self.slab.length // 2


def _ended(error: TransferError) -> TransferError:
    """The same failure as the receive sees it: its destination is not written to."""
    if error.terminal:
        return error
    return TransferError(str(error), retryable=error.retryable)
