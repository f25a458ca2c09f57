"""Windows between instances with unequal blocks: what came in part is handed over to nobody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from tests.support.geometry.world import Model, Side, instance
from vllm_pd_connector.geometry.bind import first_valid_tokens, pair, prefix_behind
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.manifest import GroupKind, Manifest
from vllm_pd_connector.geometry.plan import make_plan
from vllm_pd_connector.scheduler.leases.tables import LeasedTables

WINDOW = 64


def tables_of(block_tokens: int) -> LeasedTables:
    """Those of an instance with one windowed group."""
    spec = SlidingWindowSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=WINDOW
    )
    config: Any = SimpleNamespace(transfer_group_ids=(0,), transfer_groups=(SimpleNamespace(kv_cache_spec=spec),))
    return LeasedTables(config, 1)


def manifest_of(block_tokens: int) -> Manifest:
    [worker] = instance(Model(layers=1, heads=1, window=WINDOW), Side(block_tokens=block_tokens, num_blocks=32), "i")
    return worker.manifest


def blocks_at(tokens: int, block_tokens: int) -> list[int]:
    """vLLM's blocks of a request with so many tokens, null where the window has passed; of block i the id is i + 1."""
    first = max(0, tokens + 1 - WINDOW) // block_tokens
    return [0] * first + list(range(first + 1, -(-tokens // block_tokens) + 1))


def read(source: int, table: BlockTable, destination: int, tokens: int) -> tuple[int, int]:
    """Who goes on from `tokens` tokens reads them from this table: the first that comes, and the first from which on
    its first block is filled (0: all of that)."""
    [edge] = make_plan(manifest_of(destination), [manifest_of(source)]).edges
    ids = blocks_at(tokens, destination)
    ours = BlockTable.of(ids.count(0), ids[ids.count(0) :])
    paired = pair(edge, [table], [ours], ours.first_block * destination, tokens, late=True)
    first = min(int(((s.source_page - 1) * source + s.source_token).min()) for _, s in paired)
    return first, first_valid_tokens(paired).get(0, 0)


def least_prefix(table: BlockTable, block_tokens: int) -> int:
    return max(1, prefix_behind(GroupKind.SLIDING_WINDOW, WINDOW, table.begin * block_tokens))


@pytest.mark.parametrize("reader", [16, 32, 64])
@pytest.mark.parametrize("between", [32, 64, 128])
def test_nobody_reads_what_has_never_come(between: int, reader: int) -> None:
    """An instance with blocks of `between` receives from one with smaller ones, goes on, and is read from."""
    cut = handed = wrong = 0
    for prompt in range(90, 170, 5):
        _, filled_from = read(16, BlockTable.of(0, blocks_at(prompt, 16)), between, prompt)
        for num_tokens in range(prompt, prompt + 130, 9):
            tables, ids = tables_of(between), [blocks_at(num_tokens, between)]
            tables.follow("r")
            [whole] = tables.of("r", ids, num_tokens)
            behind = tables.came_in_part("r", {0: filled_from // between}) if filled_from else 0
            [table] = tables.of("r", ids, num_tokens)
            cut += table.begin > whole.begin
            least = least_prefix(table, between)
            assert least >= behind
            assert (least <= num_tokens) == (behind <= num_tokens), "the last position can be gone on from, or none"
            if least <= num_tokens:
                handed += 1
                for tokens in (least, (least + num_tokens) // 2, num_tokens):
                    assert read(between, table, reader, tokens)[0] >= filled_from
            wrong += read(between, whole, reader, least_prefix(whole, between))[0] < filled_from
    assert cut and handed and wrong, "without the cut what has never come would be read"


def test_what_a_request_has_received_is_forgotten_with_it() -> None:
    tables = tables_of(32)
    ids = [blocks_at(96, 32)]
    assert tables.came_in_part("r", {0: 1}) == 0, "nobody follows it"
    tables.follow("r")
    assert tables.came_in_part("r", {0: 1}) == 64 + WINDOW - 1
    assert tables.came_in_part("r", {0: 0}) == 32 + WINDOW - 1, "another rank's"
    assert [table.begin for table in tables.of("r", ids, 96)] == [2], "what some rank lacks counts"
    tables.over("r")
    assert [table.begin for table in tables.of("r", ids, 96)] == [1]
