"""From a model of the table to vLLM's specs, by the methods of vLLM's own layers.

A layer is made without its constructor, which would want weights and a device: `get_kv_cache_spec` reads a few figures
of it, and those are set. Hybrid models get their block size and padding by the rule of vLLM's platform
(`update_block_size_for_backend`), which is the one thing that is said again here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, lcm
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention as AttentionLayer
from vllm.model_executor.layers.attention.chunked_local_attention import (
    ChunkedLocalAttention,
    create_chunked_local_attention_backend,
)
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backend import AttentionType, MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import customize_attention_spec

from tests.recorded.models import V4, Attention, Index, Latent, Layer, Model, Setup, State, Tail

BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Cache:
    """One layer's cache: vLLM's spec, the backend that writes it, how many heads the model has there, and the groups of
    a Mamba2 layer."""

    layer: str
    spec: KVCacheSpec
    backend: Any
    heads: int
    groups: int = 0


def config_of(model: Model, setup: Setup, tp: int) -> SimpleNamespace:
    """What vLLM's layers and its grouping read of a VllmConfig."""
    cache = SimpleNamespace(
        block_size=setup.block,
        cache_dtype=setup.dtype,
        skip_page_size_padded=None,
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
        enable_prefix_caching=True,
        mamba_cache_mode="align",
        mamba_block_size=None,
        mamba_page_size_padded=None,
        use_replayssm=False,
        get_resolved_kv_cache_layout=lambda: KVCacheLayout[setup.layout],
    )
    return SimpleNamespace(
        cache_config=cache,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp, decode_context_parallel_size=1, pipeline_parallel_size=1
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        num_speculative_tokens=0,
        kv_transfer_config=None,
        model_config=SimpleNamespace(dtype=BF16, max_model_len=131072, use_mla=False),
    )


def caches_of(model: Model, setup: Setup, tp: int) -> tuple[list[Cache], SimpleNamespace]:
    """The caches of the recorded layers on one rank, and the configuration that vLLM would have made of it."""
    config = config_of(model, setup, tp)
    layers = [layer for layers in model.pattern for layer in layers]
    if any(isinstance(layer, State) for layer in layers):
        _align(config, layers, setup, tp)
    found = []
    for number, parts in enumerate(model.pattern * model.recorded):
        for layer in parts:
            name, spec, backend, heads = _cache(layer, f"model.layers.{number}", config, setup, tp)
            if isinstance(spec, AttentionSpec):
                spec = customize_attention_spec(backend, spec)
            found.append(Cache(name, spec, backend, heads, layer.groups if isinstance(layer, State) else 0))
    return found, config


def _align(config: Any, layers: list[Layer], setup: Setup, tp: int) -> None:
    """vLLM 0.32, `Platform._align_hybrid_block_size`: attention pages as large as the largest state's."""
    states = [_state(layer, config, tp).page_size_bytes for layer in layers if isinstance(layer, State)]
    plain = next(layer for layer in layers if isinstance(layer, Attention | Latent))
    _, spec, backend, _ = _cache(plain, "l", config, setup, tp)
    a_token = replace(customize_attention_spec(backend, spec), block_size=1, block_stride_alignment=None)
    least = [s.base if isinstance(s, MultipleOf) else s for s in backend.get_supported_kernel_block_sizes()]
    unit = lcm(max(min(least), setup.block, 128 if isinstance(plain, Latent) else 1), min(least))
    cache = config.cache_config
    cache.block_size = max(cache.block_size, unit * ceil(max(states) / (unit * a_token.page_size_bytes)))
    cache.mamba_block_size = cache.block_size
    cache.mamba_page_size_padded = cache.block_size * a_token.page_size_bytes


def _state(layer: State, config: Any, tp: int) -> MambaSpec:
    shapes, dtypes = MambaStateShapeCalculator, MambaStateDtypeCalculator
    dims = layer.dims
    match layer.kind:
        case "gated_delta_net":
            shape, kind = shapes.gated_delta_net_state_shape(tp, *dims), MambaAttentionBackendEnum.GDN_ATTN
            dtype: Any = (BF16, torch.float32)
        case "kda":
            shape, kind = shapes.kda_state_shape(tp, *dims), MambaAttentionBackendEnum.GDN_ATTN
            dtype = dtypes.kda_state_dtype(BF16, "auto")[-2:]
        case "mamba2":
            shape, kind = shapes.mamba2_state_shape(tp, *dims), MambaAttentionBackendEnum.MAMBA2
            dtype = dtypes.mamba2_state_dtype(BF16, "auto", "float32")
        case "mamba1":
            shape, kind = shapes.mamba1_state_shape(tp, *dims), MambaAttentionBackendEnum.MAMBA1
            dtype = dtypes.mamba1_state_dtype(BF16, "auto", "auto")
        case _:
            shape = shapes.linear_attention_state_shape(dims[0], tp, dims[1])
            kind, dtype = MambaAttentionBackendEnum.LINEAR, (torch.float32,)
    cache = config.cache_config
    return MambaSpec(
        shapes=tuple(shape), dtypes=tuple(dtype), block_size=cache.mamba_block_size or 1, mamba_type=kind,
        page_size_padded=cache.mamba_page_size_padded, mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=int(layer.kind == "mamba2"),
    )  # fmt: skip


