"""Experts that engines share, as the test plugins have them on the CPU: together they compute what one engine does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from pd_test_plugins.experts import all_gatherv, own_share, reduce_scatterv
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

EXPERTS, CHOSEN, WIDTH = 4, 2, 8
SIZES = [3, 5]
"""Tokens of each engine."""


def shares(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What each engine's layer has: its tokens, and by which experts they go."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(SIZES[rank], WIDTH, generator=generator)
    return tokens, torch.rand(SIZES[rank], EXPERTS, generator=generator).topk(CHOSEN).indices


def computed(tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """An expert multiplies by its scale; a token gets the weighted sum over its experts."""
    return tokens * (weights * scales[ids.long()]).sum(dim=1, keepdim=True)


def engine(rank: int, store: torch.distributed.Store) -> torch.Tensor:
    group = torch.distributed.ProcessGroupGloo(store, rank, len(SIZES), timedelta(seconds=60))
    communicator = SimpleNamespace(world_size=len(SIZES), rank_in_group=rank, device_group=group)
    tokens, ids = shares(rank)
    every, every_id = all_gatherv(communicator, [tokens, ids], 0, SIZES)
    expert_map = torch.tensor([0, 1, -1, -1] if rank == 0 else [-1, -1, 0, 1])
    weights, own = own_share(torch.full(every_id.shape, 1 / CHOSEN), every_id, expert_map)
    part = computed(every, own, weights, torch.arange(1.0, EXPERTS + 1)[expert_map >= 0])
    return reduce_scatterv(communicator, part, 0, SIZES)


def test_engines_with_unequal_numbers_of_tokens_compute_together_what_one_does() -> None:
    store = torch.distributed.HashStore()
    with ThreadPoolExecutor(len(SIZES)) as engines:
        found = list(engines.map(engine, range(len(SIZES)), [store] * len(SIZES)))
    for rank, answer in enumerate(found):
        tokens, ids = shares(rank)
        expected = computed(tokens, ids, torch.full(ids.shape, 1 / CHOSEN), torch.arange(1.0, EXPERTS + 1))
        assert torch.allclose(answer, expected)


def test_vllms_own_lack_what_the_plugin_brings() -> None:
    """Fails when vLLM's CPU backend has them: then `experts.py` can go."""
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    for name in ("all_gatherv", "reduce_scatterv"):
        assert getattr(CpuCommunicator, name) is getattr(DeviceCommunicatorBase, name)
    with pytest.raises(NotImplementedError):
        CpuCommunicator.all_gatherv(SimpleNamespace(), torch.zeros(1))
    assert "expert_map" not in CPUUnquantizedExperts.apply.__code__.co_names
