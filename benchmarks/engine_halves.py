"""Both halves of an instance without vLLM's engine around them, and what that gives them: requests, and what a step
schedules. Benchmarks call its hooks in vLLM's order.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from vllm_pd_connector.compat.base import KVConnectorRole  # noqa: E402
from vllm_pd_connector.connector import PDConnector  # noqa: E402

BLOCK_TOKENS = 16
IN_FLIGHT, BLOCKS = 256, 16  # requests, and blocks of each
PROMPT = list(range(BLOCKS * BLOCK_TOKENS))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Engine:
    """The two halves of an instance with one worker and one full-attention group, as vLLM would build them."""

    def __init__(self, kv_role: str, requests: int = IN_FLIGHT, **extra: Any):
        settings = {"side_channel_port": free_port(), "kv_lease_duration": 600.0, **extra}
        self.scheduler, self.worker = (
            connector(role, kv_role, settings) for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
        )
        self.pool = BlockPool(num_gpu_blocks=requests * BLOCKS + 2, enable_caching=False, hash_block_size=BLOCK_TOKENS)
        self.tables: dict[str, list[list[int]]] = {}
        half = self.scheduler.scheduler
        half.bind_block_pool(self.pool)
        half.producer.progress.tables = lambda request_id: self.tables[request_id]
        half.serve([b"manifest"], [bytes(16)])

    def blocks(self) -> list[Any]:
        return list(self.pool.get_new_blocks(BLOCKS))


def connector(role: KVConnectorRole, kv_role: str, settings: dict[str, Any], block: int = BLOCK_TOKENS) -> PDConnector:
    roles = {"is_kv_producer": kv_role == "kv_producer", "is_kv_consumer": kv_role == "kv_consumer"}
    names = {"engine_id": kv_role, "kv_role": kv_role, "kv_buffer_device": "cpu"}
    transfer = SimpleNamespace(kv_connector_extra_config=settings, **names, **roles)
    sizes = {f"{kind}_parallel_size": 1 for kind in ("tensor", "pipeline", "decode_context", "prefill_context")}
    place = {"data_parallel_index": 0, "data_parallel_rank_local": None, "data_parallel_master_ip": "127.0.0.1"}
    place |= {"distributed_executor_backend": "uni"}
    parallel = SimpleNamespace(local_engines_only=False, data_parallel_backend="mp", **place, **sizes)
    model = SimpleNamespace(
        enable_sleep_mode=False, is_mm_prefix_lm=False, uses_mrope=False, is_diffusion=False, multimodal_config=None
    )
    scheduling = SimpleNamespace(disable_chunked_mm_input=False)
    others = {"num_prefill_lookahead_tokens": 0, "lora_config": None, "scheduler_config": scheduling}
    others |= {"speculative_config": None, "shutdown_timeout": 0}
    config = SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel, model_config=model, **others)
    spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float32)
    caches = SimpleNamespace(transfer_group_ids=(0,), transfer_groups=(SimpleNamespace(kv_cache_spec=spec),))
    return PDConnector(config, role, caches)


def request(number: int, params: dict[str, Any], **changes: Any) -> Any:
    fields = {
        "request_id": f"r-{number}",
        "kv_transfer_params": params,
        "prompt_token_ids": PROMPT,
        "num_prompt_tokens": len(PROMPT),
        "num_computed_tokens": len(PROMPT),
        "num_in_flight_tokens": 0,
        "status": RequestStatus.FINISHED_LENGTH_CAPPED,
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
        "mm_features": [],
        "lora_request": None,
        "max_tokens": 9,
        "abort_immediately": False,
        "resumable": False,
        "trace_headers": None,
        "get_skip_reading_prefix_cache": lambda: False,
    }
    return SimpleNamespace(**(fields | changes))


def scheduled(tokens: dict[str, tuple[int, int]]) -> Any:
    """What vLLM schedules in a step: by request the tokens that were computed before, and now."""
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            resumed_req_ids=set(),
            req_ids=list(tokens),
            num_computed_tokens=[before for before, _ in tokens.values()],
        ),
        num_scheduled_tokens={name: now for name, (_, now) in tokens.items()},
        finished_req_ids=set(),
    )
