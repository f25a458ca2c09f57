"""Pages whose states are not one a token."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from tests.compat.model.test_attention_layers import instance
from vllm_pd_connector.geometry.manifest import GroupKind
from vllm_pd_connector.geometry.plan import make_plan
from vllm_pd_connector.geometry.topology import check_pd_topology

FULL = FullAttentionSpec(
    block_size=16, num_kv_heads=32, head_size=64, dtype=torch.bfloat16, tokens_per_state=Fraction(1, 4)
)
WINDOW = SlidingWindowSpec(
    **{"block_size": 16, "num_kv_heads": 32, "head_size": 64, "dtype": torch.bfloat16, "sliding_window": 189},
    tokens_per_state=Fraction(1, 4),
)


@pytest.mark.parametrize("spec", [FULL, WINDOW], ids=["full", "window"])
def test_a_token_of_several_states_moves_with_its_page(
    spec: FullAttentionSpec | SlidingWindowSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Voxtral Realtime's encoder has 4 states a token (Whisper, pooled in blocks), in the decoder's caches; they were
    taken for none."""
    assert spec.num_states == 64
    [prefill], [decode] = (instance(spec, 1, monkeypatch, backend="FLASH_ATTN") for _ in range(2))
    [tensor] = decode.tensors
    [axis] = tensor.axes
    assert (tensor.page_tokens, tensor.pages_per_block, axis.size) == (16, 1, spec.page_size_bytes)
    assert decode.groups[0].kind is (GroupKind.FULL if spec is FULL else GroupKind.SLIDING_WINDOW)
    assert check_pd_topology([decode], [prefill]).allowed and make_plan(decode, [prefill]).edges
    other = instance(replace(spec, block_size=32), 1, monkeypatch, backend="FLASH_ATTN")
    assert {"page tokens", "page bytes"} <= {
        difference.field.split(" of ")[0] for difference in check_pd_topology([decode], other).differences
    }
