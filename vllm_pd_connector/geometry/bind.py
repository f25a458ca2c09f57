"""A request: block ids and a token range become spans of tokens, of which runs of bytes are made.

Pages of both sides are paired by absolute token position. Cutting the token range at every page boundary of either
side gives *spans*, each inside one page on both sides; equal or unequal block sizes, kernel blocks inside logical
blocks, prefix hits and tails are all just such cuts. `geometry.spans` makes runs of them.

Groups may lack different parts of a request. The range begins with what some group lacks; a destination table names the
blocks that are to be filled and no others, so what lies before its first block stays as it is (`require_filled`).

Nothing half-filled is delivered silently: a destination block that takes part must get every token of the range that
falls into it, or the request fails. One exception is for those who ask for it: the first block of a window on a
destination with larger blocks reaches back to tokens that the source has let go of and that the request itself never
looks at. Such a block may start late (`first_valid_tokens`), and must then never be shared with other requests.

Which tokens a side holds at all, and at which of its own positions, is `geometry.interleave`: a span holds tokens of
both.

Half a million tokens take milliseconds to be paired. So `pairing` yields between its passes over all of them, where
whoever has other work does it; who has none calls `pair`.

Source: vLLM 0.32 `v1/core/single_type_kv_cache_manager.py` (get_num_skipped_tokens).
"""

from __future__ import annotations

from enum import Enum
from math import lcm
from typing import TYPE_CHECKING

import numpy as np

from vllm_pd_connector.bounded import at_once
from vllm_pd_connector.errors import BindError
from vllm_pd_connector.geometry.blocks import NULL_BLOCK, BlockTable, BlockTables
from vllm_pd_connector.geometry.interleave import cut, held_before, local_position, token_at
from vllm_pd_connector.geometry.manifest import Group, GroupKind
from vllm_pd_connector.geometry.spans import Spans, require_movable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from vllm_pd_connector.bounded import Pieces
    from vllm_pd_connector.geometry.plan import Edge, PagePairing, Paging
    from vllm_pd_connector.geometry.runs import Addresses


class Tail(Enum):
    """What moves of the page in which the token range ends.

    EXACT: only tokens before `stop`. PAGE: the rest of that page too, where both sides' pages are alike. Slots after
    the last token are written before they are read (attention masks by sequence length), so PAGE is safe for the
    last move of a request, before the destination computes, and turns a transposed tail of many short runs into one.
    It is wrong for a step in the middle of a push: transfers are not ordered, and the next step's tokens lie there.
    """

    EXACT = "exact"
    PAGE = "page"


def first_valid_tokens(paired: Sequence[tuple[PagePairing, Spans]]) -> dict[int, int]:
    """Destination groups in which the first block of the window holds tokens only from a position on.

    That position is the value; the block that contains it must not be shared with other requests.
    """
    return latest(
        {pairing.destination.group: spans.first_valid_token} for pairing, spans in paired if spans.first_valid_token
    )


