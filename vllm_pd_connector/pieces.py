"""Long work in pieces: a generator that yields wherever other things may be done, and returns what comes of it.

The transfer thread serves all requests in short turns. Whoever has work that may be long gives it to the thread in this
form, and the thread goes on with it while its turn has time; who has nothing else to do asks for all of it at once.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
Pieces = Generator[None, None, Result]


def at_once(pieces: Pieces[Result]) -> Result:
    """What comes of all pieces, with nothing done in between. Raises what they raise."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: Result = end.value
            return result
