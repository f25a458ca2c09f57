"""Which form a layer's pages have: from vLLM's spec and the backend that writes them, or why it is not known.

A form is named only where the code of the writer was read; a test writes a token by each writer's formula and finds all
of it again (`tests/compat/model/test_written_pages.py`). Any other page is opaque and says why: it still moves whole,
between instances that store it alike.

Source: vLLM 0.32, by form: `flashmla_sparse.py` (the note on fp8 formats), `rocm_aiter_mla_sparse.py`
(`_indexer_k_quant_and_cache_kernel`), `models/deepseek_v4/common/ops/cache_utils.py`, `triton_attn.py`
(`_ensure_scale_caches`), `flashinfer.py` (`_nvfp4_kv_views`), `csrc/libtorch_stable/nvfp4_kv_cache_kernels.cu`;
`SlidingWindowMLASpec.merge`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from hashlib import sha256
from pathlib import Path
from platform import machine
from secrets import token_bytes
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)

from vllm_pd_connector.compat.model import backends, facts
from vllm_pd_connector.geometry.manifest import Role

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec


class Form(Enum):
    """How the bytes of a page are what they are; `values` and `scales` of a `Page` are bytes."""

    KEY_VALUE = "K and V of every head"
    KEY_VALUE_SCALED = "K with its scale, then V with its scale, of every head"
    KEY_VALUE_REGIONS = "K of all heads and tokens, its scales, then V and its scales"
    ROWS = "one record per token"
    VALUES_THEN_SCALES = "the values of all tokens, then the scales of all tokens"
    RING = "the latest tokens of a request, in a ring"
    OPAQUE = "not known"


@dataclass(frozen=True, slots=True)
class Page:
    """`role` is that of rows and values. Bytes per token (and head): `values`, `scales`; 0 where the form has none.
    `reason` says why a page is opaque; `anywhere`: yet it is known that all devices and releases have it alike."""

    form: Form
    role: Role = Role.OPAQUE
    values: int = 0
    scales: int = 0
    reason: str = ""
    anywhere: bool = False


DS_MLA_ROWS = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes of a token in DeepSeek-V3.2's packed formats: values, scales and rope part of a token in one record."""

V4_VALUES, V4_SCALES = 576, 8
"""Bytes of a token in DeepSeek-V4's packed format: 448 values and 64 bfloat16; apart from them 7 scales and a pad."""

INDEX_VALUES, INDEX_SCALES = 128, 4
SCALE_BYTES = 4


FP4_BLOCK = 16
"""Elements of NVFP4 that share a scale of one byte; two elements are a byte."""


def nvfp4_in_order() -> bool:
    """Whether this device's NVFP4 pages have the scales of V in the order of their tokens. Those of the Blackwell
    family 10.x have them in tiles of four tokens, as its kernels read them; pages of the two look alike and are not."""
    from vllm.platforms import current_platform

    return any(current_platform.is_device_capability_family(family) for family in (80, 90, 120))


def shuffled() -> bool:
    """Whether AMD's backends are to shuffle the inside of pages, those of them that can."""
    import vllm.envs as envs
    from vllm.platforms import current_platform

    return bool(current_platform.is_rocm() and envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT)


def surroundings() -> str:
    """What a writer of pages may go by that nobody has read, beside its name: the kind of device and vLLM's release.

    TurboQuant has the fp8 of its keys in one form on NVIDIA's 8.0 and in another on 9.0, and its records in planes on
    AMD's 9.5; DeepSeek-V4.1's record has its scales behind all values in 0.32, and behind its own in 0.33. Sizes are
    equal. On the CPU the operators of the releases that were read are the same.

    A variable has AMD's backends shuffle a page's inside, which shows in its shape unless a rank has two heads. On ARM
    whoever built vLLM has chosen whether bfloat16 is stored in tiles: there builds must be the same.

    Source: vLLM 0.32 and 0.33, `_use_fp8_e4b15` of `triton_turboquant_decode.py`, `is_flydsl_available`, the note on
    formats in `flashmla_sparse.py`, `AiterFlashAttentionBackend.customize_spec`; `ARM_BF16_SUPPORT` of
    `csrc/cpu/cpu_attn_neon.hpp`.
    """
    from vllm.platforms import current_platform

    capability, release = current_platform.get_device_capability(), facts.vllm_release()
    if capability is None:
        built = f" build {_build()}" if machine() == "aarch64" else ""
        return (
            f"{current_platform.device_name} {machine()}{built}{'' if release in facts.READ else f', vLLM {release}'}"
        )
    inside = ", shuffled" if shuffled() else ""
    return f"{current_platform.device_name} {capability.major}.{capability.minor}, vLLM {release}{inside}"


