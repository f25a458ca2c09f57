"""Block ids and token ranges: what is moved, what is merged, and what is refused before a byte moves."""

import tracemalloc
from dataclasses import replace

import msgspec
import pytest

from tests.support.geometry.edges import BASE, ONE, edge, manifest, offsets
from tests.support.geometry.opaque import opaque_worker
from tests.support.geometry.request import bind, copy
from tests.support.geometry.world import Model, table
from vllm_pd_connector.errors import BindError
from vllm_pd_connector.geometry.bind import Tail, first_valid_tokens, pair, window_start
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.manifest import Axis, AxisName, Group, GroupKind
from vllm_pd_connector.geometry.plan import Edge, make_plan
from vllm_pd_connector.geometry.spans import Slices, runs_of
from vllm_pd_connector.geometry.staging.chunks import split
from vllm_pd_connector.geometry.validate import validate

change = msgspec.structs.replace
PLAIN = edge(ONE, {}, {})


def test_a_block_moves_to_the_place_of_its_id() -> None:
    assert offsets(bind(PLAIN, [table(3)], [table(5)], 0, 4)) == [(48, 80, 16)]


def test_a_tail_is_exact_to_the_byte() -> None:
    assert offsets(bind(PLAIN, [table(3, 1)], [table(5, 2)], 0, 6)) == [(16, 32, 8), (48, 80, 16)]


def test_consecutive_blocks_become_one_run_with_their_tail() -> None:
    assert offsets(bind(PLAIN, [table(3, 4, 5)], [table(1, 2, 3)], 0, 10)) == [(48, 16, 40)]
    assert len(bind(PLAIN, [table(3, 4, 5)], [table(1, 2, 4)], 0, 12)) == 2
    assert len(bind(PLAIN, [table(3, 5, 6)], [table(1, 2, 3)], 0, 12)) == 2
    assert len(bind(PLAIN, [table(5, 4, 3)], [table(3, 2, 1)], 0, 12)) == 3


@pytest.mark.parametrize("window", [0, 8])
def test_a_range_that_no_table_reaches_costs_nothing_to_refuse(window: int) -> None:
    """Another instance says the range: 2**31 tokens of one array of int64 would be gigabytes."""
    far = edge(Model(layers=1, heads=1, key=1, value=1, window=window), {"block_tokens": 2}, {"block_tokens": 2})
    late = BlockTable.of((1 << 30) - 2, [5, 6])
    tracemalloc.start()
    try:
        with pytest.raises(BindError, match="destination group 0: token 4 needs logical block 2, but the table"):
            bind(far, [table(3, 1)], [table(5, 2)], 0, 1 << 31)
        with pytest.raises(BindError, match="source group 0: token 4 needs logical block 2, but the table"):
            bind(far, [table(3, 1)], [late], 0, 1 << 31)
        if window:  # what lies before the window costs nothing either
            assert offsets(bind(far, [late], [late], 0, 1 << 31))[0][1:] == (40, 16)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_more_runs_than_any_transfer_has_time_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scattered = edge(ONE, {"num_blocks": 11}, {"num_blocks": 11})
    ids = [table(*range(10, 0, -1))], [table(*range(1, 11))]
    monkeypatch.setattr("vllm_pd_connector.geometry.spans.MAX_RUNS", 10)
    assert len(bind(scattered, *ids, 0, 40)) == 10
    monkeypatch.setattr("vllm_pd_connector.geometry.spans.MAX_RUNS", 9)
    with pytest.raises(BindError, match="source group 0 to destination group 0: 10 runs for one request, at most 9"):
        bind(scattered, *ids, 0, 40)


