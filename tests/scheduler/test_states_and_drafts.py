"""A state that is received where decode drafts, with vLLM's own cache manager: it goes into a block of its own, which
is neither a scratch block of the drafts nor the null block, and stays there when drafts are looked at.

No end-to-end row can show it: vLLM's CPU backend cannot compute states with drafts, its kernels for that are Triton's.
"""

from __future__ import annotations

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from tests.scheduler.test_recurrent import STATE_BLOCK, state
from tests.support.scheduler.halves import BLOCK, FULL
from vllm_pd_connector.compat.model.recurrent import state_groups

DRAFTS, PROMPT = 2, 3 * STATE_BLOCK + 9


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("received", [PROMPT - 1, 3 * STATE_BLOCK, 3 * STATE_BLOCK + 1, 5])
def test_a_state_goes_into_a_block_of_its_own_beside_those_of_the_drafts(mode: str, received: int) -> None:
    init_none_hash(sha256)
    spec = state(mode, scratch=DRAFTS)
    groups = [KVCacheGroupSpec(["full"], FULL), KVCacheGroupSpec(["state"], spec)]
    config = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
    manager = KVCacheManager(
        config,
        max_model_len=2048,
        enable_caching=mode == "align",
        scheduler_block_size=spec.block_size,
        hash_block_size=BLOCK,
    )
    hasher = get_request_block_hasher(BLOCK, sha256)
    request = Request("d-1", list(range(received + 1)), SamplingParams(max_tokens=9), None, block_hasher=hasher)
    loaded = manager.allocate_slots(
        request, 0, num_external_computed_tokens=received, num_lookahead_tokens=DRAFTS, delay_cache_blocks=True
    )
    assert loaded is not None
    [group] = state_groups(config).values()
    ids = manager.get_block_ids("d-1")[1]
    block = group.state_block(ids, received)
    assert block and ids.count(block) == 1 and block not in ids[-DRAFTS:]
    request.num_computed_tokens = received
    assert manager.allocate_slots(request, 1 + DRAFTS, num_lookahead_tokens=DRAFTS) is not None
    after = manager.get_block_ids("d-1")[1]
    entry = (received - 1) // STATE_BLOCK if mode == "align" else 0  # where vLLM's first step looks for it
    assert after[entry] == block
