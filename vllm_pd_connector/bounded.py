"""What could grow without end, and does not: a dictionary that remembers only the newest of what it was told, and long
work in pieces.

The transfer thread serves all requests in short turns. Work that may be long is a generator, which yields wherever
other things may be done and returns what comes of it: the thread goes on with it while its turn has time. Whoever has
nothing else to do asks for all of it at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")
Result = TypeVar("Result")
Pieces = Generator[None, None, Result]


class Bounded(OrderedDict[K, V]):
    """At most `limit` entries, oldest first; an entry that is set again is the newest."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._limit:
            self.popitem(last=False)


def at_once(pieces: Pieces[Result]) -> Result:
    """What comes of all pieces, with nothing done in between. Raises what they raise."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: Result = end.value
            return result
