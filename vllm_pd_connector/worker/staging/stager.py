"""Staged transfers: by way of the staging buffer, with strided copies between it and the caches.

The *staging buffer* is memory of this worker that the transport registered beside the caches; no peer is told of it. A
staged transfer is a `Stream` of chunks (`geometry.staging.chunks`): each takes a slot of the staging buffer and gives
it back in the end. Between, a chunk that reads is read into its slot and copied to where its bytes belong; one that
writes is copied out of the cache into its slot and written from there. A stream has at most four chunks under way, so
that some are moved while another is copied, and streams with fewer go first. When the buffer is full, streams wait, and
their deadlines run on. One instance never has chunks in more than half of its sections (`buffer`), so that a frozen one
does not stop others.

Nothing but our own copies writes to the destination of a staged read, so giving it up (`cancel`) takes effect at once.
What may still be written to is the slot: it stays out until its read is terminal, or that worker has ended
(`peers.process_watch`). A staged write that was given up may still write to the peer, and
while the transport works on it `holds` says so; its slots are only read, for blocks that are in quarantine there.

A cache is read by a chunk that writes when its turn comes, and not before its stream is started: who starts it knows
that the bytes are final and stay so until the stream has ended.

All of it runs in the transfer thread, in slices of about a millisecond. Figures: docs/design/conversion.md.
"""

from __future__ import annotations

import time
from enum import IntEnum
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.runs import Runs
from vllm_pd_connector.geometry.staging.chunks import CHUNKS_PER_BUFFER
from vllm_pd_connector.transport.base import TransferStatus
from vllm_pd_connector.worker.peers.process_watch import LOOK_S
from vllm_pd_connector.worker.poll_interval import FIRST_S, pause
from vllm_pd_connector.worker.staging.buffer import ALIGNMENT, StagingBuffer
from vllm_pd_connector.worker.staging.copiers import copier_for
from vllm_pd_connector.worker.staging.stream import InFlightChunk, Stream

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vllm_pd_connector.geometry.manifest import Segment
    from vllm_pd_connector.geometry.staging.chunks import Chunk
    from vllm_pd_connector.transport.base import Transport, TransportPeer
    from vllm_pd_connector.worker.peers.process_watch import ProcessWatch
    from vllm_pd_connector.worker.staging.base import Copier

logger = init_logger(__name__)

SLICE_S = 0.001
POLL_DEVICE_S = 0.0001  # a device copies a chunk in less
POLL_DRAINING_S = 0.05
CHUNKS_UNDER_WAY = 4


class _Work(IntEnum):
    """What is done in turns; each may take as long as a turn should, so one that is late ends it. On one host a read is
    often over when it was posted: what it brought is copied before the next is started, while it is still in the
    processor's cache."""

    CONVERT = 0
    MAKE = 1
    POST = 2


