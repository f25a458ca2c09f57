"""`/release_kv_cache_memory` behind a pause that clears nothing, through vLLM's own engine core and scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.scheduler.cores import Core
from tests.support.scheduler.engines import loading, prefilled
from vllm_pd_connector.metadata import WorkerReport

PROMPT = list(range(40))


@pytest.fixture
def pair(engine: Callable[..., Any]) -> tuple[Core, Core]:
    """A prefill instance, and a decode instance that loads what it holds."""
    prefill, decode = (Core(lambda role=role: engine(role)) for role in ("kv_producer", "kv_consumer"))
    params = prefilled(prefill.engine, "p-1", PROMPT)
    prefill.engine.rest()
    loading(decode.engine, "d-1", PROMPT, params)
    return prefill, decode


def released(core: Core) -> bool:
    return "discard" in core.model_executor.asked


def test_memory_stays_while_a_failed_load_may_be_written_into_it(pair: tuple[Core, Core]) -> None:
    _, decode = pair
    decode.engine.step(failed={"d-1"}, report=WorkerReport(quarantined={"d-1": 1}))
    decode.engine.rest()
    decode.wait(decode.pause_scheduler("abort", clear_cache=False))
    with pytest.raises(RuntimeError, match="Failed to reset"):
        decode.release_kv_cache_memory()
    assert not released(decode)
    decode.engine.step(report=WorkerReport(drained={"d-1": 1}))
    decode.release_kv_cache_memory()
    assert released(decode)


def test_leases_end_before_the_memory_goes(pair: tuple[Core, Core]) -> None:
    prefill, _ = pair
    prefill.wait(prefill.pause_scheduler("keep", clear_cache=False))
    prefill.release_kv_cache_memory()
    assert released(prefill) and prefill.engine.held() == 0
    assert prefill.engine.connector.scheduler.producer.home is None, "nobody vouches for them any more"
