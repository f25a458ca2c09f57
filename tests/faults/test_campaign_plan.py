"""A campaign is repeatable, and a short one has a bit of everything."""

from __future__ import annotations

import pytest

from faults.campaign import ALL_STRIKES
from faults.plan import NETWORK, ONE_PAIR, ONE_PAIR_COMPARED, ONE_PAIR_PUSH, RESTARTS, plan

WORLDS = {
    "pair": ONE_PAIR,
    "push": ONE_PAIR_PUSH,
    "compared": ONE_PAIR_COMPARED,
    "restarts": RESTARTS,
    "network": NETWORK,
}
by_name = pytest.mark.parametrize("kinds", WORLDS.values(), ids=WORLDS)


@by_name
def test_the_same_seed_gives_the_same_faults_and_another_seed_others(kinds) -> None:
    assert plan(kinds, 100, seed=1) == plan(kinds, 100, seed=1) != plan(kinds, 100, seed=2)


def test_a_longer_campaign_begins_with_the_shorter_one() -> None:
    assert plan(ONE_PAIR, 200, seed=1)[:30] == plan(ONE_PAIR, 30, seed=1)


@by_name
def test_every_kind_has_a_strike_and_comes_up_in_one_round(kinds) -> None:
    round_of = sum(kind.share for kind in kinds)
    assert {fault.kind for fault in plan(kinds, round_of, seed=1)} == {kind.name for kind in kinds} <= set(ALL_STRIKES)
    assert round_of <= 36


@by_name
def test_a_long_campaign_strikes_everywhere_in_every_phase(kinds) -> None:
    struck = {(fault.kind, fault.where, fault.phase) for fault in plan(kinds, 250, seed=1)}
    missing = [(k.name, w, p) for k in kinds for w in k.where for p in k.phases if (k.name, w, p) not in struck]
    assert not missing
