"""The pages of vLLM's CPU attention, written by its own kernel: the manifest's tensors find each element."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVQuantMode

from vllm_pd_connector.compat.model import caches, facts
from vllm_pd_connector.compat.model.layers import LayerFacts
from vllm_pd_connector.config import Config
from vllm_pd_connector.geometry.layouts import attention
from vllm_pd_connector.geometry.layouts.attention import PageView
from vllm_pd_connector.geometry.manifest import Coordinates, ModelFacts, Role
from vllm_pd_connector.geometry.sharding import Interval
from vllm_pd_connector.geometry.validate import validate
from vllm_pd_connector.worker.build_manifest import build_manifest

PAGES, HEADS, TOKENS, SIZE = 3, 2, 64, 32
LAYER = "model.layers.0.self_attn.attn"
FACTS = ModelFacts("m", "Qwen3ForCausalLM", 1, 64, HEADS, SIZE, "float32", "fp8", "", "", "content 0", "")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WITH_FP8 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's attention has no fp8 caches on this processor"
)


def drawn(dtype: torch.dtype) -> torch.Tensor:
    """Numbers [tokens, heads, size] that the cache's dtype has exactly, without a negative zero."""
    return torch.randn(TOKENS, HEADS, SIZE).to(dtype).float() + 0.0


@pytest.mark.parametrize("model", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("auto", None),
        *(
            pytest.param(name, dtype, marks=WITH_FP8)
            for name, dtype in (("fp8", E4M3), ("fp8_e4m3", E4M3), ("fp8_e5m2", E5M2))
        ),
    ],
    ids=str,
)
def test_every_element_that_the_kernel_writes_is_found(
    model: torch.dtype, name: str, dtype: torch.dtype | None
) -> None:
    current_platform.import_kernels()
    torch.manual_seed(3)
    stored = dtype or model
    memory = torch.zeros(PAGES, HEADS, TOKENS, 2 * SIZE * stored.itemsize, dtype=torch.uint8)
    kernels_view = memory.view(torch.uint8 if dtype else model).view(PAGES, HEADS, 2 * TOKENS, SIZE)
    key, value = drawn(stored), drawn(stored)
    slots = torch.randperm(PAGES * TOKENS)[:TOKENS]
    halves = kernels_view.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key.to(model), value.to(model), *halves, slots, "vec", 1.0, 1.0, name)
    shape, strides = tuple(memory.shape), memory.stride()
    view = PageView("", 0, 0, 0, shape, strides, str(stored), stored.itemsize, 1, Interval(0, HEADS), HEADS)
    everything = memory.view(-1).numpy()
    for tensor, written in zip(attention.cpu_attention(view, SIZE), (key, value), strict=True):
        by_token, by_head, by_channel, by_byte = (*(axis.stride for axis in tensor.axes), 1)
        places = tensor.offset + slots.numpy() // TOKENS * tensor.page_stride + slots.numpy() % TOKENS * by_token
        for size, stride in ((HEADS, by_head), (SIZE, by_channel), (stored.itemsize, by_byte)):
            places = np.add.outer(places, np.arange(size) * stride)
        expected = written.to(stored).unsqueeze(-1).view(torch.uint8).numpy()
        assert np.array_equal(everything[places], expected)
        everything[places] = 0
    assert not everything.any()


@pytest.mark.parametrize(("model", "affine"), [("float32", True), ("bfloat16", False)])
def test_what_the_model_computes_in_decides_and_not_the_precision_of_the_cache(
    model: str, affine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is AMX, a bfloat16 model packs K for it, into fp8 caches, too."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(facts, "model_facts", lambda *_: replace(FACTS, dtype=model))
    monkeypatch.setattr(facts, "engine_id", lambda _: "p-0")
    monkeypatch.setattr(facts, "software", lambda *_: "test")
    monkeypatch.setattr(facts, "coordinates", lambda _: Coordinates(0, 1, 0, 1, 0, 1, 1, 1))
    monkeypatch.setattr(caches, "layer_facts", lambda _: {LAYER: LayerFacts("CPU_ATTN", HEADS, (1.0, 1.0))})
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
    )  # fmt: skip
    config: Any = KVCacheConfig(
        num_blocks=PAGES, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([LAYER], spec)]
    )
    cache = torch.zeros((PAGES, HEADS, TOKENS, 2 * SIZE), dtype=torch.uint8)
    described = {"incarnation": "0" * 32, "config": Config(), "transport": "nixl"}
    manifest = build_manifest(SimpleNamespace(speculative_config=None), config, {LAYER: cache}, **described)
    validate(manifest)
    assert {tensor.role for tensor in manifest.tensors} == ({Role.KEY, Role.VALUE} if affine else {Role.OPAQUE})
