"""Slots of received blocks that no run covers: they are zeroed before the receive is reported.

vLLM zeroes no block of a group that it is told we load. So whatever else lies in such a block keeps the bytes of who
had it before: the slots behind the last token, where both sides' pages differ so much that only tokens move; pages
behind the one in which the range ends; and the slots before the first token that came of a window. Attention masks by
position, but kernels may multiply what they mask by zero. Where groups of unequal kinds or precisions share memory,
old bytes may be read as NaN, and zero times NaN is NaN.

What a run covers follows from the plan, in a pull as in a push: every pairing has its own end of the range. So the
destination finds its blanks alone, whoever moves the bytes, and each element belongs to one edge of the plan. States
have no slots and always come whole. Where decode drafts and prefill has no like of its drafter's layers, their pages
are blank altogether: it drafts as if it had not seen the prompt.

Source: vLLM 0.32, `KVCacheConfig.needs_kv_cache_zeroing`, `KVCacheCoordinator.allocate_new_computed_blocks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_pd_connector.geometry.bind import Tail, block_tokens, pages_of, range_end
from vllm_pd_connector.geometry.interleave import cut, held_before, local_position, token_at
from vllm_pd_connector.geometry.manifest import GroupKind
from vllm_pd_connector.geometry.staging.strided_copy import Copy, fold, strided_copies

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm_pd_connector.geometry.blocks import BlockTable, BlockTables
    from vllm_pd_connector.geometry.plan import PagePairing, Plan
    from vllm_pd_connector.geometry.runs import Addresses


def blanks(
    plan: Plan, destination: BlockTables, start: int, stop: int, late_starts: Mapping[int, int]
) -> Iterator[Copy]:
    """What the moves of a request, tokens [start, stop), leave out of the blocks that `destination` names. Only the
    cache's side of these copies means something; the other is the same.

    `late_starts` are those of all moves (`bind.first_valid_tokens`). Where layers of one group began at different
    tokens, what came before the latest of these is zeroed too: nobody looks at it.
    """
    for edge in plan.edges:
        for family in edge.pairings:
            if family.kind is not GroupKind.STATE:
                late = late_starts.get(family.destination.group, 0)
                yield from _of_family(family, destination[family.destination.group], max(start, late), stop)
    for family in plan.absent:
        table, block = destination[family.destination.group], block_tokens(family.destination)
        yield from _between(family, table, table.first_block * block, table.end * block)


def _of_family(family: PagePairing, table: BlockTable, start: int, stop: int) -> Iterator[Copy]:
    paging = family.destination
    page, share, block = paging.page_tokens, paging.share, block_tokens(paging)
    begin, end = table.first_block * block, table.end * block
    stop = range_end(family, stop, Tail.PAGE)
    if family.whole:  # pages move with all of their slots
        start = token_at(share, held_before(share, start) // page * page)
    for low, high in ((begin, min(start, end)), (max(begin, stop), end)):
        yield from _between(family, table, low, high)


def _between(family: PagePairing, table: BlockTable, low: int, high: int) -> Iterator[Copy]:
    """The slots of tokens [low, high)."""
    if low >= high:  # as mostly: and without a pass of numpy over nothing, just before a request is reported
        return
    paging = family.destination
    page, share = paging.page_tokens, paging.share
    first, tokens = cut(low, high, (family.source.share, page), (share, page))
    pages, absent = pages_of(paging, table, first)
    kinds = np.stack((local_position(share, first) % page, tokens), axis=1)
    for slot, count in np.unique(kinds[~absent], axis=0).tolist():
        alike = (kinds == (slot, count)).all(axis=1) & ~absent
        yield from _in_pages(family, slot, count, np.sort(pages[alike]) * paging.page_stride)


def _in_pages(family: PagePairing, slot: int, count: int, pages: Addresses) -> Iterator[Copy]:
    """`count` slots from `slot` on of all tensors, in pages that begin so many bytes behind page 0."""
    if family.whole:
        slot, count = 0, 1
    for bundle in family.batches:
        for piece in bundle.slices:
            token = (count, piece.token.destination)
            stretches = [(axis.size, axis.destination) for axis in piece.axes]
            axes = [(size, step, step) for size, step in (*stretches, token) if size > 1]
            layers = bundle.destination + piece.destination + slot * piece.token.destination
            more, rows = fold(np.stack((layers, layers), axis=1))
            yield from strided_copies(piece.itemsize, axes + more, rows, np.stack((pages, pages), axis=1))
