"""Slots of the staging buffer: which parts of it are taken, in bytes from its start.

The buffer is cut into *sections*, as long as the largest chunk, and a slot lies within one. A slot that never comes
back keeps the largest chunk out of its section, however small it is. So a holder's share is counted in sections: it has
slots in half of them at most, and what it leaves to others has room for whole chunks. Small slots share sections, so as
many are out at once as their bytes allow.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

ALIGNMENT: Final = 64


@dataclass(slots=True)
class _Section:
    """The slots of one section by their first bytes, each with its size and holder, and how many each holder has."""

    start: int
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)
    holders: Counter[int] = field(default_factory=Counter)


class StagingBuffer:
    """Slots of one stretch of memory of `length` bytes, in sections of `section` bytes, a multiple of `ALIGNMENT`;
    first fit. A holder is a number that its owner chose."""

    def __init__(self, length: int, section: int) -> None:
        self.length = length
        self._section = section
        self._sections = [_Section(start) for start in range(0, length - section + 1, section)] if section else []
        self._most = max(1, len(self._sections) // 2)

    @property
    def free(self) -> int:
        """Bytes that no slot holds, not necessarily in one piece."""
        return self.length - sum(size for section in self._sections for size, _ in section.slots.values())

    def allows(self, size: int, holder: int) -> bool:
        """Whether the share of `holder` is not used up: it gets such a slot as soon as there is room."""
        own = self._of(holder)
        return len(own) < self._most or any(self._gap(section, size) is not None for section in own)

    def take(self, size: int, holder: int) -> int | None:
        """A slot of at least `size` bytes, or None while there is no room in what `holder` may use. Where it has
        slots already goes first: few sections are then anybody's."""
        own = self._of(holder)
        others = [section for section in self._sections if section not in own] if len(own) < self._most else []
        for section in (*own, *others):
            if (slot := self._gap(section, size)) is not None:
                section.slots[slot] = _aligned(size), holder
                section.holders[holder] += 1
                return slot
        return None

    def give(self, slot: int) -> None:
        section = self._sections[slot // self._section]
        _, holder = section.slots.pop(slot)
        section.holders[holder] -= 1
        if not section.holders[holder]:
            del section.holders[holder]

    def _of(self, holder: int) -> list[_Section]:
        """The sections in which a holder has slots."""
        return [section for section in self._sections if holder in section.holders]

    def _gap(self, section: _Section, size: int) -> int | None:
        """Where a slot of so many bytes fits into a section."""
        start = section.start
        for slot, (length, _) in [*sorted(section.slots.items()), (start + self._section, (0, 0))]:
            if slot - start >= size:
                return start
            start = slot + length
        return None


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
