"""Every order of what can happen to a push, on both sides at once: each side ends, and has all its blocks back."""

from __future__ import annotations

import pytest

from tests.support.push.halves_world import DISTURBING, PREEMPTING, World, histories


@pytest.mark.parametrize("quick", [True, False], ids=["quick workers", "slow workers"])
@pytest.mark.parametrize(("serial", "number"), [(False, 1272), (True, 164)], ids=["concurrent", "serial"])
def test_every_order_of_events_ends_on_both_sides_with_every_block_free(serial: bool, number: int, quick: bool) -> None:
    outcomes = {}
    for history in histories(serial):
        world = World(serial, quick)
        try:
            for event in history:
                world.do(event)
            outcomes[history] = world.end()
        except AssertionError as error:
            raise AssertionError(f"{', '.join(history) or 'nothing'}: {error}") from error
    assert len(outcomes) == number
    assert not any(served for history, served in outcomes.items() if not {"D registers", "P finishes"} <= {*history})
    for history, served in outcomes.items():
        # What comes after the last byte disturbs nobody, and slow workers write it last of all.
        first = min((history.index(event) for event in DISTURBING if event in history), default=len(history))
        before = history[:first] if quick else history if first == len(history) else ()
        assert served or not {"D registers", "P finishes"} <= {*before}, history
    late = [history for history, served in outcomes.items() if served and {*DISTURBING} & {*history}]
    assert late and not all(outcomes.values())


@pytest.mark.parametrize("quick", [True, False], ids=["quick workers", "slow workers"])
def test_a_prefill_that_is_preempted_is_written_from_blocks_that_nobody_else_has(quick: bool) -> None:
    """Its blocks are offered with each step; what nobody has asked for goes, and what somebody writes from stays."""
    served = early = 0
    for history in histories(False, PREEMPTING):
        world = World(False, quick)
        try:
            for event in history:
                world.do(event)
            early += world.told_early
            served += world.end() and "P is preempted" in history
        except AssertionError as error:
            raise AssertionError(f"{', '.join(history) or 'nothing'}: {error}") from error
    assert served and early
