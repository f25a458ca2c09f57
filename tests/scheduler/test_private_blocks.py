"""A block of a window that came in part is never found by the prefix cache, and what is held grows in place; with
vLLM's own cache manager."""

from __future__ import annotations

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from vllm_pd_connector.compat.blocks import HeldBlocks, keep_unshared

BLOCK, WINDOW, PROMPT = 128, 64, 300
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


@pytest.fixture
def manager() -> KVCacheManager:
    init_none_hash(sha256)
    groups = [
        KVCacheGroupSpec(["full"], FullAttentionSpec(**SHAPE)),
        KVCacheGroupSpec(["window"], SlidingWindowSpec(**SHAPE, sliding_window=WINDOW)),
    ]
    config = KVCacheConfig(num_blocks=32, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(
        config, max_model_len=2048, enable_caching=True, scheduler_block_size=BLOCK, hash_block_size=BLOCK
    )


def make_request(request_id: str, tokens: int = PROMPT) -> Request:
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(request_id, list(range(tokens)), SamplingParams(max_tokens=1), None, block_hasher=hasher)


def receive(manager: KVCacheManager, request: Request) -> None:
    """What vLLM's scheduler does until the blocks of a remote prefill are allocated."""
    blocks, hit, *_ = manager.get_computed_blocks(request)
    allocated = manager.allocate_slots(
        request,
        0,
        num_new_computed_tokens=hit,
        new_computed_blocks=blocks,
        num_external_computed_tokens=PROMPT - 1 - hit,
        delay_cache_blocks=True,
    )
    assert allocated is not None


@pytest.mark.parametrize(("private", "hit"), [(False, 256), (True, 0)])
def test_a_block_that_came_in_part_is_found_by_nobody(manager: KVCacheManager, private: bool, hit: int) -> None:
    """Position 299 looks at those from 236 on, which begin in block 1; the hit of 256 would look at those from 193."""
    request = make_request("first")
    receive(manager, request)
    assert [block.is_null for block in manager.get_blocks("first").blocks[1]] == [True, False, False]
    if private:
        keep_unshared(manager, "first", 1, 1)
    manager.cache_blocks(request, PROMPT - 1)
    assert manager.get_computed_blocks(make_request("second"))[1] == hit


def test_later_blocks_of_the_request_are_shared_as_ever(manager: KVCacheManager) -> None:
    request = make_request("first")
    receive(manager, request)
    keep_unshared(manager, "first", 1, 1)
    manager.cache_blocks(request, PROMPT - 1)
    request.num_computed_tokens = PROMPT - 1
    request.append_output_token_ids(list(range(PROMPT, 3 * BLOCK)))
    assert manager.allocate_slots(request, 3 * BLOCK - PROMPT + 1) is not None
    assert manager.get_computed_blocks(make_request("second", 3 * BLOCK + 5))[1] == 3 * BLOCK


def test_privacy_ends_with_the_request(manager: KVCacheManager) -> None:
    request = make_request("first")
    receive(manager, request)
    keep_unshared(manager, "first", 1, 1)
    manager.free(request)
    keep_unshared(manager, "first", 1, 1)  # a report that comes after the request was freed
    assert not any("first" in m.num_cached_block for m in manager.coordinator.single_type_managers)
    again = make_request("first")
    receive(manager, again)
    manager.cache_blocks(again, PROMPT - 1)
    assert manager.get_computed_blocks(make_request("second"))[1] == 256


def test_what_a_running_prefill_holds_grows_in_place(manager: KVCacheManager) -> None:
    """It grows with each step: a copy each time would take what the whole prompt has, again and again."""
    held = HeldBlocks(manager.block_pool)
    held.hold_ids("p-1", [1, 2])
    before = held._blocks["p-1"]
    held.hold_ids("p-1", [2, 3])
    assert held._blocks["p-1"] is before and held.ids_of("p-1") == (1, 2, 3)
