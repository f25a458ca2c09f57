"""When the engine core sleeps until its workers answer, instead of polling."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scheduler.halves import EMPTY_STEP, make_half
from tests.support.scheduler.loops import hold_steps
from tests.support.scheduler.push_halves import step
from vllm_pd_connector.scheduler import half as half_module


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(half_module, "rest_until_next_message", lambda: found.append(True))
    return found


def test_it_does_in_a_step_whose_workers_rested_before_it(rests: list[Any]) -> None:
    half, _ = make_half("kv_consumer")
    hold_steps(half)
    for computes, so_far in ((True, 0), (False, 0), (False, 0), (True, 1), (True, 1)):
        assert computes is not step(half, **({"d_1": (0, 20)} if computes else {})).calm
        assert len(rests) == so_far


def test_workers_that_poll_behind_an_empty_step_are_polled_for(rests: list[Any]) -> None:
    half, _ = make_half("kv_consumer")
    hold_steps(half).wake()
    half.hold.ask()
    assert not half.build_metadata(EMPTY_STEP).calm, "somebody's end is to be looked at"
    step(half, d_1=(0, 20))
    assert not rests


def test_an_engine_whose_loop_was_not_found_polls(rests: list[Any]) -> None:
    half, _ = make_half("kv_consumer")
    step(half)
    step(half, d_1=(0, 20))
    assert not rests