def _cache(layer: Layer, name: str, config: Any, setup: Setup, tp: int) -> tuple[str, KVCacheSpec, Any, int]:
    backend: Any = AttentionBackendEnum[setup.backend].get_class()
    match layer:
        case Attention():
            return _attention(layer, name, config, setup, tp, backend)
        case Latent():
            given = {"head_size": layer.size, "kv_cache_dtype": setup.dtype, "indexer": None}
            given |= {
                "sliding_window": layer.window or None,
                "non_causal_multi_token_decode": False,
                "topk_buffer_width": None,
            }
            return f"{name}.self_attn.attn", _spec(MLAAttention, config, **given), backend, 1
        case State():
            return f"{name}.mixer", _state(layer, config, tp), None, 0
        case Index() | Tail():
            return _index(layer, name, config)
        case V4():
            return _v4(layer, name, config, setup, backend)


def _spec(kind: type, config: Any, **given: Any) -> KVCacheSpec:
    """What `kind.get_kv_cache_spec` says of a layer with these figures."""
    concrete: Any = type(kind.__name__, (kind,), {})
    concrete.__abstractmethods__ = frozenset()
    layer = concrete.__new__(concrete)
    layer.__dict__ |= {"cache_config": config.cache_config, **given}
    spec: KVCacheSpec = layer.get_kv_cache_spec(config)
    return spec


def _attention(
    layer: Attention, name: str, config: Any, setup: Setup, tp: int, backend: Any
) -> tuple[str, KVCacheSpec, Any, int]:
    kind: type = AttentionLayer
    if layer.chunk:
        kind, backend = ChunkedLocalAttention, create_chunked_local_attention_backend(backend, layer.chunk)
    given = {
        "attn_type": AttentionType.DECODER,
        "kv_cache_dtype": setup.dtype,
        "kv_cache_torch_dtype": kv_cache_dtype_str_to_dtype(setup.dtype, config.model_config),
        "sliding_window": layer.window or None,
        "attention_chunk_size": layer.chunk,
        "attn_backend": backend,
        "num_kv_heads": max(1, layer.heads // tp),
        "head_size": layer.size,
        "head_size_v": layer.value_size or layer.size,
    }
    return f"{name}.self_attn.attn", _spec(kind, config, **given), backend, layer.heads


def _index(layer: Index | Tail, name: str, config: Any) -> tuple[str, KVCacheSpec, Any, int]:
    given: dict[str, Any] = {"dtype": torch.uint8, "head_dim": layer.size + 4, "_index_kpool": layer.pool}
    if isinstance(layer, Tail):
        from vllm.models.glm5next.common.attention import Glm5NextTailCache

        given["head_dim"] = layer.size
        kind: Any = Glm5NextTailCache
        place = "indexer.tail_cache"
    elif layer.owner == "glm5next":
        from vllm.models.glm5next.common.attention import Glm5NextIndexerCache as kind

        place = "indexer.k_cache"
    elif layer.owner == "m3":
        from vllm.models.minimax_m3.common.indexer import MiniMaxM3IndexerBackend
        from vllm.models.minimax_m3.common.indexer import MiniMaxM3IndexerCache as kind

        given |= {"dtype": BF16, "head_dim": layer.size, "backend_cls": MiniMaxM3IndexerBackend}
        place = "indexer.k_cache"
    else:
        kind, place = DeepseekV32IndexerCache, "indexer.k_cache"
    name = f"{name}.self_attn.{place}"
    backend = given.get("backend_cls") or kind.get_attn_backend(None)
    return name, _spec(kind, config, **given), backend, 1


def _v4(layer: V4, name: str, config: Any, setup: Setup, backend: Any) -> tuple[str, KVCacheSpec, Any, int]:
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
    from vllm.models.deepseek_v4.compressor import CompressorBackend, CompressorStateCache
    from vllm.v1.attention.backends.mla.indexer import DeepseekV4IndexerBackend
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend, DeepseekV4SWACache

    packed = setup.dtype == "fp8_ds_mla"
    dtype = torch.uint8 if packed else BF16
    name = f"{name}.self_attn"
    overlap = 1 + (layer.ratio == 4)
    state: dict[str, Any] = {"dtype": torch.float32, "sliding_window": overlap * layer.ratio}
    state["block_size"] = 4 if layer.ratio == 4 else 8
    match layer.part:
        case "main":
            given = {"compress_ratio": layer.ratio, "kv_cache_dtype": setup.dtype, "kv_cache_torch_dtype": dtype}
            return f"{name}.attn", _spec(DeepseekV4Attention, config, head_dim=512, **given), backend, 1
        case "window":
            given = {"packed_bytes_per_token": 584, "packed_page_alignment": 576, "bounded_replay": False}
            given["packed_block_stride_alignment"] = None
            given |= {"head_dim": 512, "window_size": 128, "block_size": 64, "dtype": dtype}
            return f"{name}.swa_cache", _spec(DeepseekV4SWACache, config, **given), DeepseekSparseSWABackend, 1
        case "index":
            given = {"head_dim": 132, "dtype": torch.uint8, "compress_ratio": layer.ratio}
            spec = _spec(DeepseekV4IndexerCache, config, **given)
            return f"{name}.indexer.k_cache", spec, DeepseekV4IndexerBackend, 1
        case part:
            width = 2 * overlap * (512 if part == "main state" else 128)
            place = "compressor" if part == "main state" else "indexer.compressor"
            spec = _spec(CompressorStateCache, config, state_dim=width, **state)
            return f"{name}.{place}.state_cache", spec, CompressorBackend, 1
