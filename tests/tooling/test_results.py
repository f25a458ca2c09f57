"""What counts as a defect, what counts as a fault, and what makes `make faults` fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults import campaign
from tests.faults.asked import End, Outcome, Struck
from tests.faults.campaign import run, verdict
from tests.faults.lines import LEAST, LONGEST_S, summary
from tests.faults.plan import Fault
from tests.faults.results import COLUMNS, PROBLEMS, Result, by_kind, count
from tests.faults.strikes.restarts import WAITS, of_a_server_that_ends, of_former_life

JUNK = Fault("junk", "side channel", "bytes", 0.5, 1)
KILLED = Fault("killed", "prefill engine", "decode", 0.5, 1)


def result(*outcomes: Outcome, touched: int = 1, killed: str = "", fault: Fault = JUNK) -> Result:
    made = Result(fault, touched=touched)
    made.judge(outcomes, killed)
    return made


@pytest.mark.parametrize(
    ("end", "column"),
    [
        (End.RIGHT, None),
        (End.REFUSED, None),
        (End.ABORTED, None),
        (End.WRONG, "wrong tokens"),
        (End.EMPTY, "wrong tokens"),
        (End.STUCK, "no end"),
        (End.BROKEN, "died"),
    ],
)
def test_which_ends_are_problems(end: End, column: str | None) -> None:
    problems = result(Outcome(end, asked="decode0")).problems
    assert [name for name, texts in problems.items() if texts] == ([column] if column else [])


def test_only_what_the_victim_was_asked_may_break_off() -> None:
    broken = Outcome(End.BROKEN, asked="prefill0")
    assert not result(broken, killed="prefill0").sentences
    assert result(broken, killed="decode0").problems["died"] == ["broken off: "]
    assert result(Outcome(End.BROKEN), killed="decode0").problems["died"]


def test_a_fault_that_touched_nothing_is_not_counted() -> None:
    results = [result(), result(touched=0)]
    assert count(results)["faults"] == 1
    assert (verdict(results, 1), verdict(results, 2)) == (0, 1)


def test_too_few_faults_or_a_problem_fail_a_campaign() -> None:
    assert verdict([result()], 1) == 0
    assert verdict([result()], 2) == 1
    assert verdict([result(Outcome(End.STUCK))], 1) == 1


@pytest.mark.parametrize(
    ("end", "policy", "good"),
    [(End.REFUSED, "fail", True), (End.RIGHT, "fail", False), (End.RIGHT, "recompute", True),
     (End.REFUSED, "recompute", False)],
)  # fmt: skip
def test_parameters_of_a_former_life_are_refused_or_computed_anew(end: End, policy: str, good: bool) -> None:
    assert (of_former_life(Outcome(end), policy).end is not End.WRONG) == good


class AnyWorld:
    """Stands for a world in which nothing goes wrong; notes which pair each fault strikes."""

    instances: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def pair(self, number: int) -> tuple[Any, Any]:
        self.numbers.append(number)
        return SimpleNamespace(name="prefill0"), SimpleNamespace(name="decode0")

    def dead(self) -> list[str]:
        return []

    recovers = leaks = dead

    def settled(self) -> None:
        pass


def test_a_fault_that_touches_nothing_is_tried_again_and_then_a_problem(monkeypatch, tmp_path) -> None:
    salts: list[int] = []

    def strike(world: Any, p: Any, d: Any, fault: Fault) -> Struck:
        salts.append(fault.salt)
        return Struck([], int(fault.salt == 12))

    monkeypatch.setitem(campaign.ALL_STRIKES, "junk", strike)
    faults = [Fault("junk", "router", "bytes", 0.0, 11), Fault("junk", "router", "bytes", 0.0, 20)]
    world: Any = AnyWorld()
    hit, missed = run(world, faults, tmp_path / "note", float("inf"))
    assert salts == [11, 12, 20, 21, 22]
    assert not hit.sentences and missed.sentences == ["touched nothing: in 3 tries"]


def test_a_skipped_plan_strikes_the_pairs_that_the_whole_one_would(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(campaign.ALL_STRIKES, "junk", lambda *_: Struck([], 1))
    world: Any = AnyWorld()
    run(world, [JUNK] * 3, tmp_path / "note", float("inf"), first=40)
    assert world.numbers == [40, 41, 42]


def test_a_kill_names_its_victim(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(campaign.ALL_STRIKES, "killed", lambda *_: Struck([Outcome(End.BROKEN, asked="decode0")], 1))
    world: Any = AnyWorld()
    [struck] = run(world, [KILLED], tmp_path / "note", float("inf"))
    assert struck.problems["died"]


def record(faults: int, **problems: int) -> dict[str, Any]:
    return {"asked": faults, "counts": {**dict.fromkeys(COLUMNS, 0), "faults": faults, **problems}}


def test_the_common_table_sums_its_lines() -> None:
    text, wrong = summary({"a": record(200), "b": record(LEAST - 200)}, ["a", "b"], 10.0)
    assert not wrong
    assert f"| all | {LEAST} |" in text and "| a | 200 |" in text


@pytest.mark.parametrize("problem", PROBLEMS)
def test_any_problem_of_any_line_fails_the_whole(problem: str) -> None:
    _, wrong = summary({"a": record(LEAST), "b": record(5, **{problem: 1})}, ["a", "b"], 10.0)
    assert wrong == [f"b: {problem}: 1"]


def test_too_few_faults_too_much_time_and_lines_without_a_result_fail_the_whole() -> None:
    short = {**record(LEAST), "asked": LEAST + 1}
    assert summary({"a": short}, ["a"], 10.0)[1] == [f"a: {LEAST} faults of {LEAST + 1}"]
    assert summary({"a": record(LEAST - 1)}, ["a"], 10.0)[1] == [f"{LEAST - 1} faults in all, not {LEAST}"]
    assert summary({"a": record(LEAST)}, ["a"], LONGEST_S + 1)[1] == [f"{LONGEST_S + 1:.0f} s, not {LONGEST_S:.0f}"]
    assert "b: no result" in summary({"a": record(LEAST)}, ["a", "b"], 10.0)[1]


def test_the_table_of_a_campaign_has_a_line_per_kind() -> None:
    text = by_kind([result(), result(), result(fault=KILLED)])
    assert "| junk | 2 |" in text and "| killed | 1 |" in text and "| all | 3 |" in text


def test_only_a_server_that_waits_for_its_requests_for_ever_is_excused_for_them() -> None:
    stuck = Outcome(End.STUCK, "no answer", asked="prefill0")
    said = f"INFO:     {WAITS}. (CTRL+C to force quit)"
    assert of_a_server_that_ends(stuck, "prefill0", said).end is End.BROKEN
    assert of_a_server_that_ends(stuck, "prefill0", "").end is End.STUCK
    assert of_a_server_that_ends(stuck, "decode0", said).end is End.STUCK
    wrong = Outcome(End.WRONG, asked="prefill0")
    assert of_a_server_that_ends(wrong, "prefill0", said) is wrong
