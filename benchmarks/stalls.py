"""What the machine alone adds to a thread's processor time: the control of `long_prompts.py` and `long_pushes.py`.

    python benchmarks/stalls.py [--seconds 240] [--json results.json]

One process for each core does nothing but ask for its own thread's processor time. Two answers are a microsecond
apart. Where they are milliseconds apart, the kernel has counted as the thread's what went by while it did not run: the
host had given the core to others, without a word, or the core was busy with interrupts. A turn of a transfer thread in
which that happens is as much longer, whatever it does. So turns above their goal are to be held against how often this
happens in as much time of a thread; it touches no memory and calls nothing else, so a thread that does may meet more.
`stalls` are those of STALL_MS and more.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.long_receive import TURN_GOAL_MS  # noqa: E402
from benchmarks.report import markdown, write  # noqa: E402

STALL_MS = 1.5


def stalls(seconds: float) -> list[float]:
    """Milliseconds by which this thread's processor time grew at once, of STALL_MS and more, within so many seconds of
    the clock."""
    until, found = time.monotonic() + seconds, []
    before = time.thread_time()
    while time.monotonic() < until:
        now = time.thread_time()
        if (grew := 1000 * (now - before)) >= STALL_MS:
            found.append(grew)
        before = now
    return found


def row(process: int, seconds: float, found: list[float]) -> dict[str, Any]:
    over = [grew for grew in found if grew > TURN_GOAL_MS]
    return {
        "process": f"{process + 1} of {os.cpu_count()}",
        "seconds": seconds,
        "stalls": len(found),
        "goal_ms": TURN_GOAL_MS,
        "over_goal": len(over),
        "longest_ms": round(max(found, default=0.0), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "bench" / "stalls.json")
    options = parser.parse_args()
    count = os.cpu_count() or 1
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        found = pool.map(stalls, [options.seconds] * count, chunksize=1)
    rows = [row(process, options.seconds, some) for process, some in enumerate(found)]
    print(markdown(rows))
    write(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
