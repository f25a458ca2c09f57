"""Looking at a running transfer costs a share of its time and is rare in the long run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_pd_connector.worker.poll_interval import LONGEST_S, SHARE, SHORTEST_S, pause


@given(st.floats(0, 1))
def test_an_end_is_seen_within_a_share_of_the_transfers_time(seconds: float) -> None:
    at, looks = 0.0, 0
    while at < seconds:
        at, looks = at + pause(at), looks + 1
    assert at - seconds <= max(seconds * SHARE, SHORTEST_S)
    assert looks <= 1 + at / SHORTEST_S


def test_a_transfer_that_stands_still_is_looked_at_rarely() -> None:
    assert pause(1.0) < LONGEST_S == pause(2.0) == pause(60.0)
