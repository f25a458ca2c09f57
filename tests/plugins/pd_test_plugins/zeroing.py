"""Zero newly allocated blocks on the CPU by block, where vLLM 0.32 zeroes other blocks' bytes.

vLLM's scheduler names blocks; its CPU runner uses these numbers as indices into a cache that is divided into smaller
kernel blocks, and so wipes pieces of blocks that are in use (docs/design/vllm-cpu-findings.md). That happens only in
hybrid models whose attention blocks are split, on the CPU those with MLA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, group_kernel_blocks
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def zero_block_ids(self: CPUModelRunner, block_ids: Sequence[int]) -> None:
    """Takes the place of `CPUModelRunner._zero_block_ids`."""
    config = self.kv_cache_config
    for group in config.kv_cache_groups:
        if not isinstance(group.kv_cache_spec, FullAttentionSpec):
            continue
        for layer in group.layer_names:
            cache = self.compilation_config.static_forward_context[layer].kv_cache
            if isinstance(cache, torch.Tensor):
                group_kernel_blocks(cache, config.num_blocks)[list(block_ids)] = 0