def test_the_runs_of_all_pairings_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer may cut the pages of each tensor in another way: 80 of them would be 80 times as many."""
    scattered = edge(ONE, {"num_blocks": 11}, {"num_blocks": 11})
    ids = [table(*range(10, 0, -1))], [table(*range(1, 11))]
    paired = pair(scattered, *ids, 0, 40)
    monkeypatch.setattr("vllm_pd_connector.geometry.spans.MAX_RUNS", 19)
    with pytest.raises(BindError, match="20 runs for one request, at most 19"):
        Slices.of(paired * 2)
    with pytest.raises(BindError, match="20 runs for one request, at most 19"):
        pair(replace(scattered, pairings=scattered.pairings * 2), *ids, 0, 40)


@pytest.mark.parametrize("writes", [False, True])
def test_strides_that_tear_every_element_from_its_neighbours_cost_nothing_to_refuse(writes: bool) -> None:
    """A peer says how its pages are strided: 2**26 runs of one page would be gigabytes, and no list is made of them."""
    torn = torn_edge(writes=writes)
    tracemalloc.start()
    try:
        with pytest.raises(BindError, match=r"67108864 runs for one request, at most 33554432"):
            bind(torn, [table(1)], [table(1)], 0, 1 << 14)
        assert not split(torn, 1 << 40, writes=writes)[1].pairings
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def torn_edge(*, writes: bool) -> Edge:
    """Pages of 2**26 elements of two bytes, dense on one side, with gaps of a megabyte between all of them where they
    are read or written."""
    sides = []
    for between, engine in ((1 << 20, "p-0"), (2, "d-1")):
        axes, stride = [], between
        for name, size in ((AxisName.CHANNEL, 1 << 9), (AxisName.HEAD, 8), (AxisName.TOKEN, 1 << 14)):
            axes.append(Axis(name, size, stride, 0, size))
            stride *= size
        given = manifest(ONE, engine, block_tokens=1 << 14, num_blocks=2)
        tensor = change(given.tensors[0], axes=tuple(axes), page_stride=stride)
        given = change(given, tensors=(tensor,), segments=(change(given.segments[0], length=2 * stride),))
        validate(given)
        sides.append(given)
    if writes:
        sides.reverse()
    return make_plan(sides[1], sides[:1]).edges[0]


def test_consecutive_ids_merge_across_unequal_blocks() -> None:
    """8-token blocks 1, 2 hold what 4-token blocks 3..6 get: 16 tokens in one run."""
    uneven = edge(ONE, {"block_tokens": 8}, {})
    assert offsets(bind(uneven, [table(1, 2)], [table(3, 4, 5, 6)], 0, 16)) == [(32, 48, 64)]
    assert offsets(bind(uneven, [table(1, 2)], [table(3, 4, 5, 6)], 5, 14)) == [(52, 68, 36)]


def test_contiguous_ids_are_one_run_per_layer_and_for_packed_layers_one_in_all() -> None:
    model = Model(layers=3, heads=2)
    for layout, runs in (("NHD", 3), ("HND", 3), ("CPU", 3), ("LHBNC", 6), ("BLHNC", 1), ("BHLNC", 1)):
        same = edge(model, {"layout": layout}, {"layout": layout})
        assert len(bind(same, [table(1, 2, 3)], [table(4, 5, 6)], 0, 12)) == runs, layout
    kernel = edge(model, {"ratio": 2}, {"ratio": 4})
    assert len(bind(kernel, [table(1, 2, 3)], [table(4, 5, 6)], 0, 12)) == 3


def test_padding_is_never_touched() -> None:
    padded = edge(ONE, {"padding": 6}, {"padding": 6})
    assert offsets(bind(padded, [table(1, 2)], [table(3, 4)], 0, 8)) == [(22, 66, 16), (44, 88, 16)]


def test_a_block_table_may_begin_anywhere() -> None:
    whole = offsets(bind(PLAIN, [table(3, 1, 2)], [table(5, 4, 6)], 4, 12))
    late = bind(PLAIN, [table(1, 2, first=1)], [table(4, 6, first=1)], 4, 12)
    assert offsets(late) == whole


def test_longer_tables_than_the_range_are_fine() -> None:
    assert offsets(bind(PLAIN, [table(3, 1, 2)], [table(5, 4, 6)], 0, 4)) == [(48, 80, 16)]


def test_an_empty_range_moves_no_token() -> None:
    assert len(bind(PLAIN, [table(1)], [table(1)], 4, 4)) == 0
    assert len(bind(PLAIN, [table()], [table()], 0, 0)) == 0


@pytest.mark.parametrize(
    ("source", "destination", "start", "stop", "text"),
    [
        (table(8), table(1), 0, 4, r"source group 0: block id 8 is outside \[1, 8\)"),
        (table(1), table(8), 0, 4, r"destination group 0: block id 8 is outside \[1, 8\)"),
        (table(-1), table(1), 0, 4, "source group 0: block id -1"),
        (table(1), table(-2), 0, 4, "destination group 0: block id -2"),
        (table(2**31 - 1), table(1), 0, 4, "block id 2147483647"),
        (table(1), table(1, 2), 0, 5, r"source group 0: token 4 needs logical block 1, .* too short.*\[0, 1\)"),
        (table(1, 2), table(1), 0, 5, r"destination group 0: token 4 needs logical block 1, .* too short"),
        (table(), table(1), 0, 4, "source group 0: token 0 .* too short"),
        (table(1), table(), 0, 4, "destination group 0: token 0 .* too short"),
        (table(2, first=1), table(1, 2), 0, 8, r"source group 0: token 0 .* \[1, 2\)"),
        (table(1, 0), table(1, 2), 0, 8, "source group 0: token 4 needs logical block 1, but the table is null there"),
        (table(1, 2), table(1, 0), 0, 8, "destination group 0: token 4 needs logical block 1, .* null"),
        (table(1, 2), table(3, 3), 0, 8, "destination group 0: block id 3 is given twice"),
        (table(1), table(1), -1, 4, r"token range \[-1, 4\)"),
        (table(1), table(1), 4, 3, r"token range \[4, 3\)"),
    ],
)
def test_what_does_not_fit_is_refused(
    source: BlockTable, destination: BlockTable, start: int, stop: int, text: str
) -> None:
    with pytest.raises(BindError, match=text):
        bind(PLAIN, [source], [destination], start, stop)


def test_every_group_needs_its_table() -> None:
    with pytest.raises(BindError, match="source: 2 block tables for 1 groups"):
        bind(PLAIN, [table(1), table(2)], [table(1)], 0, 4)


def test_bounds_are_those_of_each_side() -> None:
    asymmetric = edge(ONE, {"num_blocks": 3}, {"num_blocks": 9})
    assert offsets(bind(asymmetric, [table(1, 2)], [table(7, 8)], 0, 8)) == [(16, 112, 32)]
    with pytest.raises(BindError, match=r"source group 0: block id 3 is outside \[1, 3\)"):
        bind(asymmetric, [table(3)], [table(7)], 0, 4)


WINDOW = Model(layers=1, heads=1, key=1, value=1, window=6)


def test_of_a_windowed_group_only_positions_with_a_destination_block_move() -> None:
    windowed = edge(WINDOW, {}, {})
    moved = bind(windowed, [table(0, 0, 3, 4)], [table(0, 0, 1, 2)], 0, 16)
    assert offsets(moved) == [(48, 16, 32)]
    late = bind(windowed, [table(3, 4, first=2)], [table(1, 2, first=2)], 0, 16)
    assert offsets(late) == offsets(moved)
    assert offsets(bind(windowed, [table(5, 6, 3, 4)], [table(0, 0, 0, 2)], 0, 16)) == [(64, 32, 16)]
    assert len(bind(windowed, [table(0, 0, 3, 4)], [table(0, 0, 1, 2)], 0, 8)) == 0


@pytest.mark.parametrize(
    ("source", "destination", "text"),
    [
        (table(0, 0, 0, 4), table(0, 0, 1, 2), "source group 0: token 8 needs logical block 2"),
        (table(4, first=3), table(0, 0, 1, 2), "source group 0: token 8 needs logical block 2"),
        (table(0, 0, 3), table(0, 0, 1, 2), "source group 0: token 12 .* too short"),
        (table(0, 0, 3, 4), table(0, 0, 1), "destination group 0: token 12 .* too short"),
    ],
)
def test_a_half_filled_block_of_a_window_is_an_error(source: BlockTable, destination: BlockTable, text: str) -> None:
    """The destination's prefix cache would hash a block whose first tokens never came."""
    with pytest.raises(BindError, match=text):
        bind(edge(WINDOW, {}, {}), [source], [destination], 0, 16)


