"""The cache layout that a connector asks vLLM for.

A page whose heads lie one after the other (LBHNC) is one run between equal sides, and one run per head between unequal
ones; with the heads of each token side by side (LBNHC, vLLM's choice on most GPUs) unequal sides move token by token.
`benchmarks/layouts.py` has the figures. Layouts that keep all layers of a block together (BL*) move in fewer runs still
where both sides have the same tensor-parallel size, but vLLM cannot split their blocks for its kernels, so they stay
the operator's choice.

Source: vLLM 0.32, `resolve_kv_cache_layout` of `v1/attention/backends/utils.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BEST_TO_MOVE = "LBHNC"


def best_to_move(vllm_config: VllmConfig) -> str | None:
    """The layout to ask for; None where a rank has no heads to put in order: MLA's latents, or no model yet."""
    model = vllm_config.model_config
    return None if model is None or model.use_mla else BEST_TO_MOVE
