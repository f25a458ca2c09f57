"""What an attention layer's spec says about its page: which heads of how many it holds, on every rank."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from vllm_pd_connector.compat.model import caches, facts
from vllm_pd_connector.compat.model.layers import LayerFacts, draft_layers, layer_facts, scales_of_heads
from vllm_pd_connector.compat.model.recurrent import StateGroup, state_groups
from vllm_pd_connector.config import Config
from vllm_pd_connector.errors import UnsupportedCache
from vllm_pd_connector.geometry.manifest import Coordinates, GroupKind, Manifest, ModelFacts, Role
from vllm_pd_connector.geometry.plan import make_plan
from vllm_pd_connector.geometry.topology import check_pd_topology
from vllm_pd_connector.geometry.validate import validate
from vllm_pd_connector.worker.build_manifest import build_manifest

LAYER = "model.layers.0.self_attn.attn"
FACTS = ModelFacts("m", "DeepseekV32ForCausalLM", 1, 7168, 128, 576, "bfloat16", "fp8", "", "", "content 0", "")
FP8 = MLAAttentionSpec(
    block_size=64, num_kv_heads=1, max_tp_shards=1, head_size=576, dtype=torch.uint8, cache_dtype_str="fp8",
    kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
)  # fmt: skip
PACKED = MLAAttentionSpec(
    block_size=64, num_kv_heads=1, max_tp_shards=1, head_size=576, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla",
    state_content_bytes=656,
)  # fmt: skip
INDEXER = MLAAttentionSpec(
    block_size=64, num_kv_heads=1, max_tp_shards=1, head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER
)


def instance(
    spec: AttentionSpec,
    tp_size: int,
    monkeypatch: pytest.MonkeyPatch,
    scales: tuple[float, float] = (1.0, 1.0),
    per_head: str = "",
    backend: str = "FLASHMLA",
) -> list[Manifest]:
    """The manifests of an instance with one layer of this spec."""
    config: Any = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([LAYER], spec)])
    content = spec.state_content_size_bytes // spec.dtype.itemsize
    monkeypatch.setattr(facts, "model_facts", lambda *_: FACTS)
    monkeypatch.setattr(facts, "engine_id", lambda _: "p-0")
    monkeypatch.setattr(facts, "software", lambda *_: "test")
    backend = "DEEPSEEK_V32_INDEXER" if spec is INDEXER else backend
    monkeypatch.setattr(caches, "layer_facts", lambda _: {LAYER: LayerFacts(backend, 128, scales, per_head)})
    found = []
    for rank in range(tp_size):
        monkeypatch.setattr(facts, "coordinates", lambda _, rank=rank: Coordinates(rank, tp_size, 0, 1, 0, 1, 1, 1))
        cache = torch.zeros((4, spec.num_heads, spec.num_states, content), dtype=spec.dtype)
        described = {"incarnation": "0" * 32, "config": Config(), "transport": "nixl"}
        found.append(build_manifest(SimpleNamespace(speculative_config=None), config, {LAYER: cache}, **described))
        validate(found[-1])
    return found


def test_bytes_that_are_multiplied_by_other_scales_are_other_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checkpoints may be named alike by their operator, or be quantized otherwise with leave."""
    one, same, other = (instance(FP8, 1, monkeypatch, (scale, 1.0)) for scale in (0.1, 0.1, 0.10000001))
    assert check_pd_topology(one, same).allowed
    result = check_pd_topology(one, other)
    [difference] = result.differences
    assert "times 0.1 (K) and 1.0 (V)" in difference.local and "times 0.10000001 (K)" in difference.remote
    assert "the same k_scale and v_scale" in difference.advice
    assert check_pd_topology(*(instance(FP8, 1, monkeypatch) for _ in range(2))).allowed


