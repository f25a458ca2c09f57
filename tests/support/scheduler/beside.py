"""Engines with this connector in vLLM's MultiConnector, beside one that has every finished request kept and lets go of
it in the next step (`pd_test_plugins.keeping`), or beside vLLM's OffloadingConnector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata

from tests.support.scheduler.engines import Engine, transfer
from vllm_pd_connector.metadata import WorkerReport

PROMPT = list(range(40))
STEPS = 1000  # of which no request takes as many


def beside(role: str, name: str = "KeepingConnector", module: str = "keeping", **extra_config: Any) -> dict[str, Any]:
    other = {"kv_connector": name, "kv_role": role, "kv_connector_module_path": f"pd_test_plugins.{module}"}
    extra = {"connectors": [transfer(role, **extra_config), other]}
    return {"kv_connector": "MultiConnector", "kv_role": role, "kv_connector_extra_config": extra}


def offloading(role: str, *, first: bool = True, **extra_config: Any) -> dict[str, Any]:
    """`first`: this connector is named first."""
    store = {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 1 << 20}
    other = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": store}
    connectors = [transfer(role, **extra_config), other]
    extra = {"connectors": connectors if first else connectors[::-1]}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def among_others(report: WorkerReport) -> MultiKVConnectorWorkerMetadata:
    return MultiKVConnectorWorkerMetadata((report, None))


def until_true(engine: Engine, condition: Callable[[], bool]) -> None:
    """Step until it is."""
    for _ in range(STEPS):
        if condition():
            return
        engine.step()
    raise AssertionError(f"not after {STEPS} steps")


def prefilled_beside(prefill: Engine, prompt: list[int] = PROMPT) -> dict[str, Any]:
    prefill.add("p-1", prompt, {"do_remote_decode": True, "do_remote_prefill": False}, max_tokens=1)
    until_true(prefill, lambda: bool(prefill.said))
    prefill.step(sent={"p-1"})
    params: dict[str, Any] | None = prefill.ended("p-1").kv_transfer_params
    assert params is not None
    return params


def run_to_its_end(decode: Engine) -> None:
    until_true(decode, lambda: bool(decode.said) and decode.said[-1].finish_reason is not None)
    decode.step(sent={"d-1"})
