"""A campaign is repeatable, and a short one has a bit of everything."""

from __future__ import annotations

import pytest

from faults.plan import NETWORK, ONE_PAIR, RESTARTS, plan


@pytest.mark.parametrize("kinds", [ONE_PAIR, RESTARTS, NETWORK], ids=["pair", "restarts", "network"])
def test_the_same_seed_gives_the_same_faults_and_another_seed_others(kinds) -> None:
    assert plan(kinds, 100, seed=1) == plan(kinds, 100, seed=1) != plan(kinds, 100, seed=2)


def test_a_longer_campaign_begins_with_the_shorter_one() -> None:
    assert plan(ONE_PAIR, 200, seed=1)[:30] == plan(ONE_PAIR, 30, seed=1)


def test_every_kind_comes_up_in_one_round() -> None:
    round_of = sum(kind.share for kind in ONE_PAIR)
    assert {fault.kind for fault in plan(ONE_PAIR, round_of, seed=1)} == {kind.name for kind in ONE_PAIR}
    assert round_of <= 32


def test_a_long_campaign_strikes_everywhere_in_every_phase() -> None:
    struck = {(fault.kind, fault.where, fault.phase) for fault in plan(ONE_PAIR, 250, seed=1)}
    missing = [(k.name, w, p) for k in ONE_PAIR for w in k.where for p in k.phases if (k.name, w, p) not in struck]
    assert not missing
