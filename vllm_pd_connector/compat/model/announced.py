"""The layers of which vLLM says in the middle of a forward that their caches are written: by `save_kv_layer`.

Source: vLLM 0.32, `model_executor/layers/attention/kv_transfer_utils.py` (`maybe_transfer_kv_layer`, around the
operators of `Attention` and `MLAAttention`). A forward that is one CUDA graph does not come by there, and nothing is
said of it; nor does a layer of a model that calls none of the two operators, as DeepSeek-V3.2's own
(`models/deepseek_v32/attention.py`). Whoever is told must know that the layer's pages are final: a layer that shares
another's cache writes nothing, microbatches announce a layer several times, and a drafter runs its layers again after
the forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_pd_connector.compat.model.facts import drafts_with_caches

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from vllm.config import VllmConfig


OPERATORS = "vllm.model_executor.layers.attention"
"""Where the forwards are that call the two operators, and those that end in them."""


def announced_layers(vllm_config: VllmConfig, cached: Container[str]) -> tuple[tuple[str, ...], str]:
    """Names of this worker's layers, in the order of the forward, whose pages are final when they are announced; or
    none and the reason.

    Args:
        cached: the layers with a cache on this worker.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    if drafts_with_caches(vllm_config):
        return (), "a drafter writes caches after the layers"
    if vllm_config.parallel_config.use_ubatching:
        return (), "microbatches write a layer's pages in turns"
    modules: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    layers = tuple(
        name
        for name, module in modules.items()
        if isinstance(module, Attention | MLAAttention)
        and type(module).forward.__module__.startswith(OPERATORS)
        and name in cached
        and getattr(module, "attn_type", "decoder") == "decoder"
        and getattr(module, "kv_sharing_target_layer_name", None) is None
    )
    return layers, "" if layers else "no layer of this worker announces its pages"


def states_settled(vllm_config: VllmConfig, cached: Container[str], announced: Sequence[str]) -> dict[str, str]:
    """Names of this worker's layers with recurrent states, which nothing announces, and for each the first announced
    layer behind it: when that was launched, so was all that the layer writes. None where the numbers in their names are
    not in the order of the forward.

    Nor where tokens are drafted: vLLM then copies states when the forward has ended; nor, by the same care, where a
    later vLLM keeps what states are made of in rings of its own (`use_replayssm`).

    Args:
        cached: the layers with a cache on this worker.
        announced: in the order of the forward (`announced_layers`).

    Source: vLLM 0.32, `GPUModelRunner._update_states_after_model_execute`, `preprocess_mamba` (before the forward).
    """
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    numbers = [_number(layer) for layer in announced]
    if not announced or -1 in numbers or numbers != sorted(numbers) or vllm_config.speculative_config is not None:
        return {}
    if getattr(vllm_config.cache_config, "use_replayssm", False):
        return {}
    modules: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    states = (name for name, module in modules.items() if isinstance(module, MambaBase) and name in cached)
    settled = {}
    for name in states:
        behind = (layer for layer, number in zip(announced, numbers, strict=True) if number > _number(name) >= 0)
        if (layer := next(behind, None)) is not None:
            settled[name] = layer
    return settled


def _number(layer: str) -> int:
    """Of a layer, by its name; -1 if that has none, or several."""
    numbers = [int(part) for part in layer.split(".") if part.isdecimal()]
    return numbers[0] if len(numbers) == 1 else -1
