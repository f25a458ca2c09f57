"""The cache layout that a connector asks vLLM for, and how many tokens context-parallel ranks hold in turn.

A page whose heads lie one after the other (LBHNC) is one run between equal sides, and one run per head between unequal
ones; with the heads of each token side by side (LBNHC, vLLM's choice on most GPUs) unequal sides move token by token.
`benchmarks/layouts.py` has the figures. Layouts that keep all layers of a block together (BL*) move in fewer runs still
where both sides have the same tensor-parallel size, but vLLM cannot split their blocks for its kernels, so they stay
the operator's choice.

Source: vLLM 0.32, `resolve_kv_cache_layout` of `v1/attention/backends/utils.py`.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.model.layers import layer_facts
from vllm_pd_connector.compat.model.pages import shuffled
from vllm_pd_connector.compat.model.recurrent import representative

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

BEST_TO_MOVE = "LBHNC"


def best_to_move(vllm_config: VllmConfig) -> str | None:
    """The layout to ask for; None where a rank has no heads to put in order (MLA's latents, or no model yet), and where
    AMD's backends shuffle: decode kernels of ROCM_AITER_FA read K and V in planes of their own, LHBNC, and vLLM would
    take the layout that is asked for.

    Source: vLLM 0.32 and 0.33, `v1/attention/backends/rocm_aiter_fa.py` (`supported_kv_cache_layouts`).
    """
    model = vllm_config.model_config
    return None if model is None or model.use_mla or shuffled() else BEST_TO_MOVE


ONE_TOKEN_IN_TURN = "FLASHINFER_MLA"
"""The attention backend whose decode-context parallel ranks take turns with every token."""
INDEXER = "_INDEXER"
"""How the names of sparse indexers' backends end."""


def align_interleave(vllm_config: VllmConfig, config: KVCacheConfig) -> None:
    """Have decode-context parallel ranks hold whole blocks in turn, where the operator has not said how many tokens:
    with less, a pair of unequal sizes moves every few tokens by themselves. vLLM does so for its own connector alone,
    and at this point, too: call it where the worker's connector is made.

    Not where vLLM speculates, for which some backends need an interleave of 1, nor with a backend that knows no other,
    nor with a sparse indexer: where its model is compiled the interleave was taken as a constant before.

    Source: vLLM 0.32, `VllmConfig.adjust_dcp_kv_cache_interleave_size`, `check_attention_cp_compatibility`,
    `v1/attention/backends/mla/flashinfer_mla.py`, `sparse_attn_indexer.py` (`cp_kv_cache_interleave_size`).
    """
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size == 1 or vllm_config.speculative_config is not None:
        return
    if not parallel._allow_auto_resolve_cp_interleave_size or parallel.dcp_kv_cache_interleave_size > 1:
        return
    if any(f.backend == ONE_TOKEN_IN_TURN or f.backend.endswith(INDEXER) for f in layer_facts(vllm_config).values()):
        return
    specs = (representative(group.kv_cache_spec) for group in config.kv_cache_groups)
    if size := gcd(*(spec.block_size for spec in specs if spec.dcp_sharded)):
        parallel.cp_kv_cache_interleave_size = size
