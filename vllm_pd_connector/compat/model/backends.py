"""vLLM's attention backends by the form of their pages. Imports nothing: plugins register theirs early.

A plain page keeps K and V of a token side by side in the content dimension, and nothing else. Pages of a backend that
is neither plain nor `CPU` are moved as opaque bytes.

Source: vLLM 0.32, `do_kv_cache_update` of each backend under `v1/attention/backends/`.
"""

from __future__ import annotations

CPU = "CPU_ATTN"

_plain = {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"}


def register_plain_backend(name: str) -> None:
    """Say that a backend's pages are plain; `name` is its `get_name()`.

    For packages that bring a backend: their entry of `vllm.general_plugins`, which runs in every worker, calls this.
    May be called again.
    """
    _plain.add(name)


def is_plain(name: str) -> bool:
    return name in _plain
