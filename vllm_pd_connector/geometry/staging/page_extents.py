"""What moves of a page by way of the staging buffer, and where it lies there.

A page's *extents* are what must be read of it: the stretches that hold the wanted elements, neighbours made one where
the gap between them costs less than a run. The staging buffer keeps extents in the peer's own order, so that its
consecutive pages are still one run. Here `source` is the peer's side of a pairing, whichever way its bytes move
(`chunks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_pd_connector.geometry.patterns import grid
from vllm_pd_connector.geometry.plan import LayerBatch, PagePairing, StridedAxis, TensorSlice

if TYPE_CHECKING:
    from vllm_pd_connector.geometry.runs import Addresses


@dataclass(frozen=True, slots=True)
class PageExtents:
    """What moves of a page: arrays (n,) of source addresses in page 0, ascending and apart, and lengths in bytes.

    `gap` is the longest gap, in bytes, that it moves too.
    """

    start: Addresses
    length: Addresses
    gap: int

    @property
    def size(self) -> int:
        """Bytes of the staging buffer that one page takes; for some of a page's tokens never more than for all."""
        return int(self.length.sum())


@dataclass(frozen=True, slots=True)
class Reach:
    """How some tokens of a slice lie in the source's pages: in stretches of `length` bytes that hold the `inner` axes,
    one at every index of the `outer` axes. Both without TOKEN, which is outer if the tokens lie `apart`."""

    length: int
    inner: tuple[StridedAxis, ...]
    outer: tuple[StridedAxis, ...]
    token: StridedAxis
    apart: bool


@dataclass(frozen=True, slots=True)
class Placed:
    """Where in the staging buffer each of a page's extents lies for slot 0, and how far apart the slots are. Arrays
    (n,)."""

    base: Addresses
    stride: Addresses
    size: int


def page_extents(pairing: PagePairing, low: int, high: int, gap: int) -> PageExtents:
    """What must move of a source page for its tokens [low, high)."""
    start, length = [], []
    for batch in pairing.batches:
        begin, size = [], []
        for tensor_slice in batch.slices:
            reach = reach_of(tensor_slice, high - low, gap)
            outer = (*reach.outer, reach.token) if reach.apart else reach.outer
            begin.append(grid(outer)[0] + tensor_slice.source + low * tensor_slice.token.source)
            size.append(np.full(len(begin[-1]), reach.length, dtype=np.int64))
        of_layer, sizes = _merged(np.concatenate(begin), np.concatenate(size))
        start.append(np.add.outer(batch.source, of_layer).ravel())
        length.append(np.tile(sizes, len(batch.layers)))
    return PageExtents(*_merged(np.concatenate(start), np.concatenate(length)), gap)


def _merged(begin: Addresses, size: Addresses) -> tuple[Addresses, Addresses]:
    """Stretches of memory in order, those that touch or overlap made one."""
    order = np.argsort(begin, kind="stable")
    begin, size = begin[order], size[order]
    end = np.maximum.accumulate(begin + size)
    first = np.concatenate(([0], np.flatnonzero(begin[1:] > end[:-1]) + 1))
    return begin[first], end[np.append(first[1:] - 1, len(end) - 1)] - begin[first]


def reach_of(tensor_slice: TensorSlice, tokens: int, gap: int) -> Reach:
    """How `tokens` tokens lie. An axis is inner if the gaps between its elements are at most `gap` bytes: moving them
    then costs less than more runs would."""
    token = StridedAxis(tokens, tensor_slice.token.source, tensor_slice.token.destination)
    length: int = tensor_slice.itemsize
    inner: list[StridedAxis] = []
    outer: list[StridedAxis] = []
    for axis in sorted((axis for axis in (token, *tensor_slice.axes) if axis.size > 1), key=lambda axis: axis.source):
        if outer or axis.source - length > gap:
            outer.append(axis)
        else:
            length += (axis.size - 1) * axis.source
            inner.append(axis)
    apart = any(axis is token for axis in outer)
    inner, outer = ([axis for axis in axes if axis is not token] for axes in (inner, outer))
    return Reach(length, tuple(inner), tuple(outer), token, apart)


def place(extents: PageExtents, page_stride: int, slots: int) -> Placed:
    """Lay out the extents of `slots` pages in the order in which the source has them: page after page, or part after
    part."""
    if extents.start[-1] + extents.length[-1] - extents.start[0] <= page_stride:
        room = extents.length
        stride = np.full(len(room), extents.size, dtype=np.int64)
    else:
        room = extents.length * slots
        stride = extents.length
    return Placed(np.cumsum(room) - room, stride, extents.size * slots)


def peer_places(batch: LayerBatch, tensor_slice: TensorSlice, reach: Reach, low: int) -> Addresses:
    """Addresses of token `low` of page 0 in the source: array (layers, indices of the outer axes)."""
    return np.add.outer(batch.source, grid(reach.outer)[0] + tensor_slice.source + low * tensor_slice.token.source)


def in_staging(extents: PageExtents, placed: Placed, source: Addresses) -> tuple[Addresses, Addresses]:
    """Where addresses of page 0 lie in the staging buffer for slot 0, and how far apart the slots are there."""
    part = np.searchsorted(extents.start, source, side="right") - 1
    return source - extents.start[part] + placed.base[part], placed.stride[part]


def token_steps(extents: PageExtents, placed: Placed, source: Addresses, reach: Reach) -> Addresses | None:
    """Bytes from token to token in the staging buffer, for tokens that begin at addresses `source`; None if they
    vary."""
    if not reach.apart:
        return np.full(source.shape, reach.token.source, dtype=np.int64)
    tokens = np.arange(reach.token.size, dtype=np.int64) * reach.token.source
    steps = np.diff(in_staging(extents, placed, np.add.outer(source, tokens))[0], axis=-1)
    return steps[..., 0] if (steps == steps[..., :1]).all() else None
