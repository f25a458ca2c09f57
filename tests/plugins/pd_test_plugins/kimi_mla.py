"""MLA on the CPU for hybrid models: larger blocks, prefix caching and prefill in chunks.

vLLM's CPU backend has none of the three. It refuses blocks of more than 16 tokens, although the allocator splits them
before the backend sees them; and its prefill knows the new tokens only, so the platform turns prefix caching and chunks
off (`cpu_platform.py` undoes that). Here a prefill attends over everything that the request has in the cache, the new
tokens included, in plain torch: in float64, and with keys and values made block by block, so that a token's numbers do
not depend on how many others are computed with it.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata, MLACommonMetadataBuilder
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

KERNEL_BLOCK_TOKENS = 16


class HybridMLABackend(CPUMLABackend):
    """vLLM's backend, but for prefill and for the blocks that it accepts."""

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % KERNEL_BLOCK_TOKENS == 0

    @staticmethod
    def get_impl_cls() -> type[HybridMLA]:
        return HybridMLA

    @staticmethod
    def get_builder_cls() -> type[HybridMLABuilder]:
        return HybridMLABuilder


class HybridMLABuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Adds to the metadata of a prefill how many tokens each request has, computed before or now."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLACommonMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if metadata.prefill is not None:
            metadata.prefill.total_tokens = common_attn_metadata.seq_lens[metadata.num_decodes :].tolist()
        return metadata


class HybridMLA(CPUMLAImpl):
    """Decode is vLLM's kernel."""

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Attention of `q` [tokens, heads, size] over the cache [kernel blocks, tokens, latent and rope part]."""
        prefill: Any = attn_metadata.prefill
        starts = prefill.query_start_loc.tolist()
        for request, total in enumerate(prefill.total_tokens):
            start, stop = starts[request : request + 2]
            blocks = prefill.block_table[request, : -(-total // kv_c_and_k_pe_cache.shape[-2])].long()
            expanded = [self._expand(block.flatten(0, -2).to(q.dtype)) for block in kv_c_and_k_pe_cache[blocks]]
            keys, values = (torch.cat(parts)[:total] for parts in zip(*expanded, strict=True))
            scores = torch.einsum("qhc,khc->hqk", q[start:stop].double(), keys) * self.scale
            unseen = torch.ones(scores.shape[1:], dtype=torch.bool).triu(total - (stop - start) + 1)
            weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1)
            output[start:stop] = torch.einsum("hqk,khv->qhv", weights, values).flatten(1).to(output.dtype)

    def _expand(self, cached: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [tokens, heads, size] in float64 from latents with their rope part [tokens, size]."""
        latent, rope = cached.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        expanded = self.kv_b_proj(latent.contiguous())[0].view(
            -1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim
        )
        nope, values = expanded.double().split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        return torch.cat([nope, rope.double().unsqueeze(1).expand(-1, self.num_heads, -1)], dim=-1), values