@cache
def _build() -> str:
    """Which build of vLLM's operators this is, by their files; of one that has none nobody's is the same."""
    import vllm

    files = sorted(file for place in vllm.__path__ for file in Path(place).glob("_C*.so"))
    digest = sha256(b"" if files else token_bytes(16))
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def index_scales() -> str:
    """In which form an indexer's fp8 keys have their scales, in words; empty for float32.

    Source: vLLM 0.33, `mqa_logits_use_mx_scales` of `utils/deep_gemm.py`: four equal bytes of an exponent, on NVIDIA's
    10.x alone. 0.32 has float32 there, too.
    """
    import vllm.utils.deep_gemm as deep_gemm

    exponents = getattr(deep_gemm, "mqa_logits_use_mx_scales", None)
    return "ue8m0" if exponents is not None and exponents() else ""


def fp8_of_half_value() -> bool:
    """Whether the fp8 of this device is `fnuz`, whose exponents count from one less: the bytes of a number here mean
    half or twice as much on other devices. AMD's MI300 has it, its MI350 does not.

    Source: vLLM 0.32, `RocmPlatform.is_fp8_fnuz`.
    """
    from vllm.platforms import current_platform

    return bool(current_platform.is_fp8_fnuz())


def page_of(
    spec: AttentionSpec, backend: str, *, rocm: bool, nvfp4_in_order: bool = False, shuffled: bool = False
) -> Page:
    """The form of the pages of one layer; `nvfp4_in_order` and `shuffled` are as the functions of these names tell."""
    if isinstance(spec, CircularBufferSpec):
        return Page(Form.RING, Role.INDEX)
    if spec.tokens_per_state != 1:
        anywhere = backend in backends.POOLED_ALIKE and not rocm
        return _opaque(f"a state stands for {spec.tokens_per_state} tokens", anywhere=anywhere)
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        return _vectors(spec, backend, rocm)
    if type(spec) not in (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec):
        return _opaque(f"a {type(spec).__name__}")
    return _heads(spec, backend, nvfp4_in_order, shuffled)


def _opaque(reason: str, *, anywhere: bool = False) -> Page:
    """`anywhere`: releases that were read write it alike on all devices."""
    return Page(Form.OPAQUE, reason=reason, anywhere=anywhere and facts.vllm_release() in facts.READ)


