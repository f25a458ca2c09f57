"""What faults led to: judged one by one, counted by kind and by campaign, and shown as tables in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.faults.asked import End, Outcome
from tests.faults.plan import Fault

PROBLEMS = ("wrong tokens", "no end", "leaked", "died", "no recovery", "touched nothing")
COLUMNS = ("faults", "requests", "right", "refused", *PROBLEMS)


@dataclass(slots=True)
class Result:
    """One fault and what it led to. `problems` has sentences, one for each thing that did not hold."""

    fault: Fault
    seconds: float = 0.0
    touched: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    problems: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in PROBLEMS})

    @property
    def sentences(self) -> list[str]:
        return [f"{name}: {text}" for name, texts in self.problems.items() for text in texts]

    def judge(self, outcomes: Sequence[Outcome], killed: str) -> None:
        """How the requests ended; only those that the instance of name `killed` was asked may break off."""
        for outcome in outcomes:
            self.ends[outcome.end.value] += 1
            text = f"{outcome.end.value}: {outcome.detail}"
            if outcome.end in (End.WRONG, End.EMPTY):
                self.problems["wrong tokens"].append(text)
            elif outcome.end is End.STUCK:
                self.problems["no end"].append(text)
            elif outcome.end is End.BROKEN and (not killed or outcome.asked != killed):
                self.problems["died"].append(text)

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        kept = {"seconds": self.seconds, "touched": self.touched, "ends": self.ends, "problems": self.sentences}
        return {**asdict(self.fault), **kept}


def count(results: Sequence[Result]) -> dict[str, int]:
    """One number for each of COLUMNS. A fault that touched nothing is a problem and does not count as a fault."""
    ends: Counter[str] = sum((result.ends for result in results), Counter())
    return {
        "faults": sum(result.touched > 0 for result in results),
        "requests": sum(ends.values()),
        "right": ends["right"],
        "refused": ends["refused"],
        **{name: sum(len(result.problems[name]) for result in results) for name in PROBLEMS},
    }


def table(first: str, rows: Mapping[str, Mapping[str, int]]) -> str:
    """Rows of counts with the column `first` for their names; the last row is their sum, where there are several."""
    total = {column: sum(row[column] for row in rows.values()) for column in COLUMNS}
    lines = [f"| {first} | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, row in {**rows, "all": total}.items():
        lines.append(f"| {name} | " + " | ".join(str(row[column]) for column in COLUMNS) + " |")
    return "\n".join(lines)


def by_kind(results: Sequence[Result]) -> str:
    """A line per kind and their sum."""
    kinds = dict.fromkeys(result.fault.kind for result in results)
    return table("kind", {kind: count([r for r in results if r.fault.kind == kind]) for kind in kinds})
