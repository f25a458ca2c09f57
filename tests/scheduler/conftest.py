"""What all tests of the scheduler halves share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm.v1.core.block_pool import BlockPool

from tests.support.scheduler.halves import ended_halves, make_half, serving_half
from tests.support.scheduler.loops import Loop, made
from tests.support.scheduler.push_halves import Prefill
from vllm_pd_connector.scheduler.half import SchedulerHalf
from vllm_pd_connector.scheduler.step_hold import StepHold


@pytest.fixture(autouse=True)
def halves() -> Iterator[None]:
    """No half that a test has made outlives it."""
    with ended_halves():
        yield


@pytest.fixture
def producer() -> SchedulerHalf:
    return serving_half("kv_producer", kv_lease_duration=600.0)[0]  # so that only a release ends its leases


@pytest.fixture
def consumer() -> tuple[SchedulerHalf, BlockPool]:
    return make_half("kv_consumer")


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def hold(loop: Loop) -> Iterator[StepHold]:
    """Of the steps of an engine with that loop."""
    made_hold = made(loop)
    yield made_hold
    made_hold.close()


@pytest.fixture
def prefill(request: pytest.FixtureRequest) -> Iterator[Prefill]:
    """A prefill instance that pushes."""
    made = Prefill(**getattr(request, "param", {}))
    yield made
    made.close()