def _vectors(spec: MLAAttentionSpec | SlidingWindowMLASpec, backend: str, rocm: bool) -> Page:
    if spec.num_heads != 1:
        return _opaque(f"a vector per token in {spec.num_heads} parts")
    content = spec.state_content_size_bytes
    plain = spec.state_content_bytes is None and spec.head_size_v == 0
    role = getattr(spec, "cache_role", None)
    if role is not None and role.value == "indexer":
        if backend in backends.INDEX_ROWS and plain:
            return Page(Form.ROWS, Role.INDEX, content)
        expected = INDEX_VALUES + INDEX_SCALES
        if backend in backends.VALUES_THEN_SCALES and not rocm and plain and content == expected:
            return Page(Form.VALUES_THEN_SCALES, Role.INDEX, INDEX_VALUES, INDEX_SCALES)
        return _opaque(f"an indexer of {backend} with {content} bytes a token")
    if spec.model_version == "deepseek_v4" and not plain:
        if spec.cache_dtype_str == "fp8_ds_mla" and content == V4_VALUES + V4_SCALES and not rocm:
            return Page(Form.VALUES_THEN_SCALES, Role.LATENT, V4_VALUES, V4_SCALES)
        return _opaque(f"{spec.cache_dtype_str} of DeepSeek-V4 with {content} bytes a token")
    # Bytes are no elements of a vector: somebody packs them, as DeepSeek-V4.1's indexers do, which bear no role.
    if plain and spec.kv_quant_mode is KVQuantMode.NONE and spec.dtype.itemsize > 1:
        return Page(Form.ROWS, Role.LATENT, content)
    if backend not in backends.ROWS or rocm:
        return _opaque(f"{spec.cache_dtype_str or spec.dtype} of {backend}, whose writer was not read")
    # The name, too: what vLLM merges of several layers' windows has lost its mode.
    if plain and KVQuantMode.FP8_PER_TENSOR in (spec.kv_quant_mode, get_kv_quant_mode(spec.cache_dtype_str or "auto")):
        return Page(Form.ROWS, Role.LATENT, content)
    if DS_MLA_ROWS.get(str(spec.cache_dtype_str)) == content:
        return Page(Form.ROWS, Role.LATENT, content)
    return _opaque(f"{spec.cache_dtype_str} with {content} bytes a token")


def _heads(spec: AttentionSpec, backend: str, nvfp4_in_order: bool, shuffled: bool) -> Page:
    mode = spec.kv_quant_mode
    plain = spec.num_head_slots is None and spec.state_content_bytes is None
    # One scale per tensor, kept with the weights: the page holds plain one-byte elements.
    if plain and mode in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR):
        quantized = mode is not KVQuantMode.NONE
        if backend == backends.CPU or backends.is_plain(backend, quantized=quantized, shuffled=shuffled):
            return Page(Form.KEY_VALUE, Role.KEY)
        return _opaque(f"the writer of {backend} was not read")
    scaled = mode in (KVQuantMode.INT8_PER_TOKEN_HEAD, KVQuantMode.FP8_PER_TOKEN_HEAD, KVQuantMode.INT4_PER_TOKEN_HEAD)
    content = spec.state_content_size_bytes
    if scaled and spec.num_head_slots is None and spec.head_size == spec.head_size_v and content % 2 == 0:
        if backend in backends.INLINE_SCALES:
            return Page(Form.KEY_VALUE_SCALED, Role.KEY, content // 2 - SCALE_BYTES, SCALE_BYTES)
        return _opaque(f"{mode.name} of {backend}, whose writer was not read")
    if mode.is_nvfp4:
        return _nvfp4(spec, backend, nvfp4_in_order)
    return _opaque(f"{mode.name} of {backend} in {spec.num_heads} slots of {content} bytes a token")


def _nvfp4(spec: AttentionSpec, backend: str, in_order: bool) -> Page:
    content, values, scales = spec.state_content_size_bytes, spec.head_size // 2, spec.head_size // FP4_BLOCK
    slots = spec.num_head_slots == 2 * spec.num_kv_heads and content == values + scales
    if backend not in backends.FP4_REGIONS or not slots or spec.head_size != spec.head_size_v:
        return _opaque(f"NVFP4 of {backend}, whose writer was not read")
    if not in_order:
        return _opaque("NVFP4, where this device has the scales of V in tiles of four tokens", anywhere=True)
    return Page(Form.KEY_VALUE_REGIONS, Role.KEY, values, scales)


def cpu_attention_is_affine(head_size: int, model_dtype: str, block_tokens: int) -> bool:
    """Whether CPU_ATTN stores K transposed and V token-major (its `vec` kernels), in whichever precision; AMX packs K
    in another form. The backend chooses by the dtype that the model computes in, not by the cache's.

    Source: vLLM 0.32, `v1/attention/backends/cpu_attn.py` (_get_attn_isa); bytes compared on a real cache.
    """
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(getattr(torch, model_dtype), block_tokens, head_size) in ("vec", "vec16")
