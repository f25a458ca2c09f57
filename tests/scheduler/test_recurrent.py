"""Models with recurrent states: which block of a state group is handed over, and where prefill and decode part."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import CircularBufferSpec, MambaSpec

from tests.support.scheduler.halves import (
    BLOCK,
    EMPTY_STEP,
    FULL,
    PROMPT,
    TOKEN,
    found,
    make_half,
    make_request,
    new_prompt,
)
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.scheduler.half import SchedulerHalf

STATE_BLOCK = 32
COMPUTED = len(PROMPT) - 1


def state(mode: str, scratch: int = 0) -> MambaSpec:
    """A group of states; in mode none vLLM's block size is the model's whole context."""
    return MambaSpec(
        block_size=STATE_BLOCK if mode == "align" else 2048,
        shapes=((3, 64), (2, 8, 8)),
        dtypes=(torch.float32, torch.float32),
        mamba_cache_mode=mode,
        num_speculative_blocks=scratch,
    )


def pair_of(spec: MambaSpec, other: MambaSpec | None = None) -> tuple[SchedulerHalf, SchedulerHalf, BlockPool]:
    """A prefill and a decode half of a model with one attention and two state groups."""
    producer, _ = make_half("kv_producer", spec=(FULL, spec, spec))
    there = other or spec
    consumer, pool = make_half("kv_consumer", spec=(FULL, there, there))
    producer.serve([b"manifest"], [TOKEN])
    return producer, consumer, pool


def prefilled(producer: SchedulerHalf, block_ids: tuple[list[int], ...]) -> dict[str, Any]:
    """A whole prefill: it arrives, computes what is left of its prompt, and is handed over."""
    request = new_prompt("p-1", {"do_remote_decode": True}, PROMPT)
    producer.on_new_request(request)
    assert request.num_prompt_tokens == COMPUTED and request.max_tokens == 1
    request.num_computed_tokens = request.num_prompt_tokens
    _, params = producer.request_finished(request, block_ids)
    assert params is not None
    return dict(json.loads(json.dumps(params)))


@pytest.mark.parametrize(
    ("spec", "ids", "block"),
    [
        (state("none"), [5], 5),
        (state("none", scratch=2), [5, 6, 7], 5),
        (state("align"), [0, 6], 6),
        (state("align"), [4, 6], 6),  # block 4 keeps a state for the prefix cache
        (state("align", scratch=1), [0, 6, 7], 6),
    ],
)
def test_prefill_names_the_block_of_each_group_that_holds_the_state_of_what_it_computed(spec, ids, block):
    producer, _, _ = pair_of(spec)
    params = prefilled(producer, ([1, 2, 3], ids, [8, *ids[1:]]))
    assert params["remote_num_tokens"] == COMPUTED
    assert params["remote_block_ids"][:2] == [[1, 2, 3], [block]]
    assert params["pd_connector"]["first_blocks"] == [0, 0, 0]
    held = producer.producer._blocks
    assert held is not None and held._blocks["p-1"].keys() >= {1, 2, 3, block}


def test_a_prefill_without_the_state_of_its_last_token_is_not_handed_over():
    producer, _, _ = pair_of(state("align"))
    request = new_prompt("p-1", {"do_remote_decode": True}, PROMPT)
    producer.on_new_request(request)
    request.num_computed_tokens = COMPUTED
    assert producer.request_finished(request, ([1, 2, 3], [5, 0], [6, 0])) == (False, None)
    assert producer.producer.num_leases == 0


@pytest.mark.parametrize(
    ("p_mode", "d_mode", "cached"),
    [("none", "none", 0), ("align", "align", 0), ("align", "align", STATE_BLOCK), ("none", "align", 0)],
)
def test_decode_loads_all_but_the_last_token_into_the_block_that_its_own_mode_names(p_mode, d_mode, cached):
    producer, consumer, pool = pair_of(state(p_mode), state(d_mode))
    request = new_prompt("d-1", prefilled(producer, ([1, 2, 3], *[[5] if p_mode == "none" else [0, 5]] * 2)), PROMPT)
    consumer.on_new_request(request)
    assert consumer.num_matched_tokens(request, cached) == (COMPUTED - cached, True)
    attention, first, second = pool.get_new_blocks(3), pool.get_new_blocks(1), pool.get_new_blocks(1)
    null = [pool.null_block] if d_mode == "align" else []
    found(attention[: cached // BLOCK])
    consumer.update_after_alloc(request, KVCacheBlocks((attention, null + first, null + second)), COMPUTED - cached)
    [receive] = consumer.build_metadata(EMPTY_STEP).receives
    assert (receive.start, receive.stop) == (cached, COMPUTED)
    assert receive.blocks == (
        BlockTable.of(cached // BLOCK, tuple(block.block_id for block in attention[cached // BLOCK :])),
        BlockTable.of(0, (first[0].block_id,)),
        BlockTable.of(0, (second[0].block_id,)),
    )
    assert consumer.group_ids == (0, 1, 2), "a group that is not named is wiped while its state arrives"


def test_a_prompt_that_is_cached_but_for_its_last_token_loads_nothing():
    producer, consumer, pool = pair_of(state("align"))
    request = new_prompt("d-1", prefilled(producer, ([1, 2, 3], [0, 5], [0, 6])), PROMPT)
    consumer.on_new_request(request)
    assert consumer.num_matched_tokens(request, COMPUTED) == (0, False)
    blocks = pool.get_new_blocks(3)
    consumer.update_after_alloc(request, KVCacheBlocks((blocks, [], [])), 0)
    assert consumer.build_metadata(EMPTY_STEP).receives == []


def test_of_a_ring_and_of_a_state_a_prompt_takes_few_blocks_however_long_it_is() -> None:
    """GLM-5-Next: rings of 4 tokens. Else one long prompt were counted as more than all blocks."""
    ring = CircularBufferSpec(
        block_size=4, num_kv_heads=2, head_size=128, head_size_v=0, dtype=torch.bfloat16, dcp_sharded=False
    )
    half, _ = make_half("kv_both", spec=(FULL, ring, state("align")))
    half.share.add("p-1", 100 * BLOCK)
    assert half.share._needs == {"p-1": 100 + 1 + 1}
    lending = half.producer.lending
    lending.add("c-1", (1,))
    assert lending.blocks_for(make_request("d-1", None, num_tokens=100 * BLOCK)) == 101 + 2 + 3


def test_a_single_token_is_computed_by_decode():
    producer, consumer, _ = pair_of(state("none"))
    prefill = new_prompt("p-1", {"do_remote_decode": True}, [7])
    producer.on_new_request(prefill)
    assert prefill.num_prompt_tokens == 1
    prefill.num_computed_tokens = 1
    _, params = producer.request_finished(prefill, ([1], [5], [6]))
    request = new_prompt("d-1", json.loads(json.dumps(params)), [7])
    consumer.on_new_request(request)
    assert consumer.num_matched_tokens(request, 0) == (0, False)


@pytest.mark.parametrize(
    ("spec", "drafts", "kept"),
    [
        (state("none"), None, True),
        (state("none"), "ngram", False),
        (state("align"), "ngram", False),
        (state("align", scratch=2), "ngram", False),
        (FULL, "ngram", True),
        (
            CircularBufferSpec(
                block_size=4, num_kv_heads=2, head_size=128, head_size_v=0, dtype=torch.bfloat16, dcp_sharded=False
            ),
            "ngram",
            True,
        ),
    ],
    ids=["no drafts", "none", "align", "scratch blocks", "attention", "a ring"],
)
def test_a_state_that_drafts_have_advanced_is_kept_for_no_next_turn(spec: Any, drafts: str | None, kept: bool) -> None:
    """RecoverSSM takes all drafts that were right into its one state, and has no scratch blocks; vLLM 0.33 counts those
    back that the answer does not take, so the numbers do not tell."""
    speculative = None if drafts is None else SimpleNamespace(method=drafts)
    half, _ = make_half("kv_consumer", spec=(FULL, spec), speculative=speculative, conversations=True)
    request = make_request("c-1", None, num_tokens=len(PROMPT) + 1)
    assert (half.producer.lending.why_not(request) == "") is kept
