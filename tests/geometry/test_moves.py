"""Whatever the two sides look like, exactly the asked bytes arrive: real bytes, an oracle without strides."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.effort import examples
from tests.support.geometry.moves import moves, windows
from tests.support.geometry.numbers import write
from tests.support.geometry.request import Move, bind, copy, make_move
from tests.support.geometry.world import LAYOUTS, Model, Side, Worker, instance, legal, table
from vllm_pd_connector.geometry.bind import Tail
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.plan import make_plan
from vllm_pd_connector.geometry.topology import check_pd_topology
from vllm_pd_connector.geometry.validate import validate

PAIRS = [(h, a, b) for h, a, b in product(range(1, 9), repeat=3) if legal(h, a) and legal(h, b)]


@pytest.mark.parametrize("heads", range(1, 9))
def test_all_pairs_of_tensor_parallel_sizes(heads: int) -> None:
    for h, a, b in PAIRS:
        if h == heads:
            model = Model(layers=2, heads=heads, key=1, value=1)
            make_move(model, Side(tp=a, block_tokens=2), Side(tp=b, block_tokens=2), 1, 5).run()


@pytest.mark.parametrize("source", [*LAYOUTS, "CPU"])
@pytest.mark.parametrize("destination", [*LAYOUTS, "CPU"])
def test_all_pairs_of_layouts(source: str, destination: str) -> None:
    make_move(Model(heads=2), Side(layout=source), Side(layout=destination, block_tokens=6), 3, 11).run()


@settings(max_examples=examples(1200), deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(moves())
def test_exactly_the_asked_bytes_arrive(move: Move) -> None:
    ours = [w.manifest for w in instance(move.model, move.destination, "decode-1")]
    theirs = [w.manifest for w in instance(move.model, move.source)]
    for manifest in (*ours, *theirs):
        validate(manifest)
    assert check_pd_topology(ours, theirs).allowed and check_pd_topology(ours[0], theirs).allowed
    move.run()


@settings(max_examples=examples(600), deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(windows())
def test_a_window_gets_all_that_the_next_position_looks_at_from_blocks_of_any_size(move: Move) -> None:
    """And nothing before what the source still holds is written."""
    move.run()


@settings(max_examples=examples(200), deadline=None)
@given(moves(), st.lists(st.integers(0, 40), max_size=4))
def test_a_range_bound_in_steps_is_the_range_bound_at_once(move: Move, cuts: list[int]) -> None:
    source = [w.manifest for w in instance(move.model, move.source)]
    destination = instance(move.model, move.destination, "decode-1")[-1].manifest
    steps = [move.start, *sorted(cut for cut in cuts if move.start < cut < move.stop), move.stop]
    for edge in make_plan(destination, source).edges:
        args = move.source_tables, move.destination_tables
        once = bind(edge, *args, move.start, move.stop)
        parts = [bind(edge, *args, a, b, states=b == move.stop) for a, b in pairwise(steps)]
        moved = np.sort(np.concatenate([expand(r.source, r.destination, r.length) for r in parts]))
        assert (moved == np.sort(expand(once.source, once.destination, once.length))).all()


def expand(source: np.ndarray, destination: np.ndarray, length: np.ndarray) -> np.ndarray:
    """One complex number per byte: source + destination * j."""
    inside = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    return (np.repeat(source, length) + inside) + 1j * (np.repeat(destination, length) + inside)


@pytest.mark.parametrize("layout", ["CPU", "LBNHC", "BHLNC"])
def test_a_page_tail_moves_the_rest_of_the_last_page_and_nothing_else(layout: str) -> None:
    model, side = Model(heads=4), Side(layout=layout, block_tokens=8, ratio=1 if layout[0] == "B" else 2)
    exact = make_move(model, replace(side, tp=2), side, 0, 12)  # ends at a page boundary
    exact.run()
    for stop in (9, 10, 11, 12):
        sources = instance(model, exact.source)
        for worker in sources:
            write(model, exact.source, worker, exact.source_tables, worker.memory, 0, 12)
        worker = instance(model, exact.destination, "decode-1")[0]
        expected = worker.memory.copy()
        widened = 12 if exact.source.ratio == 2 else 16
        write(model, exact.destination, worker, exact.destination_tables, expected, 0, stop)
        runs = carry(exact, worker, sources, stop, Tail.PAGE)
        kept = written(model, exact, widened, worker)
        tail = written(model, exact, stop, worker)
        assert (worker.memory[tail] == expected[tail]).all()
        assert (worker.memory[~kept] == expected[~kept]).all()
        assert runs <= sum(len(bind(e, exact.source_tables, exact.destination_tables, 0, widened)) for e in make_plan(
            worker.manifest, [s.manifest for s in sources]).edges)  # fmt: skip


def carry(move: Move, worker: Worker, sources: list[Worker], stop: int, tail: Tail) -> int:
    count = 0
    for edge in make_plan(worker.manifest, [s.manifest for s in sources]).edges:
        runs = bind(edge, move.source_tables, move.destination_tables, 0, stop, tail=tail)
        copy(runs, sources[edge.source[2]], worker)
        count += len(runs)
    return count


def written(model: Model, move: Move, stop: int, worker: Worker) -> np.ndarray:
    """Which bytes of a destination belong to tokens before `stop`."""
    marks = [np.full(len(worker.memory), fill, dtype=np.uint8) for fill in (0, 255)]
    for memory in marks:
        write(model, move.destination, worker, move.destination_tables, memory, 0, stop)
    return marks[0] == marks[1]


def test_the_tail_of_a_larger_prefill_block_is_not_read() -> None:
    """Blocks of 8 to blocks of 4, five tokens: the second destination block gets one token, the rest stays."""
    make_move(Model(), Side(block_tokens=8), Side(block_tokens=4), 0, 5).run()


def test_prefix_hit_with_unequal_blocks_pairs_by_token_position() -> None:
    """nP=4, nD=16, 40 tokens of which 16 are cached on D: D's next tokens come from P's fifth block on."""
    model = Model(layers=1, heads=1)
    source, destination = Side(block_tokens=4, num_blocks=120), Side(block_tokens=16, num_blocks=12)
    theirs, ours = [table(*range(100, 110))], [table(4, 5, 6)]
    Move(model, source, destination, 16, 40, theirs, ours).run()
    suffix = [BlockTable.of(1, [5, 6])]  # the table without the cached block says the same
    Move(model, source, destination, 16, 40, theirs, suffix).run()


def test_states_move_once_from_the_last_block_whatever_the_range() -> None:
    model = Model(layers=2, heads=0, key=64, states=2)
    for start in (0, 7, 9):
        make_move(model, Side(tp=4, conv="SD"), Side(tp=2, block_tokens=6), start, 9).run()
