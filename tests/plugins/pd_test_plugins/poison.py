"""Caches whose old bytes are not a number, and that a kernel reads: what must never be left in a block shows.

With PD_TEST_POISON all bytes of an instance's caches are 0xFF, a NaN in every type, when the connector gets them. The
reference attention then multiplies what it masks by zero, as kernels do that load whole pages. vLLM is made to zero the
blocks that it hands out, as it does for models with recurrent states or with caches of several precisions; the blocks
that the connector says it loads are excepted, so these are as the connector leaves them.
"""

from __future__ import annotations

import os
from typing import Any

POISONED = os.environ.get("PD_TEST_POISON") == "1"


def have_new_blocks_zeroed() -> None:
    """In any process, early: vLLM's scheduler and its workers ask for this."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    KVCacheConfig.needs_kv_cache_zeroing = property(lambda self: True)  # type: ignore[assignment]


def poison_caches() -> None:
    """In a worker, before its caches are allocated."""
    import torch

    from vllm_pd_connector.connector import PDConnector

    register = PDConnector.register_kv_caches

    def register_poisoned(self: Any, kv_caches: dict[str, torch.Tensor]) -> None:
        for tensor in kv_caches.values():
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0xFF)
        print("all caches are filled with NaN", flush=True)
        register(self, kv_caches)

    PDConnector.register_kv_caches = register_poisoned  # type: ignore[method-assign]
