"""Numbers that say where they belong: what stands for an element of a cache, and where a manifest wants it.

Each element's number follows from its layer, role, token and place on the logical axes, and is put where the manifest's
strides say: neither plan nor bind has a part in that. So an element that comes to a wrong place, or does not come, is
found with its layer and token, and so is a write into blocks beside those of the request.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_pd_connector.geometry.bind import window_start
from vllm_pd_connector.geometry.blocks import NULL_BLOCK, BlockTables
from vllm_pd_connector.geometry.checksums.digest import mix
from vllm_pd_connector.geometry.interleave import holds, local_position
from vllm_pd_connector.geometry.manifest import AxisName, GroupKind, Manifest, Tensor
from vllm_pd_connector.geometry.sharding import logical_axes

TOKENS_AT_ONCE: Final = 256
_BESIDE: Final = 0xA5

Places = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Caches:
    """A worker's caches: the manifest, and the bytes of its segments."""

    manifest: Manifest
    memory: tuple[NDArray[np.uint8], ...]


def _elements(worker: Caches, tensor: Tensor) -> NDArray[np.uint8]:
    """View of shape (pages, tokens of a page if it has any, sizes of the logical axes, bytes of an element)."""
    axes = [*(axis for axis in tensor.axes if axis.name is AxisName.TOKEN), *logical_axes(tensor.axes)]
    return np.ndarray(
        (tensor.pages, *(axis.size for axis in axes), tensor.itemsize),
        dtype=np.uint8,
        buffer=worker.memory[tensor.segment],
        offset=tensor.offset,
        strides=(tensor.page_stride, *(axis.stride for axis in axes), 1),
    )


def _held(manifest: Manifest, tensor: Tensor, tables: BlockTables, stop: int) -> tuple[Places, NDArray[np.bool_]]:
    """Where a worker has what of tokens [0, stop): their numbers, pages and slots; and per token whether it has it. A
    state is one number, 0; so is a page of unknown form, its place among its rank's pages, at its first token."""
    group, table = manifest.groups[tensor.group], tables[tensor.group]
    if group.kind is GroupKind.STATE:
        none = np.zeros(1, dtype=np.int64)
        return (none, table.ids[-1:], none), np.ones(1, dtype=np.bool_)
    tokens = np.arange(stop)
    local = local_position(group.share, tokens)
    page = local // tensor.page_tokens
    entry = page // tensor.pages_per_block - table.first_block
    held = (entry >= 0) & (entry < len(table.ids)) & holds(group.share, tokens)
    ids = np.zeros(stop, dtype=np.int64)
    ids[held] = table.ids[entry[held]]
    held &= ids != NULL_BLOCK
    pages = (ids * tensor.pages_per_block + page % tensor.pages_per_block)[held]
    if not tensor.opaque:
        return (tokens[held], pages, (local % tensor.page_tokens)[held]), held
    _, first = np.unique(pages, return_index=True)
    return (page[held][first], pages[first], np.zeros_like(first)), held


def _numbers(tensor: Tensor, tokens: NDArray[np.int64]) -> NDArray[np.uint8]:
    """What stands for these tokens in this worker's part of a tensor: shape (tokens, sizes of the logical axes, bytes
    of an element). Sums of odd multiples, mixed, so that neighbours along any axis differ."""
    odd = mix(np.arange(8, dtype=np.uint64)) | np.uint64(1)
    seed = zlib.crc32(f"{tensor.layer} {tensor.role}".encode())
    total = tokens.astype(np.uint64) * odd[0] + np.uint64(seed)
    for axis, step in zip(logical_axes(tensor.axes), odd[1:], strict=False):
        total = total[..., None] + np.arange(axis.start, axis.start + axis.size, dtype=np.uint64) * step
    wide = mix(total)[..., None].view(np.uint8)
    return wide[..., np.arange(tensor.itemsize) % wide.shape[-1]]


def _parts(places: Places) -> Iterator[Places]:
    for i in range(0, len(places[0]), TOKENS_AT_ONCE):
        tokens, pages, slots = (one[i : i + TOKENS_AT_ONCE] for one in places)
        yield tokens, pages, slots


