"""A connector that asks vLLM to keep every finished request's blocks, and lets go of them in the next step.

So do LMCacheMPConnector and HF3FSKVConnector of vLLM 0.32 with requests of which they store nothing, also with those
that were aborted before they were ever computed.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


class KeepingConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. It stores and loads nothing."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return True, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return True, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], None]:
        return set(finished_req_ids), None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
