"""CPU MLA for hybrid models: blocks of any multiple of 16 tokens, which vLLM splits into kernel blocks of 16."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

KERNEL_BLOCK_TOKENS = 16


class SplittableMLABackend(CPUMLABackend):
    """vLLM's backend, which refuses larger blocks although it only ever sees kernel blocks."""

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % KERNEL_BLOCK_TOKENS == 0
