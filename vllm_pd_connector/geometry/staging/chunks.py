"""Where runs are short: long runs between a staging buffer and the peer, and strided copies between the staging buffer
and the own cache.

A run costs a transport a fixed price, however short it is. Where two page layouts cut a page into many short runs, the
initiator reads whole stretches of the peer's pages into memory of its own (the *staging buffer*) and puts the elements
in place with strided copies between two views of the same elements: the peer's strides over the staging buffer, its own
strides over its cache. Both follow from the same `TensorSlice`, so no pair of layouts is a case of its own.

`split` decides per pairing, once per peer. `chunks` turns the spans that `bind.pair` found into pieces of work of
bounded size: what to read to where in the staging buffer, a page's *extents* (`page_extents`), then what to copy.
Copies name exactly the elements of the token range: a byte that is read needlessly goes no further than the buffer.

An initiator that writes does the same backwards, with the two sides of the plan exchanged (`_turned`): copies gather
extents of the destination's pages in the staging buffer, runs carry them there. The one difference is that its extents
have no gaps: what lies there belongs to others. Below, `source` of a turned pairing is the peer in both cases.

Figures: docs/design/conversion.md, `benchmarks/convert.py`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_pd_connector.geometry.bind import filled_every
from vllm_pd_connector.geometry.interleave import cut, local_position
from vllm_pd_connector.geometry.manifest import GroupKind
from vllm_pd_connector.geometry.patterns import batch_runs, grid
from vllm_pd_connector.geometry.plan import Edge, LayerBatch, PagePairing, StridedAxis, TensorSlice
from vllm_pd_connector.geometry.runs import Addresses, Runs, join
from vllm_pd_connector.geometry.spans import Spans
from vllm_pd_connector.geometry.staging.page_extents import (
    PageExtents,
    Placed,
    in_staging,
    page_extents,
    peer_places,
    place,
    reach_of,
    token_steps,
)
from vllm_pd_connector.geometry.staging.strided_copy import Copies, CopyAxis, fold

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

RUN_COST_BYTES = 20 << 10
"""What one more run costs, in bytes that could be moved and converted instead: staging pays where the average run is
shorter. It is the transport's to say, and its self-test's to measure; this is for those that say nothing, measured over
CMA and TCP (docs/design/conversion.md)."""

# A chunk takes up to this part of the staging buffer, so that transfers share it and one moves while another is copied.
CHUNKS_PER_BUFFER = 8

_ESTIMATE_RUNS = 1 << 18
_ESTIMATE_TOKENS = 1 << 14

# A chunk has up to so many runs, as far as a layer's page allows it: to make more and to give them to a transport takes
# longer than a turn of the transfer thread should, where memory is new (docs/design/conversion.md).
MOST_RUNS = 4096

# Pages in more parts are not staged: the parts are laid out one by one, and a peer's page says how many there are.
MAX_PARTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of work that takes `size` bytes of the staging buffer: `runs` between the staging buffer and the peer,
    `copies` between the staging buffer and the cache.

    Reads come before their copies, out of the staging buffer; with `writes`, copies into the staging buffer come first.
    On the staging buffer's side runs count from the chunk's first byte.
    """

    size: int
    runs: Runs
    copies: Copies
    writes: bool = False


