"""What the machine alone adds to a thread's processor time: the control of `long_prompts.py` and `long_pushes.py`.

    python benchmarks/stalls.py [--seconds 120] [--json results.json]

One process for each core does nothing but ask for its own thread's processor time. Two answers are a microsecond
apart. Where they are milliseconds apart, the kernel has counted as the thread's what went by while it did not run: the
host had given the core to others, without a word, or the core was busy with interrupts. After that one for each core
copies memory that it has written before, PIECE_BYTES between two questions, as a transfer does. A turn of a transfer
thread in which that happens is as much longer, whatever it does. So turns above their goal are to be held against how
often this happens in as much time of a thread. `stalls` are those of STALL_MS and more.

`new_ms` is what 2 MiB of memory take that are written for the first time, the median: where a hypervisor gives a
guest's memory only when it is touched, and takes back what is free, that is milliseconds.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.long_receive import TURN_GOAL_MS  # noqa: E402
from benchmarks.report import markdown, write  # noqa: E402

STALL_MS = 1.5
NEW_BYTES, COPIED_BYTES, PIECE_BYTES = 2 << 20, 256 << 20, 64 << 10


def stalls(seconds: float, between: Callable[[], object]) -> list[float]:
    """Milliseconds by which this thread's processor time grew at once, of STALL_MS and more, within so many seconds of
    the clock; what it does `between` two questions takes some microseconds."""
    until, found = time.monotonic() + seconds, []
    before = time.thread_time()
    while time.monotonic() < until:
        between()
        now = time.thread_time()
        if (grew := 1000 * (now - before)) >= STALL_MS:
            found.append(grew)
        before = now
    return found


def asks(seconds: float) -> dict[str, Any]:
    return counted(stalls(seconds, lambda: None))


def copies(seconds: float) -> dict[str, Any]:
    """Pieces in an order by chance from one half of memory that was written before to the other."""
    memory = np.empty((COPIED_BYTES // NEW_BYTES, NEW_BYTES), dtype=np.uint8)
    new = []
    for piece in memory:
        began = time.thread_time()
        piece[:] = 1
        new.append(1000 * (time.thread_time() - began))
    half = COPIED_BYTES // 2
    places = np.random.default_rng(0).integers(0, half // PIECE_BYTES, 4096) * PIECE_BYTES + memory.ctypes.data
    order = itertools.cycle(places.tolist())
    found = counted(stalls(seconds, lambda: ctypes.memmove(next(order) + half, next(order), PIECE_BYTES)))
    return found | {"new_ms": round(float(np.median(new)), 2)}


def counted(found: list[float]) -> dict[str, Any]:
    return {
        "stalls": len(found),
        "goal_ms": TURN_GOAL_MS,
        "over_goal": sum(grew > TURN_GOAL_MS for grew in found),
        "longest_ms": round(max(found, default=0.0), 2),
        "new_ms": None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "bench" / "stalls.json")
    options = parser.parse_args()
    count = os.cpu_count() or 1
    rows = []
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        for what in (asks, copies):
            found = pool.map(what, [options.seconds] * count, chunksize=1)
            about = {"does": what.__name__, "seconds": options.seconds}
            rows += [{"process": f"{process} of {count}"} | about | row for process, row in enumerate(found, 1)]
    print(markdown(rows))
    write(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
