"""A connector that does nothing, for what vLLM's own hooks cost (`step.py`): metadata is made and pickled, results are
asked for and merged, and nothing is in them."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput


class Metadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM ships no types
    """Of a step in which nothing is to be done."""


class Nothing(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM ships no types
    """See the module."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        return Metadata()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        pass

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


def nothing() -> SimpleNamespace:
    """Both halves of it."""
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
    scheduler, worker = (Nothing(config, role, None) for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER))
    return SimpleNamespace(scheduler=scheduler, worker=worker)


def layers_of_nothing(count: int, reps: int, apart_s: float) -> list[float]:
    """Microseconds that it takes for one of so many layers, which come so far apart, per step."""
    hook, times = nothing().worker.save_kv_layer, []
    for _ in range(reps):
        times.append(0.0)
        for _ in range(count):
            time.sleep(apart_s)
            began = time.perf_counter()
            hook("a layer", None, None)
            times[-1] += (time.perf_counter() - began) * 1e6 / count
    return times
