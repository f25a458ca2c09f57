"""A campaign is repeatable, a short one has a bit of everything, and those of `make faults` together have it all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults import instances
from tests.faults.campaign import ALL_STRIKES, ROOT, faults_of, parser
from tests.faults.lines import LANES, LEAST, LONGEST_S, Line
from tests.faults.plan import (
    BOTH,
    CONFIRMED_TOO,
    ELASTIC,
    NETWORK,
    ONE_PAIR,
    ONE_PAIR_COMPARED,
    ONE_PAIR_PUSH,
    OPERATED,
    RESTARTS,
    TALKS,
    WORKERS,
    Fault,
    plan,
)
from tests.faults.short_campaign import NUMBER, SEED

WORLDS = {
    "pair": ONE_PAIR,
    "push": ONE_PAIR_PUSH,
    "compared": ONE_PAIR_COMPARED,
    "restarts": RESTARTS,
    "workers": WORKERS,
    "network": NETWORK,
    "both": BOTH,
    "operated": OPERATED,
    "elastic": ELASTIC,
    "talks": TALKS,
}
LINES = [line for lane in LANES for line in lane]
by_name = pytest.mark.parametrize("kinds", WORLDS.values(), ids=WORLDS)
seeds = pytest.mark.parametrize("seed", range(1, 6))


def faults_in(line: Line, seed: int) -> list[Fault]:
    return faults_of(parser().parse_args(line.arguments(seed)))


def places(faults: list[Fault], kind: str) -> set[tuple[str, str]]:
    return {(fault.where, fault.phase) for fault in faults if fault.kind == kind}


@by_name
def test_the_same_seed_gives_the_same_faults_and_another_seed_others(kinds) -> None:
    assert plan(kinds, 100, seed=1) == plan(kinds, 100, seed=1) != plan(kinds, 100, seed=2)


def test_a_longer_campaign_begins_with_the_shorter_one() -> None:
    assert plan(ONE_PAIR, 200, seed=1)[:30] == plan(ONE_PAIR, 30, seed=1)


@by_name
def test_every_kind_has_a_strike_and_comes_up_in_one_round(kinds) -> None:
    round_of = sum(kind.share for kind in kinds)
    assert {fault.kind for fault in plan(kinds, round_of, seed=1)} == {kind.name for kind in kinds} <= set(ALL_STRIKES)


def test_the_short_campaign_has_every_kind() -> None:
    assert {fault.kind for fault in plan(ONE_PAIR, NUMBER, SEED)} == {kind.name for kind in ONE_PAIR}


@by_name
def test_a_long_campaign_strikes_everywhere_in_every_phase(kinds) -> None:
    struck = {(fault.kind, fault.where, fault.phase) for fault in plan(kinds, 300, seed=1)}
    missing = [(k.name, w, p) for k in kinds for w in k.where for p in k.phases if (k.name, w, p) not in struck]
    assert not missing


@seeds
@pytest.mark.parametrize("kind", ["killed", "stopped"])
def test_make_faults_kills_and_stops_every_process_in_every_phase(kind: str, seed: int) -> None:
    faults = [fault for line in LINES for fault in faults_in(line, seed)]
    wanted = {(f"{side} {part}", phase) for side in ("prefill", "decode") for part in ("worker", "engine", "server")
              for phase in CONFIRMED_TOO}  # fmt: skip
    assert places(faults, kind) == wanted


@seeds
def test_make_faults_spoils_the_network_in_every_way_and_phase(seed: int) -> None:
    faults = [fault for line in LINES if "network" in line.words for fault in faults_in(line, seed)]
    assert {(f.kind, f.where, f.phase) for f in faults} == {
        (kind.name, where, phase) for kind in NETWORK for where in kind.where for phase in kind.phases
    }


@seeds
def test_make_faults_strikes_conversations_in_every_way_and_forges_each_of_their_fields(seed: int) -> None:
    faults = [fault for line in LINES if "talks" in line.words for fault in faults_in(line, seed)]
    assert {(f.kind, f.where, f.phase) for f in faults} == {
        (kind.name, where, phase) for kind in TALKS for where in kind.where for phase in kind.phases
    }


@seeds
def test_make_faults_has_every_kind_in_every_world_and_a_few_in_mode_push(seed: int) -> None:
    for words, pushes, kinds in (
        ("--world pair", False, ONE_PAIR),
        ("--world pair", True, ONE_PAIR_PUSH),
        ("--world workers", False, WORKERS),
        ("--world operated", False, OPERATED),
    ):
        lines = [line for line in LINES if words in line.words and ("push" in line.words) == pushes]
        assert {fault.kind for line in lines for fault in faults_in(line, seed)} == {kind.name for kind in kinds}
    for world in ("restarts", "network", "talks"):
        lines = [line for line in LINES if f"--world {world}" in line.words]
        assert {"push" in line.words for line in lines} == {True, False}
        assert all(len(faults_in(line, seed)) >= 6 for line in lines)


def test_make_faults_has_a_pair_beside_another_connector() -> None:
    [line] = [line for line in LINES if parser().parse_args(line.arguments(1)).stored]
    assert len({fault.kind for fault in faults_in(line, 1)}) > 5


def test_make_faults_runs_these_lines_enough_faults_and_ends_in_time() -> None:
    assert re.search(r"^faults: setup\n\t\$\(RUN\) tests/faults/lines\.py ", Path(ROOT / "Makefile").read_text(), re.M)
    assert sum(len(faults_in(line, 1)) for line in LINES) >= LEAST
    assert len({line.name for line in LINES}) == len(LINES)
    # A line may take its seconds and its last fault, which ends within a minute or two.
    assert all(sum(line.seconds for line in lane) + 120 <= LONGEST_S for lane in LANES)


def skipped(line: Line) -> int:
    return int(parser().parse_args(line.arguments(1)).skip)


def test_lines_with_the_same_kinds_go_on_where_the_other_stopped() -> None:
    for world, kinds in [("restarts", RESTARTS), ("network", NETWORK), ("talks", TALKS)]:
        lines = sorted((line for line in LINES if f"--world {world}" in line.words), key=skipped)
        assert [fault for line in lines for fault in faults_in(line, 1)] == plan(
            kinds, sum(len(faults_in(line, 1)) for line in lines), 1
        )


def test_instances_of_this_host_do_not_use_the_links_of_another_campaign(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [(1, "lo"), (2, "eth0"), (7, "pd4353d"), (8, "pd4353p"), (9, "pdx")]
    monkeypatch.setattr(instances.socket, "if_nameindex", lambda: there)
    assert instances.kept_to(instances.lasting_interfaces()) == {"UCX_NET_DEVICES": "lo,eth0,pdx"}
    assert instances.kept_to([]) == {}