def test_scales_of_heads_are_told_alike_by_all_ranks_and_apart_from_others_with_the_same_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a rank's heads vLLM's number is the largest: another on each rank, and the same for other checkpoints."""
    heads = (0.1, 0.2, 0.4, 0.3)

    def told(*ranks: tuple[float, ...]) -> str:
        return scales_of_heads([(own, own) for own in ranks], 4)

    whole = told(heads)
    assert whole == told(heads[:2], heads[2:]) == told(*((one,) for one in heads for _ in range(2)))
    other = told((0.1, 0.1, 0.4, 0.3))
    assert other != whole
    one, rank, apart = (
        instance(FP8, 1, monkeypatch, (largest, 1.0), of) for largest, of in ((0.4, whole), (0.2, whole), (0.4, other))
    )
    assert check_pd_topology(one, rank).allowed
    assert "a scale of each head" in check_pd_topology(one, apart).differences[0].local


BF16 = replace(FP8, dtype=torch.bfloat16, cache_dtype_str="auto", kv_quant_mode=KVQuantMode.NONE)
INT8 = replace(FP8, dtype=torch.int8, cache_dtype_str="int8", kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)


@pytest.mark.parametrize(
    ("spec", "same"), [(FP8, False), (PACKED, False), (INDEXER, False), (BF16, True), (INT8, True)],
    ids=["fp8", "fp8_ds_mla", "indexer", "bfloat16", "int8"],
)  # fmt: skip
def test_the_fp8_of_one_amd_gpu_means_half_of_what_it_does_elsewhere(
    spec: MLAAttentionSpec, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MI300 (fnuz) beside MI350: options, pages and scales are equal, and each byte is another number."""
    sides = []
    for fnuz in (True, False):
        monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", lambda *_, fnuz=fnuz: fnuz)
        sides.append(instance(spec, 1, monkeypatch))
    result = check_pd_topology(*sides)
    assert result.allowed == same
    assert {difference.field.split(" of ")[0] for difference in result.differences} == (set() if same else {"dtype"})


TURBO = FullAttentionSpec(
    block_size=64, num_kv_heads=1, head_size=128, dtype=torch.uint8, kv_quant_mode=KVQuantMode.TURBOQUANT_K8V4,
    state_content_bytes=196,
)  # fmt: skip
POOLED = replace(PACKED, block_size=256, tokens_per_state=4, state_content_bytes=584, model_version="deepseek_v4")


def test_pages_of_two_heads_that_amd_s_backend_shuffles_are_other_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V of two heads, each side by side; or K of both, then V of both: of one shape."""
    plain = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
    shuffled = replace(plain, num_head_slots=2, state_content_bytes=2 * 128 * 2)
    assert (plain.num_heads, plain.state_content_size_bytes) == (shuffled.num_heads, shuffled.state_content_size_bytes)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_, **__: DeviceCapability(9, 4))
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda _: True)
    sides = []
    for spec, variable in ((plain, "0"), (shuffled, "1")):
        monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", variable)
        sides.append([instance(spec, 1, monkeypatch, backend="ROCM_AITER_FA") for _ in range(2)])
    assert all(check_pd_topology(*side).allowed for side in sides)
    assert not check_pd_topology(sides[0][0], sides[1][0]).allowed


@pytest.mark.parametrize(
    ("spec", "backend", "anywhere"),
    [(TURBO, "TURBOQUANT", False), (POOLED, "FLASHMLA_SPARSE_DSV4", True), (FP8, "FLASHMLA", True)],
    ids=["TurboQuant", "DeepSeek-V4", "affine"],
)
def test_a_page_whose_writer_was_not_read_goes_to_devices_of_its_kind_only(
    spec: AttentionSpec, backend: str, anywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TurboQuant has its keys in e4m3 on Hopper and in e4b15 on Ampere."""
    sides = []
    for capability in (DeviceCapability(8, 0), DeviceCapability(9, 0)):
        monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_, told=capability, **__: told)
        sides.append(instance(spec, 1, monkeypatch, backend=backend))
    assert check_pd_topology(sides[0], instance(spec, 1, monkeypatch, backend=backend)).allowed == anywhere
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_, **__: DeviceCapability(8, 0))
    assert check_pd_topology(sides[0], instance(spec, 1, monkeypatch, backend=backend)).allowed