@dataclass(frozen=True, slots=True)
class _Shape:
    """What copies of several slices share; the axes without TOKEN, whose strides (staging buffer, destination) stand
    apart."""

    item: int
    axes: tuple[CopyAxis, ...]
    token: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How chunks of equally many pages with the same extents use the staging buffer.

    Attributes:
        into: where in the staging buffer every part of every page's extents lies, parts first; array (parts * pages,).
        rows: per shape, the distance of slots, axes of layers and slices, and what does not fold into axes: an array
            (n, 2) of (staging buffer, destination) in slot 0 and page 0.
    """

    extents: PageExtents
    size: int
    into: Addresses
    rows: tuple[tuple[_Shape, int, list[CopyAxis], NDArray[np.int64]], ...]


def split(edge: Edge, limit: int, *, writes: bool = False, run_cost: int = RUN_COST_BYTES) -> tuple[Edge, Edge]:
    """The pairings of an edge that move directly, and those that are staged in chunks of up to `limit` bytes by the
    destination, or, with `writes`, by the source. `run_cost` is in bytes, and the same for the `chunks` of the edge."""
    staged = tuple(
        pairing
        for pairing in edge.pairings
        if _stages(_turned(pairing, writes), limit, _gap(pairing, writes, run_cost), run_cost)
    )
    direct = tuple(pairing for pairing in edge.pairings if pairing not in staged)
    return replace(edge, pairings=direct), replace(edge, pairings=staged)


def _stages(pairing: PagePairing, limit: int, gap: int, run_cost: int) -> bool:
    few = _part_count(pairing, gap) <= MAX_PARTS and (gap > 0 or _cuts(pairing).stretches == 1)
    return few and _fits(pairing, limit, gap) and _pays(pairing, gap, run_cost) and _is_even(pairing, gap)


def _pays(pairing: PagePairing, gap: int, run_cost: int) -> bool:
    """Whether the runs that staging saves per source page cost more than the bytes that it moves."""
    extents = page_extents(pairing, 0, _page_tokens(pairing), gap)
    saved = _cuts(pairing).spans * run_count(pairing) - len(extents.start)
    return saved * run_cost > int(extents.length.sum())


def _part_count(pairing: PagePairing, gap: int) -> int:
    """Parts of a page's extents, before neighbours are made one."""
    reaches = (
        (batch, reach_of(tensor_slice, _page_tokens(pairing), gap))
        for batch in pairing.batches
        for tensor_slice in batch.slices
    )
    return sum(
        len(batch.layers) * prod(axis.size for axis in reach.outer) * (reach.token.size if reach.apart else 1)
        for batch, reach in reaches
    )


def _page_tokens(pairing: PagePairing) -> int:
    return 1 if pairing.whole else pairing.source.page_tokens


def _gap(pairing: PagePairing, writes: bool, run_cost: int) -> int:
    """The longest gap, in bytes, that is read rather than left out. A state is large, moves once per request and lies
    there without gaps but for other ranks' shares, which may be most of it: those are never read. Nothing is ever
    written into a gap."""
    return 0 if writes or pairing.kind is GroupKind.STATE else run_cost


def _turned(pairing: PagePairing, writes: bool) -> PagePairing:
    """The pairing with the initiator as its destination: as it is for reads, with its sides exchanged for writes."""
    if not writes:
        return pairing
    batches = tuple(
        LayerBatch(tuple(map(_turned_slice, b.slices)), b.layers, b.destination, b.source) for b in pairing.batches
    )
    return PagePairing(pairing.kind, pairing.destination, pairing.source, pairing.whole, pairing.alike, batches)


def _turned_slice(tensor_slice: TensorSlice) -> TensorSlice:
    token, *axes = (
        StridedAxis(axis.size, axis.destination, axis.source) for axis in (tensor_slice.token, *tensor_slice.axes)
    )
    return TensorSlice(tensor_slice.destination, tensor_slice.source, tensor_slice.itemsize, token, tuple(axes))


def run_count(pairing: PagePairing) -> float:
    """About how many runs move a span of mean length directly."""
    tokens = _cuts(pairing).tokens
    return sum(_run_count(batch, tokens) for batch in pairing.batches)


class _Cuts(NamedTuple):
    """How source pages of which something moves are cut, on average: into so many spans, of so many tokens, in so many
    stretches without a gap."""

    spans: float
    tokens: int
    stretches: float