class Stager:
    """See the module.

    Args:
        segments: of the caches; the staging buffer lies on their device.
        length: bytes of the staging buffer, 0 for none.
        states: whether there are recurrent states among the caches.

    `copier` is for the caches' device.

    Raises:
        TransferError: the device has no memory for the staging buffer.
    """

    def __init__(self, transport: Transport, segments: Sequence[Segment], length: int, *, states: bool = False) -> None:
        self._transport = transport
        self.chunk_bytes = length // CHUNKS_PER_BUFFER // ALIGNMENT * ALIGNMENT
        self.copier: Copier = copier_for(segments, copies=self.chunk_bytes > 0, states=states)
        self._memory = self.copier.allocate(length, "the staging buffer (staging_bytes)") if self.chunk_bytes else None
        self.staging = StagingBuffer(length if self._memory else 0, self.chunk_bytes)
        self._streams: list[Stream] = []
        self._orphans: list[InFlightChunk] = []
        self._stuck: list[InFlightChunk] = []
        self._work, self._posted, self._posted_at = _Work.CONVERT, False, 0.0
        self._moving = False  # as far as the last look at what runs tells

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What to register with the transport."""
        return (self._memory.segment,) if self._memory else ()

    @property
    def converting(self) -> bool:
        """Whether there may be work that does not wait for anything."""
        if self._posted or self._work is not _Work.CONVERT or any(stream.unmade for stream in self._streams):
            return True
        return any(not flight.copying.launched for flight in self._being_copied())

    def pause(self) -> float | None:
        """Seconds until a `poll` is due; None if there is nothing to look at."""
        if self.converting:
            return 0.0
        if any(self._being_copied()):
            return POLL_DEVICE_S
        if self._streams:
            age, chunks = time.monotonic() - self._posted_at, CHUNKS_UNDER_WAY * self.chunk_bytes
            return FIRST_S if self._moving else pause(age, chunks)
        over = any(flight.stream.watch is not None and flight.stream.watch.over for flight in self._stuck)
        return POLL_DRAINING_S if self._orphans or over else LOOK_S if self._stuck else None

    def start(
        self,
        owner: object,
        index: int,
        instance: object,
        peer: TransportPeer,
        chunks: Iterable[Chunk],
        watch: ProcessWatch | None = None,
    ) -> Stream:
        """Begin a staged transfer from or to `peer`, a rank of `instance`; `poll` names it when it has ended."""
        self._streams.append(stream := Stream(owner, index, instance, peer, iter(chunks), watch))
        self._posted = True
        return stream

    def poll(self) -> list[tuple[Stream, TransferError | None]]:
        """Go on for about a millisecond. Returns the streams that ended, with what failed them.

        The destinations of reads are not written to any more, so their errors are `terminal`, whatever the transport
        said. Of a stream that writes, every error is told, also after its end.
        """
        if not (self._streams or self._orphans or self._stuck):
            self._work, self._posted = _Work.CONVERT, False  # what was given up may have left a round
            return []
        self._moving = False
        ended: list[tuple[Stream, TransferError | None]] = list(self._poll_orphans())
        self._bury(time.monotonic())
        failed: dict[Stream, TransferError] = {}
        until = time.monotonic() + SLICE_S
        while True:
            self._do(self._work, until, failed)
            self._work = _Work((self._work + 1) % len(_Work))
            if time.monotonic() >= until or (self._work is _Work.CONVERT and not self._posted):
                break
        for stream in [s for s in self._streams if s.made and s not in failed and not s.in_flight]:
            self._streams.remove(stream)
            ended.append((stream, None))
        for stream in failed:
            self._abandon(stream)
        if not self._streams:  # who comes next begins a round, and is not looked at in the middle of one
            self._work, self._posted = _Work.CONVERT, False
        return [*ended, *failed.items()]

    def _do(self, work: _Work, until: float, failed: dict[Stream, TransferError]) -> None:
        match work:
            case _Work.CONVERT:
                for number, stream in enumerate(list(self._streams)):
                    if number and time.monotonic() >= until:
                        break
                    self._streams.append(self._streams.pop(0))  # who had no look goes first the next time
                    self._look(stream, until, failed)
                self._convert(until, failed)
            case _Work.MAKE:
                for number, stream in enumerate([s for s in self._streams if s.unmade]):
                    if number and time.monotonic() >= until:
                        break
                    self._make(stream, failed)
            case _Work.POST:
                self._posted = self._refill(failed)

    def cancel(self, owner: object) -> None:
        """Give up the streams of `owner`: when this returns nothing is written to the destinations of those that read,
        and nothing is copied any more for those that write; see `holds`."""
        for stream in [s for s in self._streams if s.owner == owner]:
            self._abandon(stream)

    def holds(self, owner: object) -> bool:
        """Whether `owner` has streams, or some that the transport may still work on."""
        return any(stream.owner == owner for stream in (*self._streams, *self._lost()))

    def moves(self, owner: object) -> bool:
        """Whether the transport still tells of something of `owner`; of the rest of what it `holds` only the end of a
        worker's process will."""
        return any(stream.owner == owner for stream in (*self._streams, *(f.stream for f in self._orphans)))

    def involves(self, instance: object) -> bool:
        """Whether streams for this instance are lost: only by it is known when they have ended."""
        return any(stream.instance is instance for stream in self._lost())

    def _lost(self) -> list[Stream]:
        return [flight.stream for flight in (*self._orphans, *self._stuck)]

    def landed(self, owner: object) -> int:
        """Chunks that have arrived of the streams of `owner` that run."""
        return sum(stream.landed for stream in self._streams if stream.owner == owner)

    def outstanding(self, owner: object) -> int:
        """Parts that the transport still works on of streams of `owner` that were given up."""
        transfers = [flight.transfer for flight in self._orphans if flight.stream.owner == owner]
        return sum(transfer.left + 1 for transfer in transfers if transfer is not None)

    def account(self, owner: object) -> str:
        """How far the streams of `owner` are, in words for a log; empty if there are none."""
        streams = [stream for stream in self._streams if stream.owner == owner]
        if not streams:
            return ""
        flights = [flight for stream in streams for flight in stream.in_flight]
        moving, waiting = sum(f.transfer is not None for f in flights), sum(s.waiting is not None for s in streams)
        return (
            f"{sum(stream.bytes for stream in streams)} bytes were posted; {moving} chunks being moved, "
            f"{len(flights) - moving} being copied, {waiting} waiting for room; {self.staging.free} of "
            f"{self.staging.length} bytes of the staging buffer are free"
        )

    def _being_copied(self) -> Iterator[InFlightChunk]:
        return (flight for stream in self._streams for flight in stream.in_flight if not flight.transfer)

    def _bury(self, now: float) -> None:
        """Forget transfers that were given up and run on, or of which nothing is heard any more, when their worker has
        ended."""
        for lost in (self._orphans, self._stuck):
            for flight in list(lost):
                if flight.stream.has_ended(self._transport, now):
                    lost.remove(flight)
                    self.staging.give(flight.slot)

    def _abandon(self, stream: Stream) -> None:
        self._streams.remove(stream)
        for flight in stream.in_flight:
            if flight.transfer is not None:
                self._orphans.append(flight)
            elif self._stopped(flight):
                self.staging.give(flight.slot)
            else:
                self._stuck.append(flight)
        stream.in_flight = []

    def _stopped(self, flight: InFlightChunk) -> bool:
        """End a chunk's copies; False if the device does not say that they have ended."""
        try:
            flight.copying.stop()
            return True
        except Exception as error:  # a device that has failed: no forward will work either
            _defect(error)
            return False

    def _poll_orphans(self) -> Iterator[tuple[Stream, TransferError]]:
        """Look at what was given up; yields what failed of streams that write."""
        for flight in list(self._orphans):
            try:
                if self._is_over(flight):
                    self._orphans.remove(flight)
                    self.staging.give(flight.slot)
            except TransferError as error:
                self._orphans.remove(flight)
                self._slot_after(flight, error)
                if flight.chunk.writes:
                    yield flight.stream, error

    def _look(self, stream: Stream, until: float, failed: dict[Stream, TransferError]) -> None:
        """Look at what is read or written of a stream, one chunk at least, the oldest first."""
        for number, flight in enumerate([f for f in stream.in_flight if f.transfer is not None]):
            if number and time.monotonic() >= until:
                return
            try:
                if not self._is_over(flight):
                    continue
                flight.transfer = None
                if flight.chunk.writes:
                    self._land(flight)
                else:
                    self.copier.arrived()
            except TransferError as error:
                stream.in_flight.remove(flight)
                self._slot_after(flight, error)
                failed[stream] = _seen_by_owner(flight.chunk, error)

    def _is_over(self, flight: InFlightChunk) -> bool:
        assert flight.transfer is not None
        try:
            status = self._transport.poll(flight.transfer)
            self._moving |= status in (TransferStatus.MOVING, TransferStatus.POSTING)
            return status is TransferStatus.DONE
        except TransferError:
            raise
        except Exception as error:
            raise _unknown(error) from error

    def _slot_after(self, flight: InFlightChunk, error: TransferError) -> None:
        flight.stream.may_write |= flight.chunk.writes and not error.terminal  # whatever else of it fails, and when
        if error.terminal or flight.chunk.writes:
            self.staging.give(flight.slot)
        else:
            self._stuck.append(flight)

    def _land(self, flight: InFlightChunk) -> None:
        """A chunk is where it belongs."""
        flight.stream.in_flight.remove(flight)
        flight.stream.landed += 1
        self.staging.give(flight.slot)

    def _convert(self, until: float, failed: dict[Stream, TransferError]) -> None:
        """Copy what is to be copied, stream by stream, while there is time, and write what was copied to be written."""
        for stream in self._streams:
            for flight in [f for f in stream.in_flight if f.transfer is None]:
                if stream in failed:
                    break
                try:
                    if flight.copying.advance(until):
                        if flight.chunk.writes:
                            self._post(flight, failed)
                        else:
                            self._land(flight)
                    elif time.monotonic() >= until:
                        return
                except Exception as error:  # a defect of ours that one stream met must not reach the others
                    failed[stream] = _defect(error)

    def _refill(self, failed: dict[Stream, TransferError]) -> bool:
        """Start one chunk if there is room; whether it did. The first that does not fit keeps its turn: before all
        others, or, where its instance has used up its share, before others of that."""
        ready = [s for s in self._streams if len(s.in_flight) < CHUNKS_UNDER_WAY and s not in failed]
        used_up: set[int] = set()
        for stream in sorted(ready, key=lambda s: len(s.in_flight)):
            holder, chunk = id(stream.instance), stream.waiting
            if chunk is None or holder in used_up:
                continue
            if self.staging.allows(chunk.size, holder):
                break
            used_up.add(holder)
        else:
            return False
        if (slot := self.staging.take(chunk.size, holder)) is None:
            return False
        stream.waiting = None
        assert self._memory is not None
        copying = self.copier.begin(self._memory.segment.address + slot, chunk.copies, gather=chunk.writes)
        flight = InFlightChunk(stream, chunk, slot, copying)
        stream.in_flight.append(flight)
        if not chunk.writes:
            try:
                self._post(flight, failed)
            except Exception as error:  # a defect of ours that one stream met must not reach the others
                failed[stream] = _defect(error)
        return True

    def _post(self, flight: InFlightChunk, failed: dict[Stream, TransferError]) -> None:
        """Give a chunk's runs to the transport. If it does not take them and nothing moves, the slot is given back when
        the stream is abandoned; if something may, see `_slot_after`."""
        assert self._memory is not None
        stream, runs, base = flight.stream, flight.chunk.runs, self._memory.segment.address + flight.slot
        if flight.chunk.writes:
            move, runs = self._transport.write, Runs(runs.source + base, runs.destination, runs.length)
        else:
            move, runs = self._transport.read, Runs(runs.source, runs.destination + base, runs.length)
        try:
            flight.transfer = move(stream.peer, runs)
            stream.descriptors += flight.transfer.descriptors
        except Exception as error:
            failure = error if isinstance(error, TransferError) else _unknown(error)
            if flight.transfer is None and not failure.terminal:
                stream.in_flight.remove(flight)
                self._slot_after(flight, failure)
            failed[stream] = _seen_by_owner(flight.chunk, failure)
            return
        self._posted_at = time.monotonic()
        stream.bytes, stream.runs = stream.bytes + runs.total_bytes, stream.runs + len(runs)

    def _make(self, stream: Stream, failed: dict[Stream, TransferError]) -> None:
        """Make a stream's next chunk, if there is one."""
        try:
            stream.waiting = next(stream.rest, None)
            stream.made = stream.waiting is None
        except Exception as error:  # a defect of ours that one stream met must not reach the others
            failed[stream] = _defect(error)


def _seen_by_owner(chunk: Chunk, error: TransferError) -> TransferError:
    """The same failure as the owner sees it: the destination of a read is not written to."""
    if error.terminal or chunk.writes:
        return error
    return TransferError(str(error), retryable=error.retryable)


def _unknown(error: Exception) -> TransferError:
    """After a call of the transport that raised an error which is none of ours nobody knows what goes on. It is to cost
    nobody else's transfers a turn."""
    return TransferError(str(_defect(error)), terminal=False)


def _defect(error: Exception) -> TransferError:
    logger.error("a staged transfer", exc_info=error)
    return TransferError(f"{type(error).__name__}: {error}")
