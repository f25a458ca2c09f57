"""What the test plugins put in place of vLLM's code does what that code should."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
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
    # To the last bit, on every processor: see the theory of `kda`.
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
        assert torch.equal(output[0, 0], whole[0, t])
        assert not output[0, 1].any(), "slot 0 is padding"
    assert torch.equal(cache[slot], final[0])
    assert not cache[[0, 1, 3]].any(), "no other slot is touched"


@pytest.mark.parametrize("lengths", [(1, 5, 9), (7, 2), (3, 3, 3, 3), (2, 31)])
def test_a_request_beside_others_is_the_request_alone(lengths: tuple[int, ...]) -> None:
    """Whatever part of a vector its elements fall in."""
    given = inputs(sum(lengths))
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    none = torch.zeros(len(lengths), HEADS, SIZE, SIZE)
    together, states = kda.chunk_kda_with_fused_gate(**given, initial_state=none, cu_seqlens=torch.tensor(starts))
    for request, (start, stop) in enumerate(pairwise(starts)):
        alone, state = prefill(given, start, stop, none[:1])
        assert torch.equal(together[:, start:stop], alone), request
        assert torch.equal(states[request], state[0]), request


def test_requests_without_a_state_start_from_zero() -> None:
    states = torch.arange(1.0, 5.0).view(4, 1, 1, 1).expand(4, HEADS, SIZE, SIZE)
    taken = kda.gather_initial_states(states, torch.tensor([3, 1]), torch.tensor([True, False]))
    assert taken[0].eq(4).all()
    assert taken[1].eq(0).all()


# -- attention ---------------------------------------------------------------------------------------------------------

TOKENS, PAGE, SLOTS, LATENT, ROPE = 45, 16, 3, 24, 8


def chunked(attend: Callable[[int, int], torch.Tensor]) -> None:
    """`attend` gives the output of queries [start, stop) over all tokens before stop: to the last bit whoever is
    computed with them."""
    whole = attend(0, TOKENS)
    for cut in (1, 16, 23, 44):
        assert torch.equal(torch.cat([attend(0, cut), attend(cut, TOKENS)]), whole), cut


@pytest.mark.parametrize("window", [0, 20])
def test_attention_of_a_token_does_not_depend_on_its_chunk(window: int) -> None:
    from pd_test_plugins.reference_attention import ReferenceAttention

    heads, size = 2, 12
    attention = ReferenceAttention.__new__(ReferenceAttention)
    attention.kv_cache_dtype = "auto"
    attention.head_size, attention.num_queries_per_kv = size, 2
    attention.scale, attention.sliding_window = size**-0.5, window
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(SLOTS, heads, PAGE, 2 * size, generator=generator)
    query = torch.randn(TOKENS, 2 * heads, size, generator=generator)

    def attend(start: int, stop: int) -> torch.Tensor:
        metadata: Any = SimpleNamespace(
            query_start_loc=torch.tensor([0, stop - start]),
            seq_lens=torch.tensor([stop]),
            block_table=torch.arange(SLOTS).unsqueeze(0),
        )
        output = torch.empty(stop - start, 2 * heads, size)
        return attention.forward(None, query[start:stop], cache, cache, cache, metadata, output)

    chunked(attend)


def test_mla_of_a_token_does_not_depend_on_its_chunk() -> None:
    from pd_test_plugins.kimi_mla import HybridMLA

    heads, nope, value = 2, 10, 6
    generator = torch.Generator().manual_seed(2)
    attention = HybridMLA.__new__(HybridMLA)
    attention.kv_lora_rank, attention.qk_rope_head_dim = LATENT, ROPE
    attention.qk_nope_head_dim, attention.v_head_dim, attention.num_heads = nope, value, heads
    attention.scale = (nope + ROPE) ** -0.5
    weight = torch.randn(LATENT, heads * (nope + value), generator=generator)
    attention.kv_b_proj = lambda latent: (latent @ weight,)
    cache = torch.randn(SLOTS, PAGE, LATENT + ROPE, generator=generator)
    query = torch.randn(TOKENS, heads, nope + ROPE, generator=generator)

    def attend(start: int, stop: int) -> torch.Tensor:
        asked = SimpleNamespace(
            query_start_loc=torch.tensor([0, stop - start]),
            total_tokens=[stop],
            block_table=torch.arange(SLOTS).unsqueeze(0),
        )
        output, one = torch.empty(stop - start, heads * value), torch.ones(())
        metadata: Any = SimpleNamespace(prefill=asked)
        attention.forward_mha(query[start:stop], cache, cache, cache, metadata, one, output)
        return output

    chunked(attend)