def _cuts(pairing: PagePairing) -> _Cuts:
    a, b = pairing.source, pairing.destination
    if pairing.whole:
        return _Cuts(1.0, 1, 1.0)
    some = min(_ESTIMATE_TOKENS, lcm(filled_every(a), filled_every(b)))
    first, tokens = cut(0, some, (a.share, a.page_tokens), (b.share, b.page_tokens))
    if not len(first):
        return _Cuts(1.0, a.page_tokens, 1.0)
    position = local_position(a.share, first)
    pages = len(np.unique(position // a.page_tokens))
    apart = np.count_nonzero((np.diff(position // a.page_tokens) == 0) & (position[1:] != (position + tokens)[:-1]))
    return _Cuts(len(first) / pages, max(1, round(tokens.mean())), 1 + apart / pages)


def chunks(
    paired: Iterable[tuple[PagePairing, Spans]], limit: int, *, writes: bool = False, run_cost: int = RUN_COST_BYTES
) -> Iterator[Chunk]:
    """The work of moving `paired` through a staging buffer of the destination, or, with `writes`, of the source: in
    order, each chunk at most `limit` bytes of it, and of about MOST_RUNS runs.

    Every pairing must fit: a page of one of its layers takes at most `limit` bytes (`split` sees to it).
    """
    for pairing, spans in paired:
        if not len(spans.tokens):
            continue
        gap, pairing = _gap(pairing, writes, run_cost), _turned(pairing, writes)
        if writes:
            spans = Spans(
                spans.destination_page, spans.source_page, spans.destination_token, spans.source_token, spans.tokens
            )
        if pairing.whole:
            none = np.zeros_like(spans.tokens)
            spans = replace(spans, source_token=none, destination_token=none, tokens=none + 1)
        # Of each source page, the tokens from `low` to `high` are wanted; pages alike in that share extents. What is
        # between them is another rank's, where tokens are interleaved: it may be read, never written.
        follows = (np.diff(spans.source_page) == 0) & (
            not writes or spans.source_token[1:] == (spans.source_token + spans.tokens)[:-1]
        )
        first = np.concatenate(([0], np.flatnonzero(~follows) + 1))
        low = np.minimum.reduceat(spans.source_token, first)
        high = np.maximum.reduceat(spans.source_token + spans.tokens, first)
        change = np.flatnonzero((np.diff(low) != 0) | (np.diff(high) != 0)) + 1
        bounds = np.append(first, len(spans.tokens))
        edges = [0, *change.tolist(), len(first)]
        for i, j in itertools.pairwise(edges):
            alike = _alike_chunks(pairing, spans, bounds[i : j + 1], int(low[i]), int(high[i]), gap, limit)
            yield from map(_written, alike) if writes else alike


def _written(chunk: Chunk) -> Chunk:
    """A chunk that writes what this one reads."""
    runs = chunk.runs
    return Chunk(chunk.size, Runs(runs.destination, runs.source, runs.length), chunk.copies, writes=True)


def _alike_chunks(
    pairing: PagePairing, spans: Spans, bounds: Addresses, low: int, high: int, gap: int, limit: int
) -> Iterator[Chunk]:
    """Chunks of consecutive source pages with the same extents; page k has the spans bounds[k] to bounds[k + 1]."""
    extents = page_extents(pairing, low, high, gap)
    parts = len(extents.start)
    if extents.size > limit or (parts > MOST_RUNS and _layer_count(pairing) > 1):
        for half in _halves(pairing):
            yield from _alike_chunks(half, spans, bounds, low, high, gap, limit)
        return
    at_once = max(1, min(limit // extents.size, MOST_RUNS // parts))
    layouts: dict[int, _Layout] = {}  # the last chunk may have fewer pages
    for k in range(0, len(bounds) - 1, at_once):
        some = bounds[k : k + at_once + 1]
        slots = len(some) - 1
        layout = layouts.get(slots) or layouts.setdefault(slots, _lay_out(pairing, extents, low, high, slots))
        yield _chunk(pairing, layout, low, spans.part(some[0], some[-1]), some - some[0])


def _layer_count(pairing: PagePairing) -> int:
    return sum(len(batch.layers) for batch in pairing.batches)


def _halves(pairing: PagePairing) -> tuple[PagePairing, PagePairing]:
    """The pairing's layers in two parts."""
    batches = pairing.batches
    if len(batches) > 1:
        middle = len(batches) // 2
        return replace(pairing, batches=batches[:middle]), replace(pairing, batches=batches[middle:])
    middle = len(batches[0].layers) // 2
    assert middle, "a page of one layer does not fit; split() keeps such families out"
    layers = _layers(batches[0], 0, middle), _layers(batches[0], middle, None)
    return replace(pairing, batches=layers[:1]), replace(pairing, batches=layers[1:])


def _layers(batch: LayerBatch, first: int, last: int | None) -> LayerBatch:
    part = slice(first, last)
    return LayerBatch(batch.slices, batch.layers[part], batch.source[part], batch.destination[part])


def _fits(pairing: PagePairing, limit: int, gap: int) -> bool:
    single = (replace(pairing, batches=(_layers(batch, 0, 1),)) for batch in pairing.batches)
    return all(page_extents(one, 0, _page_tokens(pairing), gap).size <= limit for one in single)


def _is_even(pairing: PagePairing, gap: int) -> bool:
    """Whether the tokens of a page are equally far apart in the staging buffer, which they are not where those of two
    slices interleave; then no strided copy moves several."""
    extents = page_extents(pairing, 0, _page_tokens(pairing), gap)
    placed = place(extents, pairing.source.page_stride, 2)
    return all(
        token_steps(extents, placed, peer_places(batch, tensor_slice, reach, 0), reach) is not None
        for batch in pairing.batches
        for tensor_slice in batch.slices
        for reach in [reach_of(tensor_slice, _page_tokens(pairing), gap)]
    )


def _run_count(batch: LayerBatch, tokens: int) -> float:
    """About how many runs move `tokens` tokens of a pair of pages; of many layers, only some are looked at."""
    rows = sum(prod(axis.size for axis in tensor_slice.axes[:-1]) * tokens for tensor_slice in batch.slices)
    some = min(len(batch.layers), max(1, _ESTIMATE_RUNS // max(1, rows)))
    return len(join([batch_runs(_layers(batch, 0, some), 0, 0, tokens)])) * len(batch.layers) / some


def _lay_out(pairing: PagePairing, extents: PageExtents, low: int, high: int, slots: int) -> _Layout:
    placed = place(extents, pairing.source.page_stride, slots)
    into = placed.base[:, None] + np.multiply.outer(placed.stride, np.arange(slots, dtype=np.int64))
    rows = tuple((*key, *fold(p)) for key, p in _rows(pairing, extents, placed, low, high).items())
    return _Layout(extents, placed.size, into.ravel(), rows)


def _chunk(pairing: PagePairing, layout: _Layout, low: int, spans: Spans, first: Addresses) -> Chunk:
    """One chunk of pages; page k of it, in slot k, has the spans first[k] to first[k + 1]."""
    extents, slots = layout.extents, len(first) - 1
    pages = spans.source_page[first[:-1]] * pairing.source.page_stride
    source = np.add.outer(extents.start, pages).ravel()
    runs = join([Runs(source, layout.into, np.repeat(extents.length, slots))])
    shapes = []
    slot = np.repeat(np.arange(slots, dtype=np.int64), np.diff(first))
    for tokens in np.unique(spans.tokens).tolist():
        some = np.flatnonzero(spans.tokens == tokens)
        from_, to = spans.source_token[some] - low, spans.destination_token[some]
        page = spans.destination_page[some] * pairing.destination.page_stride
        for shape, stride, axes, rows in layout.rows:
            columns = np.stack((slot[some] * stride + from_ * shape.token[0], page + to * shape.token[1]), axis=1)
            token = [(tokens, *shape.token)] if tokens > 1 else []
            shapes.append((shape.item, (*shape.axes, *token, *axes), rows, columns))
    return Chunk(layout.size, runs, Copies(tuple(shapes)))


def _rows(
    pairing: PagePairing, extents: PageExtents, placed: Placed, low: int, high: int
) -> dict[tuple[_Shape, int], NDArray[np.int64]]:
    """By shape and distance of the slots: (staging buffer, destination) of every slice of every layer, in slot 0 and
    page 0."""
    rows: dict[tuple[_Shape, int], list[NDArray[np.int64]]] = {}
    for batch in pairing.batches:
        of_bundle: dict[tuple[_Shape, int], list[NDArray[np.int64]]] = {}
        for tensor_slice in batch.slices:
            reach = reach_of(tensor_slice, high - low, extents.gap)
            axes = tuple((axis.size, axis.source, axis.destination) for axis in reach.inner)
            source = peer_places(batch, tensor_slice, reach, low)
            staging, stride = in_staging(extents, placed, source)
            ours = np.add.outer(batch.destination, grid(reach.outer)[1] + tensor_slice.destination)
            both = np.stack((staging, ours), axis=2)
            steps = token_steps(extents, placed, source, reach)
            assert steps is not None, "tokens interleave; split() keeps such families out"
            # Parts of different length only differ between layers where some of them lie side by side.
            distances = np.stack((stride, steps), axis=2)
            for distance in np.unique(distances.reshape(-1, 2), axis=0):
                alike = (distances == distance).all(axis=2)
                shape = _Shape(tensor_slice.itemsize, axes, (int(distance[1]), tensor_slice.token.destination))
                if alike.all():
                    of_bundle.setdefault((shape, int(distance[0])), []).append(both)
                else:
                    rows.setdefault((shape, int(distance[0])), []).append(both[alike])
        for key, members in of_bundle.items():
            rows.setdefault(key, []).append(np.concatenate(members, axis=1).reshape(-1, 2))
    return {key: np.concatenate(members) for key, members in rows.items()}
