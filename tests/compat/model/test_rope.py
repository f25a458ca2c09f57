"""What an instance says of its rope: the parameters, and what vLLM makes of them by the length of requests."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.compat.model.test_facts import facts


@pytest.mark.parametrize("several", [False, True])
def test_long_rope_has_two_sets_of_factors_and_max_model_len_decides(several: bool) -> None:
    """Phi-4-mini beside itself with another --max-model-len: keys are rotated otherwise."""
    kind = {"rope_type": "longrope", "original_max_position_embeddings": 4096, "short_factor": [1.0]}
    rope = {"full_attention": kind, "sliding_attention": {"rope_type": "default"}} if several else kind
    short, longer, longest = (facts("/m", None, rope=rope, max_model_len=n) for n in (4096, 8192, 131072))
    assert short.rope != longer.rope and longer == longest
    plain = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
    assert facts("/m", None, rope=plain) == facts("/m", None, rope=plain, max_model_len=131072)


@pytest.mark.parametrize("several", [False, True])
def test_a_dynamic_rope_that_names_what_was_trained_goes_by_max_model_len(several: bool) -> None:
    """PLaMo 3 and MiniMax-M2 give vLLM's rope that length, and its base follows from both. Without the key they cancel
    each other out."""

    def rope(length: int, **more: object) -> str:
        kind = {"rope_type": "dynamic", "factor": 2.0, **more}
        parameters = {"full_attention": kind, "sliding_attention": {"rope_type": "default"}} if several else kind
        return facts("/m", None, rope=parameters, max_model_len=length).rope

    trained = {"max_trained_positions": 4096}
    assert rope(4096, **trained) != rope(8192, **trained) != rope(16384, **trained)
    assert rope(4096) == rope(8192)


def test_vllm_s_rope_goes_by_what_was_trained_and_by_the_length() -> None:
    from vllm.model_executor.layers.rotary_embedding.dynamic_ntk_scaling_rope import DynamicNTKScalingRotaryEmbedding

    def cached(length: int, trained: int) -> list[float]:
        made: Any = SimpleNamespace(base=1e4, rotary_dim=8, scaling_factor=2.0)
        made.max_position_embeddings, made.max_trained_positions = length, trained
        made._compute_inv_freq = lambda base: torch.tensor([base])
        return list(DynamicNTKScalingRotaryEmbedding._compute_cos_sin_cache(made)[1].tolist())

    assert cached(64, 64) == cached(128, 128) != cached(128, 64) != cached(256, 64)


@pytest.mark.parametrize("name", ["Llama4ForCausalLM", "Llama4ForConditionalGeneration"])
def test_llama_4_scales_queries_by_position_where_max_model_len_is_above_32768(name: str) -> None:
    """Its layers without rope; later layers' keys and values follow from what they give. Configurations may say it."""

    def rope(length: int, stored: Mapping[str, Any] = MappingProxyType({}), **given: Any) -> str:
        says = {"try_get_generation_config": lambda: dict(stored), "override_generation_config": given}
        return facts("/m", None, rope={"rope_theta": 5e5}, max_model_len=length, architecture=name, **says).rope

    on, off = {"attn_temperature_tuning": True}, {"attn_temperature_tuning": False}
    short, long = rope(32768), rope(32769)
    assert short != long
    assert short == rope(8192) == rope(65536, off) == rope(65536, on, **off)
    assert long == rope(131072) == rope(8192, on) == rope(8192, off, **on)


def test_a_length_that_vllm_fits_to_its_memory_is_not_the_one_that_a_model_was_made_by() -> None:
    """`--max-model-len auto`: it is fitted when the model is there."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 32768}
    says = {"try_get_generation_config": dict, "override_generation_config": {}, "architecture": "Llama4ForCausalLM"}
    fits = {"original_max_model_len": -1, "get_and_verify_max_len": {-1: 131072}.__getitem__}
    short, long = ({**says, "rope": rope, "max_model_len": length} for length in (30000, 131072))
    assert facts("/m", None, **short, **fits) == facts("/m", None, **long) != facts("/m", None, **short)


def test_how_many_heads_a_rank_has_is_no_part_of_a_rope() -> None:
    """InternS1-Pro's attention writes it among the parameters; the coefficients of a head are the same on any rank."""
    fope = {"rope_type": "default", "use_fope": True, "fope_sep_head": True, "num_inv_freq": 16}
    two, four = (facts("/m", None, rope={**fope, "num_key_value_heads": heads}).rope for heads in (4, 2))
    assert two == four == facts("/m", None, rope=fope).rope
    assert two != facts("/m", None, rope={**fope, "num_inv_freq": 8}).rope
