"""Where vLLM's own kernel puts tokens under decode context parallelism is where manifests say that they are."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from pd_test_plugins.slot_mapping import compute_slot_mapping

from vllm_pd_connector.geometry.bind import pages_of
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.interleave import holds, local_position
from vllm_pd_connector.geometry.manifest import WHOLE, TokenShare
from vllm_pd_connector.geometry.plan import Paging

PAD = -1
IDS = [[5, 2, 9, 7, 1, 11, 3], [4, 8, 6]]
TOKENS = [(3, 90), (0, 41)]
"""Of two requests: blocks, and the tokens that a step computes."""


@pytest.mark.parametrize(
    ("size", "slots", "interleave"),
    [c for c in product((1, 2, 3, 8), (16, 48), (1, 4, 16, 48)) if c[1] % c[2] == 0],
)
@pytest.mark.parametrize("pages", [1, 2])
def test_every_token_lies_in_the_slot_that_vllm_gives_it(size: int, slots: int, interleave: int, pages: int) -> None:
    counts = [stop - start for start, stop in TOKENS]
    starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    positions = torch.cat([torch.arange(start, stop) for start, stop in TOKENS])
    table = torch.zeros((2, 16), dtype=torch.int32)
    for row, ids in zip(table, IDS, strict=True):
        row[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
    room = len(positions) + 5
    for rank in range(size):
        mapping = torch.full((room,), 7, dtype=torch.int64)
        compute_slot_mapping(
            len(positions), room, starts, positions, table, table.stride(0), mapping, slots, size, rank, interleave,
            PAD, 1024,
        )  # fmt: skip
        share = TokenShare(rank, size, interleave) if size > 1 else WHOLE
        paging = Paging(0, slots // pages, pages, 0, share)
        expected = []
        for ids, (start, stop) in zip(IDS, TOKENS, strict=True):
            tokens = np.arange(start, stop)
            page, absent = pages_of(paging, BlockTable.of(0, ids), tokens)
            slot = page * paging.page_tokens + local_position(share, tokens) % paging.page_tokens
            held = holds(share, tokens)
            assert not absent[held].any()
            expected += np.where(held, slot, PAD).tolist()
        assert mapping.tolist() == [*expected, *[PAD] * 5]
