"""What the test plugins put in place of vLLM's code does what that code should."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pd_test_plugins import kda

HEADS, SIZE = 3, 4


def zeroed(zero: Callable[..., None], block: int) -> dict[int, float]:
    """Share of each block's elements that `zero` wiped when told to wipe `block`; blocks left alone are absent.

    The cache is a real one: 8 blocks of 64 tokens of MLA latents, divided into kernel blocks of 16 tokens.
    """
    from vllm.v1.kv_cache_interface import (
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheLayout,
        KVCacheTensor,
        MLAAttentionSpec,
    )
    from vllm.v1.worker.utils import allocate_kv_cache

    blocks = 8
    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.float32)
    page = spec.page_size_bytes
    placed = KVCacheTensor(size=page * blocks, layers=["mla"], layer_stride=page * blocks, block_stride=page)
    config = KVCacheConfig(blocks, [placed], [KVCacheGroupSpec(["mla"], spec)])
    cache = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBNHC, [16])["mla"].fill_(1)
    layers = {"mla": SimpleNamespace(kv_cache=cache)}
    runner = SimpleNamespace(kv_cache_config=config, compilation_config=SimpleNamespace(static_forward_context=layers))
    zero(runner, [block])
    shares = (cache.view(blocks, -1) == 0).float().mean(dim=1).tolist()
    return {block: share for block, share in enumerate(shares) if share}


def test_the_blocks_that_are_named_are_zeroed() -> None:
    from pd_test_plugins.zeroing import zero_block_ids

    assert zeroed(zero_block_ids, 6) == {6: 1.0}


def test_vllm_still_zeroes_a_part_of_another_block() -> None:
    """Fails when vLLM's CPU runner is mended: then `zeroing.py` can go."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    assert zeroed(CPUModelRunner._zero_block_ids, 6) == {1: 0.25}


# -- KDA --------------------------------------------------------------------------------------------------------------


def inputs(tokens: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v, raw_g = (draw(1, tokens, HEADS, SIZE) for _ in range(4))
    return {
        "q": q,
        "k": k,
        "v": v,
        "raw_g": raw_g,
        "raw_beta": draw(1, tokens, HEADS),
        "A_log": draw(HEADS),
        "g_bias": draw(HEADS * SIZE),
    }


def by_hand(given: dict[str, Any], head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition for one head in float64: outputs [tokens, V] and the state [V, K] after the last token."""
    q, k, v, raw_g = (given[name][0, :, head].double() for name in ("q", "k", "v", "raw_g"))
    beta = given["raw_beta"][0, :, head].double().sigmoid()
    bias = given["g_bias"].double().view(HEADS, SIZE)[head]
    gate = -given["A_log"][head].double().exp() * torch.log1p((raw_g + bias).exp())
    state = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    outputs = []
    for t in range(q.shape[0]):
        query, key = (x / (x @ x + kda.NORM_EPSILON).sqrt() for x in (q[t], k[t]))
        state = state @ torch.diag(gate[t].exp())
        state = state + beta[t] * torch.outer(v[t] - state @ key, key)
        outputs.append(state @ query / SIZE**0.5)
    return torch.stack(outputs), state


def prefill(given: dict[str, Any], start: int, stop: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    part = {name: x[:, start:stop] if x.dim() > 2 else x for name, x in given.items()}
    return kda.chunk_kda_with_fused_gate(**part, initial_state=state, cu_seqlens=torch.tensor([0, stop - start]))


def test_kda_is_its_definition() -> None:
    given = inputs(9)
    output, state = prefill(given, 0, 9, torch.zeros(1, HEADS, SIZE, SIZE))
    for head in range(HEADS):
        expected, final = by_hand(given, head)
        torch.testing.assert_close(output[0, :, head].double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state[0, head].double(), final, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", [1, 4, 8])
def test_kda_in_two_chunks_or_by_decoding_is_kda_at_once(first: int) -> None:
    tokens, slot = 9, 2
    given = inputs(tokens)
    none = torch.zeros(1, HEADS, SIZE, SIZE)
    whole, final = prefill(given, 0, tokens, none)
    before, middle = prefill(given, 0, first, none)
    after, end = prefill(given, first, tokens, middle)
    assert torch.equal(torch.cat([before, after], dim=1), whole)
    assert torch.equal(end, final)

    cache = torch.zeros(4, HEADS, SIZE, SIZE)
    cache[slot] = middle[0]
    for t in range(first, tokens):
        packed = torch.cat([given[name][0, t].flatten() for name in "qkv"]).expand(2, -1)
        step = {
            name: given[name][:, t].unsqueeze(1).expand(1, 2, *given[name].shape[2:]) for name in ("raw_g", "raw_beta")
        }
        output, _ = kda.fused_recurrent_kda_packed_decode(
            packed,
            **step,
            A_log=given["A_log"],
            dt_bias=given["g_bias"],
            lower_bound=None,
            initial_state=cache,
            state_indices=torch.tensor([slot, 0]),
        )
        torch.testing.assert_close(output[0, 0], whole[0, t], rtol=1e-6, atol=1e-6)
        assert not output[0, 1].any(), "slot 0 is padding"
    torch.testing.assert_close(cache[slot], final[0], rtol=1e-6, atol=1e-6)
    assert not cache[[0, 1, 3]].any(), "no other slot is touched"


def test_requests_without_a_state_start_from_zero() -> None:
    states = torch.arange(1.0, 5.0).view(4, 1, 1, 1).expand(4, HEADS, SIZE, SIZE)
    taken = kda.gather_initial_states(states, torch.tensor([3, 1]), torch.tensor([True, False]))
    assert taken[0].eq(4).all()
    assert taken[1].eq(0).all()
