"""Small worlds for the geometry tests: workers with real bytes, and an oracle that knows no strides.

The oracle numbers the bytes of a segment (`arange`), reshapes them in the physical order of a layout and transposes
them to logical order: what comes out says at which byte each logical element lies. Manifests are built the other way
round, from strides through the codecs, as the connector does.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from itertools import product

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
    """What both sides serve. `heads` 0 means MLA: one latent of `key` channels per token."""

    layers: int = 2
    heads: int = 4
    key: int = 2
    value: int = 2
    states: int = 0
    state_heads: int = 4
    window: int = 0

    @property
    def roles(self) -> dict[Role, int]:
        return {Role.KEY: self.key, Role.VALUE: self.value} if self.heads else {Role.LATENT: self.key}


@dataclass(frozen=True)
class Side:
    """How one side lays it out."""

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

    @property
    def slots(self) -> int:
        """Tokens that one rank has room for in a logical block."""
        return self.block_tokens // self.dcp

    @property
    def page_tokens(self) -> int:
        return self.slots // self.ratio


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
    order = ALIASES.get(side.layout, side.layout)
    heads = shard(model.heads or 1, side.tp, tp_rank) if model.heads else Interval(0, 1)
    layers = [i for i in range(model.layers) if i * side.pp // model.layers == pp_rank]
    pages, tokens = side.num_blocks * side.ratio, side.page_tokens
    content = sum(model.roles.values()) * ITEM
    sizes = {"L": len(layers), "B": pages, "H": len(heads), "N": tokens, "C": content}
    strides, total = _strides(order, sizes, side.padding)
    states, where_states, state_heads = _states(model, side, pp_rank, tp_rank, order, strides)
    rng = np.random.default_rng([pp_rank, tp_rank, len(engine), pcp_rank][: 4 if pcp_rank else 3])
    length = total + 5
    memory = rng.integers(0, 256, length, dtype=np.uint8)

    tensors: list[Tensor] = []
    where: dict[tuple[str, Role], NDArray[np.int64]] = {}
    for i, layer in enumerate(layers):
        name = f"layers.{layer}.attn"
        view = attention.PageView(
            name, 0, 0, i * strides["L"], (pages, len(heads), tokens, content),
            (strides["B"], strides["H"], strides["N"], strides["C"]),
            "bfloat16", ITEM, side.ratio, heads, model.heads or 1,
        )  # fmt: skip
        if side.layout == "CPU":
            tensors += attention.cpu_attention(view, model.key)
        elif model.heads:
            tensors += attention.key_value(view, model.key, model.value)
        else:
            tensors += attention.latent(view, model.key)
        for role, index in _index(model, side, order, sizes, i).items():
            where[name, role] = index
    kind = GroupKind.SLIDING_WINDOW if model.window else GroupKind.FULL
    context_rank = (tp_rank * side.pcp + pcp_rank) % side.dcp
    share = TokenShare(context_rank, side.dcp, side.interleave) if side.dcp > 1 else WHOLE
    groups = [Group(kind, side.block_tokens, side.num_blocks, model.window, share)]
    if model.states:
        groups.append(Group(GroupKind.STATE, side.block_tokens, side.num_blocks))
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


def _strides(order: str, sizes: dict[str, int], padding: int) -> tuple[dict[str, int], int]:
    strides, step = {}, 1
    for i, axis in reversed(list(enumerate(order))):
        if i == 1 and set(order[:2]) == {"L", "B"}:
            step += padding
        strides[axis] = step
        step *= sizes[axis]
    return strides, step


def _index(model: Model, side: Side, order: str, sizes: dict[str, int], layer: int) -> dict[Role, NDArray[np.int64]]:
    page = sizes["H"] * sizes["N"] * sizes["C"]
    if set(order[:2]) == {"L", "B"}:
        flat = np.arange(sizes["L"] * sizes["B"] * (page + side.padding)).reshape(-1, page + side.padding)[:, :page]
    else:
        assert side.padding == 0
        flat = np.arange(sizes["L"] * sizes["B"] * page)
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
    model: Model, side: Side, pp_rank: int, tp_rank: int, order: str, strides: dict[str, int]
) -> tuple[list[Tensor], dict[tuple[str, Role], NDArray[np.int64]], Interval]:
    """State layers over the same bytes as the attention blocks (a dual view): one block holds one or the other."""
    if not model.states:
        return [], {}, Interval(0, 1)
    heads = shard(model.state_heads, side.tp, tp_rank)
    n, h = len(heads), model.state_heads
    conv, ssm = n * PER_HEAD * TAPS * ITEM, n * DK * DV * 4
    count = sum(i * side.pp // model.layers == pp_rank for i in range(model.layers))
    layers = [i for i in range(model.states) if i * side.pp // model.layers == pp_rank]
    page, between = strides["B"] * side.ratio, strides["L"]  # bytes from block to block, from layer to layer
    room = page if order[0] == "L" else between
    assert set(order[:2]) == {"L", "B"} and 3 * conv + ssm <= room, "the state must fit the attention block"
    every = np.arange(count * side.num_blocks * room)
    tensors, where = [], {}
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
            tensors.append(_state(name, role, "bfloat16", ITEM, start + offset, side, page, axes))
            where[name, role] = index
        axes = (
            Axis(AxisName.HEAD, n, DK * DV * 4, heads.start, h),
            Axis(AxisName.DK, DK, DV * 4, 0, DK),
            Axis(AxisName.DV, DV, 4, 0, DV),
        )
        tensors.append(_state(name, Role.SSM, "float32", 4, start + 3 * conv, side, page, axes))
        where[name, Role.SSM] = flat[:, 3 * conv : 3 * conv + ssm].reshape(side.num_blocks, n, DK, DV, 4)
    return tensors, where, heads


def _state(
    layer: str, role: Role, dtype: str, item: int, offset: int, side: Side, page: int, axes: tuple[Axis, ...]
) -> Tensor:
    return Tensor(layer, role, 1, dtype, item, 0, offset, side.num_blocks, page, 1, 0, axes)


def numbers(model: Model, layer: str, role: Role, tokens: int) -> NDArray[np.uint8]:
    """A different number in every logical element: bytes of [token, head, channel] or of a whole state."""
    seed = [int(layer.split(".")[1]), list(Role).index(role), layer.endswith("state")]
    start = (seed[0] * len(Role) + seed[1]) * 2 + seed[2]
    if role is Role.SSM:
        shape: tuple[int, ...] = (model.state_heads, DK, DV)
        values = np.arange(np.prod(shape), dtype="<u4") + np.uint32(start * 100003 + 7)
    elif role in STATE_ROLES:
        shape = (model.state_heads * PER_HEAD, TAPS)
        values = (np.arange(np.prod(shape)) * 40503 + start * 977 + 1).astype("<u2")
    else:
        shape = (tokens, model.heads or 1, model.roles[role])
        values = (np.arange(np.prod(shape)) * 40503 + start * 977 + 1).astype("<u2")
    return values.view(np.uint8).reshape(*shape, values.itemsize)


def local_part(model: Model, worker: Worker, role: Role, values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The rank's own part of a logical tensor."""
    h, s = worker.heads, worker.state_heads
    if role is Role.SSM:
        return values[s.start : s.stop]
    if role in STATE_ROLES:
        return values[s.start * PER_HEAD : s.stop * PER_HEAD]
    return values[:, h.start : h.stop]


