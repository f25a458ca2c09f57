"""The goals of docs/performance.md beside the worst figure that a run has for each, made from its documents.

A figure is the worst of all that a goal is for, with the case that has it; `within` counts the cases. Nothing of this
table is written by hand, so that it cannot say better than the tables below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Rows = list[Mapping[str, Any]]
Documents = Callable[[str], Mapping[str, Any]]
"""By name, without suffix."""
Case = tuple[str, float | None]
"""Words that say which, and its figure; none if it was not had, which is no success."""


@dataclass(frozen=True, slots=True)
class Goal:
    """`limit` is what a figure must not pass: from below, or where `least` from above."""

    says: str
    limit: float
    cases: list[Case]
    least: bool = False

    def held(self, figure: float | None) -> bool:
        return figure is not None and (figure >= self.limit if self.least else figure <= self.limit)

    def row(self) -> dict[str, Any]:
        """Its line of the table; a goal that nothing was measured for is not met."""
        lacking = [case for case in self.cases if case[1] is None]
        had = sorted(((one, where) for where, one in self.cases if one is not None), reverse=not self.least)
        worst, where = had[0] if had else (None, "")
        within = sum(self.held(figure) for _, figure in self.cases)
        return {
            "goal": self.says,
            "limit": f"at {'least' if self.least else 'most'} {self.limit:g}",
            "worst": worst,
            "of": ", ".join([where, *(f"{name} not had" for name, _ in lacking)]).strip(", "),
            "within": f"{within} of {len(self.cases)}",
            "met": "yes" if self.cases and within == len(self.cases) else "no",
        }


def goals(documents: Documents) -> list[dict[str, Any]]:
    """The table's rows."""
    found = (_waiting, _busy_pairs, _first_tokens, _turns, _transports, _steps, _exposed)
    return [goal.row() for some in found for goal in some(documents)]


def _waiting(documents: Documents) -> Iterator[Goal]:
    rows: Rows = [row for row in documents("waiting")["rows"] if row["variant"] == "pd"]
    cases = [(f"{row['case']}, TP {row['tp']}", row["cores, waiting"]) for row in rows]
    yield Goal("cores that decode keeps busy while it waits", 0.2, cases)


def _busy_pairs(documents: Documents) -> Iterator[Goal]:
    rows: Rows = [row for row in documents("busy_pairs")["rows"] if row["variant"].startswith("pd")]
    cases = [(f"{r['pair']}, {r['asked']}", min(r["answered"], r["as the plain instance's"])) for r in rows]
    yield Goal("right answers of 18 pushes between pairs that compete for cores", 18, cases, least=True)


def _first_tokens(documents: Documents) -> Iterator[Goal]:
    document = documents("pull")
    ours = {row["variant"]: row for row in document["rows"] if row["variant"].startswith("pd")}
    [plain] = [row for row in document["rows"] if row["variant"] == "plain"]
    ratios = [(row["variant"], row["ratio"]) for row in document["ratios"] if row["variant"] in ours]
    yield Goal("first token, of the rival's", 0.8, ratios)
    tails = [(name, round(row["p99"] / plain["p99"], 2)) for name, row in ours.items()]
    yield Goal("its 99th percentile, of the plain instance's", 2, tails)
    worst = {name: (f"{name}, {row['starts']} starts", row["its worst"]) for name, row in ours.items()}
    yield Goal("first request to a peer that was introduced, ms, in each start", 100, [worst["pd-introduced"]])
    yield Goal("the same to one that was not", 100, [worst["pd"]])


def _turns(documents: Documents) -> Iterator[Goal]:
    for document, table, does in (("long_prompts", "turns", "that reads"), ("long_pushes", "rows", "that writes")):
        rows: Rows = documents(document)[table]
        says = {
            "longest_of_all_ms": f"longest turn of a transfer thread {does}",
            "contact_ms": f"first contact of one {does}",
        }
        for transport in dict.fromkeys(row["transport"] for row in rows):
            of = [row for row in rows if row["transport"] == transport]
            for key, what in says.items():
                cases = [(f"{row['pair']}, {row['prompt']}", row[key]) for row in of]
                yield Goal(f"{what}, {transport}, ms", 5, cases)


def _transports(documents: Documents) -> Iterator[Goal]:
    rows: Rows = documents("transports")["summary"]
    for transport, limit in dict.fromkeys((row["transport"], row["goal"]) for row in rows):
        of = [row for row in rows if (row["transport"], row["goal"]) == (transport, limit)]
        cases = [(f"{row['operation']} of {row['message']}", row["connector / bare, median"]) for row in of]
        sizes = "of 1 MiB" if all(row["message"] == "1 MiB" for row in of) else "from 4 MiB on"
        yield Goal(f"of the bare library's speed, {transport}, {sizes}", limit, cases, least=True)


def _steps(documents: Documents) -> Iterator[Goal]:
    rows: Rows = [row for row in documents("step")["rows"] if "does nothing" not in row["case"]]
    for thread, limit in dict.fromkeys((row["thread"], row["goal_us"]) for row in rows):
        of = [row for row in rows if (row["thread"], row["goal_us"]) == (thread, limit)]
        kind = "a layer" if limit == 5 else "an idle step" if limit == 10 else "a step with 256 in flight"
        yield Goal(f"{kind}, {thread}'s thread, us", limit, [(row["case"], row["median_us"]) for row in of])


def _exposed(documents: Documents) -> Iterator[Goal]:
    cases = [(row["model"], row["exposed"]) for row in documents("overlap-layers")["rows"]]
    yield Goal("of a prompt of one step exposed, between servers", 0.15, cases)
    legs: Rows = [row for row in documents("late_legs")["rows"] if row["push_when"] == "layers"]
    early = [row for row in legs if row["decode leg"] == "before" or row["decode leg"].startswith("0 ms")]
    yield Goal("the same between halves", 0.15, [(f"leg {row['decode leg']}", row["exposed"]) for row in early])
