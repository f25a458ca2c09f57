"""vLLM's attention backends by the form of their pages. Imports nothing: plugins register theirs early.

A *plain* page keeps K and V of a token side by side in the content dimension, and nothing else. A page of *rows* keeps
one record per token, all of whose bytes lie together (an MLA latent, in whichever precision). Pages of a backend that
is not named here are moved as opaque bytes.

Source: vLLM 0.32, `do_kv_cache_update` of each backend under `v1/attention/backends/`; `fused_norm_rope` of
`models/deepseek_v32/common/kernels.py` and `concat_and_cache_mla` for rows; `models/minimax_m3/common/ops/`.
"""

from __future__ import annotations

CPU = "CPU_ATTN"

_plain = {
    "FLASH_ATTN",
    "FLASHINFER",
    "TRITON_ATTN",
    "FLEX_ATTENTION",
    # K and V of unequal width, one behind the other.
    "FLASH_ATTN_DIFFKV",
    "TRITON_ATTN_DIFFKV",
    # Each layer's cache is written by one of two plain backends, who share it.
    "TRITON_FLASH_ATTN",
    "TRITON_FLASHINFER",
    "MINIMAX_M3_SPARSE",
}

PLAIN_UNLESS_QUANTIZED = frozenset({"HPC_ATTN"})
"""Plain where the cache has the model's dtype; in fp8 the model's own operator writes it, which was not read."""

ROWS = frozenset({
    "CUTLASS_MLA", "FLASHINFER_MLA", "FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120",
    "FLASHINFER_MLA_SPARSE_SM90", "FLASHMLA", "FLASHMLA_SPARSE", "FLASH_ATTN_MLA", "FLASH_ATTN_MLA_SPARSE",
    "TOKENSPEED_MLA", "TRITON_MLA",
})  # fmt: skip
"""MLA backends that leave the writing to vLLM's common operators, by which a token's bytes lie together."""

VALUES_THEN_SCALES = frozenset({"DEEPSEEK_V32_INDEXER"})
"""Indexers whose page has the values of all its tokens first, then their scales; not on ROCm, which shuffles them."""

INDEX_ROWS = frozenset({"MINIMAX_M3_SPARSE_INDEXER"})
"""Indexers whose page has a plain vector per token."""

FP8_INDEXERS = frozenset({
    "DEEPSEEK_V32_INDEXER", "DEEPSEEK_V4_INDEXER", "DEEPSEEK_V41_INDEXER", "DEEPSEEK_V41_SPARSE_INDEXER",
})  # fmt: skip
"""Indexers whose keys are 128 bytes of fp8 and a scale of 4 bytes, the form of which depends on device and release."""

POOLED_ALIKE = frozenset({
    "FLASHMLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV4", "DEEPSEEK_V4_INDEXER", "DEEPSEEK_V32_INDEXER",
})  # fmt: skip
"""Backends whose states for several tokens are written alike on all of NVIDIA's GPUs, by vLLM 0.32 and 0.33, but for an
indexer's scales."""

PLAIN_UNLESS_SHUFFLED = frozenset({"ROCM_AITER_UNIFIED_ATTN"})
"""AMD's default beside a connector: `reshape_and_cache_flash` or a fused operator writes what a kernel reads by
strides. With the variable that shuffles pages vLLM 0.33 has another writer on gfx1250."""

INLINE_SCALES = frozenset({"TRITON_ATTN"})
"""Backends that keep the scales of each token and head behind its K, and behind its V."""

FP4_REGIONS = frozenset({"FLASHINFER"})
"""Backends whose NVFP4 pages have K, its scales, V and its scales in regions of their own."""


def register_plain_backend(name: str) -> None:
    """Say that a backend's pages are plain; `name` is its `get_name()`.

    For packages that bring a backend: their entry of `vllm.general_plugins`, which runs in every worker, calls this.
    May be called again.
    """
    _plain.add(name)


def is_plain(name: str, *, quantized: bool = False, shuffled: bool = False) -> bool:
    """`quantized`: the cache has less than the model's precision; `shuffled`: as `pages.shuffled` says."""
    if name in PLAIN_UNLESS_QUANTIZED:
        return not quantized
    return name in _plain or (name in PLAIN_UNLESS_SHUFFLED and not shuffled)
