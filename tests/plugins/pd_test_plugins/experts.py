"""A mixture of experts whose data-parallel engines share the experts, on the CPU.

Each layer gathers the tokens of all engines, computes with its own experts, and gives each engine the sum over its own
tokens. vLLM's communicator of the CPU lacks the two collectives for engines with unequal numbers of tokens; here they
are, over the ones that it has.

Source: vLLM 0.32, `AgRsAll2AllManager`; `all_gatherv` and `reduce_scatterv` of `DeviceCommunicatorBase`, which
`CpuCommunicator` leaves as they are: NotImplementedError.
"""

from __future__ import annotations

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def all_gatherv(
    self: CpuCommunicator, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """The rows of all ranks, one rank's after the other's; `sizes` are their numbers of rows."""
    if isinstance(input_, list):
        return [_gathered(self, one, dim, sizes) for one in input_]
    return _gathered(self, input_, dim, sizes)


def _gathered(self: CpuCommunicator, own: torch.Tensor, dim: int, sizes: list[int] | None) -> torch.Tensor:
    assert dim == 0
    sizes = sizes or [len(own)] * self.world_size
    padded = own.new_zeros((max(sizes), *own.shape[1:]))
    padded[: len(own)] = own
    found = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(found, padded, group=self.device_group)
    return torch.cat([one[:size] for one, size in zip(found, sizes, strict=True)])


def reduce_scatterv(
    self: CpuCommunicator, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """This rank's rows of the sum over all ranks."""
    assert dim == 0
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    summed = input_.clone()
    torch.distributed.all_reduce(summed, group=self.device_group)
    return summed.split(sizes)[self.rank_in_group]


def gather_unequal_numbers() -> None:
    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
