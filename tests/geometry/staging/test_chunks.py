"""By way of the staging buffer arrive exactly the bytes that arrive directly: real bytes, every byte of every
destination."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.effort import examples
from tests.support.geometry.moves import moves, windows
from tests.support.geometry.numbers import write
from tests.support.geometry.request import Move, bind, copy, make_move
from tests.support.geometry.world import LAYOUTS, Model, Side, Worker, instance, legal, table
from vllm_pd_connector.geometry.bind import Tail, pair
from vllm_pd_connector.geometry.plan import Edge, LayerBatch, Paging, StridedAxis, TensorSlice, make_plan
from vllm_pd_connector.geometry.spans import runs_of
from vllm_pd_connector.geometry.staging import chunks as chunks_module
from vllm_pd_connector.geometry.staging import strided_copy
from vllm_pd_connector.geometry.staging.chunks import RUN_COST_BYTES, Chunk, chunks, split
from vllm_pd_connector.geometry.staging.strided_copy import Copy

PLENTY = 1 << 30


def places(part: Copy) -> tuple[np.ndarray, np.ndarray]:
    """Every byte of a copy, in the staging buffer and in the cache."""
    assert part.total_bytes <= strided_copy.COPY_BYTES or not part.axes
    assert all(size > 1 and a > 0 and b > 0 for size, a, b in part.axes), "torch has no negative strides"
    found = np.zeros((2, *(size for size, _, _ in part.axes), part.item), dtype=np.int64)
    for i, strides in enumerate(([*(a for _, a, _ in part.axes), 1], [*(b for _, _, b in part.axes), 1])):
        for axis, stride in enumerate(strides):
            shape = [-1 if j == axis else 1 for j in range(len(strides))]
            found[i] += np.arange(found.shape[1 + axis]).reshape(shape) * stride
    return found[0].ravel() + part.staging, found[1].ravel() + part.cache


def inside(address: int, length: int, worker: Worker) -> slice:
    """These addresses in a worker's memory."""
    [segment] = worker.manifest.segments
    first = address - segment.address
    assert length > 0 and first >= 0 and first + length <= segment.length
    return slice(first, first + length)


def carry_out(chunk: Chunk, source: Worker, destination: Worker, limit: int, written: np.ndarray) -> None:
    """A chunk as a worker carries it out; what is written to the destination is counted in `written`."""
    assert 0 < chunk.size <= limit
    staging = np.full(chunk.size, 0xEE, dtype=np.uint8)
    filled = np.zeros(chunk.size, dtype=np.int64)
    of_cache = (source if chunk.writes else destination).manifest.segments[0].address
    if chunk.writes:
        for part in chunk.copies:
            to, from_ = places(part)
            staging[to] = source.memory[from_ - of_cache]
            np.add.at(filled, to, 1)
        assert (filled == 1).all(), "the staging buffer holds what is written and nothing else"
    runs = chunk.runs
    for from_, to, length in zip(runs.source.tolist(), runs.destination.tolist(), runs.length.tolist(), strict=True):
        if chunk.writes:
            assert from_ >= 0 and from_ + length <= chunk.size
            there = inside(to, length, destination)
            destination.memory[there] = staging[from_ : from_ + length]
            written[there] += 1
        else:
            assert to >= 0 and to + length <= chunk.size
            staging[to : to + length] = source.memory[inside(from_, length, source)]
    if not chunk.writes:
        for part in chunk.copies:
            from_, to = places(part)
            destination.memory[to - of_cache] = staging[from_]
            np.add.at(written, to - of_cache, 1)


@pytest.fixture(params=[False, True], ids=["reads", "writes"])
def writes(request: pytest.FixtureRequest) -> bool:
    return request.param


