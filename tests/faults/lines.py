"""The campaigns of `make faults`, and their common table.

    python tests/faults/lines.py [--seed S]

A line is the arguments of a campaign. The lines of a lane run one after the other, and the two lanes beside each other:
most of a fault is waiting, for leases to end, deadlines to pass and servers to start. Only one lane uses the network's
addresses. Lines with the same kinds of fault go through one plan: a later one skips what an earlier one does. Exit code
0 if every line's was, and at least LEAST faults were struck in at most LONGEST_S.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from tests.faults.results import COLUMNS, PROBLEMS, table  # noqa: E402

LEAST = 300
LONGEST_S = 2160.0


@dataclass(frozen=True, slots=True)
class Line:
    """One campaign; `name` is unique. It begins no fault later than `seconds` after its start, of which its servers
    take the first 20 to 60."""

    name: str
    seconds: int
    words: str

    def arguments(self, seed: int) -> list[str]:
        return [*self.words.split(), "--seed", str(seed), "--seconds", str(self.seconds)]


LANES: tuple[tuple[Line, ...], ...] = (
    (
        Line("restarts", 700, "--world restarts --faults 17"),
        Line("restarts, push", 420, "--world restarts --mode push --skip 17 --faults 28"),
        Line("workers", 240, "--world workers --faults 10"),
        Line("workers, push", 220, "--world workers --mode push --faults 4"),
        Line("both roles", 100, "--world both --faults 2"),
        Line("operated", 120, "--world operated --faults 12"),
        Line("conversations, push", 230, "--world talks --mode push --skip 24 --faults 48"),
    ),
    (
        Line("pair", 300, "--world pair --faults 80"),
        Line("pair, push", 310, "--world pair --mode push --verify sample --faults 75"),
        Line("pair, Mooncake", 200, "--world pair --transport mooncake --faults 35"),
        Line("pair, Mooncake, push", 190, "--world pair --transport mooncake --mode push --faults 25"),
        Line("pair, several groups", 150, "--world pair --family swa --faults 20"),
        Line("pair, beside a store", 120, "--world pair --stored --skip 80 --faults 95"),
        Line("network", 150, "--world network --faults 9"),
        Line("network, push, IPv6", 140, "--world network --mode push --ipv6 --skip 9 --faults 18"),
        Line("network, Mooncake", 140, "--world network --transport mooncake --skip 18 --faults 27"),
        Line(
            "network, Mooncake, push, IPv6",
            100,
            "--world network --transport mooncake --mode push --ipv6 --skip 27 --faults 33",
        ),
        Line("conversations", 230, "--world talks --faults 24"),
    ),
)


def summary(records: dict[str, dict[str, Any]], expected: Sequence[str], seconds: float) -> tuple[str, list[str]]:
    """The common table, and what is wrong with the campaigns as a whole.

    `records` are what lines wrote down, by name; `seconds` is how long all of them took.
    """
    nothing = {"asked": 0, "counts": dict.fromkeys(COLUMNS, 0)}
    found = {name: records.get(name, nothing) for name in expected}
    wrong = [f"{name}: no result" for name in expected if name not in records]
    for name, record in found.items():
        counts = record["counts"]
        wrong += [f"{name}: {problem}: {counts[problem]}" for problem in PROBLEMS if counts[problem]]
        if counts["faults"] < record["asked"]:
            wrong.append(f"{name}: {counts['faults']} faults of {record['asked']}")
    struck = sum(record["counts"]["faults"] for record in found.values())
    if struck < LEAST:
        wrong.append(f"{struck} faults in all, not {LEAST}")
    if seconds > LONGEST_S:
        wrong.append(f"{seconds:.0f} s, not {LONGEST_S:.0f}")
    return table("campaign", {name: record["counts"] for name, record in found.items()}), wrong


def run_lane(lane: Sequence[Line], seed: int, directory: Path, codes: dict[str, int]) -> None:
    """Run lines one after the other; what they print goes to their directories."""
    for line in lane:
        into = directory / line.name.replace(", ", "-").replace(" ", "-")
        into.mkdir(parents=True)
        began = time.monotonic()
        command = [sys.executable, str(Path(__file__).with_name("campaign.py")), *line.arguments(seed)]
        with (into / "campaign.log").open("wb") as log:
            codes[line.name] = subprocess.call([*command, "--into", str(into)], stdout=log, stderr=subprocess.STDOUT)
        said = f"exit code {codes[line.name]} after {time.monotonic() - began:.0f} s"
        print(f"{line.name}: {said}, see {into / 'campaign.log'}", flush=True)


def main(arguments: Sequence[str] | None = None, lanes: Sequence[Sequence[Line]] = LANES) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    directory = ROOT / "out" / "faults" / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
    began = time.monotonic()
    codes: dict[str, int] = {}
    threads = [threading.Thread(target=run_lane, args=(lane, options.seed, directory, codes)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    names = [line.name for lane in lanes for line in lane]
    records = {}
    for path in directory.glob("*/result.json"):
        records[path.parent.name] = json.loads(path.read_text())
    by_name = {name: records[key] for name in names if (key := name.replace(", ", "-").replace(" ", "-")) in records}
    text, wrong = summary(by_name, names, seconds)
    wrong += [f"{name}: exit code {codes.get(name)}" for name in names if codes.get(name) != 0]
    print(text)
    print(f"seed {options.seed}, {seconds:.0f} s", *wrong, sep="\n! ")
    (directory / "result.json").write_text(json.dumps({"seed": options.seed, "seconds": seconds, "lines": by_name}))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
