"""Attention in plain torch whose pages are those of a GPU backend: K and V of a token side by side, in any layout.

vLLM's own CPU backend reads one layout only (LBHNC), with K transposed inside a page, in blocks of 32 tokens. This one
addresses the cache through vLLM's logical view [blocks, heads, tokens, content] alone and takes whatever strides the
view has, so every layout and every block size that is a multiple of 16 can be served. It computes in float64, so that a
token's numbers do not depend on how many others are computed with it. Clear, not fast.

Caches in fp8 hold K and V divided by their layer's scales, rounded as torch rounds, on any processor.

Under decode context parallelism a rank attends with the heads of its whole group over the tokens that it holds; outputs
and the logarithms of their normalisers are exchanged and combined.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.config import get_current_vllm_config
from vllm.distributed import get_dcp_group
from vllm.v1.attention.backend import AttentionType, MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from pd_test_plugins.poison import POISONED, poison_caches

BLOCK_TOKENS = 16
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""By vLLM's name of the cache's dtype; vLLM's tensors of them are bytes."""

if POISONED:
    poison_caches()


def _from_all(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's tensor of the decode-context parallel group, in their order."""
    group = get_dcp_group()
    found = [torch.empty_like(tensor) for _ in range(group.world_size)]
    torch.distributed.all_gather(found, tensor.contiguous(), group=group.cpu_group)
    return found


class ReferenceAttentionBackend(CPUAttentionBackend):
    """Metadata is CPU_ATTN's; writing to the cache and attention are `ReferenceAttention`."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN_REFERENCE"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(BLOCK_TOKENS)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> None:
        """None: any layout."""
        return

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @staticmethod
    def get_impl_cls() -> type[ReferenceAttention]:
        return ReferenceAttention

    @staticmethod
    def get_builder_cls() -> type[ReferenceMetadataBuilder]:
        return ReferenceMetadataBuilder


class ReferenceMetadataBuilder(CPUAttentionMetadataBuilder):
    """CPU_ATTN's, not asked whether its kernels have fp8 caches on this processor."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        told = copy.copy(vllm_config)
        told.cache_config = copy.copy(told.cache_config)
        told.cache_config.cache_dtype = "auto"
        super().__init__(kv_cache_spec, layer_names, told, device)
        self.vllm_config = vllm_config


class ReferenceAttention(CPUAttentionBackendImpl):
    """Causal attention with an optional window; sinks, soft caps and position biases are refused."""

    supports_dcp = True
    can_return_lse_for_decode = True
    dcp_world_size: int
    dcp_rank: int

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._parallel = get_current_vllm_config().parallel_config  # a connector may still set the interleave
        if self.sinks is not None or self.alibi_slopes is not None or self.logits_soft_cap:
            raise NotImplementedError("reference attention has no sinks, ALiBi slopes or soft cap; use CPU_ATTN")

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write tokens to the cache [blocks, heads, tokens, K and V]; slots below 0 are padding."""
        written = slot_mapping >= 0
        slots = slot_mapping[written].long()
        block, token = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
        count = slot_mapping.shape[0]
        if stored := FP8.get(self.kv_cache_dtype):
            largest = torch.finfo(stored).max
            key, value = (
                (part / scale).clamp(-largest, largest).to(stored).view(torch.uint8)
                for part, scale in ((key, layer._k_scale_float), (value, layer._v_scale_float))
            )
        kv_cache[block, :, token] = torch.cat([key[:count][written], value[:count][written]], dim=-1).to(kv_cache.dtype)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of `query` [tokens, heads, head size] over each request's pages, into `output`."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("reference attention does not quantize its output")
        if attn_metadata is None:  # vLLM's profiling run
            return output
        self._layer = layer
        starts: Sequence[int] = attn_metadata.query_start_loc.tolist()
        lengths: Sequence[int] = attn_metadata.seq_lens.tolist()
        for request, (start, stop) in enumerate(itertools.pairwise(starts)):
            if start == stop:
                continue
            attend = self._attended if self.dcp_world_size == 1 else self._attended_in_group
            attended = attend(query[start:stop], kv_cache, attn_metadata.block_table[request], lengths[request])
            output[start:stop] = attended.to(output.dtype).view_as(output[start:stop])
        return output

    def _attended(self, query: torch.Tensor, kv_cache: torch.Tensor, table: torch.Tensor, tokens: int) -> torch.Tensor:
        """Attention of the last `query` of `tokens` tokens. Pages before the window are not read: vLLM has put the null
        block in their place, in which anything may lie. If the caches are poisoned, every slot of the others is, with
        zero as the weight of what is masked."""
        page, queries = kv_cache.shape[2], query.shape[0]
        lowest = max(0, tokens - queries + 1 - self.sliding_window) if self.sliding_window > 0 else 0
        first, last = lowest // page, -(-tokens // page)
        slots = self._numbers(kv_cache[table[first:last].long()]).transpose(1, 2).flatten(0, 1).transpose(0, 1)
        if not POISONED:
            slots = slots[:, : tokens - first * page]
        keys, values = (
            part.repeat_interleave(self.num_queries_per_kv, dim=0) for part in slots.split(self.head_size, dim=-1)
        )
        visible = torch.zeros(queries, slots.shape[1], dtype=torch.bool)
        visible[:, : tokens - first * page] = self._visible(queries, tokens)[:, first * page :]
        query = query.transpose(0, 1).double()
        if not POISONED:
            attended = scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=self.scale)
        else:
            scores = (query @ keys.transpose(1, 2)) * self.scale
            attended = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1) @ values
        return attended.transpose(0, 1)

    def _attended_in_group(
        self, query: torch.Tensor, kv_cache: torch.Tensor, table: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        """The same, where each rank of a group has some of the tokens of their one KV head."""
        queries, own, page = query.shape[0], query.shape[1], kv_cache.shape[2]
        heads = torch.cat(_from_all(query.double()), dim=1)
        positions = torch.arange(tokens)
        positions = positions[
            positions // self._parallel.cp_kv_cache_interleave_size % self.dcp_world_size == self.dcp_rank
        ]
        held = self._numbers(kv_cache[table[: -(-len(positions) // page)].long()])
        held = held.transpose(1, 2).flatten(0, 1)[: len(positions), 0]
        keys, values = held.split(self.head_size, dim=-1)
        scores = torch.einsum("qhc,kc->qhk", heads, keys) * self.scale
        unseen = positions[None, :] > torch.arange(tokens - queries, tokens)[:, None]
        scores = scores.masked_fill(unseen[:, None], float("-inf"))
        norms = scores.logsumexp(dim=-1)  # minus infinity where this rank has nothing to see
        whole = torch.stack(_from_all(norms)).logsumexp(dim=0)
        partial = (scores - whole[..., None]).exp() @ values
        combined = torch.stack(_from_all(partial)).sum(dim=0)
        return combined[:, self.dcp_rank * own : (self.dcp_rank + 1) * own]

    def _numbers(self, pages: torch.Tensor) -> torch.Tensor:
        """What pages [pages, heads, tokens, K and V] hold, in float64."""
        if stored := FP8.get(self.kv_cache_dtype):
            numbers = pages.view(stored).double()
            numbers[..., : self.head_size] *= self._layer._k_scale_float
            numbers[..., self.head_size :] *= self._layer._v_scale_float
            return numbers
        return pages.double()

    def _visible(self, queries: int, tokens: int) -> torch.Tensor:
        """Mask [queries, tokens]: the last `queries` tokens see themselves and what precedes them in the window."""
        distance = torch.arange(tokens - queries, tokens)[:, None] - torch.arange(tokens)[None, :]
        return (distance >= 0) & ((distance < self.sliding_window) if self.sliding_window > 0 else True)