CONVOLUTIONS = SlidingWindowSpec(
    block_size=4, num_kv_heads=1, head_size=2048, head_size_v=0, dtype=torch.bfloat16, sliding_window=4
)


@pytest.mark.parametrize(
    ("spec", "backend"),
    [(replace(POOLED, max_tp_shards=None), "FLASHMLA"), (CONVOLUTIONS, "INKLING_SCONV_SWA")],
    ids=["Step-5", "Inkling"],
)
def test_an_opaque_page_that_nobody_knows_the_sharding_of_moves_from_rank_to_rank(
    spec: AttentionSpec, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step-5's summaries, and short convolutions beside Inkling's full attention, of which the configuration states
    those of its windows: one head on each rank. Between equal sizes that is no matter, and others are refused."""
    one, same, other = (instance(spec, size, monkeypatch, backend=backend) for size in (2, 2, 4))
    assert check_pd_topology(one, same).allowed
    assert [[edge.source for edge in make_plan(m, one).edges] for m in same] == [[(0, 0, 0)], [(0, 0, 1)]]
    for sides in ((one, other), (other, one)):
        result = check_pd_topology(*sides)
        assert {difference.field.split(" of ")[0] for difference in result.differences} == {"page bytes"}


@pytest.mark.parametrize(
    ("spec", "backend", "anywhere"),
    [
        (replace(PACKED, state_content_bytes=528, model_version="deepseek_v4"), "FLASHMLA_SPARSE_DSV41", False),
        (replace(POOLED, state_content_bytes=528), "FLASHMLA_SPARSE_DSV41", False),
        (POOLED, "FLASHMLA_SPARSE_DSV4", True),
    ],
    ids=["DeepSeek-V4.1", "DeepSeek-V4.1, 4 tokens", "DeepSeek-V4"],
)
def test_a_page_whose_writer_was_not_read_goes_to_the_same_release_only(
    spec: AttentionSpec, backend: str, anywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V4.1's record: scales behind all values of a page in vLLM 0.32, behind each value's in 0.33."""
    import vllm

    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_, **__: DeviceCapability(10, 0))
    sides = []
    for release in ("0.32.0", "0.33.0"):
        monkeypatch.setattr(vllm, "__version__", release)
        sides.append(instance(spec, 1, monkeypatch, backend=backend))
    assert check_pd_topology(*sides).allowed == anywhere


