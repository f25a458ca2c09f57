"""Registered memory as sorted ranges, and runs cut to fit it: our own bounds check before any library's.

Libraries check little (NIXL reads memory that the peer deregistered, Mooncake over tcp accepts any local address), so
every run is placed inside a registered segment on both sides here. A run that goes on from one segment into an
adjacent one is legal, the binder merges by address, but a library wants each descriptor inside one registration:
such runs are cut at the segment's end, in the same pass that cuts runs longer than a transport posts at once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.runs import Addresses, Runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from vllm_pd_connector.geometry.manifest import Segment


@dataclass(frozen=True, slots=True)
class Ranges:
    """Memory of one worker: arrays of shape (n,), sorted by address, [start, stop) in bytes.

    `owner` names the worker in messages ("this worker", "the peer"). `ends` is `stop` and a 0, the end of the range
    -1 in which the search finds what lies below all others. `alike`: all are one kind of memory of one device.
    """

    owner: str
    start: Addresses
    stop: Addresses
    cuda: NDArray[np.bool_]
    device: Addresses
    ends: Addresses
    alike: bool

    @classmethod
    def of(cls, segments: Sequence[Segment], owner: str) -> Ranges:
        """Ranges of `segments`, in any order.

        Raises:
            TransferError: a segment is empty, of an unknown device, outside int64, or overlaps another.
        """
        ordered = sorted(segments, key=lambda segment: segment.address)
        for segment in ordered:
            if segment.address <= 0 or segment.length <= 0 or segment.address + segment.length > 2**63 - 1:
                raise TransferError(f"{owner}: segment at {segment.address:#x} of {segment.length} bytes is not memory")
            if segment.device not in ("cpu", "cuda"):
                raise TransferError(f"{owner}: segment device {segment.device!r}, only cpu and cuda can be registered")
        for before, after in itertools.pairwise(ordered):
            if before.address + before.length > after.address:
                raise TransferError(
                    f"{owner}: segment at {before.address:#x} of {before.length} bytes overlaps the one at "
                    f"{after.address:#x}; describe shared storage as one segment"
                )
        start = np.array([segment.address for segment in ordered], dtype=np.int64)
        stop = start + np.array([segment.length for segment in ordered], dtype=np.int64)
        return cls(
            owner=owner,
            start=start,
            stop=stop,
            cuda=np.array([segment.device == "cuda" for segment in ordered], dtype=np.bool_),
            device=np.array([segment.device_id for segment in ordered], dtype=np.int64),
            ends=np.append(stop, np.int64(0)),
            alike=len({(segment.device, segment.device_id) for segment in ordered}) == 1,
        )

    def room(self, address: Addresses) -> tuple[NDArray[np.intp], Addresses]:
        """The range that holds each address, and the bytes from the address to its end: 0 or fewer if none does."""
        index = self.start.searchsorted(address, "right") - 1
        return index, self.ends[index] - address

    def require(self, address: Addresses, room: Addresses) -> None:
        """Raises:
        TransferError: an address lies in no range.
        """
        outside = np.flatnonzero(room <= 0)
        if len(outside):
            first = int(outside[0])
            raise TransferError(
                f"run {first} reaches address {int(address[first]):#x}, outside the {len(self.start)} registered "
                f"segments of {self.owner}; the manifest that was planned with is not this endpoint's"
            )


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Runs that each lie in one range per side, with the index of that range. Arrays of shape (n,)."""

    runs: Runs
    source_range: NDArray[np.intp]
    destination_range: NDArray[np.intp]

    def take(self, index: NDArray[np.intp] | slice) -> Descriptors:
        runs = Runs(self.runs.source[index], self.runs.destination[index], self.runs.length[index])
        return Descriptors(runs, self.source_range[index], self.destination_range[index])


