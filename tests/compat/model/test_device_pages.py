"""Pages by the device whose backends write and read them: AMD's, plain and shuffled, and SM120's."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVQuantMode

from tests.compat.model import test_attention_layers as layers
from tests.compat.model.test_attention_layers import FACTS, LAYER, PACKED
from vllm_pd_connector.compat.model import caches, facts
from vllm_pd_connector.compat.model.layers import LayerFacts
from vllm_pd_connector.compat.model.pages import Form, page_of
from vllm_pd_connector.config import Config
from vllm_pd_connector.geometry.manifest import READS_POWERS, Coordinates, Manifest, Role
from vllm_pd_connector.geometry.topology import check_pd_topology
from vllm_pd_connector.geometry.validate import validate
from vllm_pd_connector.worker.build_manifest import build_manifest

PLAIN = FullAttentionSpec(block_size=64, num_kv_heads=4, head_size=128, dtype=torch.bfloat16)
FP8 = replace(PLAIN, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
SHUFFLED = replace(PLAIN, num_head_slots=2, state_content_bytes=4 * 128 * 2)


@pytest.fixture
def unified(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module, which asks an AMD GPU what it is from 0.33 on."""
    monkeypatch.setitem(sys.modules, "vllm.platforms.rocm", SimpleNamespace(on_gfx1250=lambda: False))
    return importlib.import_module("vllm.v1.attention.backends.rocm_aiter_unified_attn")


@pytest.mark.parametrize("spec", [PLAIN, FP8], ids=["bfloat16", "fp8"])
def test_the_unified_backend_writes_what_flash_attention_does(spec: FullAttentionSpec, unified: Any) -> None:
    """AMD's default beside a connector. Shuffled, as vLLM 0.33 has it on gfx1250, it was not read."""
    backend = unified.RocmAiterUnifiedAttentionBackend
    assert backend.customize_spec(spec) is spec
    known = page_of(spec, "FLASH_ATTN", rocm=True)
    assert page_of(spec, backend.get_name(), rocm=True) == known and known.form is Form.KEY_VALUE
    assert page_of(spec, backend.get_name(), rocm=True, shuffled=True).form is Form.OPAQUE


def test_the_unified_backend_has_k_and_v_side_by_side_in_the_content(unified: Any) -> None:
    cache = torch.arange(3 * 2 * 4 * 16).reshape(3, 2, 4, 16)  # (B, H, N, 2 * hs)
    own: Any = SimpleNamespace(head_size=8, _shuffle_kv_layout=False)
    key, value = unified.RocmAiterUnifiedAttentionImpl._split_kv_cache(own, cache)
    assert torch.equal(key.transpose(1, 2), cache[..., :8]) and torch.equal(value.transpose(1, 2), cache[..., 8:])


def instance(tp_size: int, blocks: int, planes: bool, monkeypatch: pytest.MonkeyPatch) -> list[Manifest]:
    """Manifests of ranks whose pages ROCM_AITER_FA shuffles, in the layout LHBNC or LBHNC."""
    config: Any = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([LAYER], SHUFFLED)]
    )
    monkeypatch.setattr(facts, "model_facts", lambda *_: FACTS)
    monkeypatch.setattr(facts, "engine_id", lambda _: "p-0")
    monkeypatch.setattr(facts, "software", lambda *_: "test")
    monkeypatch.setattr(caches, "layer_facts", lambda _: {LAYER: LayerFacts("FLASH_ATTN", 128, (1.0, 1.0), "")})
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_, **__: DeviceCapability(9, 4))
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda _: True)
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
    found = []
    for rank in range(tp_size):
        monkeypatch.setattr(facts, "coordinates", lambda _, rank=rank: Coordinates(rank, tp_size, 0, 1, 0, 1, 1, 1))
        shape = (2, blocks, 64, 512) if planes else (blocks, 2, 64, 512)
        cache = torch.zeros(shape, dtype=torch.bfloat16)
        view = cache.transpose(0, 1) if planes else cache
        described = {"incarnation": "0" * 32, "config": Config(), "transport": "nixl"}
        found.append(build_manifest(SimpleNamespace(speculative_config=None), config, {LAYER: view}, **described))
        validate(found[-1])
    return found


def test_pages_in_planes_move_whole_between_instances_of_any_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only layout in which decode kernels of ROCM_AITER_FA read them; it was refused for its gaps."""
    one, other = instance(2, 4, True, monkeypatch), instance(2, 9, True, monkeypatch)
    assert [tensor.role for tensor in one[0].tensors] == [Role.KEY, Role.VALUE]
    assert all(tensor.opaque and tensor.pages == 4 for tensor in one[0].tensors)
    assert check_pd_topology(one, other).allowed


@pytest.mark.parametrize(("tp_size", "planes"), [(1, True), (2, False)], ids=["other TP", "other layout"])
def test_pages_in_planes_move_to_no_other_form(tp_size: int, planes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not check_pd_topology(instance(2, 4, True, monkeypatch), instance(tp_size, 4, planes, monkeypatch)).allowed


@pytest.mark.parametrize("powers", [True, False])
def test_who_reads_scales_as_powers_of_two_says_so(powers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "LayerFacts", lambda *given: LayerFacts(*given, powers=powers))
    found = layers.instance(PACKED, 1, monkeypatch, backend="FLASHINFER_MLA_SPARSE_SM120")
    assert [tensor.dtype.endswith(READS_POWERS) for m in found for tensor in m.tensors] == [powers]
