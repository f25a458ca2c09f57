"""What the moves of a request leave out of its blocks, and nothing else, is blank."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.support.effort import examples
from tests.support.geometry.moves import moves, windows
from tests.support.geometry.opaque import opaque_worker
from tests.support.geometry.request import Move, make_move
from tests.support.geometry.world import STATE_ROLES, Model, Side, Worker, instance, table, token_groups
from vllm_pd_connector.geometry.bind import Tail, first_valid_tokens, latest, pair
from vllm_pd_connector.geometry.blocks import NULL_BLOCK, BlockTable
from vllm_pd_connector.geometry.plan import make_plan
from vllm_pd_connector.geometry.spans import runs_of
from vllm_pd_connector.geometry.staging.blanks import blanks
from vllm_pd_connector.geometry.staging.strided_copy import Copy

change = msgspec.structs.replace


def as_ordered(move: Move) -> Move:
    """The move of a request whose prefix hit is whole blocks of every group; the tables name those that are to be
    filled. A window of the source may begin after the hit."""
    groups = token_groups(move.model, move.destination)
    hit = lcm(*(group.block_tokens for group in groups))
    start, tables = move.start // hit * hit, list(move.destination_tables)
    for number, group in enumerate(groups):
        ids = tables[number].ids
        named = np.flatnonzero((ids != NULL_BLOCK) & (np.arange(len(ids)) >= start // group.block_tokens))
        first = int(named[0]) if len(named) else len(ids)
        tables[number] = BlockTable.of(first, ids[first:].tolist())
    theirs = zip(token_groups(move.model, move.source), move.source_tables, strict=False)
    held = max((table.begin * group.block_tokens for group, table in theirs if group.window), default=0)
    late = max(move.late_start, held) if held > start else move.late_start
    return replace(move, start=start, destination_tables=tables, late_start=late)


def places(worker: Worker, copies: list[Copy]) -> list[int]:
    """The bytes that copies name of a worker's memory."""
    found = []
    for copy in copies:
        at = np.array([copy.cache - worker.manifest.segments[0].address])
        for size, _, step in (*copy.axes, (copy.item, 1, 1)):
            at = np.add.outer(at, np.arange(size) * step).ravel()
        found += at.tolist()
    return found


def written(worker: Worker, move: Move, sources: list[Worker]) -> tuple[set[int], dict[int, int]]:
    """The bytes that the last move of a request writes, and where its windows begin late."""
    base, found, late = worker.manifest.segments[0].address, set(), []
    for edge in make_plan(worker.manifest, [s.manifest for s in sources]).edges:
        tables = move.source_tables, move.destination_tables
        paired = pair(edge, *tables, move.start, move.stop, tail=Tail.PAGE, late=move.late_start > 0)
        late.append(first_valid_tokens(paired))
        runs = runs_of(paired)
        for to, length in zip((runs.destination - base).tolist(), runs.length.tolist(), strict=True):
            found.update(range(to, to + length))
    return found, latest(late)


def slots(worker: Worker, move: Move) -> set[int]:
    """The bytes of all slots in the named blocks, and of the states."""
    found, pages = set(), {}
    for group, blocks in zip(token_groups(move.model, move.destination), move.destination_tables, strict=False):
        ids = blocks.ids[blocks.ids != NULL_BLOCK]
        rows = (ids[:, None] * group.ratio + np.arange(group.ratio)).ravel()
        pages |= dict.fromkeys(group.names, rows)
    for (layer, role), index in worker.where.items():
        rows = move.destination_tables[-1].ids[-1:] if role in STATE_ROLES else pages[layer]
        found.update(index[rows].ravel().tolist())
    return found