def run(
    move: Move, limit: int = PLENTY, *, forced: bool = True, writes: bool = False, cost: int = RUN_COST_BYTES
) -> None:
    """Execute a move and compare every byte; with `forced` everything is staged, else what pays."""
    sources = instance(move.model, move.source, "p-0")
    for worker in sources:
        write(move.model, move.source, worker, move.source_tables, worker.memory, 0, move.stop)
    for worker in instance(move.model, move.destination, "decode-1"):
        expected, late = move.expected(worker), move.late_start > 0
        written = np.zeros(len(expected), dtype=np.int64)
        args = move.source_tables, move.destination_tables, move.start, move.stop
        for edge in make_plan(worker.manifest, [s.manifest for s in sources]).edges:
            origin = next(s for s in sources if s.manifest.parallel.rank == edge.source)
            direct, staged = (
                (replace(edge, pairings=()), edge) if forced else split(edge, limit, writes=writes, run_cost=cost)
            )
            runs = runs_of(pair(direct, *args, tail=move.tail, late=late))
            copy(runs, origin, worker)
            for to, length in zip(runs.destination.tolist(), runs.length.tolist(), strict=True):
                to -= worker.manifest.segments[0].address
                written[to : to + length] += 1
            for chunk in chunks(pair(staged, *args, tail=move.tail, late=late), limit, writes=writes, run_cost=cost):
                assert chunk.writes is writes
                carry_out(chunk, origin, worker, limit, written)
        wrong = np.flatnonzero(worker.memory != expected)
        assert not len(wrong), f"{move}\nrank {worker.manifest.parallel}: bytes {wrong[:20]} differ"
        assert written.max() <= 1, f"{move}: a byte was written {written.max()} times"


