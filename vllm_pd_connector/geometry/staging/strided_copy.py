"""Strided copies between a staging buffer and a cache: few of them for many places.

Elements of one shape that lie at regular distances on both sides are one copy with more axes, so places are searched
for equal steps. What is contiguous on both sides becomes part of the item.

Of pages that lie anyhow there is a copy for each, and to make an object of each takes longer than a turn of the thread
that starts them: `Copies` are made one by one, when they are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

# A single copy moves at most this much, so that whoever carries it out can look up in between (about 1 ms).
COPY_BYTES = 4 << 20

CopyAxis = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided copy between staging buffer and cache, in bytes: `item` contiguous bytes at every index of `axes`.

    `staging` counts from where the chunk lies in the staging buffer, `cache` is an absolute address. An axis is (size,
    staging buffer stride, cache stride); the outermost in the cache comes first.
    """

    staging: int
    cache: int
    item: int
    axes: tuple[CopyAxis, ...]

    @property
    def total_bytes(self) -> int:
        return self.item * prod(size for size, _, _ in self.axes)


@dataclass(frozen=True, slots=True)
class Copies:
    """The copies of several shapes, each as `strided_copies` takes it; the same ones whenever they are looked at."""

    shapes: tuple[tuple[int, tuple[CopyAxis, ...], NDArray[np.int64], NDArray[np.int64]], ...]

    def __iter__(self) -> Iterator[Copy]:
        for shape in self.shapes:
            yield from strided_copies(*shape)


def strided_copies(
    item: int, axes: Sequence[CopyAxis], rows: NDArray[np.int64], columns: NDArray[np.int64]
) -> Iterator[Copy]:
    """Copies of one shape at every row plus every column, both arrays of (staging buffer, cache)."""
    single = tuple(_cut(_compact(0, 0, item, axes)))
    for first, count, step in _progressions(columns):
        parts = single if count == 1 else tuple(_cut(_compact(0, 0, item, [*axes, (count, *step)])))
        for staging, cache in (rows + columns[first]).tolist():
            for part in parts:
                yield Copy(staging + part.staging, cache + part.cache, part.item, part.axes)


def fold(places: NDArray[np.int64]) -> tuple[list[CopyAxis], NDArray[np.int64]]:
    """Take out of an array (n, 2) of places every axis of equal steps, innermost first; and what remains."""
    axes: list[CopyAxis] = []
    while len(places) > 1:
        steps = np.diff(places, axis=0)
        other = np.flatnonzero((steps != steps[0]).any(axis=1))
        size = int(other[0]) + 1 if len(other) else len(places)
        blocks = places.reshape(-1, size, 2) if size > 1 and len(places) % size == 0 else None
        if blocks is None or (steps[0] <= 0).any() or (np.diff(blocks, axis=1) != steps[0]).any():
            break
        axes.append((size, int(steps[0, 0]), int(steps[0, 1])))
        places = blocks[:, 0]
    return axes, places


def _progressions(places: NDArray[np.int64]) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Cut an array (n, 2) into stretches of equal positive steps: (index of the first, how many, step)."""
    steps = np.diff(places, axis=0)
    broken = (steps[1:] != steps[:-1]).any(axis=1)
    ends = [*(np.flatnonzero(broken) + 1).tolist(), len(steps)]  # steps up to here equal the ones before
    # Looked at one by one: lists, of which an element costs a tenth of an array's.
    rises: Any = (steps > 0).all(axis=1).tolist()
    by: list[list[int]] = steps.tolist()
    first = next_end = 0
    while first < len(places):
        if first == len(steps) or not rises[first]:
            yield first, 1, (0, 0)
            first += 1
            continue
        while ends[next_end] <= first:
            next_end += 1
        end = ends[next_end]
        yield first, end - first + 1, (by[first][0], by[first][1])
        first = end + 1


def _compact(staging: int, cache: int, item: int, axes: Sequence[CopyAxis]) -> Copy:
    """A copy with its contiguous axes made part of the item."""
    ordered = sorted(axes, key=lambda axis: axis[2])
    while ordered and ordered[0][1] == ordered[0][2] == item:
        item *= ordered.pop(0)[0]
    return Copy(staging, cache, item, tuple(reversed(ordered)))


def _cut(copy: Copy) -> Iterator[Copy]:
    """A copy in parts of at most COPY_BYTES, or as close as one element of its outer axes allows."""
    if copy.total_bytes <= COPY_BYTES or not copy.axes:
        yield copy
        return
    (size, from_, to), inner = copy.axes[0], copy.axes[1:]
    at_once = max(1, COPY_BYTES * size // copy.total_bytes)
    for i in range(0, size, at_once):
        count = min(at_once, size - i)
        axes = ((count, from_, to), *inner) if count > 1 else inner
        part = Copy(copy.staging + i * from_, copy.cache + i * to, copy.item, axes)
        yield from _cut(part) if count == 1 else (part,)
