"""Looking at a running transfer costs a share of its time and is rare in the long run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_pd_connector.worker.poll_interval import FIRST_S, LONGEST_S, SHARE, SHORTEST_S, WAKE_S, YOUNG_SHARE, pause


@given(st.floats(0, 1))
def test_an_end_is_seen_within_a_share_of_the_transfers_time(seconds: float) -> None:
    at, looks = 0.0, 0
    while at < seconds:
        at, looks = at + pause(at) + WAKE_S, looks + 1
    assert at - seconds <= max(seconds * SHARE, SHORTEST_S) + WAKE_S
    assert looks <= 20 + at / SHORTEST_S


@given(st.floats(0, (SHORTEST_S + WAKE_S) / YOUNG_SHARE))
def test_an_end_of_a_young_transfer_is_seen_within_an_eighth_of_its_time(seconds: float) -> None:
    at = 0.0
    while at < seconds:
        at += pause(at) + WAKE_S
    assert at - seconds <= max(seconds * YOUNG_SHARE, FIRST_S + WAKE_S)


def test_a_transfer_that_stands_still_is_looked_at_rarely() -> None:
    assert pause(1.0) < LONGEST_S == pause(2.0) == pause(60.0)
