"""KV-cache groups that lack different parts of a prompt: each gets what it lacks; with vLLM's own cache manager.

Beside recurrent states vLLM takes the prefix hit of its first full-attention group for the request's, however much of
it other groups have lost since, and allocates new blocks for what they lack (`supports_divergent_local_hybrid_hits`).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from tests.support.scheduler.halves import EMPTY_STEP, make_half, new_prompt, serving_half
from vllm_pd_connector.compat.model.caches import transfer_groups
from vllm_pd_connector.metadata import ReceiveRequest
from vllm_pd_connector.worker.checksums import starts_of

BLOCK, WINDOW = 16, 64
PROMPT = list(range(212))
STOP = len(PROMPT) - 1
HIT = 208
LOOKS_BACK_TO = STOP + 1 - WINDOW
NULL = 0

FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
OTHER = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
WINDOWED = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=WINDOW)
STATES = MambaSpec(
    block_size=BLOCK, shapes=((3, 16), (2, 8, 8)), dtypes=(torch.float32, torch.float32), mamba_cache_mode="align"
)


class Decode:
    """A decode instance's scheduler side: vLLM's cache manager, and our half."""

    def __init__(self, specs: tuple[KVCacheSpec, ...]):
        init_none_hash(sha256)
        self.requests: dict[str, Request] = {}
        groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
        config = KVCacheConfig(num_blocks=128, kv_cache_tensors=[], kv_cache_groups=groups)
        self.manager = KVCacheManager(
            config, max_model_len=2048, enable_caching=True, scheduler_block_size=BLOCK, hash_block_size=BLOCK
        )
        self.half, _ = make_half("kv_consumer", spec=specs)
        self.half.bind_cache_manager(self.manager)

    def receive(self, request_id: str, params: Any) -> tuple[int, ReceiveRequest]:
        """What vLLM's scheduler does with a remote prefill: the prefix hit, and what the workers are told."""
        arguments = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(request_id, PROMPT, arguments, None, block_hasher=hasher)
        self.requests[request_id] = request
        self.half.on_new_request(request)
        found, hit, *_ = self.manager.get_computed_blocks_for_connector(request)
        count, is_async = self.half.num_matched_tokens(request, hit)
        assert is_async and count == STOP - hit
        allocated = self.manager.allocate_slots(
            request,
            0,
            num_new_computed_tokens=hit,
            new_computed_blocks=found,
            num_external_computed_tokens=count,
            delay_cache_blocks=True,
            skip_zeroing_group_ids=self.half.group_ids,
        )
        assert allocated is not None
        self.half.update_after_alloc(request, self.manager.get_blocks(request_id), count)
        [receive] = self.half.build_metadata(EMPTY_STEP).receives
        assert receive.read is not None
        self.manager.cache_blocks(request, STOP)
        return hit, receive

    def pass_by(self, request_id: str, prompt: list[int]) -> None:
        """Another request comes, is received whole and leaves."""
        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(request_id, prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        found, hit, *_ = self.manager.get_computed_blocks_for_connector(request)
        lacking = len(prompt) - 1 - hit
        arguments = {"num_new_computed_tokens": hit, "new_computed_blocks": found, "delay_cache_blocks": True}
        assert self.manager.allocate_slots(request, 0, num_external_computed_tokens=lacking, **arguments) is not None
        self.manager.cache_blocks(request, len(prompt) - 1)
        self.manager.free(request)

    def forget(self, request_id: str, group: int, numbers: Collection[int]) -> None:
        """Have the prefix cache lose these blocks of a request, as it does when it needs them for others."""
        blocks = self.manager.get_blocks(request_id).blocks[group]
        self.manager.block_pool.evict_blocks({blocks[i].block_id for i in numbers})


def prefilled(specs: tuple[KVCacheSpec, ...]) -> Any:
    """The answer of a prefill instance that has computed the prompt."""
    producer, _ = serving_half("kv_producer", spec=specs)
    request = new_prompt("p-1", {"do_remote_decode": True}, PROMPT)
    producer.on_new_request(request)
    request.num_computed_tokens = STOP
    count = -(-STOP // BLOCK)
    last = {FullAttentionSpec: count, SlidingWindowSpec: WINDOW // BLOCK + 1, MambaSpec: 1}
    ids = tuple([NULL] * (count - last[type(spec)]) + list(range(1, last[type(spec)] + 1)) for spec in specs)
    _, params = producer.request_finished(request, ids)
    return json.loads(json.dumps(params))


def fetched(receive: ReceiveRequest, group: int) -> range:
    """The positions that workers get into a group's blocks for a request."""
    table = receive.blocks[group]
    named = next(i for i, block in enumerate(table.ids) if block != NULL) + table.first_block
    return range(max(receive.start, named * BLOCK), min(receive.stop, (table.first_block + len(table.ids)) * BLOCK))


@pytest.mark.parametrize(
    ("specs", "lost", "begins"),
    [
        pytest.param((FULL, WINDOWED, STATES), (), {0: HIT, 1: HIT}, id="all alike"),
        pytest.param((FULL, WINDOWED, STATES), range(9, 13), {0: HIT, 1: 144}, id="a window's"),
        pytest.param((FULL, WINDOWED, STATES), (9,), {0: HIT, 1: 144}, id="the first of a window's"),
        pytest.param((FULL, OTHER, STATES), range(6, 13), {0: HIT, 1: 96}, id="another full group's"),
        pytest.param((FULL, OTHER, STATES), (0,), {0: HIT, 1: 0}, id="all of another full group's"),
    ],
)
def test_each_group_gets_what_it_has_lost_of_a_prefix(specs, lost, begins):
    params = prefilled(specs)
    decode = Decode(specs)
    _, first = decode.receive("first", params)
    assert fetched(first, 0) == range(STOP) and fetched(first, 1).start == (144 if WINDOWED in specs else 0)
    decode.forget("first", 1, lost)
    blocks = [block for group in decode.manager.get_blocks("first").blocks for block in group]
    shared = {block.block_id for block in blocks if block.block_hash is not None}
    hit, receive = decode.receive("second", params)
    assert hit == HIT, "the case is the one that is meant"
    for group, begin in begins.items():
        assert fetched(receive, group) == range(begin, STOP)
    manifest: Any = SimpleNamespace(groups=transfer_groups(decode.manager.kv_cache_config))
    compared = starts_of(receive, manifest, {})
    assert {group: compared[group] for group in begins} == begins, "verification leaves nothing of it out"
    if WINDOWED in specs:
        assert fetched(receive, 1).start <= LOOKS_BACK_TO or not lost
    written = {
        block
        for group in begins
        for i, block in enumerate(receive.blocks[group].ids, receive.blocks[group].first_block)
        if (i + 1) * BLOCK > receive.start
    }
    assert not written & shared, "what others find in the prefix cache is written"


def test_plain_use_of_a_prefix_loses_the_part_that_the_window_needs() -> None:
    """Long requests that begin alike keep the full group's blocks in use and never touch the window's, which go to
    others."""
    specs = (FULL, WINDOWED, STATES)
    params = prefilled(specs)
    decode = Decode(specs)
    decode.receive("first", params)
    decode.manager.free(decode.requests["first"])
    for i in range(10):
        decode.pass_by(f"long {i}", [*PROMPT[:HIT], *range(1000 * i + 1000, 1000 * i + 1500)])
    hit, receive = decode.receive("second", params)
    assert hit == HIT and fetched(receive, 0) == range(HIT, STOP)
    assert fetched(receive, 1) == range(144, STOP)
