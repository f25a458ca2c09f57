"""Runs are made in slices: together they move what the request asks for, and each is short."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.effort import examples
from tests.support.geometry.edges import edge
from tests.support.geometry.moves import moves
from tests.support.geometry.request import Move
from tests.support.geometry.world import Model, table
from vllm_pd_connector.geometry import spans
from vllm_pd_connector.geometry.bind import Tail, pair
from vllm_pd_connector.geometry.spans import Slices, runs_of

LAYERS = 3
MODEL = Model(layers=LAYERS, heads=1, key=1, value=1)
BLOCKS = 24


@settings(max_examples=examples(300), deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(moves(), st.integers(1, 9), st.integers(1, 9))
def test_exactly_the_asked_bytes_arrive_in_slices_of_any_size(move: Move, size: int, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "SLICE_RUNS", size)
        patch.setattr(spans, "WINDOW", window)
        move.run()


@pytest.mark.parametrize("theirs", [4, 2])
def test_no_slice_is_much_longer_than_it_may_be(monkeypatch: pytest.MonkeyPatch, theirs: int) -> None:
    monkeypatch.setattr(spans, "SLICE_RUNS", 10)
    sides = {"num_blocks": 4 * BLOCKS + 1, "block_tokens": theirs}, {"num_blocks": BLOCKS + 1, "block_tokens": 4}
    apart = edge(MODEL, *sides)
    blocks = range(2 * BLOCKS * 4 // theirs, 0, -2), range(1, BLOCKS + 1)
    slices = Slices.of(pair(apart, [table(*blocks[0])], [table(*blocks[1])], 0, 4 * BLOCKS, tail=Tail.PAGE))
    sizes = [len(runs) for runs in slices]
    assert len(sizes) > 5 and max(sizes) <= 10 + LAYERS
    assert sum(sizes) == BLOCKS * 4 // theirs * LAYERS
    assert sizes == [len(runs) for runs in slices], "it can be gone through again"


def test_what_follows_a_slice_is_made_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of the transfer thread makes one of them, and may have no time for another."""
    monkeypatch.setattr(spans, "SLICE_RUNS", 10)
    made: list[int] = []
    make = spans._runs
    monkeypatch.setattr(spans, "_runs", lambda *given: (runs := make(*given), made.append(len(runs)))[0])
    alike = edge(MODEL, *[{"num_blocks": 4 * BLOCKS + 1, "block_tokens": 4}] * 2)
    blocks = [table(*range(2 * BLOCKS, 0, -2))]
    for number, runs in enumerate(Slices.of(pair(alike, blocks, blocks, 0, 4 * BLOCKS)), start=1):
        assert len(made) == number and len(runs) == made[-1]
    assert len(made) > 5 and not Slices.of(pair(alike, blocks, blocks, 0, 4 * BLOCKS)).single


def test_consecutive_pages_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "SLICE_RUNS", LAYERS)
    alike = edge(MODEL, *[{"num_blocks": BLOCKS + 1, "block_tokens": 4}] * 2)
    blocks = [table(*range(1, BLOCKS + 1))]
    [runs] = Slices.of(pair(alike, blocks, blocks, 0, 4 * BLOCKS))
    assert len(runs) == LAYERS


def test_no_more_spans_are_looked_through_at_a_time_than_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of half a million tokens has tens of thousands of them, and each look at all is a long turn's."""
    monkeypatch.setattr(spans, "SLICE_RUNS", 4)
    monkeypatch.setattr(spans, "WINDOW", 5)
    looked: list[int] = []
    look = spans._broken
    monkeypatch.setattr(spans, "_broken", lambda *pages: (looked.append(len(pages[0])), look(*pages))[1])
    alike = edge(MODEL, *[{"num_blocks": BLOCKS + 1, "block_tokens": 4}] * 2)
    blocks = [table(*range(1, BLOCKS + 1))]
    made = list(Slices.of(pair(alike, blocks, blocks, 0, 4 * BLOCKS)))
    assert max(looked) == 5 and sum(map(len, made)) == LAYERS * -(-BLOCKS // 5)


def test_a_short_request_is_one_slice_and_nothing_is_none() -> None:
    plain = edge(MODEL, {}, {})
    twice = pair(plain, [table(1)], [table(2)], 0, 4) + pair(plain, [table(2)], [table(3)], 0, 4)
    short = Slices.of(twice)
    [runs] = short
    assert short and short.single and len(short.paired) == 2 and len(runs) == 2 * LAYERS == len(runs_of(twice))
    nothing = Slices.of(pair(plain, [table(1)], [table(2)], 4, 4))
    assert not nothing and not nothing.single and list(nothing) == [] and not len(runs_of(nothing.paired))