def test_a_larger_destination_block_must_be_covered_whole() -> None:
    larger = edge(WINDOW, {}, {"block_tokens": 8})
    with pytest.raises(BindError, match=r"source group 0: token 8 needs logical block 2, .*filled completely"):
        bind(larger, [table(0, 0, 0, 4)], [table(0, 2)], 0, 16)
    # what was there before `start` is the destination's own
    assert offsets(bind(larger, [table(0, 0, 0, 4)], [table(0, 2)], 12, 16)) == [(64, 80, 16)]


@pytest.mark.parametrize(("stop", "held", "filled"), [(14, 8, 0), (17, 12, 12), (18, 12, 12), (21, 16, 0), (8, 0, 0)])
def test_on_request_the_first_block_of_a_window_may_begin_with_what_the_source_still_has(
    stop: int, held: int, filled: int
) -> None:
    """Window 6: who computes position `stop` looks at those from `stop` - 5 on; destination blocks are 8 tokens."""
    larger = edge(WINDOW, {}, {"block_tokens": 8})
    theirs = [table(*(0 if 4 * i < held else i + 1 for i in range(6)))]
    first = (stop - 5) // 8 if stop > 5 else 0
    ours = [table(*(0 if i < first else i + 1 for i in range(3)))]
    paired = pair(larger, theirs, ours, 0, stop, late=True)
    assert first_valid_tokens(paired) == ({0: filled} if filled else {})
    assert runs_of(paired).total_bytes == 4 * (stop - held)
    if filled:
        with pytest.raises(BindError, match="filled completely"):
            bind(larger, theirs, ours, 0, stop)


