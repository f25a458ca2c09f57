"""What decode-context parallel ranks combine of their shares of a cache is the attention over all of it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pd_test_plugins import reference_attention
from pd_test_plugins.reference_attention import ReferenceAttention

PAGE, HEADS, SIZE = 4, 2, 8


def rank_of(rank: int, ranks: int, interleave: int) -> Any:
    one: Any = object.__new__(ReferenceAttention)
    one.dcp_world_size, one.dcp_rank, one.sliding_window, one.scale = ranks, rank, -1, 0.3
    one.head_size, one.num_queries_per_kv, one.kv_cache_dtype = SIZE, HEADS, "auto"
    one._parallel = SimpleNamespace(cp_kv_cache_interleave_size=interleave)
    return one


@pytest.mark.parametrize("interleave", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("tokens", "queries"), [(23, 1), (23, 7), (2, 2)], ids=["decode", "chunk", "less than all"])
def test_shares_combined_are_the_whole(
    ranks: int, interleave: int, tokens: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    cached = torch.randn(1, tokens, 2 * SIZE)
    heads = torch.randn(ranks, queries, HEADS, SIZE)
    given: list[Any] = [None] * ranks
    turn = threading.Barrier(ranks)

    def from_all(tensor: torch.Tensor) -> list[torch.Tensor]:
        given[int(threading.current_thread().name.rpartition("_")[2])] = tensor
        turn.wait(60)
        found = list(given)
        turn.wait(60)
        return found

    def attend(_: int) -> tuple[int, torch.Tensor]:
        rank = int(threading.current_thread().name.rpartition("_")[2])
        turn.wait(60)  # every thread takes one of the calls
        held = [t for t in range(tokens) if t // interleave % ranks == rank]
        pages = torch.zeros(9, 1, PAGE, 2 * SIZE)
        for slot, token in enumerate(held):
            pages[8 - slot // PAGE, 0, slot % PAGE] = cached[0, token]
        one = rank_of(rank, ranks, interleave)
        return rank, one._attended_in_group(heads[rank], pages, torch.arange(8, -1, -1), tokens)

    monkeypatch.setattr(reference_attention, "_from_all", from_all)
    # The math library chooses its `exp` at its first use: threads that race for it get one good to 1e-10 now and then.
    torch.ones(64, dtype=torch.float64).exp().log()
    with ThreadPoolExecutor(ranks, "rank") as pool:
        found = dict(pool.map(attend, range(ranks)))
    whole = torch.zeros(9, 1, PAGE, 2 * SIZE)
    for token in range(tokens):
        whole[token // PAGE, 0, token % PAGE] = cached[0, token]
    for rank in range(ranks):
        alone = rank_of(0, 1, 1)._attended(heads[rank], whole, torch.arange(9), tokens)
        torch.testing.assert_close(found[rank], alone, rtol=0, atol=1e-12)
