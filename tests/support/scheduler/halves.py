"""Scheduler halves with a block pool, requests for them, and what vLLM's scheduler would call."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus

from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port
from vllm_pd_connector.config import Config
from vllm_pd_connector.scheduler.half import SchedulerHalf

PROMPT = list(range(40))
TOKEN = bytes(16)
EMPTY_STEP: Any = SimpleNamespace(
    scheduled_new_reqs=[],
    scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(), req_ids=[], num_computed_tokens=[]),
    num_scheduled_tokens={},
    finished_req_ids=set(),
)
BLOCK = 16
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
WINDOW = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=24)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


_made: list[SchedulerHalf] | None = None


@contextmanager
def ended_halves() -> Iterator[None]:
    """Shuts down in the end what `make_half` has made meanwhile, if nobody has. Decode first: what it holds it gives
    back, and it waits some seconds for an answer."""
    global _made
    made: list[SchedulerHalf] = []
    _made = made
    yield
    _made = None
    for half in sorted(made, key=lambda half: half.producer._keeps):
        half.shutdown()


def make_half(
    role: str,
    lookahead: int = 0,
    spec: Any = FULL,
    parallel: Mapping[str, Any] | None = None,
    media: Any = None,
    speculative: Any = None,
    layers: int = 8,
    **changes: Any,
) -> tuple[SchedulerHalf, BlockPool]:
    """A scheduler half with a real block pool; `role` is a `kv_role`, `spec` that of each group, `media`
    vLLM's MultiModalConfig of an engine without prefix caching, `speculative` its SpeculativeConfig. Each group has one
    layer; the model has `layers`, and those behind them are its drafter's."""
    specs = spec if isinstance(spec, tuple) else (spec,)
    alone = {
        "data_parallel_index": 0, "data_parallel_rank_local": None, "data_parallel_master_ip": "127.0.0.1",
        "local_engines_only": False, "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
    }  # fmt: skip
    ranks = SimpleNamespace(**alone | dict(parallel or {}))
    index = ranks.data_parallel_index
    produces, consumes = role != "kv_consumer", role != "kv_producer"
    transfer = SimpleNamespace(engine_id=f"{role}-{index}", is_kv_producer=produces, is_kv_consumer=consumes)
    config = Config(**{"side_channel_port": free_port() - index, **changes})
    half = SchedulerHalf(
        config,
        SimpleNamespace(
            parallel_config=ranks,
            kv_transfer_config=transfer,
            lora_config=None,
            num_prefill_lookahead_tokens=lookahead,
            scheduler_config=SimpleNamespace(disable_chunked_mm_input=False),
            model_config=SimpleNamespace(
                is_mm_prefix_lm=False,
                uses_mrope=False,
                multimodal_config=media,
                get_total_num_hidden_layers=lambda: layers,
            ),
            compilation_config=SimpleNamespace(static_forward_context={}),
            cache_config=SimpleNamespace(enable_prefix_caching=False),
            ec_transfer_config=None,
            speculative_config=speculative,
        ),
        SimpleNamespace(
            transfer_group_ids=tuple(range(len(specs))),
            transfer_groups=tuple(
                SimpleNamespace(kv_cache_spec=each, layer_names=[f"model.layers.{i}.attn"])
                for i, each in enumerate(specs)
            ),
        ),
    )
    pool = BlockPool(num_gpu_blocks=32, enable_caching=False, hash_block_size=BLOCK)
    half.bind_block_pool(pool)
    if _made is not None:
        _made.append(half)
    return half, pool


def serving_half(role: str, **changes: Any) -> tuple[SchedulerHalf, BlockPool]:
    """The same, whose workers have described themselves."""
    half, pool = make_half(role, **changes)
    half.serve([b"manifest"], [TOKEN])
    return half, pool


def make_request(request_id: str, params: Any, prompt: list[int] = PROMPT, **changes: Any) -> Any:
    fields = {
        "request_id": request_id,
        "kv_transfer_params": params,
        "prompt_token_ids": prompt,
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
        "num_prompt_tokens": len(prompt),
        "num_computed_tokens": len(prompt),
        "num_in_flight_tokens": 0,
        "status": RequestStatus.FINISHED_LENGTH_CAPPED,
        "mm_features": [],
        "lora_request": None,
        "abort_immediately": False,
        "resumable": False,
        "trace_headers": None,
        "max_tokens": 1,
        "get_skip_reading_prefix_cache": lambda: False,
    }
    return SimpleNamespace(**(fields | changes))


def hand_over(producer: SchedulerHalf, request_id: str = "p-1", **changes: Any) -> dict[str, Any]:
    """Finish a prefill and return the parameters as the router would forward them."""
    request = make_request(request_id, {"do_remote_decode": True, "do_remote_prefill": False}, **changes)
    producer.on_new_request(request)
    delay, params = producer.request_finished(request, ([5, 6, 7],))
    assert not delay and params is not None
    return json.loads(json.dumps(params))  # type: ignore[no-any-return]


def allocate(half: SchedulerHalf, pool: BlockPool, request: Any, computed: int = 0) -> tuple[int, list[Any]]:
    """What vLLM's scheduler does with a waiting request: ask, allocate, tell."""
    count, is_async = half.num_matched_tokens(request, computed)
    assert count is not None and is_async == (count > 0)
    blocks = pool.get_new_blocks(3)
    found(blocks[: computed // BLOCK])
    half.update_after_alloc(request, KVCacheBlocks((blocks,)), count)
    return count, blocks


def receive_of(half: SchedulerHalf, pool: BlockPool, request: Any, computed: int = 0) -> Any:
    """What the workers are ordered to receive for a new request, of which this much was found."""
    half.on_new_request(request)
    allocate(half, pool, request, computed)
    [receive] = half.build_metadata(EMPTY_STEP).receives
    return receive


def abort(half: SchedulerHalf, request: Any) -> None:
    """What vLLM's scheduler does with a request that has no blocks when it is aborted."""
    request.status = RequestStatus.FINISHED_ABORTED
    half.request_finished(request, ([],))


def found(blocks: list[Any]) -> None:
    """Have these blocks be some that vLLM's prefix cache found."""
    for block in blocks:
        block.set_block_hash(BlockHashWithGroupId(b"some prefix"), BLOCK)


def freed(producer: SchedulerHalf) -> list[str]:
    """Request ids whose blocks were given back since the last call."""
    return producer.producer.drain()


def new_prompt(request_id: str, params: Any, prompt: list[int]) -> Any:
    """A request as vLLM adds it: nothing computed yet."""
    request = make_request(request_id, params, list(prompt), num_computed_tokens=0, max_tokens=9)
    request._all_token_ids = list(prompt)
    return request


def broken(*_: object, **__: object) -> None:
    """In the place of a method: a defect of ours."""
    raise ZeroDivisionError("a defect")
