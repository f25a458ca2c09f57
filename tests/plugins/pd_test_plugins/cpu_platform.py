"""Prefix caching and chunked prefill for MLA on the CPU; the platform turns both off, as its own backend has neither.

In a module of its own because it takes effect when an engine is configured, long before a backend may be imported.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform


def keep_prefix_caching() -> None:
    """Keep what was asked for. Doing so twice does no harm."""
    check_as_vllm = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: VllmConfig) -> None:
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        asked = (cache.enable_prefix_caching, scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens)
        check_as_vllm(vllm_config)
        cache.enable_prefix_caching, scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = asked

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
