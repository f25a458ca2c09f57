"""Many requests through both halves of a pair with few blocks, a short form of `tests.faults.soak_halves`."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator

import pytest

from tests.faults.soak_halves import LEAST_REQUESTS, LEGS, STUCK_S, Halves, Kept
from tests.faults.system.memory import Trend
from vllm_pd_connector.protocol.lease import LeaseTable

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


def kept(requests: int, objects: list[float]) -> Kept:
    """What a run of so many requests found."""
    made = Kept({name: Trend() for name in ("bytes", "objects", "threads", "files")})
    for number, found in enumerate(objects, start=1):
        for name, trend in made.trends.items():
            trend.add(requests * number // len(objects), int(found) if name == "objects" else 7)
    return made


def test_growth_is_what_goes_on_when_all_is_remembered_that_will_be() -> None:
    remembered = inspect.signature(LeaseTable).parameters["remember"].default
    assert remembered < 0.9 * LEAST_REQUESTS / 2, "the second half begins with a full memory"
    fills = [4.0 * min(number * LEAST_REQUESTS / 20, remembered) for number in range(20)]
    assert kept(LEAST_REQUESTS, fills).problems() == []
    [grows] = kept(LEAST_REQUESTS, [300.0 * number for number in range(20)]).problems()
    assert grows.startswith("objects grew by 2")
    [short] = kept(LEAST_REQUESTS // 6, fills[:4]).problems()
    assert "too few" in short
