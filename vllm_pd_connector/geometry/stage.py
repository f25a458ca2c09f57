"""Where runs are short: long runs between a slab and the peer, and strided copies between the slab and the own cache.

A run costs a transport a fixed price, however short it is. Where two page layouts cut a page into many short runs, the
initiator reads whole stretches of the peer's pages into memory of its own (the *slab*) and puts the elements in place
with strided copies between two views of the same elements: the peer's strides over the slab, its own strides over its
cache. Both follow from the same `Piece`, so no pair of layouts is a case of its own.

`split` decides per family, once per peer. `chunks` turns the spans that `bind.pair` found into pieces of work of
bounded size: what to read to where in the slab, a page's *image* (`images`), then what to copy. Copies name exactly
the elements of the token range: a byte that is read needlessly goes no further than the slab.

An initiator that writes does the same backwards, with the two sides of the plan exchanged (`_turned`): copies gather
images of the destination's pages in the slab, runs carry them there. The one difference is that its images have no
gaps: what lies there belongs to others. Below, `source` of a turned family is the peer in both cases.

Source: architecture.md, idea 3. Figures: docs/design/conversion.md, `benchmarks/convert.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import lcm, prod

import numpy as np
from numpy.typing import NDArray

from vllm_pd_connector.geometry.bind import Spans
from vllm_pd_connector.geometry.images import (
    Image,
    Placed,
    grid,
    image_of,
    in_slab,
    peer_places,
    place,
    reach_of,
    token_steps,
)
from vllm_pd_connector.geometry.manifest import GroupKind
from vllm_pd_connector.geometry.plan import Bundle, Edge, Family, Piece, Stretch, bundle_runs, join
from vllm_pd_connector.geometry.runs import Addresses, Runs
from vllm_pd_connector.geometry.strided import Axis, Copy, fold, strided_copies

# The price of one more run, in bytes that could be read and converted instead. Staging pays where the average run
# is shorter than this. Measured; see docs/design/conversion.md.
RUN_COST_BYTES = 20 << 10

# A chunk takes up to this part of the slab, so that transfers share it and one moves while another is copied.
CHUNKS_PER_SLAB = 8

_ESTIMATE_RUNS = 1 << 18

# Pages in more parts are not staged: the parts are laid out one by one, and a peer's page says how many there are.
MAX_PARTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of work that takes `size` bytes of the slab: `runs` between the slab and the peer, `copies` between the
    slab and the cache.

    Reads come before their copies, out of the slab; with `writes`, copies into the slab come first. On the slab's side
    runs count from the chunk's first byte.
    """

    size: int
    runs: Runs
    copies: tuple[Copy, ...]
    writes: bool = False


@dataclass(frozen=True, slots=True)
class _Shape:
    """What copies of several pieces share; the axes without TOKEN, whose strides (slab, destination) stand apart."""

    item: int
    axes: tuple[Axis, ...]
    token: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How chunks of equally many pages with one image use the slab.

    Attributes:
        into: where in the slab every part of the image of every page lies, parts first; array (parts * pages,).
        rows: per shape, the distance of slots, axes of layers and pieces, and what does not fold into axes: an array
            (n, 2) of (slab, destination) in slot 0 and page 0.
    """

    image: Image
    size: int
    into: Addresses
    rows: tuple[tuple[_Shape, int, list[Axis], NDArray[np.int64]], ...]


def split(edge: Edge, limit: int, *, writes: bool = False) -> tuple[Edge, Edge]:
    """The families of an edge that move directly, and those that are staged in chunks of up to `limit` bytes by the
    destination, or, with `writes`, by the source."""
    staged = tuple(family for family in edge.families if _stages(_turned(family, writes), limit, _gap(family, writes)))
    direct = tuple(family for family in edge.families if family not in staged)
    return replace(edge, families=direct), replace(edge, families=staged)


def _stages(family: Family, limit: int, gap: int) -> bool:
    few = _part_count(family, gap) <= MAX_PARTS
    return few and _fits(family, limit, gap) and _pays(family, gap) and _is_even(family, gap)


def _pays(family: Family, gap: int) -> bool:
    """Whether the runs that staging saves per source page cost more than the bytes that it moves."""
    image = image_of(family, 0, _page_tokens(family), gap)
    saved = _spans_per_page(family) * run_count(family) - len(image.start)
    return saved * RUN_COST_BYTES > int(image.length.sum())


def _part_count(family: Family, gap: int) -> int:
    """Parts of a page's image, before neighbours are made one."""
    reaches = (
        (bundle, reach_of(piece, _page_tokens(family), gap)) for bundle in family.bundles for piece in bundle.pieces
    )
    return sum(
        len(bundle.layers) * prod(axis.size for axis in reach.outer) * (reach.token.size if reach.apart else 1)
        for bundle, reach in reaches
    )


def _page_tokens(family: Family) -> int:
    return 1 if family.whole else family.source.page_tokens


