"""One request between two instances of `world`, carried out and compared byte by byte."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.support.geometry.world import Model, Side, Worker, instance, table, write
from vllm_pd_connector.geometry.bind import Tail, first_valid_tokens, pair
from vllm_pd_connector.geometry.blocks import BlockTable, BlockTables
from vllm_pd_connector.geometry.plan import Edge, make_plan
from vllm_pd_connector.geometry.runs import Runs
from vllm_pd_connector.geometry.spans import runs_of


def copy(runs: Runs, source: Worker, destination: Worker) -> None:
    """Carry out runs as memcpy; anything outside the two segments is an error of the code under test."""
    a, b = source.manifest.segments[0], destination.manifest.segments[0]
    for from_, to, length in zip(runs.source.tolist(), runs.destination.tolist(), runs.length.tolist(), strict=True):
        from_, to = from_ - a.address, to - b.address
        assert length > 0 and from_ >= 0 and from_ + length <= a.length and to >= 0 and to + length <= b.length
        destination.memory[to : to + length] = source.memory[from_ : from_ + length]


def bind(edge: Edge, source: BlockTables, destination: BlockTables, start: int, stop: int, **how: Any) -> Runs:
    """The runs that move these tokens along an edge."""
    return runs_of(pair(edge, source, destination, start, stop, **how))


@dataclass
class Move:
    """One request between two instances; `run` executes it and compares every byte of every destination rank."""

    model: Model
    source: Side
    destination: Side
    start: int
    stop: int
    source_tables: list[BlockTable]
    destination_tables: list[BlockTable]
    tail: Tail = Tail.EXACT
    late_start: int = 0
    """What the source still holds begins here, and the destination's first block of a window may begin with it."""

    def run(self) -> None:
        sources = instance(self.model, self.source, "p-0")
        for worker in sources:
            write(self.model, self.source, worker, self.source_tables, worker.memory, 0, self.stop)
        first = max(self.start, self.late_start)
        for worker in instance(self.model, self.destination, "decode-1"):
            expected = worker.memory.copy()
            write(self.model, self.destination, worker, self.destination_tables, expected, first, self.stop)
            written = np.zeros(len(expected), dtype=np.int64)
            for edge in make_plan(worker.manifest, [s.manifest for s in sources]).edges:
                origin = next(s for s in sources if s.manifest.parallel.rank == edge.source)
                tables = self.source_tables, self.destination_tables
                late = self.late_start > 0
                paired = pair(edge, *tables, self.start, self.stop, tail=self.tail, late=late)
                assert first_valid_tokens(paired).get(0, first) == first
                runs = runs_of(paired)
                copy(runs, origin, worker)
                base = worker.manifest.segments[0].address
                for to, length in zip(runs.destination.tolist(), runs.length.tolist(), strict=True):
                    written[to - base : to - base + length] += 1
            wrong = np.flatnonzero(worker.memory != expected)
            assert not len(wrong), f"{self}\nrank {worker.manifest.parallel}: bytes {wrong[:20]} differ"
            assert written.max() <= 1, f"{self}: a byte was written {written.max()} times"


def blocks_for(tokens: int, block_tokens: int, num_blocks: int, seed: int, first: int = 1) -> BlockTable:
    """A scattered table that covers `tokens` tokens, of ids from `first` on."""
    needed = -(-tokens // block_tokens)
    ids = np.random.default_rng(seed).permutation(np.arange(first, num_blocks))[:needed]
    return BlockTable.of(0, ids.tolist())


def make_move(
    model: Model, source: Side, destination: Side, start: int, stop: int, tail: Tail = Tail.EXACT, seed: int = 0
) -> Move:
    """A request whose tables are as long as they must be and scattered; enough blocks are added to both sides."""
    tables = []
    sides = []
    for i, side in enumerate((source, destination)):
        blocks = -(-max(stop, 1) // side.block_tokens) + 2
        first = 3 if model.states else 1  # ids 1 and 2 hold the states
        side = replace(side, num_blocks=blocks + first)
        mine = [blocks_for(max(stop, 1), side.block_tokens, side.num_blocks, seed * 2 + i, first)]
        if model.states:
            mine.append(table(0, 1 + i))
        sides.append(side)
        tables.append(mine)
    if model.window:
        # The source forgot blocks that lie wholly before the window; the destination has none that it cannot fill.
        kept = max(0, stop - model.window) // source.block_tokens * source.block_tokens
        for side, mine in zip(sides, tables, strict=True):
            ids = mine[0].ids
            starts = np.arange(len(ids)) * side.block_tokens
            ids[(np.maximum(starts, start) if mine is tables[1] else starts) < kept] = 0
            mine[0] = table(*ids.tolist())
    return Move(model, sides[0], sides[1], start, stop, tables[0], tables[1], tail)
