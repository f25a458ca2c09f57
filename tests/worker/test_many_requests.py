"""Many requests through both halves of a pair with few blocks, a short form of `tests.faults.soak_halves`."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.faults.soak_halves import LEGS, STUCK_S, Halves

REQUESTS = 120


@pytest.fixture
def halves(request: pytest.FixtureRequest) -> Iterator[Halves]:
    made = Halves(7, request.param, "loopback")
    yield made
    made.close()


@pytest.mark.parametrize("halves", LEGS, indirect=True)
def test_every_request_ends_right_or_is_left_and_nothing_is_held(halves: Halves) -> None:
    halves.run(REQUESTS, time.monotonic() + STUCK_S)
    halves.settle()
    assert halves.problems == []
    assert halves.requests == REQUESTS and halves.ends["left"] > 0
    assert halves.decode.counted["receives"] > REQUESTS / 3


@pytest.mark.parametrize("halves", LEGS[:1], indirect=True)
def test_other_bytes_than_those_of_the_prefill_are_seen(halves: Halves) -> None:
    halves.prefill._worker.memory[:] = 0
    written = type(halves.prefill)._forward

    def overwritten(engine: object, name: str, count: int) -> None:
        written(halves.prefill, name, count)
        halves.prefill._worker.memory[::7] ^= 1

    halves.prefill._forward = overwritten.__get__(halves.prefill)  # type: ignore[method-assign]
    halves.run(20, time.monotonic() + STUCK_S)
    assert any("tokens, from" in problem for problem in halves.problems)