def cut(runs: Runs, source: Ranges, destination: Ranges, limit: int) -> Descriptors:
    """`runs` as descriptors of at most `limit` bytes, cut where a range ends. Runs of length 0 disappear.

    Raises:
        TransferError: a length is negative, or a byte lies outside the ranges of its side. Nothing was moved.
    """
    inside = _inside(runs, source, destination)
    if inside is not None:
        return inside if runs.length.max() <= limit else _shorter(inside, limit)
    if (runs.length < 0).any():
        raise TransferError(f"a run has the negative length {int(runs.length.min())}; the planner is wrong")
    some = runs.length > 0
    rest = Runs(runs.source[some], runs.destination[some], runs.length[some])
    pieces: list[tuple[Addresses | NDArray[np.intp], ...]] = []
    while True:
        source_range, source_room = source.room(rest.source)
        destination_range, destination_room = destination.room(rest.destination)
        source.require(rest.source, source_room)
        destination.require(rest.destination, destination_room)
        length = np.minimum(np.minimum(source_room, destination_room), np.minimum(rest.length, limit))
        pieces.append((rest.source, rest.destination, length, source_range, destination_range))
        more = length < rest.length
        if not more.any():
            break
        step = length[more]
        rest = Runs(rest.source[more] + step, rest.destination[more] + step, rest.length[more] - step)
    columns = tuple(np.concatenate(column) for column in zip(*pieces, strict=True))
    return Descriptors(Runs(columns[0], columns[1], columns[2]), columns[3], columns[4])


def _inside(runs: Runs, source: Ranges, destination: Ranges) -> Descriptors | None:
    """`runs` as they are, unless one has to be cut at a range's end, dropped or refused: the usual case.

    Few calls of numpy: between two large transfers all code is cold and each takes 4 us, where 16 MiB take 650.
    """
    length = runs.length
    source_range, source_room = source.room(runs.source)
    destination_range, destination_room = destination.room(runs.destination)
    if not len(length) or length.min() <= 0:
        return None
    if not (length <= np.minimum(source_room, destination_room)).all():
        return None
    return Descriptors(runs, source_range, destination_range)


def _shorter(whole: Descriptors, limit: int) -> Descriptors:
    """The same bytes in the same order, by descriptors of at most `limit` bytes."""
    pieces = -(-whole.runs.length // limit)
    index = np.repeat(np.arange(len(pieces)), pieces)
    cut = whole.take(index)
    before = (np.arange(len(index)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * limit
    length = np.minimum(cut.runs.length - before, limit)
    runs = Runs(cut.runs.source + before, cut.runs.destination + before, length)
    return Descriptors(runs, cut.source_range, cut.destination_range)


@dataclass(slots=True)
class Batches:
    """Descriptors of one kind of memory on each side, to be posted in order, in batches of bounded cost. `cost` has
    what those up to each descriptor cost: an array of shape (n,). Those before `next` were taken."""

    descriptors: Descriptors
    cost: Addresses
    next: int = 0

    @property
    def left(self) -> int:
        return len(self.cost) - self.next

    def take(self, limit: int) -> tuple[Descriptors, int]:
        """The next ones, which cost at most `limit` together or are one alone, and their cost."""
        first, before = self.next, int(self.cost[self.next - 1]) if self.next else 0
        stop = max(first + 1, int(self.cost.searchsorted(before + limit, "right")))
        self.next, cost = stop, int(self.cost[stop - 1]) - before
        if not first and stop == len(self.cost):
            return self.descriptors, cost
        return self.descriptors.take(slice(first, stop)), cost


def batches(descriptors: Descriptors, source: Ranges, destination: Ranges, per_descriptor: int) -> list[Batches]:
    """Descriptors by kind of memory, as a library wants what it is given at once.

    The cost of a descriptor is its bytes plus `per_descriptor` bytes.
    """
    if not len(descriptors.runs):
        return []
    if source.alike and destination.alike:
        parts = [descriptors]
    else:
        kind = 2 * source.cuda[descriptors.source_range] + destination.cuda[descriptors.destination_range]
        parts = [descriptors.take(np.flatnonzero(kind == value)) for value in np.unique(kind)]
    return [Batches(part, np.cumsum(part.runs.length + per_descriptor)) for part in parts]