@pytest.mark.parametrize("pool", [1, 4], ids=["DeepSeek-V3.2", "GLM-5-Next"])
def test_an_indexer_s_scales_of_another_form_are_other_caches(pool: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 has them as four exponents on Blackwell, as a float32 on Hopper; 0.32 as a float32 on both."""
    from vllm.utils import deep_gemm

    spec = replace(INDEXER, block_size=64 * pool, tokens_per_state=pool)
    sides = []
    for exponents in (True, False):
        told = lambda exponents=exponents: exponents  # noqa: E731
        monkeypatch.setattr(deep_gemm, "mqa_logits_use_mx_scales", told, raising=False)
        sides.append(instance(spec, 1, monkeypatch, backend="DEEPSEEK_V32_INDEXER"))
    monkeypatch.delattr(deep_gemm, "mqa_logits_use_mx_scales")  # 0.32
    sides.append(instance(spec, 1, monkeypatch, backend="DEEPSEEK_V32_INDEXER"))
    assert check_pd_topology(sides[1], sides[2]).allowed
    for other in sides[1:]:
        result = check_pd_topology(sides[0], other)
        assert result.differences[0].field.startswith("dtype of")


@pytest.mark.parametrize(
    ("writer", "flag", "said"),
    [
        ("TURBOQUANT", "_soa_store", "TURBOQUANT in planes"),
        ("ROCM_ATTN", "_use_interleaved_v_cache", "ROCM_ATTN with V interleaved"),
    ],
)
def test_a_writer_with_two_forms_under_one_name_is_told_by_its_form(
    writer: str, flag: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TurboQuant keeps its records in planes where a library for AMD's GPUs is installed; AMD's attention in vLLM 0.33
    interleaves V where the model is compiled, and not with --enforce-eager."""
    import vllm.config

    backend = SimpleNamespace(get_name=lambda: writer)
    layers = {
        name: SimpleNamespace(get_attn_backend=lambda: backend, impl=SimpleNamespace(**{flag: other}))
        for name, other in (("a", True), ("b", False))
    }
    monkeypatch.setattr(vllm.config, "get_layers_from_vllm_config", lambda *_: layers)
    arch = SimpleNamespace(total_num_hidden_layers=2, total_num_kv_heads=16)
    model = SimpleNamespace(model_arch_config=arch, hf_text_config=None)
    config: Any = SimpleNamespace(model_config=model, speculative_config=None)
    assert {name: found.backend for name, found in layer_facts(config).items()} == {"a": said, "b": writer}


@pytest.mark.parametrize("spec", [FP8, PACKED, INDEXER], ids=["fp8", "fp8_ds_mla", "indexer"])
def test_what_every_rank_holds_is_no_share_of_the_heads_of_the_model(
    spec: MLAAttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek has 128 KV heads by its configuration and one latent on each of 8 ranks; any rank can give it."""
    prefill, decode = (instance(spec, tp_size, monkeypatch) for tp_size in (8, 2))
    content = spec.state_content_size_bytes
    roles = {Role.INDEX: 128, Role.INDEX_SCALE: 4} if spec is INDEXER else {Role.LATENT: content}
    for manifest in (*prefill, *decode):
        assert {tensor.role: tensor.axes[-1].size for tensor in manifest.tensors} == roles
        assert all((axis.start, axis.size) == (0, axis.total) for tensor in manifest.tensors for axis in tensor.axes)
    assert check_pd_topology(decode, prefill).allowed and check_pd_topology(prefill, decode).allowed
    assert [[edge.source for edge in make_plan(one, prefill).edges] for one in decode] == [[(0, 0, 0)], [(0, 0, 4)]]


def test_a_group_of_unequal_recurrent_layers_is_a_state_group_to_both_halves() -> None:
    """Such a group carries a spec per layer; the scheduler half must name the state's block there, too."""
    shapes = {"a": ((3, 64), (4, 16, 16)), "b": ((3, 64), (2, 32, 16))}
    specs = {
        name: MambaSpec(
            block_size=16, shapes=one, dtypes=(torch.bfloat16, torch.float32), mamba_cache_mode="align",
            num_speculative_blocks=1,
        )
        for name, one in shapes.items()
    }  # fmt: skip
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs))
    config = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[group])
    assert [one.kind for one in caches.transfer_groups(config)] == [GroupKind.STATE]
    assert state_groups(config) == {0: StateGroup(scratch=1, block_tokens=16)}


