"""A process on each core beside a benchmark that tells whether the machine itself stood still for a moment.

Every EVERY_S it copies PIECES pieces of 1 KiB from places by chance in memory that it has written before, which takes a
thirtieth of a millisecond, and looks how much of its thread's processor time that took. It has nothing to do with what
is measured but the machine. Where it is slow at the moment at which something of ours is, the machine was: a hypervisor
that gives a core or a guest's memory anew says nothing of it, and the time counts as that of the thread which had it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.other_process import OtherProcess

EVERY_S = 0.002
MEMORY_BYTES, PIECE_BYTES, PIECES = 256 << 20, 1 << 10, 128
SLOW_S = 0.0004
"""Ten times and more of what it mostly takes."""

NEAR_S = 0.01
"""So long before and after the witness was slow what is ours may be slowed by the same."""

Moment = tuple[float, float]
"""When something began and ended, by the monotonic clock in seconds, which all processes of a machine share."""


def watch(pipe: Connection, core: int) -> None:
    """Main of a core's witness: answers each question with the moments at which it was slow since the last."""
    os.sched_setaffinity(0, {core})
    memory = np.ones((MEMORY_BYTES // PIECE_BYTES, PIECE_BYTES), dtype=np.uint8)
    random, copied = np.random.default_rng(0), np.empty((PIECES, PIECE_BYTES), dtype=np.uint8)
    slow: list[Moment] = []
    pipe.send(None)
    while True:
        if pipe.poll(EVERY_S):
            if pipe.recv() is None:
                return
            pipe.send(slow)
            slow = []
        places = random.integers(0, len(memory), PIECES)
        began, busy = time.monotonic(), time.thread_time()
        np.take(memory, places, axis=0, out=copied)
        if time.thread_time() - busy > SLOW_S:
            slow.append((began, time.monotonic()))


def together(moments: Iterable[Moment], slow: Sequence[Moment]) -> int:
    """How many of the moments are at one of the slow ones, or near it."""
    return sum(
        any(began < until + NEAR_S and ended > since - NEAR_S for began, ended in slow) for since, until in moments
    )


class Witness:
    """Runs until it is closed. `slow`: how often it was, in all, on any core."""

    def __init__(self) -> None:
        self._processes, self.slow = [OtherProcess(watch, core) for core in sorted(os.sched_getaffinity(0))], 0
        for process in self._processes:
            process.answer()

    def saw(self, moments: Iterable[Moment]) -> int:
        """At how many of these, all since it was last asked, it was slow, too."""
        slow: list[Moment] = [moment for process in self._processes for moment in process.ask("slow")]
        self.slow += len(slow)
        return together(moments, slow)

    def judged(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row whose `over_goal` are moments: how many they are, and at how many the witness was slow."""
        found: dict[str, Any] = {}
        for name, value in row.items():
            found[name] = len(value) if name == "over_goal" else value
            if name == "over_goal":
                found["of_these_witness_slow"] = self.saw(value)
        return found

    def close(self) -> None:
        for process in self._processes:
            process.close()
