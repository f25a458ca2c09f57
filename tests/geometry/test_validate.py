"""A manifest that contradicts itself never gets past `validate`, however it was made."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.geometry.world import CAN_PAD, LAYOUTS, Model, Side, make_worker
from vllm_pd_connector.errors import InvalidManifest
from vllm_pd_connector.geometry import validate as rules
from vllm_pd_connector.geometry.manifest import (
    AxisName,
    Group,
    GroupKind,
    LivenessAddress,
    Manifest,
    Segment,
    TokenShare,
)
from vllm_pd_connector.geometry.validate import validate

change = msgspec.structs.replace
GOOD = make_worker(Model(layers=2, heads=4), Side(tp=2, block_tokens=4, ratio=2), 0, 1).manifest


def with_tensor(index: int = 0, **fields: object) -> Manifest:
    tensors = list(GOOD.tensors)
    tensors[index] = change(tensors[index], **fields)
    return change(GOOD, tensors=tuple(tensors))


def with_axis(axis: int, index: int = 0, **fields: object) -> Manifest:
    axes = list(GOOD.tensors[index].axes)
    axes[axis] = change(axes[axis], **fields)
    return with_tensor(index, axes=tuple(axes))


def with_group(**fields: object) -> Manifest:
    return change(GOOD, groups=(change(GOOD.groups[0], **fields),))


def with_parallel(**fields: object) -> Manifest:
    return change(GOOD, parallel=change(GOOD.parallel, **fields))


def in_turns(rank: int, *, interleave: int = 2, parallel: int = 2, **group: object) -> Manifest:
    """Rank 1 of two that take turns with the tokens, or whatever else it says of itself."""
    share = TokenShare(rank, 2, interleave)
    return change(
        with_group(**{"block_tokens": 8, "share": share, **group}),
        parallel=change(GOOD.parallel, dcp_size=parallel, dcp_rank=1 % parallel, interleave=2),
    )


def with_segment(**fields: object) -> Manifest:
    return change(GOOD, segments=(change(GOOD.segments[0], **fields),))


@pytest.mark.parametrize("layout", [*LAYOUTS, "CPU", "NHD", "HND"])
@pytest.mark.parametrize("heads", [0, 1, 4])
def test_every_layout_is_valid(layout: str, heads: int) -> None:
    if layout == "CPU" and not heads:
        return
    states = 2 if layout in CAN_PAD else 0
    model = Model(layers=3, heads=heads, key=64, value=64 if heads else 0, states=states)
    for ratio in (1, 2) if layout[0] != "B" else (1,):
        side = Side(tp=2, layout=layout, ratio=ratio, block_tokens=4, padding=8 if layout in CAN_PAD else 0)
        for rank in range(2):
            validate(make_worker(model, side, 0, rank).manifest)


def test_two_groups_may_share_memory() -> None:
    manifest = make_worker(Model(layers=2, heads=0, key=64, states=2), Side(), 0, 0).manifest
    first = {t.group: t.offset for t in reversed(manifest.tensors)}
    assert first[0] == first[1] == 0
    validate(manifest)


TOKEN, HEAD, CHANNEL = range(3)


@pytest.mark.parametrize(
    ("manifest", "text"),
    [
        (change(GOOD, version=GOOD.version + 1), f"version is {GOOD.version + 1}"),
        (change(GOOD, incarnation="ABC"), "incarnation is ABC"),
        (change(GOOD, engine_id=""), "engine_id is 0 characters"),
        (change(GOOD, endpoint=b"x" * (rules.MAX_ENDPOINT + 1)), "endpoint"),
        (change(GOOD, software="x" * (rules.MAX_FACT + 1)), "software is 65537 characters long"),
        (change(GOOD, model=change(GOOD.model, rope="x" * (rules.MAX_FACT + 1))), r"model\.rope is 65537 char"),
        (change(GOOD, software=", configuration " + " ".join(f"{i}=0" for i in range(99))), "software is 99 files"),
        (change(GOOD, life=LivenessAddress("prefill.example", 9, "w")), "address is prefill.example: must be an IP"),
        (
            change(GOOD, life=LivenessAddress("fe80::1%" + "z" * 999, 9, "w")),
            r"address is fe80::1%z{56}: must be an IP",
        ),
        (change(GOOD, segments=()), "segments is 0 entries"),
        (change(GOOD, groups=()), "groups is 0 entries"),
        (change(GOOD, tensors=()), "tensors is 0 entries"),
        (change(GOOD, tensors=GOOD.tensors[:1] * (rules.MAX_TENSORS + 1)), "must have 1 to 4096"),
        (change(GOOD, tensors=GOOD.tensors * 2), r"layers\.0\.attn key\) is twice: duplicate"),
        (change(GOOD, draft_layers=("layers.0.attn", "layers.9.attn")), "draft_layers is layers.9.attn: must name"),
        (with_parallel(tp_size=0), "tp_size is 0"),
        (with_parallel(dp_size=0), "dp_size is 0"),
        (with_parallel(tp_rank=2), "tp_rank is 2: must be below tp_size 2"),
        (with_parallel(pp_rank=-1), "pp_rank is -1"),
        (with_parallel(dcp_size=0), "dcp_size is 0"),
        (with_parallel(tp_size=1 << 40), "tp_size"),
        (with_parallel(pcp_rank=1), "pcp_rank is 1: must be below pcp_size 1"),
        (with_parallel(dcp_rank=1), "dcp_rank is 1: must be below dcp_size 1"),
        (with_parallel(pcp_size=1024), "pcp_size is 1024: times tp_size 2 must be 1 to 1024"),
        (with_parallel(dcp_size=3), "dcp_size is 3: must divide the 2 tensor"),
        (with_parallel(dcp_size=2), "dcp_rank is 0: must be 1"),
        (with_parallel(interleave=0), "interleave is 0"),
        (in_turns(0), "share is rank 0 of 2 by 2: must be all tokens, or rank 1 of 2 by 2"),
        (in_turns(1, interleave=1), "share is rank 1 of 2 by 1: must be all tokens, or rank 1 of 2 by 2"),
        (in_turns(1, parallel=1), "share is rank 1 of 2 by 2: must be all tokens, or rank 0 of 1 by 1"),
        (in_turns(1, kind=GroupKind.STATE), "a state group is not interleaved"),
        (in_turns(1, kind=GroupKind.SLIDING_WINDOW, window=8), "a sliding_window group is not interleaved"),
        (in_turns(1, block_tokens=6), "must divide the group's 6 tokens per block"),
        (in_turns(1, block_tokens=4), "2 pages must hold the group's 4 tokens per block over 2 ranks"),
        (with_segment(length=0), r"segments\[0\] is 0 bytes"),
        (with_segment(address=-1), r"segments\[0\]"),
        (with_segment(address=1 << 62), r"segments\[0\]"),
        (with_segment(device="tpu"), r"segments\[0\].device is tpu"),
        (with_segment(device_id=-1), "device_id is -1"),
        (with_segment(length=GOOD.segments[0].length - 6), "leave the segment"),
        (with_group(num_blocks=0), "num_blocks is 0"),
        (with_group(num_blocks=9), "pages is 16: must be 9 blocks of 2 pages"),
        (with_group(block_tokens=0), "block_tokens is 0"),
        (with_group(block_tokens=8), "page_tokens is 2: 2 pages must hold the group's 8"),
        (with_group(window=16), "a full group has no window"),
        (with_group(kind=GroupKind.SLIDING_WINDOW), "a sliding_window group has a window"),
        (with_group(kind=GroupKind.STATE), "a state has no tokens"),
        (with_tensor(group=1), "group is 1: there are 1"),
        (with_tensor(segment=-1), "segment is -1"),
        (with_tensor(itemsize=0), "itemsize is 0"),
        (with_tensor(pages=15), "pages is 15"),
        (with_tensor(page_stride=0), "page_stride is 0"),
        (with_tensor(page_stride=-64), "page_stride is -64"),
        (with_tensor(page_stride=1 << 60), "leave the segment"),
        (with_tensor(pages_per_block=1), "pages is 16"),
        (with_tensor(page_tokens=4), "page_tokens is 4"),
        (with_tensor(offset=-1), "offset is -1"),
        (with_tensor(layer=""), "layer is 0 characters"),
        (with_tensor(layer="x" * 5000), "layer is 5000 characters"),
        (with_tensor(opaque="packed"), "an opaque page is one BYTE axis"),
        (with_tensor(axes=()), "axes is "),
        (with_tensor(axes=GOOD.tensors[0].axes[:2] * 2), "different axes"),
        (with_tensor(axes=GOOD.tensors[0].axes[1:]), "page_tokens is 2"),
        (with_axis(CHANNEL, name=AxisName.BYTE), "a page of bytes needs a description"),
        (with_axis(TOKEN, size=1, total=1), "token is 1 of 1: size and total must be the page's 2 tokens"),
        (with_axis(HEAD, size=0), "head is 0 elements"),
        (with_axis(HEAD, start=-1), r"head is \[-1, 1\) of 4"),
        (with_axis(HEAD, start=3), r"head is \[3, 5\) of 4"),
        (with_axis(HEAD, stride=-8), "-8 bytes apart"),
        (with_axis(HEAD, start=(1 << 64) - 1), "must lie inside its total"),
        (with_axis(HEAD, size=1 << 61, total=(1 << 62) - 1), "leave the segment"),
        (with_axis(CHANNEL, total=4), "sharded along several axes"),
        (with_axis(CHANNEL, stride=1), "two elements share a byte"),
        (with_axis(HEAD, stride=0), "two elements share a byte"),
        (with_axis(TOKEN, stride=8), "two elements share a byte"),
        (with_tensor(page_stride=8), "two elements share a byte"),
    ],
)
def test_a_contradiction_is_refused_by_name(manifest: Manifest, text: str) -> None:
    with pytest.raises(InvalidManifest, match=text):
        validate(manifest)


def test_a_manifest_survives_the_wire_and_unknown_fields_do_not() -> None:
    wire = msgspec.msgpack.encode(GOOD)
    assert msgspec.msgpack.decode(wire, type=Manifest) == GOOD
    extra = msgspec.msgpack.encode({**msgspec.to_builtins(GOOD), "more": 1})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(extra, type=Manifest)


@settings(max_examples=400, deadline=None)
@given(
    layout=st.sampled_from([*LAYOUTS, "CPU"]),
    heads=st.sampled_from([1, 2, 4]),
    ratio=st.sampled_from([1, 2]),
    which=st.integers(0, 5),
    shift=st.integers(-64, 64),
)
def test_a_shifted_tensor_is_refused_exactly_when_bytes_collide(
    layout: str, heads: int, ratio: int, which: int, shift: int
) -> None:
    """Move one tensor by some bytes and compare with a bitmap of every byte of the group."""
    ratio = 1 if layout[0] == "B" else ratio
    worker = make_worker(Model(layers=3, heads=heads), Side(layout=layout, ratio=ratio, num_blocks=3), 0, 0)
    tensors = list(worker.manifest.tensors)
    moved = tensors[which] = change(tensors[which], offset=tensors[which].offset + shift)
    manifest = change(worker.manifest, tensors=tuple(tensors))
    index = worker.where[moved.layer, moved.role] + shift
    used = [index if t is moved else worker.where[t.layer, t.role] for t in tensors]
    if index.min() < 0 or index.max() >= len(worker.memory):
        collide = True
    else:
        counts = [0] * len(worker.memory)
        for byte in (b for part in used for b in part.ravel().tolist()):
            counts[byte] += 1
        collide = max(counts) > 1
    try:
        validate(manifest)
        refused = False
    except InvalidManifest:
        refused = True
    assert refused == collide


def test_many_tensors_are_checked_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block-outermost packing of thousands of layers: the work grows with their number, not with its square."""
    worker = make_worker(Model(layers=2000, heads=1, key=1, value=1), Side(layout="BLHNC", num_blocks=2), 0, 0)
    seen = 0
    clusters = rules._clusters

    def counting(items: list) -> object:
        nonlocal seen
        seen += len(items)
        return clusters(items)

    monkeypatch.setattr(rules, "_clusters", counting)
    validate(worker.manifest)
    assert seen <= 8 * len(worker.manifest.tensors)