def write(
    model: Model,
    side: Side,
    worker: Worker,
    tables: list[BlockTable],
    memory: NDArray[np.uint8],
    start: int,
    stop: int,
    layers: Container[str] | None = None,
) -> None:
    """Put the numbers of tokens [start, stop) and of all states where this rank's layout wants them; of all layers, or
    of these."""
    tokens, pages, slots = _places(side, worker, tables[0], start, stop)
    for (layer, role), index in worker.where.items():
        if layers is not None and layer not in layers:
            continue
        values = local_part(model, worker, role, numbers(model, layer, role, stop))
        if role in STATE_ROLES:
            memory[index[tables[1].ids[-1]]] = values
            continue
        memory[index[pages, slots]] = values[tokens]


def blank(side: Side, worker: Worker, table: BlockTable, memory: NDArray[np.uint8], start: int, stop: int) -> None:
    """Put zeros where this rank's layout wants tokens [start, stop)."""
    _, pages, slots = _places(side, worker, table, start, stop)
    for (_, role), index in worker.where.items():
        if role not in STATE_ROLES:
            memory[index[pages, slots]] = 0


def _places(
    side: Side, worker: Worker, table: BlockTable, start: int, stop: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Those of the tokens [start, stop) that this rank has a slot for, and their pages and slots: as vLLM maps them.

    Source: vLLM 0.32, `ComputeSlotMappingKernel`.
    """
    tokens, blocks = _blocks_of(table, side.block_tokens, start, stop)
    inside = tokens % side.block_tokens
    mine = inside // side.interleave % side.dcp == worker.context_rank
    tokens, blocks, inside = tokens[mine], blocks[mine], inside[mine]
    inside = inside // (side.dcp * side.interleave) * side.interleave + inside % side.interleave
    return tokens, blocks * side.ratio + inside // side.page_tokens, inside % side.page_tokens


def _blocks_of(
    blocks: BlockTable, block_tokens: int, start: int, stop: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Those of the tokens [start, stop) that have a block other than the null block, and its id for each."""
    tokens = np.arange(start, stop)
    entries = tokens // block_tokens - blocks.first_block
    known = (entries >= 0) & (entries < len(blocks.ids))
    tokens, ids = tokens[known], blocks.ids[entries[known]]
    return tokens[ids != 0], ids[ids != 0]


def table(*ids: int, first: int = 0) -> BlockTable:
    return BlockTable.of(first, ids)
