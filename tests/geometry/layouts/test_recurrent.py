"""Recurrent states: the codec against an oracle of its own, and the numbers of two real hybrid models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.geometry.mismatches import mismatches
from tests.support.geometry.request import bind
from tests.support.geometry.world import FACTS
from vllm_pd_connector.errors import UnsupportedCache
from vllm_pd_connector.geometry.bind import Tail, pair
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.checksums.digest import digests
from vllm_pd_connector.geometry.layouts.attention import PageView, key_value, latent
from vllm_pd_connector.geometry.layouts.recurrent import Convolution, Projection, Recurrent, StatePage, state_tensors
from vllm_pd_connector.geometry.manifest import (
    MANIFEST_VERSION,
    AxisName,
    Coordinates,
    Group,
    GroupKind,
    Manifest,
    Role,
    Segment,
    Tensor,
)
from vllm_pd_connector.geometry.plan import make_plan
from vllm_pd_connector.geometry.sharding import Interval, shard
from vllm_pd_connector.geometry.staging.chunks import chunks, split
from vllm_pd_connector.geometry.topology import check_pd_topology
from vllm_pd_connector.geometry.validate import validate


def convolution(sizes: dict[Role, int], tp: int, rank: int, taps: int, dim_first: bool, item: int = 2) -> Convolution:
    parts = tuple(
        Projection(role, Interval(rank * size // tp, (rank + 1) * size // tp), size) for role, size in sizes.items()
    )
    return Convolution(parts, taps, dim_first, "bfloat16", item)


def recurrent(heads: int, tp: int, rank: int, inner: tuple[tuple[AxisName, int], ...], item: int = 4) -> Recurrent:
    return Recurrent(shard(heads, tp, rank), heads, inner, "float32", item)


def element_bytes(tensor: Tensor, page: int) -> np.ndarray:
    """First byte of every element of one page, in the order of the tensor's axes."""
    where = np.array(tensor.offset + page * tensor.page_stride)
    for axis in tensor.axes:
        where = np.add.outer(where, np.arange(axis.size) * axis.stride)
    return where


@settings(max_examples=60)
@given(
    q=st.integers(1, 4),
    v=st.integers(1, 4),
    taps=st.integers(1, 5),
    dim_first=st.booleans(),
    padding=st.integers(0, 7),
    transposed=st.booleans(),
)
def test_every_element_of_a_page_is_where_a_dense_page_has_it(q, v, taps, dim_first, padding, transposed):
    sizes = {Role.CONV_Q: 2 * q, Role.CONV_K: 2 * q, Role.CONV_V: 2 * v}
    conv = convolution(sizes, 1, 0, taps, dim_first)
    inner = ((AxisName.DV, 3), (AxisName.DK, 2))
    state = recurrent(v, 1, 0, inner[::-1] if transposed else inner)
    size = conv.nbytes + state.nbytes
    page = StatePage("l", 0, 0, 11, 4, size + padding, size)
    tensors = {tensor.role: tensor for tensor in state_tensors(page, conv, state)}

    numbered = 11 + 2 * (size + padding) + np.arange(size)  # every byte of page 2 is its own address
    flat = numbered[: conv.nbytes].reshape(-1, 2)[:, 0]
    oracle = flat.reshape(-1, taps) if dim_first else flat.reshape(taps, -1).T
    first = 0
    for role, channels in sizes.items():
        assert (element_bytes(tensors[role], 2) == oracle[first : first + channels]).all()
        first += channels
    matrix = numbered[conv.nbytes :].reshape(v, *(size for _, size in state.axes), 4)[..., 0]
    assert (element_bytes(tensors[Role.SSM], 2) == matrix).all()


def test_a_page_that_holds_more_than_its_states_is_refused():
    conv = convolution({Role.CONV_X: 4}, 1, 0, 3, True)
    with pytest.raises(UnsupportedCache, match="24 bytes but a page holds 25"):
        state_tensors(StatePage("l", 0, 0, 0, 2, 32, 25), conv, None)


