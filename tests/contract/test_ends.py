"""Engines that are told to end, and requests that they never begin, through vLLM's own engine core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineShutdownState

from tests.support.scheduler.cores import Core
from tests.support.scheduler.engines import given_back, prefilled

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


def test_what_the_input_thread_refuses_passes_through_vllms_scheduler(cores: Callable[..., Core]) -> None:
    """Also with a grammar, for which a request waits there before anything else."""
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    asked = {"kv_transfer_params": prefilled(prefill.engine, "p-1", PROMPT)}
    prefill.engine.rest()
    sampling = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(regex="a+"), extra_args=asked)
    decode.reject_new_requests = False  # vLLM 0.33
    decode._handle_request_preproc_error(EngineCoreRequest("d-1", PROMPT, None, sampling, None, 0.0, None, None, None))
    decode._handle_client_request(*decode.input_queue.get_nowait())
    assert not decode.scheduler.requests
    given_back(prefill.engine)
