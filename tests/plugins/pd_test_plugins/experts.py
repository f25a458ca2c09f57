"""A mixture of experts whose data-parallel engines share the experts, on the CPU.

Each layer gathers the tokens of all engines, computes with its own experts, and gives each engine the sum over its own
tokens. Two things lack in vLLM's CPU backend: the collectives for engines with unequal numbers of tokens, and experts
that leave out what others compute (`cpu_moe.py` takes global numbers of experts for its own, and reads beyond its
weights). Named by `--worker-cls`, so that it is imported only where workers run.

Source: vLLM 0.32, `AgRsAll2AllManager`; `all_gatherv` and `reduce_scatterv` of `DeviceCommunicatorBase`, which
`CpuCommunicator` leaves as they are (NotImplementedError); `CPUUnquantizedExperts.apply`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.v1.worker.cpu_worker import CPUWorker


def all_gatherv(
    self: Any, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """The rows of all ranks, one rank's after the other's; `sizes` are their numbers of rows."""
    if isinstance(input_, list):
        return [_gathered(self, one, dim, sizes) for one in input_]
    return _gathered(self, input_, dim, sizes)


def _gathered(self: Any, own: torch.Tensor, dim: int, sizes: list[int] | None) -> torch.Tensor:
    assert dim == 0
    sizes = sizes or [len(own)] * self.world_size
    padded = own.new_zeros((max(sizes), *own.shape[1:]))
    padded[: len(own)] = own
    found = [torch.empty_like(padded) for _ in sizes]
    self.device_group.allgather([found], [padded]).wait()
    return torch.cat([one[:size] for one, size in zip(found, sizes, strict=True)])


def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """This rank's rows of the sum over all ranks."""
    assert dim == 0
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    summed = input_.clone()
    self.device_group.allreduce([summed]).wait()
    return summed.split(sizes)[self.rank_in_group]


def own_share(
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and numbers of experts [tokens, chosen] as this rank has them: what others compute weighs nothing.
    `expert_map` has the rank's own number for each expert, and -1 for those of others."""
    own = expert_map[topk_ids.long()].to(topk_ids.dtype)
    return torch.where(own >= 0, topk_weights, 0.0), own.clamp(min=0)


_apply = CPUUnquantizedExperts.apply


def apply(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    *rest: Any,
    **named: Any,
) -> None:
    if expert_map is not None:
        topk_weights, topk_ids = own_share(topk_weights, topk_ids, expert_map)
    _apply(
        self,
        output,
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation,
        global_num_experts,
        None,
        *rest,
        **named,
    )


class SharedExpertsWorker(CPUWorker):
    """CPUWorker whose engines can share experts."""

    def init_device(self) -> None:
        CpuCommunicator.all_gatherv = all_gatherv
        CpuCommunicator.reduce_scatterv = reduce_scatterv
        CPUUnquantizedExperts.apply = apply
        super().init_device()
