"""Small worlds for the geometry tests: workers with real bytes, and an oracle that knows no strides.

The oracle numbers the bytes of a segment (`arange`), reshapes them in the physical order of a layout and transposes
them to logical order: what comes out says at which byte each logical element lies. Manifests are built the other way
round, from strides through the codecs, as the connector does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import product
from math import lcm, prod

import numpy as np
from numpy.typing import NDArray

from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.layouts import attention
from vllm_pd_connector.geometry.manifest import (
    MANIFEST_VERSION,
    WHOLE,
    Axis,
    AxisName,
    Coordinates,
    Group,
    GroupKind,
    Manifest,
    ModelFacts,
    Role,
    Segment,
    Tensor,
    TokenShare,
)
from vllm_pd_connector.geometry.sharding import Interval, shard

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
ALIASES = {"NHD": "LBNHC", "HND": "LBHNC", "CPU": "LBHNC"}
CAN_PAD = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
ITEM = 2


@dataclass(frozen=True)
class Model:
    """What both sides serve. `heads` 0 means MLA: one latent of `key` channels per token. With a `window`, its layers
    but those of `full` look at no more than it."""

    layers: int = 2
    heads: int = 4
    key: int = 2
    value: int = 2
    states: int = 0
    state_heads: int = 4
    window: int = 0
    full: tuple[int, ...] = ()

    @property
    def roles(self) -> dict[Role, int]:
        return {Role.KEY: self.key, Role.VALUE: self.value} if self.heads else {Role.LATENT: self.key}


@dataclass(frozen=True)
class Side:
    """How one side lays it out. The window's blocks have `window_slots` and pages of their own, or (0) those of full
    attention; their group comes last, or first. Layers of one kind are one group, or each is one `apart`."""

    tp: int = 1
    pp: int = 1
    layout: str = "NHD"
    block_tokens: int = 4
    ratio: int = 1
    num_blocks: int = 8
    padding: int = 0
    conv: str = "DS"
    pcp: int = 1
    dcp: int = 1
    interleave: int = 1
    window_slots: int = 0
    window_ratio: int = 1
    window_first: bool = False
    apart: bool = False

    @property
    def slots(self) -> int:
        """Tokens that one rank has room for in a logical block."""
        return self.block_tokens // self.dcp


@dataclass(frozen=True)
class TokenGroup:
    """A group of layers on one side: so many `slots` and pages has a block on each of the ranks that share tokens."""

    layers: tuple[int, ...]
    window: int
    slots: int
    ratio: int
    ranks: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"layers.{layer}.attn" for layer in self.layers)

    @property
    def block_tokens(self) -> int:
        return self.slots * self.ranks

    @property
    def page_tokens(self) -> int:
        return self.slots // self.ratio


def token_groups(model: Model, side: Side) -> list[TokenGroup]:
    """In the order of the manifest, where a group of states follows them. vLLM shares no window's tokens out."""
    windowed = tuple(layer for layer in range(model.layers) if model.window and layer not in model.full)
    full = tuple(layer for layer in range(model.layers) if layer not in windowed)
    slots, ratio = (side.window_slots, side.window_ratio) if side.window_slots else (side.slots, side.ratio)
    groups = [
        TokenGroup(full, 0, side.slots, side.ratio, side.dcp),
        TokenGroup(windowed, model.window, slots, ratio, ranks=1),
    ]
    ordered = [group for group in (groups[::-1] if side.window_first else groups) if group.layers]
    if side.apart:
        return [replace(group, layers=(layer,)) for group in ordered for layer in group.layers]
    return ordered


@dataclass
class Worker:
    """A rank: its manifest, its memory (one segment), and the oracle's byte index of every tensor.

    Token-indexed: [page, slot, local head, channel, byte]; states: [block, *axes as in STATE_AXES, byte].
    """

    manifest: Manifest
    memory: NDArray[np.uint8]
    where: dict[tuple[str, Role], NDArray[np.int64]] = field(default_factory=dict)
    heads: Interval = Interval(0, 1)
    state_heads: Interval = Interval(0, 1)

    @property
    def context_rank(self) -> int:
        return self.manifest.parallel.dcp_rank


