"""What ended in an idle engine: when it is asked to take that up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.scheduler.loops import Loop, take_step
from vllm_pd_connector.scheduler import step_hold as hold_module
from vllm_pd_connector.scheduler.step_hold import GATHER_S, LONGEST_S, StepHold


def test_what_ends_in_an_idle_engine_is_gathered_for_one_step(
    hold: StepHold, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(hold_module, "time", SimpleNamespace(monotonic=lambda: now))
    take_step(hold, waiting=False)
    assert hold.ask_soon() == pytest.approx(GATHER_S) and not hold.asked
    now += GATHER_S / 4
    assert hold.ask_soon() == pytest.approx(GATHER_S * 3 / 4), "it is not put off again by what ends next"
    now += GATHER_S
    assert hold.ask_soon() == 0.0 and hold.asked and loop._queue.qsize() == 1
    take_step(hold, waiting=False)
    assert hold.ask_soon() == pytest.approx(GATHER_S), "what ended before was taken by a step"


def test_what_a_request_may_wait_for_is_given_back_at_once(hold: StepHold) -> None:
    take_step(hold)
    assert hold.ask_soon() == 0.0 and hold.asked


def test_a_step_that_gives_back_what_was_put_off_is_not_held(hold: StepHold, loop: Loop) -> None:
    """vLLM has looked at a request that waits for it before, and looks again in the next."""
    take_step(hold, computes=True, waiting=False)
    hold.ask_soon()
    take_step(hold)
    assert not loop.waits
    take_step(hold)
    assert loop.waits == [LONGEST_S]
