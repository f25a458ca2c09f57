"""Digests of cache contents that do not depend on layout, block size or parallel sizes.

Two sides that hold the same logical elements get the same 64-bit values, however their bytes are arranged: a value is
made per (layer, role, global head, token position) of token-indexed tensors and per (layer, role, global index of
the sharded axis) of states, from the elements alone, in the order of the logical axes. So a wrong byte after a
transfer is found together with the layer, head and token that it belongs to.

The hash is a sum over elements of value times a fixed odd weight, modulo 2^64, then mixed. It finds accidents; it is
not meant to resist anybody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_pd_connector.errors import BindError
from vllm_pd_connector.geometry.blocks import NULL_BLOCK, BlockTables
from vllm_pd_connector.geometry.interleave import holds, local_position
from vllm_pd_connector.geometry.manifest import WHOLE, AxisName, GroupKind, Manifest, Role, Tensor, TokenShare
from vllm_pd_connector.geometry.sharding import logical_axes

if TYPE_CHECKING:
    from collections.abc import Sequence

Values = NDArray[np.uint64]
PAGES_AT_ONCE = 64


class Pages(Protocol):
    """Memory that cannot be looked at directly."""

    def gather(self, offset: int, stride: int, extent: int, pages: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Array of shape (len(pages), extent): the bytes from `offset + page * stride` on, of each page."""


Memory = NDArray[np.uint8] | Pages
"""The bytes of one segment."""


@dataclass(frozen=True, slots=True, eq=False)
class Digest:
    """Values of shape (positions, indices): token positions from `first_token` on, of which only those in `share` mean
    something, and global indices of the head (or, for convolution states, channel) axis from `first_index` on. States
    have one position."""

    layer: str
    role: Role
    first_token: int
    first_index: int
    values: Values
    share: TokenShare = WHOLE


def digests(
    manifest: Manifest, memory: Sequence[Memory], tables: BlockTables, start: int, stop: int
) -> dict[tuple[str, Role], Digest]:
    """Digest what one worker holds of a request: tokens [start, stop), and the last block of every state table.

    `memory` has the bytes of every segment of the manifest, in order. Positions without a block (outside a window) or
    in other ranks' shares digest to 0. Opaque tensors have no known elements and are left out.

    Raises:
        BindError: a state table without a last block, or an id outside the cache.
    """
    found = {}
    for tensor in manifest.tensors:
        if tensor.opaque:
            continue
        group, table = manifest.groups[tensor.group], tables[tensor.group]
        blocks = table.ids
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < group.num_blocks:
            raise BindError(f"group {tensor.group}: block ids must lie in [1, {group.num_blocks})")
        if group.kind is GroupKind.STATE:
            if not len(blocks) or blocks[-1] == NULL_BLOCK:
                raise BindError(f"group {tensor.group}: no block holds the state")
            values, first_index = _page_values(tensor, memory[tensor.segment], blocks[-1:])
            values = values[0]
        else:
            positions = np.arange(start, stop)
            local = local_position(group.share, positions)
            page = local // tensor.page_tokens
            entry = page // tensor.pages_per_block - table.first_block
            held = (entry >= 0) & (entry < len(blocks)) & holds(group.share, positions)
            ids = np.zeros(len(positions), dtype=np.int64)
            ids[held] = blocks[entry[held]]
            held = ids != NULL_BLOCK
            pages, where = np.unique(
                (ids * tensor.pages_per_block + page % tensor.pages_per_block)[held], return_inverse=True
            )
            per_page, first_index = _page_values(tensor, memory[tensor.segment], pages)
            values = np.zeros((len(positions), per_page.shape[2]), dtype=np.uint64)
            values[held] = per_page[where, local[held] % tensor.page_tokens]
        first_token = 0 if group.kind is GroupKind.STATE else start
        key = tensor.layer, tensor.role
        found[key] = Digest(*key, first_token, first_index, values, group.share)
    return found


def _page_values(tensor: Tensor, memory: Memory, pages: NDArray[np.int64]) -> tuple[Values, int]:
    """Values of shape (pages, tokens or 1, indices), and the global number of the first index. A device's pages come
    to the host `PAGES_AT_ONCE` at a time: to gather them takes as much of its memory, which nobody has counted."""
    axes = logical_axes(tensor.axes)
    token = [axis for axis in tensor.axes if axis.name is AxisName.TOKEN]
    named = [AxisName.HEAD] if token else [AxisName.HEAD, AxisName.CHANNEL]
    index = next((axis for name in named for axis in axes if axis.name is name), None)
    inner = [axis for axis in axes if axis is not index]
    unit = tensor.itemsize if tensor.itemsize in (1, 2, 4, 8) else 1
    outer = [axis for axis in (token[0] if token else None, index) if axis is not None]
    extent = tensor.itemsize + sum((axis.size - 1) * axis.stride for axis in tensor.axes)

    def view(buffer: NDArray[np.uint8], count: int, offset: int, page_stride: int) -> NDArray[np.unsignedinteger]:
        return np.ndarray(
            (count, *(axis.size for axis in outer + inner), tensor.itemsize // unit),
            dtype=f"<u{unit}",
            buffer=buffer,
            offset=offset,
            strides=(page_stride, *(axis.stride for axis in outer + inner), unit),
        )

    shape = (token[0].size if token else 1, index.size if index else 1)
    weights = _weights(math.prod(axis.size for axis in inner) * tensor.itemsize // unit)
    values = np.empty((len(pages), *shape), dtype=np.uint64)
    for i in range(0, len(pages), PAGES_AT_ONCE):
        some = pages[i : i + PAGES_AT_ONCE]
        if isinstance(memory, np.ndarray):
            chunk = view(memory, tensor.pages, tensor.offset, tensor.page_stride)[some]
        else:
            gathered = memory.gather(tensor.offset, tensor.page_stride, extent, some)
            chunk = view(gathered.reshape(-1), len(some), 0, extent)
        wide = chunk.astype(np.uint64).reshape(-1, *shape, len(weights))
        values[i : i + PAGES_AT_ONCE] = mix((wide * weights).sum(axis=-1))
    return values, index.start if index else 0


def _weights(count: int) -> Values:
    return mix(np.arange(1, count + 1, dtype=np.uint64)) | np.uint64(1)


def mix(x: Values) -> Values:
    """A bijection of 64-bit values that spreads every bit (SplitMix64's finaliser), with a start that 0 lacks."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