def legal(heads: int, tp: int) -> bool:
    return heads % tp == 0 or tp % heads == 0


def shares_heads(heads: int, tp: int, pcp: int, dcp: int) -> bool:
    """Whether the ranks that hold each head, or the latent (0), have all of its tokens between them."""
    if tp * pcp % dcp:
        return False
    held: dict[int, set[int]] = {}
    for context, rank in product(range(pcp), range(tp)):
        head = shard(heads, tp, rank).start if heads else 0
        held.setdefault(head, set()).add((rank * pcp + context) % dcp)
    return all(len(ranks) == dcp for ranks in held.values())


FACTS = ModelFacts("tiny", "TinyForCausalLM", 2, 8, 4, 2, "bfloat16", "auto", "default", "none", "content 0", "")


def instance(model: Model, side: Side, engine: str = "p-0") -> list[Worker]:
    """All ranks of one instance, pipeline-major. Memory is filled with noise."""
    ranks = product(range(side.pp), range(side.pcp), range(side.tp))
    return [make_worker(model, side, pp, tp, engine, pcp) for pp, pcp, tp in ranks]


def make_worker(model: Model, side: Side, pp_rank: int, tp_rank: int, engine: str = "p-0", pcp_rank: int = 0) -> Worker:
    heads = shard(model.heads or 1, side.tp, tp_rank) if model.heads else Interval(0, 1)
    context_rank = (tp_rank * side.pcp + pcp_rank) % side.dcp
    share = TokenShare(context_rank, side.dcp, side.interleave) if side.dcp > 1 else WHOLE
    tensors: list[Tensor] = []
    where: dict[tuple[str, Role], NDArray[np.int64]] = {}
    groups = []
    every = _pages(model, side, pp_rank, len(heads))
    for number, pages in enumerate(every):
        group = pages.group
        kind = GroupKind.SLIDING_WINDOW if group.window else GroupKind.FULL
        shared = WHOLE if group.ranks == 1 else share
        groups.append(Group(kind, group.block_tokens, side.num_blocks, group.window, shared))
        for i, name in enumerate(replace(group, layers=stage(model, side, pp_rank, group.layers)).names):
            tensors += _tensors(model, side, pages, number, name, i, heads)
            where |= {(name, role): index for role, index in _index(model, side, pages, i).items()}
    states, where_states, state_heads = _states(model, side, pp_rank, tp_rank, every[0])
    if model.states:
        groups.append(Group(GroupKind.STATE, side.block_tokens, side.num_blocks))
    rng = np.random.default_rng([pp_rank, tp_rank, len(engine), pcp_rank][: 4 if pcp_rank else 3])
    length = every[0].total + 5
    memory = rng.integers(0, 256, length, dtype=np.uint8)
    manifest = Manifest(
        version=MANIFEST_VERSION,
        engine_id=engine,
        incarnation="0123456789abcdef" * 2,
        software="test",
        model=FACTS,
        parallel=Coordinates(
            tp_rank, side.tp, pp_rank, side.pp, 0, 1, side.dcp, side.pcp, context_rank, pcp_rank, side.interleave
        ),
        segments=(
            Segment((1 << 40) + ((pp_rank * 64 + tp_rank) * 8 + pcp_rank << 33) + len(engine), length, "cpu", 0),
        ),
        groups=tuple(groups),
        tensors=tuple(tensors + states),
        transport="loopback",
        endpoint=b"",
    )
    return Worker(manifest, memory, where | where_states, heads, state_heads)