def latest(parts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """The largest value of every key: layers of one group may lie in groups of other block sizes on the source, or come
    from several ranks, and what some lack must count."""
    merged: dict[int, int] = {}
    for part in parts:
        for key, value in part.items():
            merged[key] = max(value, merged.get(key, value))
    return merged


def require_filled(groups: Sequence[Group], destination: BlockTables, start: int) -> None:
    """Refuse a range from `start` on that would leave a named destination block unfilled, or a part of it.

    Raises:
        BindError: a group names a block with tokens before `start`, which nothing would be written into.
    """
    for number, (group, table) in enumerate(zip(groups, destination, strict=True)):
        if group.kind is GroupKind.STATE or table.begin == table.end:
            continue
        begin = table.begin * group.block_tokens
        if begin < start:
            raise BindError(
                f"destination group {number}: its first block that is to be filled begins with token {begin}, but the "
                f"range begins with {start}; the block would keep what was there: name no block of a prefix hit, or "
                "begin where the group that lacks most begins"
            )


def window_start(group: Group, tokens: int) -> int:
    """The first position that whoever computes position `tokens` looks at, in one of the group's layers."""
    match group.kind:
        case GroupKind.SLIDING_WINDOW:
            return max(0, tokens + 1 - group.window)
        case GroupKind.CHUNKED_LOCAL:
            return tokens // group.window * group.window
        case _:
            return 0


def prefix_behind(kind: GroupKind | None, window: int, first_token: int) -> int:
    """The shortest prefix, in tokens, that can be gone on with where a group holds nothing before `first_token`: the
    least number of which `window_start` is not before it."""
    match kind:
        case GroupKind.SLIDING_WINDOW if first_token:
            return first_token + window - 1
        case GroupKind.CHUNKED_LOCAL:
            return -(-first_token // window) * window
        case _:
            return 0


def pair(
    edge: Edge,
    source: BlockTables,
    destination: BlockTables,
    start: int,
    stop: int,
    *,
    tail: Tail = Tail.EXACT,
    states: bool = True,
    late: bool = False,
) -> list[tuple[PagePairing, Spans]]:
    """`pairing`, with nothing done in between."""
    return at_once(pairing(edge, source, destination, start, stop, tail=tail, states=states, late=late))


def pairing(
    edge: Edge,
    source: BlockTables,
    destination: BlockTables,
    start: int,
    stop: int,
    *,
    tail: Tail = Tail.EXACT,
    states: bool = True,
    late: bool = False,
) -> Pieces[list[tuple[PagePairing, Spans]]]:
    """The spans of every pairing that moves, for tokens [start, stop), in absolute positions, along one edge.

    States have no token positions: the last block of each side's table moves, once, whatever the range; without
    `states` (a push in the middle of a prefill) they stay. Opaque pages move whole, so the range must start at one of
    their boundaries and their last page moves with all its slots. With `late`, which is for the last move of a request
    only, the first block of a window may lack tokens that the source does not hold and that nobody who computes
    position `stop` looks at; see `first_valid_tokens`.

    Raises:
        BindError: a block id outside [1, num_blocks), a table that does not reach the range, a destination block
            that would stay partly unfilled, a range that a tensor cannot follow, or more spans than runs can be moved.
    """
    if not 0 <= start <= stop:
        raise BindError(f"token range [{start}, {stop}) is not a range; start must lie between 0 and stop")
    moving = [f for f in edge.pairings if (states if f.kind is GroupKind.STATE else start < stop)]
    for side, tables, groups, used in (
        ("source", source, edge.source_groups, {f.source.group for f in moving}),
        ("destination", destination, edge.destination_groups, {f.destination.group for f in moving}),
    ):
        if len(tables) != len(groups):
            raise BindError(f"{side}: {len(tables)} block tables for {len(groups)} groups; give one per group")
        for group in used:
            _check_ids(f"{side} group {group}", tables[group], groups[group], unique=side == "destination")
            yield
    paired, runs = [], 0
    known: dict[object, Spans] = {}
    for some in moving:
        theirs, ours = source[some.source.group], destination[some.destination.group]
        if some.kind is GroupKind.STATE:
            found = _state_spans(some, theirs, ours)
        else:
            stop_ = range_end(some, stop, tail)
            # Families of the same groups mostly have equal pages (K, V and their scales): pair those once.
            key = some.kind, *_cuts(some.source), *_cuts(some.destination), stop_
            if (cached := known.get(key)) is None:
                needed = window_start(edge.destination_groups[some.destination.group], stop) if late else 0
                cached = known[key] = yield from _token_spans(some, theirs, ours, start, stop_, needed)
            found = cached
        runs += len(found.tokens)  # of each at least one; a peer may cut the pages of each tensor in another way
        require_movable(some, runs)
        paired.append((some, found))
    return paired


def _cuts(paging: Paging) -> tuple[object, ...]:
    return paging.group, paging.page_tokens, paging.pages_per_block, paging.share


def _check_ids(name: str, table: BlockTable, group: Group, *, unique: bool) -> None:
    ids = table.narrow
    if not len(ids):
        return
    ordered = np.sort(ids) if unique else None
    least, most = (ids.min(), ids.max()) if ordered is None else (ordered[0], ordered[-1])
    if least < NULL_BLOCK or most >= group.num_blocks:
        wrong = ids[(ids < NULL_BLOCK) | (ids >= group.num_blocks)][0]
        raise BindError(f"{name}: block id {wrong} is outside [1, {group.num_blocks}) of this side's cache")
    if ordered is not None:
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice := twice[twice != NULL_BLOCK]):
            raise BindError(f"{name}: block id {twice[0]} is given twice; two positions would write the same bytes")


def range_end(pairing: PagePairing, stop: int, tail: Tail) -> int:
    """Where the range ends for this pairing: at a page boundary if the rest of the last page may move."""
    page, share = pairing.destination.page_tokens, pairing.destination.share
    if tail is Tail.EXACT or not pairing.alike or not (held := held_before(share, stop)):
        return stop
    return max(stop, token_at(share, -(-held // page) * page - 1) + 1)


def _state_spans(pairing: PagePairing, theirs: BlockTable, ours: BlockTable) -> Spans:
    pages = []
    for side, group, table in (
        ("source", pairing.source.group, theirs),
        ("destination", pairing.destination.group, ours),
    ):
        ids = table.ids
        if not len(ids) or ids[-1] == NULL_BLOCK:
            raise BindError(f"{side} group {group}: no block holds the state; the last id of the table must be set")
        pages.append(ids[-1:])
    none, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    return Spans(pages[0], pages[1], none, none, one)


def _token_spans(
    pairing: PagePairing, theirs: BlockTable, ours: BlockTable, start: int, stop: int, needed: int
) -> Pieces[Spans]:
    a, b = pairing.source, pairing.destination
    # Before anything is laid out token by token: the range is a peer's word, and the tables are what came with it.
    _refuse_beyond("destination", b, ours, start, stop)
    _refuse_beyond("source", a, theirs, start, stop)
    start = max(start, ours.first_block * block_tokens(b))
    if pairing.whole and start < stop and held_before(b.share, start) % b.page_tokens:
        raise BindError(
            f"group {b.group}: tokens from {start} on begin inside an opaque page of {b.page_tokens} tokens, which "
            "only moves whole; start at a page boundary"
        )
    first, tokens = cut(start, stop, (a.share, a.page_tokens), (b.share, b.page_tokens))
    small, large = sorted((a.page_tokens, b.page_tokens))
    step = small if a.share == b.share and large % small == 0 else 0
    yield
    source, from_, source_absent = _places(a, theirs, first, step)
    yield
    destination, to, destination_absent = _places(b, ours, first, step)
    if pairing.kind is GroupKind.FULL:  # a windowed table may begin late or with null blocks
        _refuse_any("destination", b, ours, first, destination_absent)
    yield
    spans = Spans(source, destination, from_, to, tokens)
    if not (source_absent | destination_absent).any():
        return spans
    lacking = source_absent & ~destination_absent
    spared = lacking & (first + tokens <= needed)
    _refuse_any("source", a, theirs, first, lacking & ~spared)
    present = np.flatnonzero(~(destination_absent | spared))
    return spans.take(present, first_valid_token=int((first + tokens)[spared].max(initial=0)))


def block_tokens(paging: Paging) -> int:
    """Tokens of a logical block, on all ranks that share them."""
    return paging.page_tokens * paging.pages_per_block * paging.share.size


def filled_every(paging: Paging) -> int:
    """Tokens after which no page is filled in part, and every multiple."""
    return paging.share.size * lcm(paging.share.interleave, paging.page_tokens)


def _refuse_beyond(side: str, paging: Paging, table: BlockTable, start: int, stop: int) -> None:
    """Every table, also a windowed one, reaches the last token of the range [start, stop)."""
    end = table.end * block_tokens(paging)
    if stop > end:
        _refuse_any(side, paging, table, np.array([max(start, end)]), np.array([True]))


def pages_of(paging: Paging, table: BlockTable, tokens: Addresses) -> tuple[Addresses, NDArray[np.bool_]]:
    """Pages that hold these token positions, and where there is none (the page is then meaningless). All of them are
    positions that this side's share holds, in order."""
    page = local_position(paging.share, tokens) // paging.page_tokens
    block = page // paging.pages_per_block if paging.pages_per_block > 1 else page
    entry, ids = block - table.first_block if table.first_block else block, table.narrow
    if not len(entry) or (entry.item(0) >= 0 and entry.item(-1) < len(ids)):  # they are in order
        wide = ids.take(entry).astype(np.int64)
        absent = wide == NULL_BLOCK
    else:
        absent = (entry < 0) | (entry >= len(ids))
        if absent.all():
            return np.zeros_like(page), absent
        wide = ids.take(np.where(absent, 0, entry)).astype(np.int64)
        absent |= wide == NULL_BLOCK
    return (wide if block is page else (wide - block) * paging.pages_per_block + page), absent


def _places(
    paging: Paging, table: BlockTable, first: Addresses, step: int
) -> tuple[Addresses, Addresses, NDArray[np.bool_]]:
    """Pages that hold parts of the range, which begin with these tokens, where in its page each begins, and where there
    is none. With a `step`, which divides a page, this side holds the tokens of every part behind those of the one
    before, and each part but the first begins with a multiple of it.

    A long prompt has tens of thousands of parts, and each array of them is memory that no cache holds: with a step they
    are a piece of the table, each of its pages as often as it has steps.
    """
    position, page = local_position(paging.share, first), paging.page_tokens
    if step and len(position) and paging.pages_per_block == 1:
        low, high = position.item(0), position.item(-1)
        begin, end = low // page - table.first_block, high // page - table.first_block
        if begin >= 0 and end < len(ids := table.narrow):
            wide, inside = ids[begin : end + 1].astype(np.int64), np.broadcast_to(np.int64(0), position.shape)
            if step < page:
                parts = slice(low % page // step, low % page // step + len(position))
                inside = np.tile(np.arange(0, page, step, dtype=np.int64), len(wide))[parts]
                wide = np.repeat(wide, page // step)[parts]
            if low % step:
                inside = inside.copy()
                inside[0] = low % page
            return wide, inside, wide == NULL_BLOCK
    pages, absent = pages_of(paging, table, first)
    return pages, position % page, absent


def _refuse_any(side: str, paging: Paging, table: BlockTable, tokens: Addresses, missing: NDArray[np.bool_]) -> None:
    if not missing.any():
        return
    token = int(tokens[np.argmax(missing)])
    block = token // block_tokens(paging)
    if table.first_block <= block < table.end:
        problem = "is null there"
    else:
        problem = f"is too short: it holds logical blocks [{table.first_block}, {table.end})"
    raise BindError(
        f"{side} group {paging.group}: token {token} needs logical block {block}, but the table {problem}; a "
        "destination block must be filled completely or not at all"
    )