@pytest.fixture(params=[0, 1 << 20], ids=["gaps are not read", "gaps are read"])
def run_cost(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("source", [*LAYOUTS, "CPU"])
@pytest.mark.parametrize("destination", [*LAYOUTS, "CPU"])
def test_all_pairs_of_layouts(source: str, destination: str, run_cost: int, writes: bool) -> None:
    move = make_move(Model(heads=2), Side(layout=source), Side(layout=destination, block_tokens=6), 3, 11)
    run(move, writes=writes, cost=run_cost)


@pytest.mark.parametrize("heads", [2, 4, 6, 8])
def test_all_pairs_of_tensor_parallel_sizes(heads: int, writes: bool) -> None:
    for a, b in product(range(1, 9), repeat=2):
        if legal(heads, a) and legal(heads, b):
            model = Model(layers=2, heads=heads, key=1, value=1)
            for sides in (("NHD", "HND"), ("HND", "NHD")):
                p, d = Side(tp=a, block_tokens=2, layout=sides[0]), Side(tp=b, block_tokens=3, layout=sides[1])
                run(make_move(model, p, d, 1, 5), writes=writes)


@pytest.mark.parametrize("interleave", [1, 2])
def test_nothing_is_written_between_tokens_where_other_ranks_write_theirs(interleave: int) -> None:
    """Two ranks take turns with the tokens of pages that are one rank's on the other side."""
    model = Model(layers=2, heads=0, key=4)
    source, destination = Side(tp=2, dcp=2, block_tokens=8, interleave=interleave), Side(block_tokens=8, layout="HND")
    run(make_move(model, source, destination, 0, 29), writes=True)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(windows(), st.booleans())
def test_a_window_that_begins_late_in_a_larger_block_is_converted_like_the_rest(move: Move, writes: bool) -> None:
    run(move, writes=writes)


@settings(max_examples=examples(500), deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(moves(), st.sampled_from([0, 12, 1 << 20]), st.booleans(), st.booleans())
def test_exactly_the_asked_bytes_arrive(move: Move, cost: int, forced: bool, writes: bool) -> None:
    run(move, forced=forced, writes=writes, cost=cost)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(
    moves(),
    st.sampled_from([0, 12, 1 << 20]),
    st.integers(1, 4000),
    st.integers(2, 200),
    st.integers(1, 40),
    st.booleans(),
)
def test_a_small_staging_buffer_small_copies_and_few_runs_change_nothing(
    move: Move, cost: int, limit: int, most: int, runs: int, writes: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strided_copy, "COPY_BYTES", most)
        patch.setattr(chunks_module, "MOST_RUNS", runs)
        run(move, limit, forced=False, writes=writes, cost=cost)


def only_edge(model: Model, source: Side, destination: Side) -> Edge:
    [worker], [origin] = instance(model, destination, "decode-1"), instance(model, source)
    [edge] = make_plan(worker.manifest, [origin.manifest]).edges
    return edge


REAL = Model(layers=4, heads=8, key=128, value=128)
NHD = Side(layout="NHD", block_tokens=16, num_blocks=3)


def staged_families(source: Side, destination: Side, model: Model = REAL, limit: int = PLENTY) -> int:
    return len(split(only_edge(model, source, destination), limit)[1].pairings)


@pytest.mark.parametrize("layout", ["HND", "CPU", "BHLNC", "LHBNC"])
def test_runs_of_one_token_are_staged(layout: str) -> None:
    assert staged_families(NHD, replace(NHD, layout=layout)) == 1
    assert staged_families(replace(NHD, layout=layout), NHD) == 1


@pytest.mark.parametrize("layout", [*LAYOUTS, "CPU"])
def test_equal_layouts_move_directly(layout: str) -> None:
    side = replace(NHD, layout=layout)
    assert staged_families(side, side) == 0


def test_other_block_sizes_move_directly_where_their_runs_are_long() -> None:
    assert staged_families(NHD, replace(NHD, block_tokens=64)) == 0
    assert staged_families(replace(NHD, block_tokens=64), NHD) == 0
    hnd = replace(NHD, layout="HND")
    assert staged_families(hnd, replace(hnd, block_tokens=128)) == 1
    assert staged_families(replace(hnd, block_tokens=128), replace(hnd, block_tokens=64)) == 0


def test_pages_that_the_staging_buffer_cannot_take_move_directly() -> None:
    page = 16 * 8 * 2 * 128 * 2
    other = replace(NHD, layout="HND")
    assert staged_families(NHD, other, limit=page) == 1
    assert staged_families(NHD, other, limit=page - 1) == 0
    assert staged_families(NHD, other, limit=0) == 0


def test_a_page_of_all_layers_is_one_copy_and_consecutive_pages_are_one_read_per_layer() -> None:
    move = make_move(REAL, NHD, replace(NHD, layout="HND"), 0, 64)
    move.source_tables, move.destination_tables = [table(1, 2, 3, 4)], [table(5, 3, 1, 2)]
    edge = only_edge(REAL, move.source, move.destination)
    [chunk] = chunks(pair(edge, move.source_tables, move.destination_tables, 0, 64), PLENTY)
    assert len(chunk.runs) == 4 and chunk.size == chunk.runs.total_bytes == 64 * 4 * 8 * 512
    assert [part.item for part in chunk.copies] == [512] * 3
    sizes = [tuple(size for size, _, _ in part.axes) for part in chunk.copies]
    assert sizes == [(4, 8, 16), (4, 8, 16), (4, 2, 8, 16)]  # the last two pages follow each other on both sides


def sizes_of(layers: int, runs: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Runs of each chunk of four pages that do not follow each other, of which every layer is one run."""
    monkeypatch.setattr(chunks_module, "MOST_RUNS", runs)
    model = replace(REAL, layers=layers)
    move = make_move(model, NHD, replace(NHD, layout="HND"), 0, 64)
    move.source_tables, move.destination_tables = [table(6, 1, 5, 3)], [table(5, 3, 1, 2)]
    edge = only_edge(model, move.source, move.destination)
    made = list(chunks(pair(edge, move.source_tables, move.destination_tables, 0, 64), PLENTY))
    assert sum(chunk.size for chunk in made) == 64 * layers * 8 * 512
    return [len(chunk.runs) for chunk in made]


def test_a_chunk_has_a_bounded_number_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sizes_of(4, 4 * 4, monkeypatch) == [16]
    assert sizes_of(4, 4 * 4 - 1, monkeypatch) == [12, 4], "as many pages as have so many"
    assert sizes_of(4, 4, monkeypatch) == [4] * 4
    assert sizes_of(4, 3, monkeypatch) == [2] * 8, "a page of half of the layers"
    assert sizes_of(3, 1, monkeypatch) == [1] * 12, "a page of one layer at least"


def test_a_page_that_holds_all_layers_side_by_side_is_one_read() -> None:
    source = replace(NHD, layout="BLNHC")
    move = make_move(REAL, source, replace(NHD, layout="HND"), 0, 48)
    move.source_tables = [table(1, 2, 4)]
    edge = only_edge(REAL, move.source, move.destination)
    [chunk] = chunks(pair(edge, move.source_tables, move.destination_tables, 0, 48), PLENTY)
    assert (chunk.runs.length / (16 * 4 * 8 * 512)).tolist() == [2, 1]


def test_only_the_wanted_tokens_of_a_page_are_read_where_they_lie_together() -> None:
    move = make_move(REAL, replace(NHD, block_tokens=128), replace(NHD, layout="HND"), 16, 24)
    edge = only_edge(REAL, move.source, move.destination)
    [chunk] = chunks(pair(edge, move.source_tables, move.destination_tables, 16, 24), PLENTY)
    assert chunk.runs.total_bytes == 8 * 4 * 8 * 512


def test_of_heads_that_are_not_needed_only_small_gaps_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of eight heads: the others lie in gaps of 3 KiB in a token-major page."""
    sources = instance(REAL, NHD)
    worker = instance(REAL, replace(NHD, tp=4, layout="HND"), "decode-1")[1]
    [edge] = make_plan(worker.manifest, [sources[0].manifest]).edges
    move = make_move(REAL, NHD, replace(NHD, layout="HND"), 0, 16)
    move.source_tables = move.destination_tables = [table(1)]
    [chunk] = chunks(pair(edge, move.source_tables, move.destination_tables, 0, 16), PLENTY)
    assert len(chunk.runs) == 4
    assert sum(part.total_bytes for part in chunk.copies) == 4 * 16 * 2 * 512


def test_a_page_tail_is_staged_like_it_is_bound() -> None:
    """Equal pages move whole although the range ends inside; other pages are cut."""
    for layout, widened in (("CPU", 12), ("NHD", 9)):
        move = make_move(Model(heads=2), Side(layout="CPU", block_tokens=6), Side(layout=layout, block_tokens=6), 0, 9)
        edge = only_edge(move.model, move.source, move.destination)
        args = move.source_tables, move.destination_tables, 0, 9
        moved = sum(p.total_bytes for c in chunks(pair(edge, *args, tail=Tail.PAGE), PLENTY) for p in c.copies)
        assert moved == bind(edge, *args, tail=Tail.PAGE).total_bytes == widened * 2 * 2 * 8


@pytest.mark.parametrize(("second", "staged"), [(4, 1), (20, 0)], ids=["side by side", "interleaved"])
def test_pages_whose_tokens_would_lie_unevenly_in_the_staging_buffer_are_not_staged(second: int, staged: int) -> None:
    """Four pieces of two bytes per token, apart on the prefill side, two and two together on the decode side; there the
    second pair begins behind the first, or in the middle of its tokens."""
    edge = only_edge(Model(layers=1, heads=1), Side(), Side())
    token, one = StridedAxis(4, 2, 8), np.zeros(1, dtype=np.int64)
    places = [(0, 0), (100, 2), (200, second), (300, second + 2)]
    batch = LayerBatch(tuple(TensorSlice(a, b, 2, token, ()) for a, b in places), ("layers.0.attn",), one, one)
    pairing = replace(edge.pairings[0], source=Paging(0, 4, 1, 400), batches=(batch,), alike=False)
    pairing = replace(pairing, destination=Paging(0, 4, 1, 64))
    assert len(split(replace(edge, pairings=(pairing,)), PLENTY, writes=True)[1].pairings) == staged


def test_a_rank_that_writes_its_heads_between_others_writes_them_token_by_token() -> None:
    """Two of four heads into token-major pages: both in one run, and nothing of the other two."""
    sources, destination = instance(REAL, replace(NHD, tp=2, layout="HND")), instance(REAL, NHD, "decode-1")[0]
    move = make_move(REAL, replace(NHD, layout="HND"), NHD, 0, 16)
    move.source_tables = move.destination_tables = [table(1)]
    edge = make_plan(destination.manifest, [s.manifest for s in sources]).edges[1]
    direct, staged = split(edge, PLENTY, writes=True)
    assert not direct.pairings
    [chunk] = chunks(pair(staged, move.source_tables, move.destination_tables, 0, 16), PLENTY, writes=True)
    assert chunk.runs.length.tolist() == [4 * 512] * 16 * REAL.layers
    assert chunk.size == chunk.runs.total_bytes == sum(part.total_bytes for part in chunk.copies)
    assert len(list(chunk.copies)) == 1


def test_a_rank_writes_directly_where_staging_would_save_no_run() -> None:
    """Its heads lie together in both sides' token-major pages, between those of others on the decode side."""
    [destination] = instance(REAL, NHD, "decode-1")
    edges = make_plan(destination.manifest, [w.manifest for w in instance(REAL, replace(NHD, tp=2))]).edges
    for edge in edges:
        assert len(split(edge, PLENTY, writes=True)[0].pairings) == 1