@pytest.mark.parametrize("swapped", [False, True])
def test_layers_of_a_window_begin_as_late_as_the_latest_of_them(swapped: bool) -> None:
    """Layers of one group may lie in groups of other block sizes on the source: one lacks tokens that another has."""
    sizes = (2, 4) if swapped else (4, 2)
    model = Model(layers=2, heads=1, key=1, value=1, window=6)
    one, other = (manifest(model, block_tokens=size, num_blocks=12) for size in sizes)
    segments = one.segments[0], change(other.segments[0], address=BASE + (1 << 30))
    tensors = *one.tensors[:2], *(change(tensor, group=1, segment=1) for tensor in other.tensors[2:])
    origin = change(one, groups=one.groups + other.groups, segments=segments, tensors=tensors)
    validate(origin)
    [mixed] = make_plan(manifest(model, "d-1", block_tokens=8), [origin]).edges
    # Who computes position 19 looks at those from 14 on.
    theirs = [table(*(0 if (i + 1) * size <= 14 else i + 1 for i in range(20 // size))) for size in sizes]
    assert first_valid_tokens(pair(mixed, theirs, [table(0, 1, 2)], 0, 19, late=True)) == {0: 14}


def test_what_a_destination_keeps_before_its_window_need_not_be_there() -> None:
    """vLLM keeps some tokens more of each window where several draft modules look ahead, on a side that drafts so: here
    two. Who computes position 13 looks at those from 8 on."""
    theirs, ours = table(0, 0, 3, 4), table(0, 2, 3, 4)
    paired = pair(edge(WINDOW, {}, {}), [theirs], [ours], 0, 13, late=True)
    assert first_valid_tokens(paired) == {0: 8}
    assert runs_of(paired).total_bytes == 4 * (13 - 8)


@pytest.mark.parametrize("forgotten", [12, 16, 24])
def test_a_token_inside_the_window_is_never_left_out(forgotten: int) -> None:
    """Who computes position 16 looks at those from 11 on."""
    larger = edge(WINDOW, {}, {"block_tokens": 8})
    theirs = table(*(0 if 4 * i < forgotten else i + 1 for i in range(6)))
    with pytest.raises(BindError, match="source group 0: token 8 needs"):
        pair(larger, [theirs], [table(0, 2)], 0, 16, late=True)


def test_without_a_window_no_token_is_ever_left_out() -> None:
    with pytest.raises(BindError, match="source group 0: token 0 needs"):
        pair(edge(ONE, {}, {"block_tokens": 8}), [table(0, 2, 3, 4)], [table(1, 2)], 0, 16, late=True)


@pytest.mark.parametrize(
    ("group", "tokens", "expected"),
    [
        (Group(GroupKind.FULL, 4, 8), 100, 0),
        (Group(GroupKind.STATE, 4, 8), 100, 0),
        (Group(GroupKind.SLIDING_WINDOW, 4, 8, window=4), 7, 4),  # vLLM's own example
        (Group(GroupKind.SLIDING_WINDOW, 4, 8, window=4), 2, 0),
        (Group(GroupKind.CHUNKED_LOCAL, 4, 8, window=8), 15, 8),
        (Group(GroupKind.CHUNKED_LOCAL, 4, 8, window=8), 16, 16),
    ],
)
def test_where_a_window_begins(group: Group, tokens: int, expected: int) -> None:
    assert window_start(group, tokens) == expected


HYBRID = Model(layers=2, heads=0, key=64, states=2)


def test_the_last_block_of_each_side_holds_the_state() -> None:
    hybrid = edge(HYBRID, {}, {})
    pages = {256 * 2}  # bytes of a block: 4 tokens of 64 two-byte channels
    (stride,) = pages
    runs = bind(hybrid, [table(3), table(1, 0, 2)], [table(4), table(5)], 4, 4)
    assert {row[0] % (8 * stride) // stride for row in offsets(runs)} == {2}
    assert {row[1] % (8 * stride) // stride for row in offsets(runs)} == {5}
    assert runs.total_bytes == 2 * 240


def test_a_push_in_the_middle_of_a_prefill_leaves_states_out() -> None:
    hybrid = edge(HYBRID, {}, {})
    tokens = bind(hybrid, [table(3), table()], [table(4), table()], 0, 4, states=False)
    assert tokens.total_bytes == 2 * 4 * 128


@pytest.mark.parametrize(
    ("source", "destination", "text"),
    [
        (table(), table(1), "source group 1: no block holds the state"),
        (table(1), table(), "destination group 1: no block holds the state"),
        (table(1, 0), table(1), "source group 1: no block holds the state"),
        (table(8), table(1), "source group 1: block id 8"),
    ],
)
def test_a_missing_state_is_never_passed_over(source: BlockTable, destination: BlockTable, text: str) -> None:
    with pytest.raises(BindError, match=text):
        bind(edge(HYBRID, {}, {}), [table(3), source], [table(4), destination], 0, 4)


def test_a_transposed_tail_is_one_run_per_page_when_the_page_may_move_whole() -> None:
    model = Model(layers=2, heads=2, key=4, value=4)
    cpu = edge(model, {"layout": "CPU"}, {"layout": "CPU"})
    exact, page = (bind(cpu, [table(1, 3)], [table(4, 6)], 0, 6, tail=tail) for tail in Tail)
    assert len(page) == 4 and len(exact) == 2 * (1 + 2 * (4 + 1))
    assert page.total_bytes == bind(cpu, [table(1, 3)], [table(4, 6)], 0, 8).total_bytes


def test_the_page_policy_changes_nothing_where_pages_differ() -> None:
    for other in ({"block_tokens": 8}, {"layout": "NHD"}):
        uneven = edge(Model(heads=2), {"layout": "CPU"}, other)
        exact, page = (bind(uneven, [table(1, 3)], [table(4, 6)], 0, 6, tail=tail) for tail in Tail)
        assert offsets(exact) == offsets(page)


def test_opaque_pages_move_whole() -> None:
    source, destination = opaque_worker("x", 4, 2, 1), opaque_worker("x", 4, 2, 1, "d-1")
    only = make_plan(destination.manifest, [opaque_worker("x", 4, 2, 0).manifest, source.manifest]).edges[0]
    before, page = destination.memory.copy(), 4 * 4 * 6
    copy(bind(only, [table(1, 2)], [table(4, 3)], 0, 5), source, destination)
    before[4 * page : 5 * page] = source.memory[page : 2 * page]
    before[3 * page : 4 * page] = source.memory[2 * page : 3 * page]
    assert (destination.memory == before).all()
    with pytest.raises(BindError, match="tokens from 2 on begin inside an opaque page of 4 tokens"):
        bind(only, [table(1, 2)], [table(4, 3)], 2, 8)


@pytest.mark.parametrize("tokens", [4, 16], ids=["the same blocks", "into larger ones"])
def test_what_is_kept_of_a_long_prompt_is_pieces_of_its_tables(tokens: int) -> None:
    """All of it is memory that no cache holds: an array of half a million tokens' blocks costs a third of a
    millisecond beside threads that copy, and a dozen of them were the longest turn of the transfer thread."""
    blocks = 1 << 15
    some = edge(ONE, {"num_blocks": blocks + 1}, {"num_blocks": blocks + 1, "block_tokens": tokens})
    theirs, ours = (BlockTable.of(0, range(count, 0, -1)) for count in (blocks, blocks * 4 // tokens))
    tracemalloc.start()
    try:
        (paired,) = pair(some, [theirs], [ours], 0, 4 * blocks)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(paired[1].tokens) == blocks
    assert kept < (3 if tokens > 4 else 2) * 8 * blocks + (1 << 16)
    assert most < kept + 3 * 8 * blocks