def test_windows_that_vllm_merges_are_rows_as_each_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline's stage may have one such layer, and its peer's several."""
    one = SlidingWindowMLASpec(
        block_size=64, num_kv_heads=1, max_tp_shards=1, head_size=576, dtype=torch.uint8, cache_dtype_str="fp8",
        kv_quant_mode=KVQuantMode.FP8_PER_TENSOR, sliding_window=128,
    )  # fmt: skip
    sides = [instance(spec, 1, monkeypatch) for spec in (one, SlidingWindowMLASpec.merge([one, one]))]
    assert all(tensor.role is Role.LATENT for [manifest] in sides for tensor in manifest.tensors)
    assert check_pd_topology(*sides).allowed


def test_a_window_whose_hits_are_computed_again_is_refused_by_name() -> None:
    spec = SlidingWindowMLASpec(
        block_size=64, num_kv_heads=1, head_size=512, dtype=torch.bfloat16, sliding_window=128, bounded_replay=True
    )
    config = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([LAYER], spec)])
    with pytest.raises(UnsupportedCache, match="Serve with --no-swa-bounded-replay"):
        caches.transfer_groups(config)


def test_a_ring_of_latest_tokens_is_a_state_to_both_halves() -> None:
    spec = CircularBufferSpec(
        block_size=4, num_kv_heads=2, head_size=128, head_size_v=0, dtype=torch.bfloat16, dcp_sharded=False
    )
    config = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([LAYER], spec)])
    assert [(group.kind, group.block_tokens) for group in caches.transfer_groups(config)] == [(GroupKind.STATE, 0)]
    assert state_groups(config) == {0: StateGroup(scratch=0, block_tokens=0)}
    assert caches.leased_blocks(config, 1, 4000) == 1


@pytest.mark.parametrize(
    ("method", "expected"),
    [("eagle", ("model.layers.2.self_attn.attn", "draft_model.layers.0.self_attn.attn")), ("ngram", ()), (None, ())],
)
def test_the_layers_of_a_drafter_are_numbered_behind_the_models_or_are_another_models(
    method: str | None, expected: tuple[str, ...]
) -> None:
    config: Any = SimpleNamespace(
        speculative_config=method and SimpleNamespace(method=method),
        compilation_config=SimpleNamespace(static_forward_context={}),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 2),
    )
    own = ["model.layers.0.self_attn.attn", "model.layers.1.mixer", "lm_head.index"]
    drafted = ["model.layers.2.self_attn.attn", "draft_model.layers.0.self_attn.attn"]
    assert draft_layers(config, [*own, *drafted]) == expected


@pytest.mark.parametrize(
    "name",
    ["mtp.layers.0.self_attn.attn", "model.mtp.layers.0.self_attn.attn", "model.eagle_layers.2.self_attn.attn",
     "model.layers.0.transformer_block.attn"],
    ids=["Qwen3.5, Exaone", "MiMo-V2", "MiniCPM", "Inkling"],
)  # fmt: skip
def test_drafters_that_number_their_layers_from_0_are_told_by_their_names(name: str) -> None:
    """Else a decode instance that drafts is refused beside a prefill instance that does not."""
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(method="mtp"),
        compilation_config=SimpleNamespace(static_forward_context={}),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 2),
    )
    own = ["model.layers.0.self_attn.attn", "language_model.model.layers.1.self_attn.attn"]
    assert draft_layers(config, [*own, name]) == (name,)


def test_what_vllm_says_of_a_layer_counts_for_more_than_its_name() -> None:
    """MiniMax-M3's drafter is named as its model; the model's own layers may be numbered beyond those it counts."""
    names = ["language_model.model.layers.2.self_attn.attn", "model.layers.0.self_attn.attn"]
    modules = {name: SimpleNamespace(is_draft_layer=drafts) for name, drafts in zip(names, (False, True), strict=True)}
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(method="mtp"),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 2),
        compilation_config=SimpleNamespace(static_forward_context=modules),
    )
    assert draft_layers(config, names) == (names[1],)


def test_a_drafter_s_layers_have_the_heads_of_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter of 2 heads on 4 ranks, of a model with 8: each rank has a copy of one, which 8 heads do not explain."""
    import vllm.config

    backend = SimpleNamespace(get_name=lambda: "B")
    names = ["model.layers.0.self_attn.attn", "draft_model.layers.0.self_attn.attn"]
    layers = {name: SimpleNamespace(get_attn_backend=lambda: backend) for name in names}
    monkeypatch.setattr(vllm.config, "get_layers_from_vllm_config", lambda *_: layers)

    class Arch(SimpleNamespace):
        def __getitem__(self, number: int) -> SimpleNamespace:
            return self

    model, drafter = (
        SimpleNamespace(
            model_arch_config=Arch(total_num_hidden_layers=2, total_num_kv_heads=heads),
            hf_text_config=None,
            get_total_num_hidden_layers=lambda: 2,
        )
        for heads in (8, 2)
    )
    speculative = SimpleNamespace(method="draft_model", draft_model_config=drafter)
    config: Any = SimpleNamespace(
        model_config=model,
        speculative_config=speculative,
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    assert {name: found.kv_heads for name, found in layer_facts(config).items()} == dict(
        zip(names, (8, 2), strict=True)
    )
