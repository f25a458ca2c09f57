"""Runs: what a transport is asked to copy, as three parallel arrays.

A run is `length` bytes from `source[i]` to `destination[i]`, absolute addresses in the two processes. Everything
above the transports ends in this form and everything in a transport begins with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterable

Addresses = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Runs:
    """Arrays of shape (n,), dtype int64: absolute byte addresses and lengths in bytes."""

    source: Addresses
    destination: Addresses
    length: Addresses

    def __len__(self) -> int:
        return int(self.length.shape[0])

    @property
    def total_bytes(self) -> int:
        return int(self.length.sum())

    def take(self, index: NDArray[np.intp]) -> Runs:
        """The runs at an array of indices, in its order."""
        return Runs(self.source[index], self.destination[index], self.length[index])


def concatenate(parts: Iterable[Runs]) -> Runs:
    given = tuple(parts)
    if len(given) == 1:
        return given[0]
    none = np.empty(0, dtype=np.int64)
    return Runs(
        np.concatenate([none, *(runs.source for runs in given)]),
        np.concatenate([none, *(runs.destination for runs in given)]),
        np.concatenate([none, *(runs.length for runs in given)]),
    )


def join(parts: Iterable[Runs]) -> Runs:
    """All runs in order of destination, those that continue each other on both sides made one."""
    runs = concatenate(parts)
    if len(runs) < 2:
        return runs
    source, destination, length = runs.source, runs.destination, runs.length
    if (destination[1:] < destination[:-1]).any():
        order = np.argsort(destination, kind="stable")
        source, destination, length = source[order], destination[order], length[order]
    reach = length[:-1]
    apart = (source[1:] - source[:-1] != reach) | (destination[1:] - destination[:-1] != reach)
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return Runs(source[first], destination[first], np.add.reduceat(length, first))
