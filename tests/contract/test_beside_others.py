"""In vLLM's MultiConnector, made by vLLM from a configuration, through its own scheduler.

The other connector is one that has every finished request kept and lets go of it in the next step, which is the one
that has met vLLM's assertions. `tests/scheduler/test_multi_connector.py` has what each call does.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.support.scheduler.engines import Engine, loading, read, transfer
from vllm_pd_connector.metadata import WorkerReport

PROMPT = list(range(40))


def beside(role: str) -> dict[str, Any]:
    other = {"kv_connector": "KeepingConnector", "kv_role": role, "kv_connector_module_path": "pd_test_plugins.keeping"}
    extra = {"connectors": [transfer(role), other]}
    return {"kv_connector": "MultiConnector", "kv_role": role, "kv_connector_extra_config": extra}


def among_others(report: WorkerReport) -> MultiKVConnectorWorkerMetadata:
    return MultiKVConnectorWorkerMetadata((report, None))


@pytest.fixture
def pair(engine: Any) -> tuple[Engine, Engine]:
    prefill, decode = (engine(beside(role), wrap=among_others) for role in ("kv_producer", "kv_consumer"))
    assert isinstance(prefill.connector, MultiConnector)
    return prefill, decode


def test_a_prefill_is_kept_by_both_and_freed_when_both_are_done(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    params = prefilled_beside(prefill)
    loading(decode, "d-1", PROMPT, params)
    assert read(decode.receive_of("d-1"))
    decode.step()
    decode.step(received={"d-1"})
    run_to_its_end(decode)
    assert decode.ended("d-1").finish_reason is FinishReason.LENGTH
    decode.check_empty()


def prefilled_beside(prefill: Engine) -> dict[str, Any]:
    prefill.add("p-1", PROMPT, {"do_remote_decode": True, "do_remote_prefill": False}, max_tokens=1)
    while not prefill.said:
        prefill.step()
    prefill.step(sent={"p-1"})
    params = prefill.ended("p-1").kv_transfer_params
    assert params is not None
    return params


def run_to_its_end(decode: Engine) -> None:
    while not decode.said or decode.said[-1].finish_reason is None:
        decode.step()
    decode.step(sent={"d-1"})


def test_a_request_that_ends_while_it_loads_is_freed_by_its_receive(pair: tuple[Engine, Engine]) -> None:
    """The other connector says first that it is done; vLLM would free the blocks at that."""
    prefill, decode = pair
    loading(decode, "d-1", PROMPT, prefilled_beside(prefill))
    decode.step()
    decode.scheduler.finish_requests("d-1", RequestStatus.FINISHED_ABORTED)
    decode.step(sent={"d-1"})
    decode.rest()
    assert decode.held() == 3, "bytes may still land there"
    decode.step(failed={"d-1"})
    decode.check_empty()


def test_a_failure_is_one_beside_others_too(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    loading(decode, "d-1", PROMPT, prefilled_beside(prefill))
    decode.step()
    decode.step(failed={"d-1"}, report=WorkerReport(quarantined={"d-1": 1}))
    assert decode.ended("d-1").finish_reason is FinishReason.ERROR
    decode.step(sent={"d-1"})
    decode.rest()
    assert decode.held() == 3
    decode.step(report=WorkerReport(drained={"d-1": 1}))
    decode.check_empty()