def test_strides_without_a_common_period_are_refused_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fold by another stride could double what is left to fold: 200 tensors would be 2**200 ranges."""
    worker = make_worker(Model(layers=1, heads=1, key=1, value=1), Side(num_blocks=2, block_tokens=1), 0, 0).manifest
    one = worker.tensors[0]
    tensors = tuple(
        change(one, layer=f"layers.{i}", offset=i * 7919 % 500, page_stride=1000 - 2 * i) for i in range(200)
    )
    seen = 0
    clusters = rules._clusters

    def counting(items: list) -> object:
        nonlocal seen
        seen += len(items)
        assert seen < 100_000
        return clusters(items)

    monkeypatch.setattr(rules, "_clusters", counting)
    with pytest.raises(InvalidManifest, match=r"tensors \(layers\.\d+ key\) and \(layers\.\d+ key\) is overlapping"):
        validate(change(worker, tensors=tensors, segments=(change(worker.segments[0], length=1 << 20),)))


@pytest.mark.parametrize("scratch", [False, True])
def test_segments_that_share_bytes_are_refused(scratch: bool) -> None:
    """Tensors of one group over them would share bytes unseen."""
    first = GOOD.segments[0]
    last = change(first, address=first.address + first.length - 1, length=8)
    behind = change(last, address=last.address + 1)
    elsewhere = change(last, device="cuda")

    def manifest(other: Segment) -> Manifest:
        return change(GOOD, scratch=other) if scratch else change(GOOD, segments=(other, first, behind))

    field = "scratch" if scratch else r"segments\[0\]"
    neighbour = r"segments\[0\]" if scratch else r"segments\[1\]"
    text = rf"{field} is 8 bytes at {last.address}: must not share bytes with {neighbour}, {first.length} bytes at "
    with pytest.raises(InvalidManifest, match=text + str(first.address)):
        validate(manifest(last))
    validate(change(GOOD, segments=(first, behind, elsewhere)))


def test_a_group_may_have_no_tensor_here() -> None:
    """A pipeline stage can lack the layers of a group."""
    extra = Group(GroupKind.STATE, 4, 8)
    validate(change(GOOD, groups=(*GOOD.groups, extra)))
