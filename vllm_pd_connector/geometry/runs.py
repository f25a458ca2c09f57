"""Runs: what a transport is asked to copy, as three parallel arrays.

A run is `length` bytes from `source[i]` to `destination[i]`, absolute addresses in the two processes. Everything
above the transports ends in this form and everything in a transport begins with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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

    @classmethod
    def empty(cls) -> Runs:
        none = np.empty(0, dtype=np.int64)
        return cls(none, none, none)
