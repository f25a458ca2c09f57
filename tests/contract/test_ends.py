"""Engines that are told to end, through vLLM's own engine core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.engine.core import EngineShutdownState

from tests.support.scheduler.cores import Core
from tests.support.scheduler.engines import prefilled

PROMPT = list(range(40))


@pytest.fixture
def cores(engine: Callable[..., Any]) -> Callable[..., Core]:
    return lambda role, **arguments: Core(lambda: engine(role, **arguments))


@pytest.mark.parametrize("limit", [0, 100], ids=["at once", "when it has done what it has"])
def test_a_pause_that_has_not_come_about_keeps_no_engine_from_ending(cores: Callable[..., Core], limit: int) -> None:
    """vLLM would step until it is killed, and nobody would be told that the instance leaves."""
    prefill = cores("kv_producer")
    prefilled(prefill.engine, "p-1", PROMPT)
    prefill.engine.rest()
    paused = prefill.pause_scheduler("wait")
    prefill.engine.step()
    assert paused is not None and not paused.done() and prefill.has_work()
    prefill.vllm_config.shutdown_timeout = limit
    prefill.shutdown_state = EngineShutdownState.REQUESTED
    assert not prefill._handle_shutdown()
    assert prefill.engine.held() == 3, "its readers have time to end"