def _gap(family: Family, writes: bool) -> int:
    """The longest gap, in bytes, that is read rather than left out. A state is large, moves once per request and lies
    there without gaps but for other ranks' shares, which may be most of it: those are never read. Nothing is ever
    written into a gap."""
    return 0 if writes or family.kind is GroupKind.STATE else RUN_COST_BYTES


def _turned(family: Family, writes: bool) -> Family:
    """The family with the initiator as its destination: as it is for reads, with its sides exchanged for writes."""
    if not writes:
        return family
    bundles = tuple(
        Bundle(tuple(map(_turned_piece, b.pieces)), b.layers, b.destination, b.source) for b in family.bundles
    )
    return Family(family.kind, family.destination, family.source, family.whole, family.alike, bundles)


def _turned_piece(piece: Piece) -> Piece:
    token, *axes = (Stretch(axis.size, axis.destination, axis.source) for axis in (piece.token, *piece.axes))
    return Piece(piece.destination, piece.source, piece.itemsize, token, tuple(axes))


def run_count(family: Family) -> float:
    """About how many runs move a span of mean length directly."""
    tokens = 1 if family.whole else max(1, round(family.source.page_tokens / _spans_per_page(family)))
    return sum(_run_count(bundle, tokens) for bundle in family.bundles)


