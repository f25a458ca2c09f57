"""vLLM's own slot mapping under decode context parallelism, on the CPU.

vLLM computes on which rank and in which slot a token lies in a Triton kernel; its CPU platform has a replacement that
knows one rank only. Here the kernel's own code runs, as plain Python over tensors: `language` has as much of Triton's
language as it uses. So what a test sees is vLLM's rule and no copy of it.

Source: vLLM 0.32, `vllm/v1/worker/block_table.py` (ComputeSlotMappingKernel), `vllm/utils/cpu_triton_utils.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

KERNEL = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"


@dataclass(frozen=True)
class Pointer:
    """Into a flat tensor, at one place or many."""

    memory: torch.Tensor
    place: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.place + offset)


def _load(pointer: Pointer, mask: torch.Tensor | None = None, other: int = 0) -> torch.Tensor:
    if mask is None:
        return pointer.memory[pointer.place]
    return torch.where(mask, pointer.memory[torch.where(mask, pointer.place, 0)], other)


def _store(pointer: Pointer, value: Any, mask: torch.Tensor) -> None:
    values = torch.as_tensor(value).expand(mask.shape)
    pointer.memory[pointer.place[mask]] = values[mask].to(pointer.memory.dtype)


def _language(program: int, programs: int) -> SimpleNamespace:
    return SimpleNamespace(
        program_id=lambda axis: program,
        num_programs=lambda axis: programs,
        arange=torch.arange,
        load=_load,
        store=_store,
        where=torch.where,
        int64=torch.int64,
        constexpr=int,
    )


def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    block_table_stride: int,
    slot_mapping_ptr: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int,
    PAD_ID: int,
    BLOCK_SIZE: int,
) -> None:
    """The kernel, for every request and for the padding behind the last."""
    from vllm.triton_utils import dispatcher
    from vllm.v1.worker import block_table

    replaced = dispatcher._registry.get(KERNEL)
    kernel: Any = replaced[0] if replaced else block_table.ComputeSlotMappingKernel.kernel
    memories = (query_start_loc_ptr, positions_ptr, block_table_ptr.view(-1), slot_mapping_ptr)
    starts, positions, table, slots = map(Pointer, memories)
    language, requests = block_table.tl, len(query_start_loc_ptr) - 1
    try:
        for program in range(requests + 1):
            block_table.tl = _language(program, requests + 1)
            kernel(
                num_tokens, max_num_tokens, starts, positions, table, block_table_stride, slots, KV_CACHE_BLOCK_SIZE,
                TOTAL_CP_WORLD_SIZE, TOTAL_CP_RANK, CP_KV_CACHE_INTERLEAVE_SIZE, PAD_ID, BLOCK_SIZE,
            )  # fmt: skip
    finally:
        block_table.tl = language


def replace_slot_mapping() -> None:
    """Have vLLM's CPU platform take this for its replacement, which it looks up when a worker starts."""
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._compute_slot_mapping_kernel_impl = compute_slot_mapping
