"""What caches are kept in: dtypes that vLLM has two names for, and layers that have another than the model's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)

from vllm_pd_connector.compat.model import facts
from vllm_pd_connector.config import Config
from vllm_pd_connector.geometry.manifest import Coordinates, Manifest
from vllm_pd_connector.geometry.topology import TopologyCheck, check_pd_topology
from vllm_pd_connector.geometry.validate import validate
from vllm_pd_connector.worker.build_manifest import build_manifest

LAYER, DRAFT = "model.layers.0.self_attn.attn", "model.layers.2.self_attn.attn"


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "coordinates", lambda _: Coordinates(0, 1, 0, 1, 0, 1, 1, 1))
    monkeypatch.setattr(facts, "engine_id", lambda _: "p-0")
    monkeypatch.setattr(facts, "software", lambda *_: "test")
    for name in ("options_of", "weights_of", "quantization_of", "_rope", "_speculative"):
        monkeypatch.setattr(facts, name, lambda *_, **__: "")


def spec(dtype: str, model: torch.dtype, *, mla: bool) -> AttentionSpec:
    """As vLLM's layers make it of the name of a dtype."""
    stored = model if dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[dtype]
    common: Any = {"block_size": 16, "dtype": stored, "kv_quant_mode": get_kv_quant_mode(dtype)}
    if mla:
        return MLAAttentionSpec(num_kv_heads=1, head_size=576, cache_dtype_str=dtype, **common)
    return FullAttentionSpec(num_kv_heads=2, head_size=64, **common)


