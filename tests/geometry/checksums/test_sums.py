"""Sums agree between any two sides that hold the same, and no accident hides in them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.geometry.moves import moves, windows
from tests.support.geometry.request import Move, make_move
from tests.support.geometry.world import Model, Side
from tests.support.geometry.written import written
from vllm_pd_connector.errors import BindError
from vllm_pd_connector.geometry.checksums import digest
from vllm_pd_connector.geometry.checksums.sums import Checksum, checksums, common_starts, difference
from vllm_pd_connector.geometry.manifest import Manifest
from vllm_pd_connector.geometry.plan import make_plan


def both_sides(move: Move) -> tuple[list[list[Checksum]], list[Checksum]]:
    """Per destination worker its sums, and the sums of all source workers."""
    starts = [move.start] * len(move.source_tables)
    sides = []
    for side, tables, engine in (
        (move.destination, move.destination_tables, "d-1"),
        (move.source, move.source_tables, "p-0"),
    ):
        workers = written(move, side, tables, engine)
        sides.append([checksums(w.manifest, [w.memory], tables, starts, move.stop) for w in workers])
    return sides[0], [one for worker in sides[1] for one in worker]


@settings(max_examples=100, deadline=None)
@given(moves(contexts=False) | windows(contexts=False))
def test_equal_contents_have_equal_sums_on_any_two_sides(move: Move) -> None:
    """Each group is summed from the first token on that it was to get; of a window that is a later one."""
    sources = written(move, move.source, move.source_tables, "p-0")
    begins = [min(begin, move.stop) for begin in move.begins] + [move.start] * bool(move.model.states)
    for worker in written(move, move.destination, move.destination_tables, "d-1"):
        plan = make_plan(worker.manifest, [source.manifest for source in sources])
        ours, theirs = common_starts(begins, plan, move.stop)
        mine = checksums(worker.manifest, [worker.memory], move.destination_tables, ours, move.stop)
        found = [checksums(w.manifest, [w.memory], move.source_tables, theirs, move.stop) for w in sources]
        assert difference(mine, [one for worker in found for one in worker]) == ""


MODEL = Model(layers=2, heads=4)


@pytest.mark.parametrize("layout", ["NHD", "HND", "CPU", "BHLNC"])
def test_a_changed_byte_inside_the_range_is_found_and_one_outside_is_not(layout: str) -> None:
    move = make_move(MODEL, Side(tp=2), Side(layout=layout, block_tokens=6), 0, 11)
    _, sources = both_sides(move)
    (worker,) = written(move, move.destination, move.destination_tables, "d-1")
    block = int(move.destination_tables[0].ids[1])  # tokens 6 to 11
    for (layer, role), index in worker.where.items():
        for slot, found in ((2, True), (5, False)):
            at = index[block, slot, 3, 1, 1]
            worker.memory[at] ^= 1
            text = difference(checksums(worker.manifest, [worker.memory], move.destination_tables, [0], 11), sources)
            worker.memory[at] ^= 1
            assert text == (f"{layer} {role} index 3 differs from the prefill side's (1 of 4)" if found else "")


def test_exchanged_tokens_are_found() -> None:
    move = make_move(MODEL, Side(), Side(), 0, 8)
    _, sources = both_sides(move)
    (worker,) = written(move, move.destination, move.destination_tables, "d-1")
    block = int(move.destination_tables[0].ids[0])
    index = next(iter(worker.where.values()))
    first, second = index[block, 0], index[block, 1]
    worker.memory[first], worker.memory[second] = worker.memory[second].copy(), worker.memory[first].copy()
    assert "differs" in difference(
        checksums(worker.manifest, [worker.memory], move.destination_tables, [0], 8), sources
    )


def test_what_no_source_has_is_told() -> None:
    mine = [Checksum("l", "key", 0, np.array([1, 2], dtype=np.uint64))]
    theirs = [Checksum("l", "key", 1, np.array([2, 3], dtype=np.uint64)), Checksum("l", "value", 0, mine[0].values)]
    assert difference(mine, theirs) == "l key index 0 is not known to the prefill side (1 of 2)"
    assert difference(mine, [*theirs, Checksum("l", "key", 0, np.array([1], dtype=np.uint64))]) == ""
    assert difference(mine, theirs, {"l"}) == "", "nobody has what a drafter of ours alone has cached"


def test_every_replica_must_agree() -> None:
    one, two = (np.array([n], dtype=np.uint64) for n in (1, 2))
    assert "differs" in difference(
        [Checksum("l", "key", 0, one)], [Checksum("l", "key", 0, one), Checksum("l", "key", 0, two)]
    )


def test_memory_that_must_be_gathered_has_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    move = make_move(MODEL, Side(tp=2), Side(layout="BHLNC", block_tokens=6), 3, 11)
    (worker,) = written(move, move.destination, move.destination_tables, "d-1")

    class Gathered:
        def gather(self, offset: int, stride: int, extent: int, pages: np.ndarray) -> np.ndarray:
            assert 0 < len(pages) <= 2, "what is gathered at once takes a device's memory, which nobody has counted"
            return np.stack([worker.memory[offset + page * stride :][:extent] for page in pages])

    monkeypatch.setattr(digest, "PAGES_AT_ONCE", 2)
    direct, gathered = (
        checksums(worker.manifest, [memory], move.destination_tables, [3], 11) for memory in (worker.memory, Gathered())
    )
    assert difference(direct, gathered) == "" and len(direct) == len(gathered)


def test_a_range_that_goes_beyond_the_blocks_is_refused_before_it_takes_memory() -> None:
    move = make_move(MODEL, Side(tp=2), Side(block_tokens=6), 0, 11)
    (worker,) = written(move, move.destination, move.destination_tables, "d-1")
    checksums(worker.manifest, [worker.memory], move.destination_tables, [0], 12)
    with pytest.raises(BindError, match="up to token 13, the blocks end at token 12"):
        checksums(worker.manifest, [worker.memory], move.destination_tables, [0], 13)


def test_starts_of_another_number_of_groups_are_refused() -> None:
    move = make_move(MODEL, Side(), Side(), 0, 11)
    (worker,) = written(move, move.destination, move.destination_tables, "d-1")
    for starts in ([], [0, 0]):
        with pytest.raises(BindError, match=f"from {len(starts)} starts, this side has 1 groups"):
            checksums(worker.manifest, [worker.memory], move.destination_tables, starts, 11)


def one_group_a_layer(manifest: Manifest) -> Manifest:
    """The same caches, as another layout or a drafter beside them lets vLLM group them."""
    layers = list(dict.fromkeys(tensor.layer for tensor in manifest.tensors))
    tensors = [msgspec.structs.replace(tensor, group=layers.index(tensor.layer)) for tensor in manifest.tensors]
    return msgspec.structs.replace(manifest, groups=manifest.groups * len(layers), tensors=tuple(tensors))


@pytest.mark.parametrize(
    ("grouped", "starts", "summed"),
    [("source", [3], ([3], [3, 3])), ("destination", [3, 5], ([5, 5], [5])), ("both", [3, 5], ([3, 5], [3, 5]))],
)
def test_layers_that_are_grouped_otherwise_are_summed_from_the_same_token_on(grouped, starts, summed) -> None:
    move = make_move(MODEL, Side(), Side(layout="HND", block_tokens=6), 3, 11)
    (mine,) = written(move, move.destination, move.destination_tables, "d-1")
    (other,) = written(move, move.source, move.source_tables, "p-0")
    sides = []
    for worker, tables, side in (
        (mine, move.destination_tables, "destination"),
        (other, move.source_tables, "source"),
    ):
        apart = grouped in (side, "both")
        manifest = one_group_a_layer(worker.manifest) if apart else worker.manifest
        sides.append((manifest, worker.memory, tables * 2 if apart else tables))
    plan = make_plan(sides[0][0], [sides[1][0]])
    found = common_starts(starts, plan, move.stop)
    assert found == summed
    sums = [
        checksums(manifest, [memory], tables, from_, move.stop)
        for (manifest, memory, tables), from_ in zip(sides, found, strict=True)
    ]
    assert difference(*sums) == ""


def test_a_group_of_which_nothing_is_brought_is_not_summed() -> None:
    move = make_move(MODEL, Side(), Side(), 3, 11)
    (mine,) = written(move, move.destination, move.destination_tables, "d-1")
    (other,) = written(move, move.source, move.source_tables, "p-0")
    one = [tensor for tensor in mine.manifest.tensors if tensor.layer == mine.manifest.tensors[0].layer]
    plan = make_plan(msgspec.structs.replace(mine.manifest, tensors=tuple(one)), [one_group_a_layer(other.manifest)])
    assert common_starts([3], plan, 11) == ([3], [3, 11])
