"""When the first of many things is due, without looking at all of them in every turn.

`Earliest` is for deadlines, which are mostly taken back: a lower bound, which each one that is set lowers. When it is
over, its owner looks at all of them and sets it anew. So a thousand requests whose deadlines are half a minute away are
looked at twice a minute, and not in each of some thousand turns a second. `Agenda` is for looks at what moves, each of
which has its time: those that are due are taken, the earliest first.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

Item = TypeVar("Item")


class Earliest:
    """See the module; moments are seconds of the monotonic clock, None is never."""

    def __init__(self) -> None:
        self._at = inf

    def lower(self, *moments: float | None) -> None:
        """These deadlines were set."""
        for moment in moments:
            if moment is not None and moment < self._at:
                self._at = moment

    def over(self, now: float) -> bool:
        """Whether a deadline may be due: all are to be looked at, and what is left told to `renew`."""
        return self._at <= now

    def renew(self, moments: Iterable[float | None]) -> None:
        """These are all deadlines there are."""
        self._at = inf
        self.lower(*moments)

    @property
    def at(self) -> float | None:
        """No deadline is before."""
        return None if self._at == inf else self._at


class Agenda(Generic[Item]):
    """See the module. An item, which is hashable, stands in it once at most."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._numbers: dict[Item, int] = {}  # of the entries that count
        self._number = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def set(self, item: Item, moment: float) -> None:
        """An item is due then, and not when it was before."""
        self._number += 1
        self._numbers[item] = self._number
        heappush(self._heap, (moment, self._number, item))

    def take(self, now: float) -> Item | None:
        """Take out the item that was due first; None if none is."""
        if (first := self.at) is None or first > now:
            return None
        item = heappop(self._heap)[2]
        del self._numbers[item]
        return item

    @property
    def at(self) -> float | None:
        """When the first item is due, None if there is none."""
        while self._heap and self._numbers.get(self._heap[0][2]) != self._heap[0][1]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None
