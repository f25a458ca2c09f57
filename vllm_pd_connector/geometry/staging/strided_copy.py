"""Strided copies between a staging buffer and a cache: few of them for many places.

Elements of one shape that lie at regular distances on both sides are one copy with more axes, so places are searched
for equal steps. What is contiguous on both sides becomes part of the item.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def strided_copies(
    item: int, axes: list[CopyAxis], rows: NDArray[np.int64], columns: NDArray[np.int64]
) -> Iterator[Copy]:
    """Copies of one shape at every row plus every column, both arrays of (staging buffer, cache)."""
    for first, count, step in _progressions(columns):
        more = [(count, *step)] if count > 1 else []
        for row in rows:
            staging, cache = (row + columns[first]).tolist()
            yield from _cut(_compact(staging, cache, item, [*axes, *more]))


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
    ends = np.append(np.flatnonzero(broken) + 1, len(steps))  # steps up to here equal the ones before
    first = 0
    while first < len(places):
        if first == len(places) - 1 or (steps[first] <= 0).any():
            yield first, 1, (0, 0)
            first += 1
            continue
        end = int(ends[np.searchsorted(ends, first, side="right")])
        yield first, end - first + 1, (int(steps[first, 0]), int(steps[first, 1]))
        first = end + 1


def _compact(staging: int, cache: int, item: int, axes: list[CopyAxis]) -> Copy:
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