@dataclass(frozen=True)
class Hybrid:
    """Sizes of a real model, as vLLM lays it out: one attention group and several state groups over one region."""

    name: str
    attention_layers: int
    state_layers: int
    token_bytes: int  # of one layer and token, over all ranks' heads once
    kv_heads: int  # 0: MLA
    kernel_tokens: int
    q_channels: int
    v_heads: int
    head: int
    taps: int
    state_item: int

    def page_bytes(self, tp: int) -> int:
        conv = (2 * self.q_channels + self.v_heads * self.head) // tp * self.taps * 2
        return conv + self.v_heads // tp * self.head * self.head * self.state_item

    def attention_token(self, tp: int) -> int:
        return self.token_bytes // min(tp, self.kv_heads) if self.kv_heads else self.token_bytes

    def block_tokens(self, tp: int) -> int:
        """vLLM 0.32 platforms/interface.py: the attention block is the smallest that is not below the state page."""
        unit = self.kernel_tokens * self.attention_token(tp)
        return -(-self.page_bytes(tp) // unit) * self.kernel_tokens

    @property
    def state_groups(self) -> list[int]:
        """Layers per state group, each at most as many as there are attention layers."""
        full, rest = divmod(self.state_layers, self.attention_layers)
        return [self.attention_layers] * full + ([rest] if rest else [])


KIMI = Hybrid("KimiLinear-48B", 7, 20, 576 * 2, 0, 128, 4096, 32, 128, 3, 4)
QWEN = Hybrid("Qwen3-Next-80B", 12, 36, 2 * 2 * 256 * 2, 2, 16, 2048, 32, 128, 3, 2)


def test_the_logical_blocks_of_kimi_are_those_of_vllm():
    assert (KIMI.page_bytes(1), KIMI.block_tokens(1), KIMI.block_tokens(2)) == (2_170_880, 1920, 1024)


SLAB = 8 << 20

# Not a published model: with 24 heads and a latent, sizes of 2 and 3 ranks are both possible.
THIRDS = replace(KIMI, name="24 KDA heads", q_channels=24 * 128, v_heads=24)


def rank_of(
    model: Hybrid, tp: int, rank: int, blocks: int, engine: str, dim_first: bool, *, filled: bool = True
) -> tuple[Manifest, np.ndarray]:
    """Manifest and memory of one rank; memory that is not filled costs nothing."""
    tokens = model.block_tokens(tp)
    token = model.attention_token(tp)
    page = tokens * token
    ratio = tokens // model.kernel_tokens
    layer_bytes = page * blocks
    tensors: list[Tensor] = []
    for i in range(model.attention_layers):
        heads = shard(model.kv_heads, tp, rank) if model.kv_heads else Interval(0, 1)
        view = PageView(
            f"layers.{i}.attn", 0, 0, i * layer_bytes,
            (blocks * ratio, len(heads), model.kernel_tokens, token // len(heads)),
            (page // ratio, token // len(heads), token, 1),
            "bfloat16", 2, ratio, heads, model.kv_heads or 1,
        )  # fmt: skip
        tensors += key_value(view, 256, 256) if model.kv_heads else latent(view, 576)
    layer = 0
    for group, count in enumerate(model.state_groups, start=1):
        for i in range(count):
            where = StatePage(f"layers.{layer}.state", group, 0, i * layer_bytes, blocks, page, model.page_bytes(tp))
            sizes = {Role.CONV_Q: model.q_channels, Role.CONV_K: model.q_channels}
            sizes[Role.CONV_V] = model.v_heads * model.head
            inner = ((AxisName.DV, model.head), (AxisName.DK, model.head))
            tensors += state_tensors(
                where,
                convolution(sizes, tp, rank, model.taps, dim_first),
                recurrent(model.v_heads, tp, rank, inner, model.state_item),
            )
            layer += 1
    length = model.attention_layers * layer_bytes
    random = np.random.default_rng([tp, rank, len(engine)])
    memory = random.integers(0, 256, length, dtype=np.uint8) if filled else np.zeros(length, dtype=np.uint8)
    groups = [Group(GroupKind.FULL, tokens, blocks)] + [Group(GroupKind.STATE, 0, blocks)] * len(model.state_groups)
    manifest = Manifest(
        MANIFEST_VERSION, engine, f"{rank:032x}", "test", FACTS, Coordinates(rank, tp, 0, 1, 0, 1, 1, 1),
        (Segment(memory.ctypes.data, length, "cpu", 0),), tuple(groups), tuple(tensors), "loopback", b"",
    )  # fmt: skip
    return manifest, memory


def tables(model: Hybrid, tp: int, stop: int, shuffle: int) -> tuple[list[BlockTable], int]:
    """Block ids of one request, none shared between groups; and how many blocks the pool has."""
    attention = -(-stop // model.block_tokens(tp))
    count = attention + len(model.state_groups)
    ids = np.random.default_rng(shuffle).permutation(count) + 1
    found = [BlockTable.of(0, ids[:attention].tolist())]
    found += [BlockTable.of(0, ids[attention + i :][:1].tolist()) for i in range(len(model.state_groups))]
    return found, count + 2


def give_replicas_equal_bytes(
    model: Hybrid, tp: int, blocks: int, table: BlockTable, memories: list[np.ndarray]
) -> None:
    """Ranks that hold the same heads (all of them, with MLA) hold the same numbers, as after a real prefill."""
    replicas = max(1, tp // (model.kv_heads or 1))
    page = model.block_tokens(tp) * model.attention_token(tp)
    for rank, memory in enumerate(memories):
        first = memories[rank // replicas * replicas].reshape(model.attention_layers, blocks, page)
        memory.reshape(model.attention_layers, blocks, page)[:, table.ids] = first[:, table.ids]


def own_bytes(model: Hybrid, manifest: Manifest, blocks: list[BlockTable], start: int, stop: int) -> int:
    """Bytes of the request's own tokens and states on one rank."""
    total = 0
    for tensor in manifest.tensors:
        elements = prod(axis.size for axis in tensor.axes if axis.name is not AxisName.TOKEN)
        total += elements * tensor.itemsize * (1 if tensor.page_tokens == 0 else stop - start)
    return total


SIZES = [(model, p_tp, d_tp) for model in (KIMI, QWEN) for p_tp in (1, 2, 4, 8) for d_tp in (1, 2, 4, 8)]
SIZES += [(THIRDS, 2, 3), (THIRDS, 3, 2), (THIRDS, 3, 6), (THIRDS, 8, 3)]


def over_sizes() -> pytest.MarkDecorator:
    ids = [f"{model.name} tp{p_tp}to{d_tp}" for model, p_tp, d_tp in SIZES]
    return pytest.mark.parametrize(("model", "p_tp", "d_tp"), SIZES, ids=ids)


@over_sizes()
def test_every_byte_of_every_rank_that_the_request_owns_is_written_once_and_no_other(model, p_tp, d_tp):
    """A prompt of several logical blocks on both sides, of which decode has the first ones."""
    start, stop = 1024, 2500
    p_tables, p_blocks = tables(model, p_tp, stop, 1)
    d_tables, d_blocks = tables(model, d_tp, stop, 2)
    prefill = [rank_of(model, p_tp, rank, p_blocks, "p-0", True, filled=False)[0] for rank in range(p_tp)]
    for rank in range(d_tp):
        manifest, memory = rank_of(model, d_tp, rank, d_blocks, "decode-1", True, filled=False)
        edges = make_plan(manifest, prefill).edges
        runs = [bind(edge, p_tables, d_tables, start, stop, tail=Tail.EXACT) for edge in edges]
        first = np.concatenate([each.destination for each in runs]) - memory.ctypes.data
        length = np.concatenate([each.length for each in runs])
        order = np.argsort(first)
        ends = (first + length)[order]
        assert (ends[:-1] <= first[order][1:]).all(), f"rank {rank}: a byte has two writers"
        assert length.sum() == own_bytes(model, manifest, d_tables, start, stop)
        assert not outside(first, length, own_ranges(manifest, d_tables, start, stop)), f"rank {rank}"


@pytest.mark.parametrize("p_first", [True, False], ids=["P DS", "P SD"])
@pytest.mark.parametrize("d_first", [True, False], ids=["D DS", "D SD"])
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (1, 2), (2, 1), (1, 8), (8, 2), (2, 3)])
def test_of_a_state_only_the_own_share_is_read_also_where_it_is_converted(p_tp, d_tp, p_first, d_first):
    """A rank of eight needs an eighth of each tap's channels, which lie between those of others."""
    model = THIRDS if 3 in (p_tp, d_tp) else KIMI
    p_tables, p_blocks = tables(model, p_tp, 1, 1)
    d_tables, d_blocks = tables(model, d_tp, 1, 2)
    prefill = [rank_of(model, p_tp, rank, p_blocks, "p-0", p_first, filled=False)[0] for rank in range(p_tp)]
    manifest, _ = rank_of(model, d_tp, d_tp - 1, d_blocks, "decode-1", d_first, filled=False)
    own = own_bytes(model, manifest, d_tables, 0, 0)
    moved, converted = 0, False
    for edge in make_plan(manifest, prefill).edges:
        direct, staged = split(edge, SLAB)
        moved += bind(direct, p_tables, d_tables, 0, 0).total_bytes
        found = list(chunks(pair(staged, p_tables, d_tables, 0, 0), SLAB))
        moved += sum(chunk.runs.total_bytes for chunk in found)
        converted |= bool(found)
    assert moved == own
    assert converted == (p_first != d_first)


def own_ranges(manifest: Manifest, blocks: list[BlockTable], start: int, stop: int) -> np.ndarray:
    """Rows (first byte, bytes) of the pages, or parts of pages, that hold the request's tokens and states."""
    rows = []
    for tensor in manifest.tensors:
        ids = blocks[tensor.group].ids
        if tensor.page_tokens == 0:
            rows += [(tensor.offset + ids[-1] * tensor.page_stride, extent(tensor))]
            continue
        for token in range(start - start % tensor.page_tokens, stop, tensor.page_tokens):
            block = ids[token // (tensor.page_tokens * tensor.pages_per_block)]
            page = block * tensor.pages_per_block + token // tensor.page_tokens % tensor.pages_per_block
            rows += [(tensor.offset + page * tensor.page_stride, extent(tensor))]
    return np.array(sorted(rows))


def extent(tensor: Tensor) -> int:
    """Bytes from the first to the last element of a page."""
    return sum((axis.size - 1) * axis.stride for axis in tensor.axes) + tensor.itemsize


def outside(first: np.ndarray, length: np.ndarray, ranges: np.ndarray) -> bool:
    """Whether some run leaves the union of the ranges, which may overlap."""
    starts, ends = ranges[:, 0], np.maximum.accumulate(ranges.sum(axis=1))
    apart = np.flatnonzero(np.append(starts[1:] > ends[:-1], True))
    starts, ends = starts[np.insert(apart[:-1] + 1, 0, 0)], ends[apart]
    where = np.searchsorted(starts, first, side="right") - 1
    return bool((where < 0).any() or (first + length > ends[where]).any())


@over_sizes()
def test_real_hybrids_move_to_any_tensor_parallel_size_with_one_writer_per_byte(model, p_tp, d_tp):
    stop, start = 700, 128
    p_tables, p_blocks = tables(model, p_tp, stop, 1)
    d_tables, d_blocks = tables(model, d_tp, stop, 2)
    prefill = [rank_of(model, p_tp, rank, p_blocks, "p-0", True) for rank in range(p_tp)]
    give_replicas_equal_bytes(model, p_tp, p_blocks, p_tables[0], [memory for _, memory in prefill])
    memory_of = {m.parallel.rank: memory for m, memory in prefill}
    sent = [digests(m, [memory], p_tables, 0, stop) for m, memory in prefill]
    for rank in {d_tp // 2}:
        # The other orientation of the convolution state moves element by element: once is enough.
        manifest, memory = rank_of(model, d_tp, rank, d_blocks, "decode-1", (p_tp, d_tp) != (8, 8))
        validate(manifest)
        assert check_pd_topology(manifest, [m for m, _ in prefill]).allowed
        before, written = memory.copy(), np.zeros(len(memory), dtype=np.uint8)
        for edge in make_plan(manifest, [m for m, _ in prefill]).edges:
            runs = bind(edge, p_tables, d_tables, start, stop, tail=Tail.EXACT)
            source = memory_of[edge.source]
            from_, to = source.ctypes.data, memory.ctypes.data
            for a, b, n in zip(runs.source.tolist(), runs.destination.tolist(), runs.length.tolist(), strict=True):
                a, b = a - from_, b - to
                memory[b : b + n] = source[a : a + n]
                written[b : b + n] += 1
        assert written.max() == 1, "a byte has two writers"
        moved, own = int(written.sum()), own_bytes(model, manifest, d_tables, start, stop)
        assert moved == own, f"moved {moved} bytes for a request of {own}: ratio {moved / own:.3f}"
        assert (memory == before)[written == 0].all(), "bytes outside the request's own pages changed"
        assert mismatches(digests(manifest, [memory], d_tables, start, stop), sent) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"taps": 5}, "tap"),
        ({"state_item": 2}, "float32"),
        ({"v_heads": 16}, "head"),
        ({"q_channels": 2048}, "channel"),
    ],
)
def test_other_states_are_refused_by_name_with_both_values(change, named):
    other = replace(KIMI, **change)
    mine, _ = rank_of(KIMI, 8, 0, 2, "decode-1", True)
    theirs = [rank_of(other, 8, rank, 2, "p-0", True)[0] for rank in range(8)]
    if "state_item" in change:
        theirs = [retype(manifest) for manifest in theirs]
    check = check_pd_topology(mine, theirs)
    assert not check.allowed and check.differences
    assert any(named in str(difference) for difference in check.differences), check.reason


def retype(manifest: Manifest) -> Manifest:
    import msgspec

    tensors = [msgspec.structs.replace(t, dtype="bfloat16") if t.role is Role.SSM else t for t in manifest.tensors]
    return msgspec.structs.replace(manifest, tensors=tuple(tensors))
