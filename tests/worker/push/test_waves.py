"""Which layers go out together, and when a wave of them is whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_pd_connector.worker.push.step_clock import StepClock
from vllm_pd_connector.worker.push.waves import MAX_WAVES, WaveCount, waves_of


@given(st.integers(0, 200))
def test_waves_are_the_layers_in_order_and_about_equally_many(count: int) -> None:
    layers = [str(i) for i in range(count)]
    waves = waves_of(layers)
    assert [layer for wave in waves for layer in wave] == layers
    assert len(waves) == min(count, MAX_WAVES)
    assert not waves or max(map(len, waves)) - min(map(len, waves)) <= 1


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
