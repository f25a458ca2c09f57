"""The other process of a benchmark, and whether bytes that were moved between the two are those that should have come.

Memory is filled with a pattern that says where a byte is from, so that either side can tell without the other's bytes.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_pd_connector.geometry.runs import Runs

PATIENCE_S = 60.0
"""For an answer of the other process, its end, or a transfer: then something is wrong."""

PERIOD, NOTHING = 251, 255
"""Of the pattern, a prime; and a byte that it does not have."""
LARGEST_UNIT, AT_ONCE = 4096, 1 << 24

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]


def fill(memory: Bytes, first: int = 0) -> None:
    """Byte i becomes (first + i) % PERIOD."""
    whole = len(memory) // PERIOD * PERIOD
    row = ((np.arange(PERIOD) + first) % PERIOD).astype(np.uint8)
    memory[:whole].reshape(-1, PERIOD)[:] = row
    memory[whole:] = row[: len(memory) - whole]


class Moved(NamedTuple):
    """What should have come: units of so many bytes, with their offsets in the two memories."""

    source: Offsets
    destination: Offsets
    unit: int


def moved(runs: Runs, source: int, destination: int) -> Moved:
    """Of runs between memories that begin at these addresses."""
    from_, to = runs.source - source, runs.destination - destination
    unit = int(np.gcd.reduce(np.concatenate([from_, to, runs.length, [LARGEST_UNIT]])))
    counts = runs.length // unit
    begins = np.cumsum(counts) - counts
    steps = (np.arange(int(counts.sum())) - np.repeat(begins, counts)) * unit
    return Moved(np.repeat(from_, counts) + steps, np.repeat(to, counts) + steps, unit)


def holds(memory: Bytes, what: Moved, first: int = 0) -> bool:
    """Whether it came to this memory, from one that was filled so."""
    rows = np.lib.stride_tricks.sliding_window_view(np.resize(np.arange(PERIOD, dtype=np.uint8), 2 * PERIOD), PERIOD)
    pattern = np.ascontiguousarray(np.tile(rows[:PERIOD], what.unit // PERIOD + 1)[:, : what.unit])
    units = memory[: len(memory) // what.unit * what.unit].reshape(-1, what.unit)
    each = max(1, AT_ONCE // what.unit)
    for at in range(0, len(what.source), each):
        expected = pattern[(what.source[at : at + each] + first) % PERIOD]
        if not np.array_equal(units[what.destination[at : at + each] // what.unit], expected):
            return False
    return True


def obey(pipe: Connection, memory: Bytes) -> None:
    """Of the other process: fill this memory, clear it or look at it as it is told, until it is told nothing."""
    while (order := pipe.recv()) is not None:
        pipe.send(done(memory, *order))


def done(memory: Bytes, order: str, *args: Any) -> int:
    """`fill` and `clear` so many bytes; whether the memory `holds` something; what `came` since it was cleared."""
    if order == "holds":
        return holds(memory, *args)
    if order == "came":
        return int(np.count_nonzero(memory != NOTHING))
    size, *first = args
    if order == "fill":
        fill(memory[:size], *first)
    else:
        memory[:size] = NOTHING
    return True


class OtherProcess:
    """Runs `serve` with a pipe and `args`. What ends early is an error, not a wait without end."""

    def __init__(self, serve: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()  # or its end would not be the pipe's

    def answer(self) -> Any:
        """What it sends next.

        Raises:
            EOFError: it ended.
            TimeoutError: nothing came.
        """
        if not self._pipe.poll(PATIENCE_S):
            raise TimeoutError(f"the other process said nothing in {PATIENCE_S:.0f} s")
        return self._pipe.recv()

    def ask(self, order: str, *args: Any) -> Any:
        """See `done`."""
        self._pipe.send((order, *args))
        return self.answer()

    def close(self) -> None:
        """It is told to end, and made to."""
        try:
            self._pipe.send(None)
            self._process.join(PATIENCE_S)
        except OSError:
            pass  # it ended
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