def instance(
    dtype: str,
    own: str = "",
    draft: str = "",
    model: torch.dtype = torch.bfloat16,
    backend: str = "FLASHINFER",
    *,
    mla: bool = False,
) -> list[Manifest]:
    """With --kv-cache-dtype `dtype` and one layer, which may have its `own`; and that of a drafter with `draft`."""
    layers, specs, views = {}, {}, {}
    for name, kept in ((LAYER, own or dtype), (DRAFT, draft)):
        if kept:
            layers[name] = SimpleNamespace(
                kv_cache_dtype=kept,
                is_draft_layer=name == DRAFT,
                get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "FLASHMLA" if mla else backend),
            )
            specs[name] = one = spec(kept, model, mla=mla)
            content = one.state_content_size_bytes // one.dtype.itemsize
            views[name] = torch.zeros((4, one.num_heads, one.num_states, content), dtype=one.dtype)
    arch = SimpleNamespace(total_num_hidden_layers=0, total_num_kv_heads=2)
    served = SimpleNamespace(
        **{"model": "m", "architecture": "LlamaForCausalLM", "dtype": model, "model_arch_config": arch},
        **{"hf_text_config": None, "get_total_num_hidden_layers": lambda: 2, "get_hidden_size": lambda: 64},
        **{"get_total_num_kv_heads": lambda: 2, "get_head_size": lambda: 64},
    )
    config: Any = SimpleNamespace(
        model_config=served,
        load_config=None,
        cache_config=SimpleNamespace(cache_dtype=dtype),
        speculative_config=SimpleNamespace(method="eagle", draft_model_config=served) if draft else None,
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs))
    caches = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[group])
    described = {"incarnation": "0" * 32, "config": Config(), "transport": "nixl"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.config.get_layers_from_vllm_config", lambda *_: layers)
        manifest = build_manifest(config, caches, views, **described)
    validate(manifest)
    return [manifest]


def fields(result: TopologyCheck) -> set[str]:
    return {difference.field.split(" of ")[0] for difference in result.differences}


@pytest.mark.parametrize("mla", [False, True], ids=["heads", "MLA"])
@pytest.mark.parametrize(
    ("one", "other", "model"),
    [
        ("fp8", "fp8_e4m3", torch.bfloat16),  # the latter is what vLLM makes of a checkpoint of ModelOpt
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", "float16", torch.float16),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_two_names_of_one_dtype_are_one_dtype(one: str, other: str, model: torch.dtype, mla: bool) -> None:
    sides = [instance(dtype, model=model, mla=mla) for dtype in (one, other)]
    assert check_pd_topology(*sides).allowed and check_pd_topology(*reversed(sides)).allowed


@pytest.mark.parametrize("mla", [False, True], ids=["heads", "MLA"])
@pytest.mark.parametrize(
    ("one", "other"),
    [("fp8", "fp8_e5m2"), ("fp8_e4m3", "fp8_e5m2"), ("fp8", "auto"), ("auto", "float16"), ("fp8", "fp8_inc")],
)
def test_other_dtypes_stay_other_dtypes(one: str, other: str, mla: bool) -> None:
    result = check_pd_topology(instance(one, mla=mla), instance(other, mla=mla))
    assert {"kv_cache_dtype", "dtype"} <= fields(result)


@pytest.mark.parametrize(
    "kept", ["fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4_ds_mla", "nvfp4", "nvfp4_4over6", "int8_per_token_head"]
)
def test_what_has_one_name_keeps_it(kept: str) -> None:
    """An instance of 0.1.0rc1 tells the name that was given."""
    from vllm_pd_connector.compat.model.weights import kept_as

    assert kept_as(kept, "bfloat16") == kept


@pytest.mark.parametrize(
    ("prefill", "decode", "allowed"),
    [
        ("fp8_e4m3", "fp8_e5m2", False),
        ("fp8", "fp8_e5m2", False),  # inherited, and its own
        ("fp8", "fp8_e4m3", True),
        ("fp8_e5m2", "fp8_e5m2", True),
        ("fp8", "", True),  # who does not draft has no use for a drafter's caches
        ("auto", "bfloat16", True),
    ],
)
def test_a_drafter_s_caches_are_of_the_drafter_s_dtype(prefill: str, decode: str, allowed: bool) -> None:
    """vLLM has all of them as bytes, in pages of one size; `kv_cache_dtype` of --speculative-config decides."""
    sides = [instance("fp8", draft=draft) for draft in (prefill, decode)]
    for one, other in (sides, sides[::-1]):
        result = check_pd_topology(one, other)
        assert result.allowed == allowed
        assert [difference.field for difference in result.differences] == (
            [] if allowed else [f"dtype of {DRAFT} key and 1 more"]
        )


def test_layers_that_are_not_quantized_are_told_from_those_that_are() -> None:
    """`--kv-cache-dtype-skip-layers`: two bytes where the others have one."""
    skipped = instance("fp8", own="auto")
    assert check_pd_topology(skipped, instance("fp8", own="auto")).allowed
    assert fields(check_pd_topology(skipped, instance("fp8"))) == {"dtype", "item size"}
    assert fields(check_pd_topology(instance("fp8", own="fp8_e5m2"), instance("fp8"))) == {"dtype"}


def test_e5m2_is_that_of_one_backend() -> None:
    """Triton's kernels see e4m3 in whatever is fp8, FlashInfer's and the CPU's what its name says."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    assert "fp8_e5m2" in TritonAttentionBackend.supported_kv_cache_dtypes
    sides = [instance("fp8_e5m2", backend=backend) for backend in ("TRITON_ATTN", "FLASHINFER")]
    assert all(check_pd_topology(side, side).allowed for side in sides)
    assert fields(check_pd_topology(*sides)) == {"dtype"}
    sides = [instance("fp8", backend=backend) for backend in ("TRITON_ATTN", "FLASHINFER")]
    assert check_pd_topology(*sides).allowed


def first_release(dtype: str, draft: str = "") -> list[Manifest]:
    """As 0.1.0rc1 describes it: the name that was given, and bytes."""
    [own] = instance(dtype, draft=draft)
    tensors = tuple(replace(t, dtype="uint8" if t.itemsize == 1 else t.dtype) for t in own.tensors)
    return [replace(own, model=replace(own.model, kv_cache_dtype=dtype), tensors=tensors)]


@pytest.mark.parametrize(
    ("there", "here", "allowed"),
    [
        ("auto", "auto", True),
        ("auto", "bfloat16", True),
        ("fp8", "fp8", True),
        ("fp8", "fp8_e4m3", True),
        ("bfloat16", "bfloat16", False),
        ("fp8_e4m3", "fp8", False),
        ("fp8_e5m2", "fp8_e5m2", False),
        ("fp8_e5m2", "fp8_e4m3", False),
    ],
)
def test_beside_the_first_release_a_pair_is_right_or_refused(there: str, here: str, allowed: bool) -> None:
    sides = first_release(there), instance(here)
    assert check_pd_topology(*sides).allowed == check_pd_topology(*reversed(sides)).allowed == allowed


@pytest.mark.parametrize("draft", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_what_the_first_release_does_not_tell_of_a_drafter_is_not_taken_for_granted(draft: str) -> None:
    for there in ("fp8", "fp8_e5m2"):
        assert fields(check_pd_topology(first_release("fp8", there), instance("fp8", draft=draft))) == {"dtype"}
