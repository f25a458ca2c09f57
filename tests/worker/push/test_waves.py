"""Which layers go out together, and when a wave of them is whole."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd_connector.worker.push.step_clock import StepClock
from vllm_pd_connector.worker.push.waves import MAX_WAVES, WaveCount, waves_of, with_earlier


@given(st.integers(0, 200))
def test_waves_are_the_layers_in_order_and_about_equally_many(count: int) -> None:
    layers = [str(i) for i in range(count)]
    waves = waves_of(layers)
    assert [layer for wave in waves for layer in wave] == layers
    assert len(waves) == min(count, MAX_WAVES)
    assert not waves or max(map(len, waves)) - min(map(len, waves)) <= 1


def test_states_go_with_the_wave_of_the_layer_behind_them() -> None:
    waves = (("2.attn", "5.attn"), ("8.attn",))
    behind = {"0.gdn": "2.attn", "3.gdn": "5.attn", "6.gdn": "8.attn"}
    assert with_earlier(waves, behind) == (("2.attn", "5.attn", "0.gdn", "3.gdn"), ("8.attn", "6.gdn"))


def test_a_wave_is_whole_with_its_last_layer_and_every_step_begins_anew() -> None:
    count = WaveCount([("a", "b"), ("c",)])
    for step in (4, 5):
        said = [count.launched(step, layer) for layer in ("a", "indexer", "b", "c")]
        assert said == [None, None, 1, 2]


def test_a_wave_that_lacks_a_layer_holds_back_all_after_it() -> None:
    count = WaveCount([("a", "b"), ("c",)])
    assert [count.launched(1, layer) for layer in ("a", "c", "a")] == [None, None, None]
    assert [count.launched(2, layer) for layer in ("a", "b")] == [None, 1]


def test_no_waves_are_never_whole() -> None:
    assert WaveCount([]).launched(1, "a") is None


def test_the_clock_tells_of_waves_when_the_device_has_done_them_in_order() -> None:
    clock, done = StepClock(), [False, False, False]
    clock.launched(6, lambda: True)
    assert (clock.done(), clock.ahead(), clock.pause(7)) == (6, (0, 0), None)
    clock.launched(7, lambda: done[0], 1)
    clock.launched(7, lambda: done[1], 2)
    clock.launched(7, lambda: done[2])
    assert clock.ahead() == (0, 0) and clock.pause(7) is not None
    done[1] = True
    assert clock.ahead() == (0, 0), "before the wave that was launched before it"
    done[0] = True
    assert (clock.done(), clock.ahead()) == (6, (7, 2))
    assert clock.pause(7) == 0.0 and clock.pause(7, 1) == 0.0, "more than is known is done"
    assert clock.pause(7, 2) != 0.0
    done[2] = True
    assert clock.done() == 7 and clock.pause(7, 2) == 0.0


def test_who_sleeps_is_told_of_a_steps_first_wave_and_of_its_end_and_looks_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, now = StepClock(), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert clock.launched(1, lambda: True) and clock.launched(2, lambda: True, 1)
    now += 0.016
    assert not clock.launched(2, lambda: True, 2)
    assert clock.pause(2, 2) == pytest.approx(0.016), "when the next is due by the last one"
    now += 0.015
    assert clock.pause(2, 2) == pytest.approx(0.001), "a sixteenth of it"
    now += 0.017
    assert clock.pause(2, 2) == pytest.approx(0.002), "a sixteenth of what has passed: looks get rare, whatever comes"
    assert clock.pause(3) is None and clock.pause(2, 1) == 0.0
    assert clock.launched(2, lambda: True), "who waits for the last of it waits for nothing else"
    assert clock.pause(2, 2) == 0.0 and clock.pause(3) is None
    assert clock.launched(3, lambda: True, 1)
    assert clock.pause(3, 1) == pytest.approx(0.0001), "what a wave takes is not known of a step that has begun"


def test_who_looks_for_what_a_device_computes_is_told_of_nothing_more_of_that_step() -> None:
    clock = StepClock()
    assert clock.launched(1, lambda: False, 1)
    assert not clock.launched(1, lambda: False, 2) and not clock.launched(1, lambda: False)
    assert clock.launched(2, lambda: False, 1), "which nobody looks for who waits for that alone"


def test_waves_between_the_first_and_the_last_cost_the_forward_no_question_and_are_not_kept() -> None:
    clock, asked = StepClock(), []
    for step in range(1, 50):
        for wave in range(1, 17):
            before = len(asked)
            clock.launched(step, lambda: not asked.append(None), wave)
            assert wave == 1 or len(asked) == before
        clock.launched(step, lambda: True)
        assert not clock._running, "where nobody waits nobody looks"
