"""Looking at a running transfer costs a share of its time and is rare where little can be on its way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_pd_connector.worker.poll_interval import (
    BYTES_PER_LOOK,
    FIRST_S,
    LONGEST_OF_OLD_S,
    LONGEST_S,
    MANY_BYTES,
    OLD_SHARE,
    SHARE,
    SHORTEST_S,
    WAKE_S,
    pause,
)

moving = st.integers(0, 1 << 40)


@given(st.floats(0, 1), moving)
def test_an_end_is_seen_within_a_share_of_the_transfers_time(seconds: float, moving: int) -> None:
    at, looks = 0.0, 0
    while at < seconds:
        at, looks = at + pause(at, moving) + WAKE_S, looks + 1
    assert at - seconds <= max(seconds * SHARE, SHORTEST_S) + WAKE_S
    assert looks <= 1 + min(at, SHORTEST_S / SHARE) / (FIRST_S + WAKE_S) + at / SHORTEST_S


@given(st.floats(0, SHORTEST_S / SHARE), moving)
def test_an_end_of_a_young_transfer_is_seen_within_the_same_share(seconds: float, moving: int) -> None:
    at = 0.0
    while at < seconds:
        at += pause(at, moving) + WAKE_S
    assert at - seconds <= max(FIRST_S, seconds * SHARE) + WAKE_S


@given(st.floats(0.001, 600), st.integers(1, 1 << 40))
def test_no_more_than_a_look_is_worth_can_have_come_between_two(elapsed: float, moving: int) -> None:
    """Unless a look each 0.1 ms is too rare for that."""
    assert pause(elapsed, moving) <= max(SHORTEST_S, BYTES_PER_LOOK / (moving / elapsed) * 1.001)


def test_a_slow_link_is_looked_at_rarely_from_the_beginning() -> None:
    """20 Mbit/s: 8 MiB, a quarter of a second after they were asked for."""
    assert pause(0.25, 8 << 20) == LONGEST_S > pause(0.25, 1 << 30)


def test_a_transfer_that_stands_still_is_looked_at_rarely() -> None:
    assert pause(1.0) < LONGEST_S == pause(4.096) and pause(1.0) == pause(1.0, MANY_BYTES)
    assert pause(2.0, 16 << 20) == 2.0 * OLD_SHARE > LONGEST_S
    assert pause(60.0, 1 << 20) == pause(600.0, 0) == LONGEST_OF_OLD_S
