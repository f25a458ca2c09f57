"""Registered memory as sorted ranges, and runs cut to fit it: our own bounds check before any library's.

Libraries check little (NIXL reads memory that the peer deregistered, Mooncake over tcp accepts any local address), so
every run is placed inside a registered segment on both sides here. A run that goes on from one segment into an
adjacent one is legal, the binder merges by address, but a library wants each descriptor inside one registration:
such runs are cut at the segment's end, and any that is longer than a transport posts at once.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.runs import Addresses, Runs, concatenate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from vllm_pd_connector.geometry.manifest import Segment


_KINDS = (False, False), (False, True), (True, False), (True, True)
"""Whether source and destination are CUDA memory."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """Memory of one worker: arrays of shape (n,), sorted by address, [start, stop) in bytes.

    `owner` names the worker in messages ("this worker", "the peer"). `only`: whether all of it is CUDA memory, and on
    which device; None where that differs. `places` is [start, stop) as integers, which `hold` looks up. `edges` and
    `ends` are for `room`: 0 and `start`, and by how many of these an address has reached, where its range ends: at the
    least number below 0, at 0 below all ranges.
    """

    owner: str
    start: Addresses
    stop: Addresses
    cuda: NDArray[np.bool_]
    device: Addresses
    only: tuple[bool, int] | None
    places: tuple[tuple[int, ...], tuple[int, ...]]
    edges: Addresses
    ends: Addresses

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
        kinds = {(segment.device == "cuda", segment.device_id) for segment in ordered}
        start = np.array([segment.address for segment in ordered], dtype=np.int64)
        stop = start + np.array([segment.length for segment in ordered], dtype=np.int64)
        return cls(
            owner=owner,
            start=start,
            stop=stop,
            cuda=np.array([segment.device == "cuda" for segment in ordered], dtype=np.bool_),
            device=np.array([segment.device_id for segment in ordered], dtype=np.int64),
            only=kinds.pop() if len(kinds) == 1 else None,
            places=(tuple(start.tolist()), tuple(stop.tolist())),
            edges=np.concatenate(([0], start)),
            ends=np.concatenate(([-(2**63), 0], stop)),
        )

    def hold(self, address: Addresses, length: int) -> bool:
        """Whether `length` bytes from each of one address or more lie in one range, the same of all. By the least and
        the greatest address alone, and so in integers that have no end."""
        starts, stops = self.places
        index = bisect_right(starts, address.item(address.argmin())) - 1
        return index >= 0 and address.item(address.argmax()) + length <= stops[index]

    def room(self, address: Addresses) -> Addresses:
        """Bytes from each address to the end of the range that holds it; 0 or fewer if none does."""
        return self.ends.take(self.edges.searchsorted(address, "right")) - address

    def memory(self, address: Addresses) -> tuple[Any, Any]:
        """Whether each address is in CUDA memory, and the number of its device: arrays, or what is so of all."""
        if self.only is not None:
            return self.only
        index = self.start.searchsorted(address, "right") - 1
        return self.cuda[index], self.device[index]

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


def cut(runs: Runs, source: Ranges, destination: Ranges, limit: int | None) -> Runs:
    """`runs` as descriptors: of at most `limit` bytes, each in one range per side. Runs of length 0 disappear.

    Few calls of numpy, of few kinds and without its wrappers in Python (`min`, `any`): between two large transfers all
    code is cold, and the first call of each kind takes 5 us, later ones 1. Caches are mostly one segment, so that it is
    enough to know the least and the greatest of each array; only where it is not is every run looked up.

    Raises:
        TransferError: a length is negative, or a byte lies outside the ranges of its side. Nothing was moved.
    """
    if not runs.length.size or runs.length.item(runs.length.argmin()) < 1:
        runs = _some(runs)
        if not len(runs):
            return runs
    longest = runs.length.item(runs.length.argmax())
    if not (source.hold(runs.source, longest) and destination.hold(runs.destination, longest)):
        over = np.minimum(source.room(runs.source), destination.room(runs.destination)) < runs.length
        if over.item(over.argmax()):
            runs = _apart(runs, source, destination)
    if limit is not None and longest > limit:
        runs = _shorter(runs, limit)
    return runs


def few(
    runs: Runs, source: Ranges, destination: Ranges, longest: int, limit: int, per_descriptor: int
) -> tuple[Addresses, tuple[bool, bool], int] | None:
    """What `cut` and `Batches.take` make of a short transfer, in half of their time: its rows, the kinds of memory and
    what they cost. None where that is over `limit`, or a run has to be cut or looked up, or is wrong: they
    look at that again. Few runs are cheaper as lists.
    """
    count, ours, theirs = runs.length.size, source.only, destination.only
    if not count or count * per_descriptor > limit or ours is None or theirs is None:
        return None
    lengths = runs.length.tolist()
    most = max(lengths)
    cost = sum(lengths) + count * per_descriptor
    if cost > limit or most > longest or min(lengths) < 1:
        return None
    for places, (starts, stops) in ((runs.source, source.places), (runs.destination, destination.places)):
        addresses = places.tolist()
        index = bisect_right(starts, min(addresses)) - 1
        if index < 0 or max(addresses) + most > stops[index]:
            return None
    return _rows(runs, ours[1], theirs[1]), (ours[0], theirs[0]), cost


def _some(runs: Runs) -> Runs:
    """Those that are not empty."""
    if (runs.length < 0).any():
        raise TransferError(f"a run has the negative length {int(runs.length.min())}; the planner is wrong")
    return runs.take(np.flatnonzero(runs.length))


def _apart(runs: Runs, source: Ranges, destination: Ranges) -> Runs:
    """The same bytes by runs that end where a range does."""
    pieces: list[Runs] = []
    while True:
        source_room, destination_room = source.room(runs.source), destination.room(runs.destination)
        source.require(runs.source, source_room)
        destination.require(runs.destination, destination_room)
        length = np.minimum(np.minimum(source_room, destination_room), runs.length)
        pieces.append(Runs(runs.source, runs.destination, length))
        more = np.flatnonzero(length < runs.length)
        if not len(more):
            return concatenate(pieces)
        rest, step = runs.take(more), length[more]
        runs = Runs(rest.source + step, rest.destination + step, rest.length - step)


def _shorter(runs: Runs, limit: int) -> Runs:
    """The same bytes in the same order by runs of at most `limit` bytes."""
    pieces = (runs.length + (limit - 1)) // limit
    index = np.arange(len(runs)).repeat(pieces)
    whole = runs.take(index)
    before = (np.arange(len(index)) - (np.add.accumulate(pieces) - pieces)[index]) * limit
    return Runs(whole.source + before, whole.destination + before, np.minimum(whole.length - before, limit))


@dataclass(slots=True)
class Batches:
    """Descriptors of one kind of memory on each side, to be posted in order, in batches of bounded cost.

    `rows` is an array of shape (2, n, 3), each side in C order: address, length and device of source and destination;
    `cuda` says of both sides whether that is memory of CUDA devices. Those before `next` were taken, `rest` is what the
    others cost. A descriptor costs its bytes plus `per_descriptor` bytes. `cost` has what those up to each cost, an
    array of shape (n,), once they are not all taken together.
    """

    rows: Addresses
    cuda: tuple[bool, bool]
    per_descriptor: int
    rest: int
    next: int = 0
    cost: Addresses | None = None

    @property
    def left(self) -> int:
        return len(self.rows[0]) - self.next

    def take(self, limit: int, most: int) -> tuple[Addresses, int]:
        """The rows of the next ones, at most `most`, which cost at most `limit` together or are one alone; and what
        they cost."""
        rows, first, stop, cost = self.rows, self.next, self.rows.shape[1], self.rest
        if cost > limit or stop - first > most:
            if self.cost is None:
                self.cost = np.add.accumulate(rows[0, :, 1] + self.per_descriptor)
            before = int(self.cost[-1]) - cost
            stop = max(first + 1, min(first + most, int(self.cost.searchsorted(before + limit, "right"))))
            cost = int(self.cost[stop - 1]) - before
        self.next, self.rest = stop, self.rest - cost
        return rows if stop - first == rows.shape[1] else rows[:, first:stop], cost


def batches(runs: Runs, source: Ranges, destination: Ranges, per_descriptor: int) -> list[Batches]:
    """Descriptors by kind of memory, as a library wants what it is given at once. For what one costs see `Batches`."""
    count = runs.length.size
    if not count:
        return []
    if (ours := source.only) and (theirs := destination.only):
        rest = np.add.accumulate(runs.length).item(-1) + count * per_descriptor
        return [Batches(_rows(runs, ours[1], theirs[1]), (ours[0], theirs[0]), per_descriptor, rest)]
    rows = _rows(runs, 0, 0)
    from_cuda, rows[0, :, 2] = source.memory(runs.source)
    to_cuda, rows[1, :, 2] = destination.memory(runs.destination)
    found = []
    for kind in _KINDS:
        some = np.flatnonzero((from_cuda == kind[0]) & (to_cuda == kind[1]))
        if len(some):
            rest = int(runs.length[some].sum()) + len(some) * per_descriptor
            found.append(Batches(rows.take(some, axis=1), kind, per_descriptor, rest))
    return found


def _rows(runs: Runs, from_device: int, to_device: int) -> Addresses:
    """See `Batches`."""
    rows = np.zeros((2, runs.length.size, 3), dtype=np.int64)
    rows[0, :, 0], rows[1, :, 0], rows[:, :, 1] = runs.source, runs.destination, runs.length
    if from_device or to_device:
        rows[0, :, 2], rows[1, :, 2] = from_device, to_device
    return rows