def _spans_per_page(family: Family) -> float:
    """Spans in a source page, on average: each page boundary of either side starts one."""
    if family.whole:
        return 1.0
    a, b = family.source.page_tokens, family.destination.page_tokens
    common = lcm(a, b)
    return (common // a + common // b - 1) / (common // a)


def chunks(paired: Iterable[tuple[Family, Spans]], limit: int, *, writes: bool = False) -> Iterator[Chunk]:
    """The work of moving `paired` through a slab of the destination, or, with `writes`, of the source: in order, each
    chunk at most `limit` bytes of it.

    Every family must fit: a page of one of its layers takes at most `limit` bytes (`split` sees to it).
    """
    for family, spans in paired:
        if not len(spans.tokens):
            continue
        gap, family = _gap(family, writes), _turned(family, writes)
        if writes:
            spans = Spans(
                spans.destination_page, spans.source_page, spans.destination_token, spans.source_token, spans.tokens
            )
        if family.whole:
            none = np.zeros_like(spans.tokens)
            spans = replace(spans, source_token=none, destination_token=none, tokens=none + 1)
        # Of each source page, the tokens from `low` to `high` are wanted; pages alike in that share an image.
        first = np.concatenate(([0], np.flatnonzero(np.diff(spans.source_page)) + 1))
        low = np.minimum.reduceat(spans.source_token, first)
        high = np.maximum.reduceat(spans.source_token + spans.tokens, first)
        change = np.flatnonzero((np.diff(low) != 0) | (np.diff(high) != 0)) + 1
        bounds = np.append(first, len(spans.tokens))
        edges = [0, *change.tolist(), len(first)]
        for i, j in zip(edges, edges[1:], strict=False):
            alike = _alike_chunks(family, spans, bounds[i : j + 1], int(low[i]), int(high[i]), gap, limit)
            yield from map(_written, alike) if writes else alike


def _written(chunk: Chunk) -> Chunk:
    """A chunk that writes what this one reads."""
    runs = chunk.runs
    return Chunk(chunk.size, Runs(runs.destination, runs.source, runs.length), chunk.copies, writes=True)


def _alike_chunks(
    family: Family, spans: Spans, bounds: Addresses, low: int, high: int, gap: int, limit: int
) -> Iterator[Chunk]:
    """Chunks of consecutive source pages with one image; page k has the spans bounds[k] to bounds[k + 1]."""
    image = image_of(family, low, high, gap)
    if image.size > limit:
        for half in _halves(family):
            yield from _alike_chunks(half, spans, bounds, low, high, gap, limit)
        return
    at_once = limit // image.size
    pages = len(bounds) - 1
    layouts = {
        slots: _lay_out(family, image, low, high, slots) for slots in {min(at_once, pages), pages % at_once} - {0}
    }
    for k in range(0, pages, at_once):
        some = bounds[k : k + at_once + 1]
        yield _chunk(family, layouts[len(some) - 1], low, _slice(spans, some[0], some[-1]), some - some[0])


def _slice(spans: Spans, first: int, last: int) -> Spans:
    return Spans(
        spans.source_page[first:last],
        spans.destination_page[first:last],
        spans.source_token[first:last],
        spans.destination_token[first:last],
        spans.tokens[first:last],
    )


def _halves(family: Family) -> tuple[Family, Family]:
    """The family's layers in two parts."""
    bundles = family.bundles
    if len(bundles) > 1:
        middle = len(bundles) // 2
        return replace(family, bundles=bundles[:middle]), replace(family, bundles=bundles[middle:])
    middle = len(bundles[0].layers) // 2
    assert middle, "a page of one layer does not fit; split() keeps such families out"
    layers = _layers(bundles[0], 0, middle), _layers(bundles[0], middle, None)
    return replace(family, bundles=layers[:1]), replace(family, bundles=layers[1:])


def _layers(bundle: Bundle, first: int, last: int | None) -> Bundle:
    part = slice(first, last)
    return Bundle(bundle.pieces, bundle.layers[part], bundle.source[part], bundle.destination[part])


def _fits(family: Family, limit: int, gap: int) -> bool:
    single = (replace(family, bundles=(_layers(bundle, 0, 1),)) for bundle in family.bundles)
    return all(image_of(one, 0, _page_tokens(family), gap).size <= limit for one in single)


def _is_even(family: Family, gap: int) -> bool:
    """Whether the tokens of a page are equally far apart in the slab, which they are not where those of two pieces
    interleave; then no strided copy moves several."""
    image = image_of(family, 0, _page_tokens(family), gap)
    placed = place(image, family.source.page_stride, 2)
    return all(
        token_steps(image, placed, peer_places(bundle, piece, reach, 0), reach) is not None
        for bundle in family.bundles
        for piece in bundle.pieces
        for reach in [reach_of(piece, _page_tokens(family), gap)]
    )


def _run_count(bundle: Bundle, tokens: int) -> float:
    """About how many runs move `tokens` tokens of a pair of pages; of many layers, only some are looked at."""
    rows = sum(prod(axis.size for axis in piece.axes[:-1]) * tokens for piece in bundle.pieces)
    some = min(len(bundle.layers), max(1, _ESTIMATE_RUNS // max(1, rows)))
    return len(join([bundle_runs(_layers(bundle, 0, some), 0, 0, tokens)])) * len(bundle.layers) / some


def _lay_out(family: Family, image: Image, low: int, high: int, slots: int) -> _Layout:
    placed = place(image, family.source.page_stride, slots)
    into = placed.base[:, None] + np.multiply.outer(placed.stride, np.arange(slots, dtype=np.int64))
    rows = tuple((*key, *fold(p)) for key, p in _rows(family, image, placed, low, high).items())
    return _Layout(image, placed.size, into.ravel(), rows)


def _chunk(family: Family, layout: _Layout, low: int, spans: Spans, first: Addresses) -> Chunk:
    """One chunk of pages; page k of it, in slot k, has the spans first[k] to first[k + 1]."""
    image, slots = layout.image, len(first) - 1
    pages = spans.source_page[first[:-1]] * family.source.page_stride
    source = np.add.outer(image.start, pages).ravel()
    runs = join([Runs(source, layout.into, np.repeat(image.length, slots))])
    copies: list[Copy] = []
    slot = np.repeat(np.arange(slots, dtype=np.int64), np.diff(first))
    for tokens in np.unique(spans.tokens).tolist():
        some = np.flatnonzero(spans.tokens == tokens)
        from_, to = spans.source_token[some] - low, spans.destination_token[some]
        page = spans.destination_page[some] * family.destination.page_stride
        for shape, stride, axes, rows in layout.rows:
            columns = np.stack((slot[some] * stride + from_ * shape.token[0], page + to * shape.token[1]), axis=1)
            token = [(tokens, *shape.token)] if tokens > 1 else []
            copies += strided_copies(shape.item, [*shape.axes, *token, *axes], rows, columns)
    return Chunk(layout.size, runs, tuple(copies))


def _rows(
    family: Family, image: Image, placed: Placed, low: int, high: int
) -> dict[tuple[_Shape, int], NDArray[np.int64]]:
    """By shape and distance of the slots: (slab, destination) of every piece of every layer, in slot 0 and page 0."""
    rows: dict[tuple[_Shape, int], list[NDArray[np.int64]]] = {}
    for bundle in family.bundles:
        of_bundle: dict[tuple[_Shape, int], list[NDArray[np.int64]]] = {}
        for piece in bundle.pieces:
            reach = reach_of(piece, high - low, image.gap)
            axes = tuple((axis.size, axis.source, axis.destination) for axis in reach.inner)
            source = peer_places(bundle, piece, reach, low)
            slab, stride = in_slab(image, placed, source)
            ours = np.add.outer(bundle.destination, grid(reach.outer)[1] + piece.destination)
            both = np.stack((slab, ours), axis=2)
            steps = token_steps(image, placed, source, reach)
            assert steps is not None, "tokens interleave; split() keeps such families out"
            # Parts of different length only differ between layers where some of them lie side by side.
            distances = np.stack((stride, steps), axis=2)
            for distance in np.unique(distances.reshape(-1, 2), axis=0):
                alike = (distances == distance).all(axis=2)
                shape = _Shape(piece.itemsize, axes, (int(distance[1]), piece.token.destination))
                if alike.all():
                    of_bundle.setdefault((shape, int(distance[0])), []).append(both)
                else:
                    rows.setdefault((shape, int(distance[0])), []).append(both[alike])
        for key, members in of_bundle.items():
            rows.setdefault(key, []).append(np.concatenate(members, axis=1).reshape(-1, 2))
    return {key: np.concatenate(members) for key, members in rows.items()}