@settings(max_examples=examples(400), deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(st.one_of(moves(), windows()))
def test_every_slot_of_a_request_s_blocks_is_written_or_blank(move: Move) -> None:
    assume(move.start < move.stop)
    require_all_written_or_blank(as_ordered(move))


def require_all_written_or_blank(move: Move) -> None:
    sources = instance(move.model, move.source, "p-0")
    for worker in instance(move.model, move.destination, "decode-1"):
        plan = make_plan(worker.manifest, [s.manifest for s in sources])
        full, late = written(worker, move, sources)
        blank = places(worker, list(blanks(plan, move.destination_tables, move.start, move.stop, late)))
        assert len(blank) == len(set(blank)), "nothing is zeroed twice"
        assert not full & set(blank), "nothing is zeroed that is written"
        assert full | set(blank) == slots(worker, move)


def test_slots_before_what_came_of_a_window_are_blank() -> None:
    """A block of eight tokens, of which the prefill side has let go of the first four: the position behind the seven
    looks at three."""
    model = Model(layers=2, heads=1, key=1, value=1, window=3)
    move = make_move(replace(model, window=0), Side(block_tokens=2), Side(block_tokens=8), 0, 7)
    ids = move.source_tables[0].ids
    ids[:2] = NULL_BLOCK
    tables = [BlockTable.of(0, ids.tolist()), *move.source_tables[1:]]
    require_all_written_or_blank(as_ordered(replace(move, model=model, late_start=4, source_tables=tables)))


@pytest.mark.parametrize(("source", "blank"), [("NHD", 0), ("HND", 3 * 2 * 2 * 2 * 2)])
def test_a_page_s_tail_is_blank_where_only_tokens_move(source: str, blank: int) -> None:
    """Three slots of two layers, two heads, a key and a value of two bytes."""
    move = make_move(Model(layers=2, heads=2, key=1, value=1), Side(layout=source), Side(layout="NHD"), 0, 5)
    sources = instance(move.model, move.source, "p-0")
    [worker] = instance(move.model, move.destination, "decode-1")
    plan = make_plan(worker.manifest, [s.manifest for s in sources])
    assert len(places(worker, list(blanks(plan, move.destination_tables, 0, 5, {})))) == blank


def test_pages_of_a_drafter_that_prefill_has_not_are_blank_whole() -> None:
    model = Model(layers=3, heads=2, key=1, value=1)
    move = make_move(model, Side(), Side(), 0, 5)
    sources, [worker] = instance(replace(model, layers=2), Side(), "p-0"), instance(model, Side(), "decode-1")
    drafts, plain = (
        change(one.manifest, model=change(one.manifest.model, speculative=name), draft_layers=layers)
        for one, name, layers in ((worker, "eagle", ("layers.2.attn",)), (sources[0], "", ()))
    )
    blank = set(places(worker, list(blanks(make_plan(drafts, [plain]), move.destination_tables, 0, 5, {}))))
    wanted = slots(worker, move)
    drafter = {
        at
        for (layer, _), index in worker.where.items()
        if layer == "layers.2.attn"
        for at in index[move.destination_tables[0].ids].ravel().tolist()
    }
    assert drafter and drafter <= blank <= wanted


def test_many_layers_and_pages_are_few_fills() -> None:
    side = Side(layout="NHD", block_tokens=64, ratio=16, num_blocks=9)
    move = make_move(Model(layers=40, heads=4), replace(side, layout="HND"), side, 0, 70)
    sources = instance(move.model, move.source, "p-0")
    [worker] = instance(move.model, move.destination, "decode-1")
    plan = make_plan(worker.manifest, [s.manifest for s in sources])
    assert len(list(blanks(plan, move.destination_tables, 0, 70, {}))) <= 4


def test_opaque_pages_behind_the_range_are_blank_whole() -> None:
    source, worker = opaque_worker("x", 4, 1, 0), opaque_worker("x", 4, 1, 0, "d-1")
    plan = make_plan(worker.manifest, [source.manifest])
    assert not list(blanks(plan, [table(3, 5)], 0, 5, {})), "the last page moved with all its slots"
    page = worker.manifest.tensors[0].page_stride
    found = places(worker, list(blanks(plan, [table(3, 5)], 0, 4, {})))
    assert sorted(found) == list(range(5 * page, 6 * page))
