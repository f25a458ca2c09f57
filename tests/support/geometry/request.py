"""One request between two instances of `world`, carried out and compared byte by byte."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.geometry.numbers import write
from tests.support.geometry.world import Model, Side, Worker, instance, table, token_groups
from vllm_pd_connector.geometry.bind import Tail, first_valid_tokens, latest, pair
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

    def expected(self, worker: Worker) -> NDArray[np.uint8]:
        """A destination rank's memory when all has come."""
        memory = worker.memory.copy()
        tables, late = self.destination_tables, self.late_start
        write(self.model, self.destination, worker, tables, memory, self.start, self.stop, late=late)
        return memory

    @property
    def begins(self) -> list[int]:
        """Of each of the destination's groups of tokens the first that it gets, if it gets any."""
        groups = token_groups(self.model, self.destination)
        named = [
            table.begin * group.block_tokens for group, table in zip(groups, self.destination_tables, strict=False)
        ]
        late = [self.late_start if group.window else 0 for group in groups]
        return [max(self.start, *both) for both in zip(named, late, strict=True)]

    @property
    def late_starts(self) -> dict[int, int]:
        """As `first_valid_tokens` of all edges: groups whose first block gets its tokens from inside of it on."""
        groups = enumerate(zip(token_groups(self.model, self.destination), self.begins, strict=True))
        return {n: begin for n, (group, begin) in groups if begin > self.start and begin % group.block_tokens}

    def run(self) -> None:
        sources = instance(self.model, self.source, "p-0")
        for worker in sources:
            write(self.model, self.source, worker, self.source_tables, worker.memory, 0, self.stop)
        late = []
        for worker in instance(self.model, self.destination, "decode-1"):
            expected = self.expected(worker)
            written = np.zeros(len(expected), dtype=np.int64)
            for edge in make_plan(worker.manifest, [s.manifest for s in sources]).edges:
                origin = next(s for s in sources if s.manifest.parallel.rank == edge.source)
                tables = self.source_tables, self.destination_tables
                paired = pair(edge, *tables, self.start, self.stop, tail=self.tail, late=self.late_start > 0)
                late.append(first_valid_tokens(paired))
                runs = runs_of(paired)
                copy(runs, origin, worker)
                base = worker.manifest.segments[0].address
                for to, length in zip(runs.destination.tolist(), runs.length.tolist(), strict=True):
                    written[to - base : to - base + length] += 1
            wrong = np.flatnonzero(worker.memory != expected)
            assert not len(wrong), f"{self}\nrank {worker.manifest.parallel}: bytes {wrong[:20]} differ"
            assert written.max() <= 1, f"{self}: a byte was written {written.max()} times"
        assert latest(late) == self.late_starts, f"{self}"


def make_move(
    model: Model,
    source: Side,
    destination: Side,
    start: int,
    stop: int,
    tail: Tail = Tail.EXACT,
    seed: int = 0,
    *,
    late: bool = False,
) -> Move:
    """A request whose tables are as long as they must be and scattered; enough blocks are added to both sides.

    Of a window both sides have forgotten blocks that lie wholly before it. Unless what comes may begin `late` inside a
    block, the destination has none that it cannot fill.
    """
    looked = max(0, stop + late - model.window) if model.window else 0
    held = 0
    tables: list[list[BlockTable]] = []
    sides: list[Side] = []
    for i, side in enumerate((source, destination)):
        groups = token_groups(model, side)
        needed = [-(-max(stop, 1) // group.block_tokens) for group in groups]
        first = 3 if model.states else 1  # ids 1 and 2 hold the states
        side = replace(side, num_blocks=first + sum(needed) + 2)
        scattered = np.random.default_rng(seed * 2 + i).permutation(np.arange(first, side.num_blocks))
        mine = []
        for group, ids in zip(groups, np.split(scattered, np.cumsum(needed))[: len(groups)], strict=True):
            starts = np.arange(len(ids)) * group.block_tokens
            if group.window:
                gone = looked // group.block_tokens * group.block_tokens
                held = held if i else gone
                ids[starts < gone if late or not i else np.maximum(starts, start) < held] = 0
            mine.append(table(*ids.tolist()))
        if model.states:
            mine.append(table(0, 1 + i))
        sides.append(side)
        tables.append(mine)
    return Move(model, sides[0], sides[1], start, stop, tables[0], tables[1], tail, held if late else 0)