def stage(model: Model, side: Side, pp_rank: int, layers: Iterable[int]) -> tuple[int, ...]:
    """Those of the layers that a pipeline stage has."""
    return tuple(layer for layer in layers if layer * side.pp // model.layers == pp_rank)


@dataclass(frozen=True)
class Pages:
    """The pages of a group on one rank. `sizes` by the letters of layouts, content in bytes. A page, or one head's part
    where those of all pages lie together, has `piece` bytes of a `room`.

    Groups share their memory, as in vLLM: the i-th layers of all lie in one place, and each block belongs to one group.
    """

    group: TokenGroup
    order: str
    sizes: dict[str, int]
    piece: int
    room: int

    @property
    def strides(self) -> dict[str, int]:
        strides, step = {}, 1
        for i, axis in reversed(list(enumerate(self.order))):
            if i == _innermost(self.order):
                step = self.room
            strides[axis] = step
            step *= self.sizes[axis]
        return strides

    @property
    def total(self) -> int:
        return self.strides[self.order[0]] * self.sizes[self.order[0]]


def _innermost(order: str) -> int:
    """Which axis of a layout goes over the pieces of memory: the last of layers and pages."""
    return max(order.index("L"), order.index("B"))


def _pages(model: Model, side: Side, pp_rank: int, heads: int) -> list[Pages]:
    order = ALIASES.get(side.layout, side.layout)
    groups = token_groups(model, side)
    layers = max(len(stage(model, side, pp_rank, of)) for of in (*(g.layers for g in groups), range(model.states)))
    content = sum(model.roles.values()) * ITEM
    sizes = [
        {"L": layers, "B": side.num_blocks * g.ratio, "H": heads, "N": g.page_tokens, "C": content} for g in groups
    ]
    pieces = [prod(each[axis] for axis in order[_innermost(order) + 1 :]) for each in sizes]
    most = max(g.ratio * (piece + side.padding) for g, piece in zip(groups, pieces, strict=True))
    unit = lcm(*(g.ratio for g in groups)) * ITEM
    block = -(-most // unit) * unit
    return [Pages(g, order, s, piece, block // g.ratio) for g, s, piece in zip(groups, sizes, pieces, strict=True)]


def _tensors(
    model: Model, side: Side, pages: Pages, group: int, name: str, i: int, heads: Interval
) -> tuple[Tensor, ...]:
    """The i-th layer's, of its group and stage."""
    (b, h, n, c), strides = (pages.sizes[axis] for axis in "BHNC"), pages.strides
    view = attention.PageView(
        name, group, 0, i * pages.strides["L"], (b, h, n, c), (strides["B"], strides["H"], strides["N"], strides["C"]),
        "bfloat16", ITEM, pages.group.ratio, heads, model.heads or 1,
    )  # fmt: skip
    if side.layout == "CPU":
        return attention.cpu_attention(view, model.key)
    if model.heads:
        return attention.key_value(view, model.key, model.value)
    return attention.latent(view, model.key)


def _index(model: Model, side: Side, pages: Pages, layer: int) -> dict[Role, NDArray[np.int64]]:
    order, sizes = pages.order, pages.sizes
    pieces = prod(sizes[axis] for axis in order[: _innermost(order) + 1])
    flat = np.arange(pieces * pages.room).reshape(pieces, pages.room)[:, : pages.piece]
    physical = flat.reshape([sizes[axis] for axis in order])
    blocks = physical.transpose([order.index(axis) for axis in "LBNHC"])[layer]  # [page, token, head, content]
    out, at = {}, 0
    if side.layout == "CPU":
        b, h, n, d = sizes["B"], sizes["H"], sizes["N"], model.key
        per_head = blocks.transpose(0, 2, 1, 3).reshape(b, h, -1)
        key, value = per_head[..., : n * d * ITEM], per_head[..., n * d * ITEM :]
        out[Role.KEY] = key.reshape(b, h, d, n, ITEM).transpose(0, 3, 1, 2, 4)
        out[Role.VALUE] = value.reshape(b, h, n, d, ITEM).transpose(0, 2, 1, 3, 4)
        return out
    for role, channels in model.roles.items():
        part = blocks[..., at : at + channels * ITEM]
        out[role] = part.reshape(*part.shape[:-1], channels, ITEM)
        at += channels * ITEM
    return out


TAPS, DK, DV, PER_HEAD = 3, 2, 3, 2
STATE_ROLES = (Role.CONV_Q, Role.CONV_K, Role.CONV_V, Role.SSM)


def _states(
    model: Model, side: Side, pp_rank: int, tp_rank: int, pages: Pages
) -> tuple[list[Tensor], dict[tuple[str, Role], NDArray[np.int64]], Interval]:
    """State layers over the same bytes as the attention blocks (a dual view): one block holds one or the other."""
    if not model.states:
        return [], {}, Interval(0, 1)
    heads = shard(model.state_heads, side.tp, tp_rank)
    n, h = len(heads), model.state_heads
    conv, ssm = n * PER_HEAD * TAPS * ITEM, n * DK * DV * 4
    order, strides, count = pages.order, pages.strides, pages.sizes["L"]
    layers = stage(model, side, pp_rank, range(model.states))
    page, between = strides["B"] * pages.group.ratio, strides["L"]  # bytes from block to block, from layer to layer
    room = page if order[0] == "L" else between
    assert set(order[:2]) == {"L", "B"} and 3 * conv + ssm <= room, "the state must fit the attention block"
    every = np.arange(count * side.num_blocks * room)
    tensors, where, group = [], {}, len(token_groups(model, side))
    for i, layer in enumerate(layers):
        name, start = f"layers.{layer}.state", i * between
        flat = every.reshape(count, -1, room)[i] if order[0] == "L" else every.reshape(-1, count, room)[:, i]
        # SD keeps all projections of one tap together, DS one channel's taps.
        conv_flat = flat[:, : 3 * conv]
        for j, role in enumerate(STATE_ROLES[:3]):
            if side.conv == "DS":
                index = conv_flat.reshape(side.num_blocks, 3, n * PER_HEAD, TAPS, ITEM)[:, j]
                offset, channel, tap = j * conv, TAPS * ITEM, ITEM
            else:
                index = conv_flat.reshape(side.num_blocks, TAPS, 3, n * PER_HEAD, ITEM)[:, :, j].transpose(0, 2, 1, 3)
                offset, channel, tap = j * n * PER_HEAD * ITEM, ITEM, 3 * n * PER_HEAD * ITEM
            axes: tuple[Axis, ...] = (
                Axis(AxisName.CHANNEL, n * PER_HEAD, channel, heads.start * PER_HEAD, h * PER_HEAD),
                Axis(AxisName.TAP, TAPS, tap, 0, TAPS),
            )
            tensors.append(_state(group, name, role, "bfloat16", ITEM, start + offset, side, page, axes))
            where[name, role] = index
        axes = (
            Axis(AxisName.HEAD, n, DK * DV * 4, heads.start, h),
            Axis(AxisName.DK, DK, DV * 4, 0, DK),
            Axis(AxisName.DV, DV, 4, 0, DV),
        )
        tensors.append(_state(group, name, Role.SSM, "float32", 4, start + 3 * conv, side, page, axes))
        where[name, Role.SSM] = flat[:, 3 * conv : 3 * conv + ssm].reshape(side.num_blocks, n, DK, DV, 4)
    return tensors, where, heads


def _state(
    group: int,
    layer: str,
    role: Role,
    dtype: str,
    item: int,
    offset: int,
    side: Side,
    page: int,
    axes: tuple[Axis, ...],
) -> Tensor:
    return Tensor(layer, role, group, dtype, item, 0, offset, side.num_blocks, page, 1, 0, axes)


def table(*ids: int, first: int = 0) -> BlockTable:
    return BlockTable.of(first, ids)
