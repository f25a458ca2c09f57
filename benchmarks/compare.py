"""The figures of two runs side by side: every figure that both have, and the newer one's ratio to the older.

    python benchmarks/compare.py OLD NEW [--above 1.1]

OLD and NEW are documents of one benchmark, or folders of them (`benchmarks/results/`, `out/bench/`). With `--above`
only ratios are shown that are at least so large, or smaller than its inverse. What only one of the two has is named,
and so is what they ran on, where that differs: ratios between two machines say little.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.report import case, figures, tables  # noqa: E402


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of two runs; NaN where a ratio to 0 would be needed."""

    where: str
    figure: str
    old: float
    new: float

    @property
    def ratio(self) -> float:
        if self.old == self.new:
            return 1.0
        return self.new / self.old if self.old else float("nan")

    def differs(self, above: float) -> bool:
        """Whether it differs by this factor, in either direction."""
        return not 1 / above < self.ratio < above


def flatten(document: Any) -> dict[tuple[str, str], float]:
    """Every figure by (table and case, name). A case that is there more than once is numbered."""
    found: dict[tuple[str, str], float] = {}
    for name, rows in tables(document):
        seen: dict[str, int] = {}
        for row in rows:
            about = ", ".join(str(value) for _, value in case(row))
            seen[about] = seen.get(about, 0) + 1
            where = f"{name}: {about}" + (f" #{seen[about]}" if seen[about] > 1 else "")
            found |= {(where, figure): value for figure, value in figures(row).items()}
    return found


def compare(old: Any, new: Any) -> tuple[list[Compared], list[str]]:
    """What both documents have, and the figures and cases that only one has, with a minus or a plus."""
    before, after = flatten(old), flatten(new)
    both = [Compared(*key, before[key], after[key]) for key in before if key in after]
    return both, [*_alone("-", before, after), *_alone("+", after, before)]


def _alone(sign: str, those: Iterable[tuple[str, str]], others: Iterable[tuple[str, str]]) -> list[str]:
    """Cases that only `those` have, and figures of cases that both have."""
    cases, known = {where for where, _ in others}, set(others)
    found = [f"{sign} {where}" if where not in cases else f"{sign} {figure}, {where}"
             for where, figure in those if (where, figure) not in known]  # fmt: skip
    return list(dict.fromkeys(found))


def pairs(old: Path, new: Path) -> Iterator[tuple[str, Path, Path]]:
    """Documents with one name on both sides; those that only one side has are named.

    Raises:
        SystemExit: there are none, or a folder stands against a file.
    """
    if old.is_dir() != new.is_dir() or not (old.exists() and new.exists()):
        sys.exit(f"{old} and {new}: give two documents, or two folders of them")
    if not old.is_dir():
        yield new.stem, old, new
        return
    before, after = ({path.name for path in side.glob("*.json")} for side in (old, new))
    if not before & after:
        sys.exit(f"{old} and {new} have no document of one name")
    for side, names in ((old, before - after), (new, after - before)):
        if names:
            print(f"only in {side}: {', '.join(sorted(names))}")
    for name in sorted(before & after):
        yield name.removesuffix(".json"), old / name, new / name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--above", type=float, default=1.0)
    options = parser.parse_args()
    for name, *paths in pairs(options.old, options.new):
        old, new = (json.loads(path.read_text()) for path in paths)
        both, alone = compare(old, new)
        print(f"\n{name}")
        for fact in ("machine", "environment", "commit"):
            before, after = (document.get(fact) if isinstance(document, dict) else None for document in (old, new))
            if before != after:
                print(f"  {fact}: {before} -> {after}")
        for found in both:
            if options.above <= 1 or found.differs(options.above):
                print(f"  {found.ratio:6.2f}  {found.old:>12.5g} -> {found.new:<12.5g} {found.figure}, {found.where}")
        for line in alone:
            print(f"  {line}")


if __name__ == "__main__":
    main()
