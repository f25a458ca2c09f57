"""Qwen3-Next whose attention layer 1 sees a window only: states, full attention and a window in one model.

vLLM's own models with all three need a GPU, or weights of their makers. The checkpoint is an ordinary one
(`WINDOWED_HYBRID` of `make_models`), and this plugin narrows the layer in every instance that serves it.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models import qwen3_next

WINDOW = 64
_LAYER = ".layers.1."
_attention = qwen3_next.Attention


def _narrowed(*arguments: Any, prefix: str = "", **keywords: Any) -> Any:
    window = {"per_layer_sliding_window": WINDOW} if _LAYER in prefix else {}
    return _attention(*arguments, prefix=prefix, **keywords, **window)


qwen3_next.Attention = _narrowed


class WindowedQwen3NextForCausalLM(qwen3_next.Qwen3NextForCausalLM):
    """See the module."""
