"""Digests see elements, not layouts: equal contents agree between any two sides, a changed element never hides."""

import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.geometry.mismatches import mismatches
from tests.support.geometry.moves import moves
from tests.support.geometry.numbers import write
from tests.support.geometry.request import Move, make_move
from tests.support.geometry.world import Model, Side, instance, table
from tests.support.geometry.written import written
from vllm_pd_connector.errors import BindError
from vllm_pd_connector.geometry.checksums.digest import digests


@settings(max_examples=150, deadline=None)
@given(moves())
def test_equal_contents_have_equal_digests_on_any_two_sides(move: Move) -> None:
    sides, start = [], min(move.stop, max(move.begins))
    for side, tables, engine in (
        (move.source, move.source_tables, "p-0"),
        (move.destination, move.destination_tables, "d-1"),
    ):
        workers = written(move, side, tables, engine)
        sides.append([digests(w.manifest, [w.memory], tables, start, move.stop) for w in workers])
    for destination in sides[1]:
        assert mismatches(destination, sides[0]) == []


@pytest.mark.parametrize("layout", ["NHD", "HND", "CPU", "BHLNC"])
def test_a_changed_byte_is_found_where_it_is(layout: str) -> None:
    model = Model(layers=2, heads=4)
    move = make_move(model, Side(tp=2), Side(layout=layout, block_tokens=6), 0, 11)
    theirs = [
        digests(w.manifest, [w.memory], move.source_tables, 0, 11)
        for w in written(move, move.source, move.source_tables, "p-0")
    ]
    (worker,) = written(move, move.destination, move.destination_tables, "d-1")
    for (layer, role), index in worker.where.items():
        block = int(move.destination_tables[0].ids[1])  # tokens 6 to 10
        for slot, head, channel, byte in ((0, 0, 0, 0), (2, 3, 1, 1), (4, 1, 0, 1)):
            at = index[block, slot, head, channel, byte]
            worker.memory[at] ^= 1
            found = mismatches(digests(worker.manifest, [worker.memory], move.destination_tables, 0, 11), theirs)
            worker.memory[at] ^= 1
            expected = (
                f"{layer} {role}: 1 of 44 values differ or have no source, first at position {6 + slot} index {head}"
            )
            assert found == [expected]
        at = index[block, 5, 0, 0, 0]  # token 11 is outside the range
        worker.memory[at] ^= 1
        assert mismatches(digests(worker.manifest, [worker.memory], move.destination_tables, 0, 11), theirs) == []


def test_swapped_channels_and_tokens_are_found() -> None:
    model = Model(layers=1, heads=1)
    move = make_move(model, Side(), Side(), 0, 4)
    (source,), (worker,) = (written(move, Side(num_blocks=4), t, e) for t, e in (
        (move.source_tables, "p-0"), (move.destination_tables, "d-1")))  # fmt: skip
    theirs = [digests(source.manifest, [source.memory], move.source_tables, 0, 4)]
    index = next(iter(worker.where.values()))[int(move.destination_tables[0].ids[0])]
    for a, b in ((index[0, 0, 0], index[0, 0, 1]), (index[0, 0], index[1, 0])):
        worker.memory[a], worker.memory[b] = worker.memory[b].copy(), worker.memory[a].copy()
        assert mismatches(digests(worker.manifest, [worker.memory], move.destination_tables, 0, 4), theirs)
        worker.memory[a], worker.memory[b] = worker.memory[b].copy(), worker.memory[a].copy()


def test_a_state_is_digested_by_its_sharded_index() -> None:
    model = Model(layers=2, heads=0, key=64, states=2)
    (worker,) = instance(model, Side())
    tables = [table(3), table(1)]
    write(model, Side(), worker, tables, worker.memory, 0, 4)
    found = digests(worker.manifest, [worker.memory], tables, 0, 4)
    shapes = {str(role): digest.values.shape for (_, role), digest in found.items()}
    assert shapes == {"latent": (4, 1), "conv_q": (1, 8), "conv_k": (1, 8), "conv_v": (1, 8), "ssm": (1, 4)}


def test_what_no_source_digested_is_reported() -> None:
    (worker,) = instance(Model(layers=1), Side())
    mine = digests(worker.manifest, [worker.memory], [table(1)], 0, 4)
    assert mismatches(mine, []) and mismatches(mine, [mine]) == []


def test_positions_without_a_block_digest_to_zero() -> None:
    (worker,) = instance(Model(layers=1, window=4), Side())
    (key, _) = digests(worker.manifest, [worker.memory], [table(0, 1)], 0, 8).values()
    assert not key.values[:4].any() and key.values[4:].all()


@pytest.mark.parametrize("ids", [(8,), (-1,)])
def test_ids_outside_the_cache_are_refused(ids: tuple[int, ...]) -> None:
    (worker,) = instance(Model(layers=1), Side())
    with pytest.raises(BindError, match=r"\[1, 8\)"):
        digests(worker.manifest, [worker.memory], [table(*ids)], 0, 4)


def test_memory_is_only_read() -> None:
    (worker,) = instance(Model(layers=1), Side())
    worker.memory.flags.writeable = False
    assert np.size(digests(worker.manifest, [worker.memory], [table(1)], 0, 4)["layers.0.attn", "key"].values) == 16
