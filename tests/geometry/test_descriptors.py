"""Registered buffers, exchanged once: what one side says of its memory, what the other checks, and which bytes follow.

The cases are those that descriptor-based registration must answer (kinds per layer, bytes per block, alignment,
duplicates, overflow, a range check against each side's own capacity), put to this project's functions: a descriptor
is a segment and the tensor in it, a layout is checked by `validate`, two of them by `check_pd_topology`, and requests
carry block ids alone. Ids are one higher than in other systems, since vLLM's block 0 is the null block.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.support.geometry.request import bind
from tests.support.geometry.world import FACTS, Model, Side, instance, table
from vllm_pd_connector.errors import BindError, IncompatiblePeer, InvalidManifest
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.manifest import (
    MANIFEST_VERSION,
    Axis,
    AxisName,
    Coordinates,
    Group,
    GroupKind,
    Manifest,
    Role,
    Segment,
    Tensor,
)
from vllm_pd_connector.geometry.plan import Plan, make_plan
from vllm_pd_connector.geometry.topology import TopologyStatus, check_pd_topology
from vllm_pd_connector.geometry.validate import validate

TOKENS = 4
change = msgspec.structs.replace

Buffer = tuple[str, Role, int, int, int]
"""Layer, role, address, bytes, bytes per block."""


def manifest(*buffers: Buffer, engine: str = "p-0") -> Manifest:
    """One worker whose buffers are segments of their own; all have as many blocks as the first."""
    blocks = buffers[0][3] // buffers[0][4]
    return Manifest(
        version=MANIFEST_VERSION,
        engine_id=engine,
        incarnation="0123456789abcdef" * 2,
        software="test",
        model=FACTS,
        parallel=Coordinates(0, 1, 0, 1, 0, 1, 1, 1),
        segments=tuple(Segment(address, length, "cpu", 0) for _, _, address, length, _ in buffers),
        groups=(Group(GroupKind.FULL, TOKENS, blocks),),
        tensors=tuple(tensor(i, blocks, *buffer) for i, buffer in enumerate(buffers)),
        transport="mooncake",
        endpoint=b"",
    )


def tensor(segment: int, blocks: int, layer: str, role: Role, address: int, length: int, block: int) -> Tensor:
    channels = block // TOKENS
    axes = (
        Axis(AxisName.TOKEN, TOKENS, channels, 0, TOKENS),
        Axis(AxisName.HEAD, 1, channels, 0, 1),
        Axis(AxisName.CHANNEL, channels, 1, 0, channels),
    )
    return Tensor(layer, role, 0, "uint8", 1, segment, 0, blocks, block, 1, TOKENS, axes)


def key(layer: str, address: int, length: int = 0x400, block: int = 0x40) -> Buffer:
    return (layer, Role.KEY, address, length, block)


def index(layer: str, address: int, length: int = 0x80, block: int = 0x08) -> Buffer:
    return (layer, Role.INDEX, address, length, block)


def rows(local: Manifest, remote: Manifest, source: BlockTable, destination: BlockTable) -> list[tuple[int, int, int]]:
    """(destination, source, length) of all runs; both tables hold as many whole blocks."""
    (edge,) = make_plan(local, [remote]).edges
    runs = bind(edge, [source], [destination], 0, TOKENS * len(source.ids))
    found = zip(runs.destination.tolist(), runs.source.tolist(), runs.length.tolist(), strict=True)
    return sorted(found)


def test_a_layer_has_the_kinds_that_it_registered_and_no_others() -> None:
    made = manifest(key("0", 0x1000), index("0", 0x3000), key("1", 0x2000))
    validate(made)
    found = {(t.layer, t.role): t.page_stride for t in made.tensors}
    assert found == {("0", Role.KEY): 0x40, ("0", Role.INDEX): 0x08, ("1", Role.KEY): 0x40}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Manifest) == made


def test_keys_and_values_alone_are_all_that_a_layer_has() -> None:
    made = manifest(("0", Role.KEY, 0x1000, 0x100, 0x10), ("0", Role.VALUE, 0x2000, 0x100, 0x10))
    validate(made)
    assert {(t.layer, t.role): (t.page_stride, t.pages) for t in made.tensors} == {
        ("0", Role.KEY): (0x10, 16),
        ("0", Role.VALUE): (0x10, 16),
    }


@pytest.mark.parametrize(
    ("segment", "fields", "text"),
    [
        ({}, {"role": "unknown"}, "Invalid enum value 'unknown'"),
        ({}, {"segment": -1}, "segment is -1: there are 1 segments"),
        ({}, {"segment": 1}, "segment is 1: there are 1 segments"),
        ({}, {"page_stride": 0}, "page_stride is 0: must be positive"),
        ({}, {"page_stride": -0x40}, "page_stride is -64: must be positive"),
        ({"length": 0}, {}, r"segments\[0\] is 0 bytes"),
        ({}, {"page_stride": 0x41}, "leave the segment of 1024"),
        ({"length": 0x3FF}, {}, "leave the segment of 1023"),
        ({"length": 0x41}, {}, "leave the segment of 65"),
        ({}, {"pages": 17}, "pages is 17: must be 16 blocks of 1 pages"),
        ({}, {"page_stride": 1 << 60}, "leave the segment"),
        ({}, {"page_stride": (1 << 62) - 1, "offset": (1 << 62) - 1}, "leave the segment"),
        ({"address": (1 << 62) - 0x3FF}, {}, "must lie inside"),
    ],
)
def test_a_descriptor_that_contradicts_itself_is_refused_by_the_field(
    segment: dict[str, int], fields: dict[str, object], text: str
) -> None:
    made = manifest(key("0", 0x1000))
    sent = msgspec.json.decode(msgspec.json.encode(made))
    sent["segments"][0] |= segment
    sent["tensors"][0] |= fields
    with pytest.raises((InvalidManifest, msgspec.ValidationError), match=text):
        validate(msgspec.json.decode(msgspec.json.encode(sent), type=Manifest))


def test_one_kind_of_a_layer_is_described_once() -> None:
    with pytest.raises(InvalidManifest, match=r"\(0 key\) is twice: duplicate"):
        validate(manifest(key("0", 0x1000), key("0", 0x5000)))


def test_two_buffers_over_the_same_bytes_are_refused() -> None:
    made = manifest(key("0", 0x1000), key("1", 0x2000))
    one_segment = change(made, tensors=(made.tensors[0], change(made.tensors[1], segment=0)))
    with pytest.raises(InvalidManifest, match="must not share bytes"):
        validate(one_segment)


def test_every_kind_moves_by_its_own_bytes_per_block() -> None:
    local = manifest(key("0", 0x1000), index("0", 0x3000), engine="d-1")
    remote = manifest(key("0", 0x5000), index("0", 0x7000))
    assert rows(local, remote, table(1, 2), table(3, 4)) == [(0x10C0, 0x5040, 0x80), (0x3018, 0x7008, 0x10)]


@pytest.mark.parametrize("extra_on", ["here", "there"])
def test_a_kind_on_one_side_only_is_a_difference(extra_on: str) -> None:
    plain, more = (key("0", 0x1000),), (key("0", 0x1000), index("0", 0x3000))
    local, remote = (more, plain) if extra_on == "here" else (plain, more)
    check = check_pd_topology(manifest(*local, engine="d-1"), [manifest(*remote)])
    assert check.status is TopologyStatus.DENY
    (difference,) = check.differences
    assert difference.field == "caches of 0" and {difference.local, difference.remote} == {"key", "index, key"}


def test_a_layer_on_one_side_only_has_no_writer() -> None:
    remote = manifest(key("0", 0x1000))
    check = check_pd_topology(manifest(key("0", 0x1000), key("1", 0x2000), engine="d-1"), [remote])
    assert not check.allowed
    with pytest.raises(IncompatiblePeer, match="no source writer"):
        make_plan(manifest(key("1", 0x2000), engine="d-1"), [remote])


def test_bytes_per_block_must_mean_the_same_numbers() -> None:
    check = check_pd_topology(manifest(key("0", 0x1000), engine="d-1"), [manifest(key("0", 0x1000, 0x200, 0x20))])
    assert check.status is TopologyStatus.DENY and "extents of 0 key" in check.reason


def test_capacities_may_differ() -> None:
    local, remote = manifest(key("0", 0x1000), engine="d-1"), manifest(key("0", 0x1000, 0x3C0))
    assert check_pd_topology(local, [remote]).status is TopologyStatus.ALLOW_HOMOGENEOUS


def test_each_side_is_bounded_by_its_own_capacity() -> None:
    large, small = key("0", 0x1000), key("0", 0x5000, 0x100)
    local, remote = manifest(large, engine="d-1"), manifest(small)
    assert rows(local, remote, table(1, 2), table(10, 11)) == [(0x1280, 0x5040, 0x80)]
    with pytest.raises(BindError, match="destination group 0: block id 4"):
        rows(manifest(small, engine="d-1"), manifest(large), table(1), table(4))
    with pytest.raises(BindError, match="source group 0: block id 4"):
        rows(local, remote, table(4), table(10))


def test_a_range_that_begins_inside_and_ends_outside_is_refused() -> None:
    local = manifest(key("0", 0x1000, 0x80), engine="d-1")
    with pytest.raises(BindError, match="destination group 0: block id 2"):
        rows(local, manifest(key("0", 0x5000)), table(1, 2), table(1, 2))


@pytest.mark.parametrize("block", [-1, 16, (1 << 31) - 1])
def test_a_block_id_that_would_overflow_is_refused_before_it_is_multiplied(block: int) -> None:
    local, remote = manifest(key("0", 0x1000), engine="d-1"), manifest(key("0", 0x5000))
    with pytest.raises(BindError, match=f"source group 0: block id {block}"):
        rows(local, remote, table(block), table(1))
    with pytest.raises(BindError, match=f"destination group 0: block id {block}"):
        rows(local, remote, table(1), table(block))


def test_all_layers_move_with_the_kinds_that_each_has() -> None:
    local = manifest(key("0", 0x1000), key("1", 0x2000), index("1", 0x3000), engine="d-1")
    remote = manifest(key("0", 0x5000), key("1", 0x6000), index("1", 0x7000))
    found = rows(local, remote, table(1, 3, 4), table(5, 7, 8))
    assert found == [
        (0x1140, 0x5040, 0x40),
        (0x11C0, 0x50C0, 0x80),
        (0x2140, 0x6040, 0x40),
        (0x21C0, 0x60C0, 0x80),
        (0x3028, 0x7008, 0x08),
        (0x3038, 0x7018, 0x10),
    ]


def test_tables_of_unequal_length_are_refused() -> None:
    local, remote = manifest(key("0", 0x1000), engine="d-1"), manifest(key("0", 0x5000))
    for source, destination in ((table(1), table(1, 2)), (table(1, 2), table(1))):
        with pytest.raises(BindError):
            (edge,) = make_plan(local, [remote]).edges
            bind(edge, [source], [destination], 0, 2 * TOKENS)


# -- who writes to whom: no rank without a writer, none with two, whatever the sizes --


def plans(source: int, destination: int, layers: int) -> list[Plan]:
    """One plan per destination rank, for MLA: every rank holds the whole latent."""
    model = Model(layers=layers, heads=0, key=8)
    sources = [worker.manifest for worker in instance(model, Side(tp=source))]
    return [make_plan(worker.manifest, sources) for worker in instance(model, Side(tp=destination), "d-1")]


@pytest.mark.parametrize("source", range(1, 9))
@pytest.mark.parametrize("destination", range(1, 9))
def test_each_replica_gets_each_byte_from_one_writer_and_the_writers_share_the_work(
    source: int, destination: int
) -> None:
    """Also where the sizes do not divide, in which routes by remainders leave ranks without a writer or with two."""
    layers = 8
    load = [0] * source
    for plan in plans(source, destination, layers):
        given = [
            (run, edge.source[2])
            for edge in plan.edges
            for run in bind(edge, [table(1)], [table(1)], 0, TOKENS).destination.tolist()
        ]
        assert len({run for run, _ in given}) == len(given) == layers
        for _, rank in given:
            load[rank] += 1
    assert sum(load) == destination * layers
    assert max(load) - min(load) <= layers


# -- steps of a prefill: what was sent stays sent, a partial block is completed later --


@pytest.mark.parametrize(
    ("sent", "tokens", "expected"),
    [
        (0, 8, [1, 2]),
        (8, 16, [3, 4]),
        (0, 9, [1, 2, 3]),
        (0, 20, [1, 2, 3, 4, 5]),
        (8, 20, [3, 4, 5]),
        (8, 9, [3]),
        (8, 8, []),
    ],
)
def test_a_step_touches_the_blocks_of_its_tokens_and_no_others(sent: int, tokens: int, expected: list[int]) -> None:
    local, remote = manifest(key("0", 0x1000), engine="d-1"), manifest(key("0", 0x5000))
    (edge,) = make_plan(local, [remote]).edges
    runs = bind(edge, [table(1, 2, 3, 4, 5)], [table(11, 12, 13, 14, 15)], sent, tokens)
    pairs = [
        ((source - 0x5000) // 0x40, (destination - 0x1000) // 0x40)
        for source, destination, length in zip(
            runs.source.tolist(), runs.destination.tolist(), runs.length.tolist(), strict=True
        )
        for source, destination in zip(
            range(source, source + length, 0x10), range(destination, destination + length, 0x10), strict=True
        )
    ]
    assert sorted({block for block, _ in pairs}) == expected
    assert all(theirs - ours == 10 for ours, theirs in pairs)
    assert runs.total_bytes == (tokens - sent) * 0x10


def test_a_destination_that_holds_too_few_blocks_is_refused_and_not_cut_short() -> None:
    local, remote = manifest(key("0", 0x1000), engine="d-1"), manifest(key("0", 0x5000))
    (edge,) = make_plan(local, [remote]).edges
    with pytest.raises(BindError, match="destination group 0"):
        bind(edge, [table(1, 2, 3)], [table(11, 12)], 0, 3 * TOKENS)