def _at(tensor: Tensor, pages: NDArray[np.int64], slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    return (pages, slots) if any(axis.name is AxisName.TOKEN for axis in tensor.axes) else (pages,)


def fill(worker: Caches, tables: BlockTables, stop: int) -> None:
    """Put the numbers of tokens [0, stop), and of states, into the blocks of these tables."""
    for tensor in worker.manifest.tensors:
        elements = _elements(worker, tensor)
        for tokens, pages, slots in _parts(_held(worker.manifest, tensor, tables, stop)[0]):
            elements[_at(tensor, pages, slots)] = _numbers(tensor, tokens)


def wrong(
    here: Caches, own: BlockTables, there: Sequence[Caches], tables: BlockTables, start: int, stop: int
) -> Iterator[str]:
    """Which elements of tokens [start, stop), and of states, are not `here` in its own blocks as they were filled in
    the blocks of `tables` `there`. Tokens that the other side has let go of and that whoever computes token `stop` does
    not look at (`bind.window_start`) may lack."""
    known: dict[tuple[str, str], NDArray[np.bool_]] = {}
    for one in there:
        for tensor in one.manifest.tensors:
            held = _held(one.manifest, tensor, tables, stop)[1]
            known[tensor.layer, tensor.role] = held | known.get((tensor.layer, tensor.role), np.False_)
    for tensor in here.manifest.tensors:
        if (has := known.get((tensor.layer, tensor.role))) is None:
            continue  # a drafter's that the prefill side has not
        group = here.manifest.groups[tensor.group]
        places, held = _held(here.manifest, tensor, own, stop)
        needed = held.copy()
        if group.kind is not GroupKind.STATE:
            first = max(start, own[tensor.group].first_block * group.block_tokens)
            needed[:first] = False
            needed[: window_start(group, stop)] &= has[: window_start(group, stop)]
            if len(lacking := np.flatnonzero(needed & ~has)):
                yield f"{tensor.layer} {tensor.role}: token {lacking[0]} is in no block of the prefill side"
            if not tensor.opaque:
                places = tuple(one[needed[held]] for one in places)  # type: ignore[assignment]
        yield from _compare(_elements(here, tensor), tensor, places)


def _compare(elements: NDArray[np.uint8], tensor: Tensor, places: Places) -> Iterator[str]:
    bad: list[int] = []
    for tokens, pages, slots in _parts(places):
        differs = elements[_at(tensor, pages, slots)] != _numbers(tensor, tokens)
        bad += tokens[differs.reshape(len(tokens), -1).any(axis=1)].tolist()
    if bad:
        what = "page" if tensor.opaque else "state" if not tensor.page_tokens else "token"
        yield f"{tensor.layer} {tensor.role}: {len(bad)} of {len(places[0])} {what}s are wrong, the first is {bad[0]}"


def _beside(worker: Caches, tables: BlockTables) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
    """Pages of the blocks next to those of the request, which nothing may be written into. Only where the groups of a
    segment have equally many blocks, which are then the same memory."""
    named = np.unique(np.concatenate([table.ids for table in tables]))
    for tensor in worker.manifest.tensors:
        group = worker.manifest.groups[tensor.group]
        mates = {t.group for t in worker.manifest.tensors if t.segment == tensor.segment}
        if len({worker.manifest.groups[mate].num_blocks for mate in mates}) > 1:
            continue
        near = np.setdiff1d(np.concatenate(([NULL_BLOCK], named - 1, named + 1)), named)
        near = near[(near >= 0) & (near < group.num_blocks)]
        pages = near[:, None] * tensor.pages_per_block + np.arange(tensor.pages_per_block)
        yield tensor, pages.ravel()


def put_beside(worker: Caches, tables: BlockTables) -> None:
    """Mark the blocks next to those of the tables, into which nothing may be written."""
    for tensor, pages in _beside(worker, tables):
        _elements(worker, tensor)[pages] = _BESIDE


def touched_beside(worker: Caches, tables: BlockTables) -> Iterator[str]:
    """Which of them were written into."""
    for tensor, pages in _beside(worker, tables):
        touched = (_elements(worker, tensor)[pages] != _BESIDE).reshape(len(pages), -1).any(axis=1)
        if touched.any():
            block = pages[np.argmax(touched)] // tensor.pages_per_block
            yield f"{tensor.layer} {tensor.role}: block {block}, which is not the request's, was written into"
