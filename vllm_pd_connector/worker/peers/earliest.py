"""When the first of many deadlines is due, without looking at all of them in every turn.

What is kept is a lower bound: each deadline that is set lowers it, and one that is taken back leaves it. When it is
over, its owner looks at all deadlines and sets it anew. So a thousand requests whose deadlines are half a minute away
are looked at twice a minute, and not in each of some thousand turns a second.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


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
