"""Slots of the staging buffer: which parts of it are taken, in bytes from its start."""

from __future__ import annotations

from typing import Final

ALIGNMENT: Final = 64


class StagingBuffer:
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
        size = -(-size // ALIGNMENT) * ALIGNMENT
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
