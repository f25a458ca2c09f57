"""A different number in every logical element, and where a rank's layout wants it."""

from __future__ import annotations

from collections.abc import Container

import numpy as np
from numpy.typing import NDArray

from tests.support.geometry.world import (
    DK,
    DV,
    PER_HEAD,
    STATE_ROLES,
    TAPS,
    Model,
    Side,
    TokenGroup,
    Worker,
    token_groups,
)
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.manifest import Role


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
    late: int = 0,
) -> None:
    """Put the numbers of tokens [start, stop) and of all states where this rank's layout wants them; of all layers, or
    of these, and of a window only those from `late` on."""
    places: dict[str, tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = {}
    for group, table in zip(token_groups(model, side), tables, strict=False):  # behind them is the states'
        found = _places(side, worker, group, table, max(start, late) if group.window else start, stop)
        places |= dict.fromkeys(group.names, found)
    for (layer, role), index in worker.where.items():
        if layers is not None and layer not in layers:
            continue
        values = local_part(model, worker, role, numbers(model, layer, role, stop))
        if role in STATE_ROLES:
            memory[index[tables[-1].ids[-1]]] = values
            continue
        tokens, pages, slots = places[layer]
        memory[index[pages, slots]] = values[tokens]


def blank(side: Side, worker: Worker, table: BlockTable, memory: NDArray[np.uint8], start: int, stop: int) -> None:
    """Put zeros where this rank's layout wants tokens [start, stop) of a model with one group of them."""
    _, pages, slots = _places(side, worker, token_groups(Model(), side)[0], table, start, stop)
    for (_, role), index in worker.where.items():
        if role not in STATE_ROLES:
            memory[index[pages, slots]] = 0


def _places(
    side: Side, worker: Worker, group: TokenGroup, table: BlockTable, start: int, stop: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Those of the tokens [start, stop) that this rank has a slot for, and their pages and slots: as vLLM maps them.

    Source: vLLM 0.32, `ComputeSlotMappingKernel`.
    """
    tokens, blocks = _blocks_of(table, group.block_tokens, start, stop)
    inside = tokens % group.block_tokens
    if group.ranks > 1:
        mine = inside // side.interleave % group.ranks == worker.context_rank
        tokens, blocks, inside = tokens[mine], blocks[mine], inside[mine]
        inside = inside // (group.ranks * side.interleave) * side.interleave + inside % side.interleave
    return tokens, blocks * group.ratio + inside // group.page_tokens, inside % group.page_tokens


def _blocks_of(
    blocks: BlockTable, block_tokens: int, start: int, stop: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Those of the tokens [start, stop) that have a block other than the null block, and its id for each."""
    tokens = np.arange(start, stop)
    entries = tokens // block_tokens - blocks.first_block
    known = (entries >= 0) & (entries < len(blocks.ids))
    tokens, ids = tokens[known], blocks.ids[entries[known]]
    return tokens[ids != 0], ids[ids != 0]
