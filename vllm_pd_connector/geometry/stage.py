"""Where runs are short: long reads into a slab, and strided copies from there to where the bytes belong.

A run costs a transport a fixed price, however short it is. Where two page layouts cut a page into many short runs, the
initiator reads whole stretches of the source's pages into memory of its own (the *slab*) and puts the elements in
place with strided copies between two views of the same elements: the source's strides over the slab, the
destination's strides over its cache. Both follow from the same `Piece`, so no pair of layouts is a case of its own.

`split` decides per family, once per peer. `chunks` turns the spans that `bind.pair` found into pieces of work of
bounded size: what to read to where in the slab, then what to copy. A page's *image* is what must be read of it: the
stretches that hold the wanted elements, neighbours made one where the gap between them costs less than a run. The
slab keeps images in the source's own order, so that consecutive source pages are still one read. Copies name exactly
the elements of the token range: a byte that is read needlessly goes no further than the slab.

Source: architecture.md, idea 3. Figures: docs/design/conversion.md, `benchmarks/convert.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import lcm, prod

import numpy as np
from numpy.typing import NDArray

from vllm_pd_connector.geometry.bind import Spans
from vllm_pd_connector.geometry.manifest import GroupKind
from vllm_pd_connector.geometry.plan import Bundle, Edge, Family, Piece, Stretch, bundle_runs, join
from vllm_pd_connector.geometry.runs import Addresses, Runs
from vllm_pd_connector.geometry.strided import Axis, Copy, fold, strided_copies

# The price of one more run, in bytes that could be read and converted instead. Staging pays where the average run
# is shorter than this. Measured; see docs/design/conversion.md.
RUN_COST_BYTES = 20 << 10

# A chunk takes up to this part of the slab, so that receives share it and one can be read while another is copied.
CHUNKS_PER_SLAB = 8

_ESTIMATE_RUNS = 1 << 18


@dataclass(frozen=True, slots=True)
class Chunk:
    """`reads` into `size` bytes of the slab (destinations count from the chunk's first byte), then `copies`."""

    size: int
    reads: Runs
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class _Image:
    """What is read of a page: arrays (n,) of source addresses in page 0, ascending and apart, and lengths in bytes."""

    start: Addresses
    length: Addresses

    @property
    def size(self) -> int:
        """Bytes of the slab that one page takes; for some of a page's tokens never more than for all."""
        return int(self.length.sum())


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where in the slab each part of an image lies for slot 0, and how far apart the slots are. Arrays (n,)."""

    base: Addresses
    stride: Addresses
    size: int


@dataclass(frozen=True, slots=True)
class _Shape:
    """What copies of several pieces share; the axes without TOKEN, whose strides stand apart."""

    item: int
    axes: tuple[Axis, ...]
    token: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How chunks of equally many pages with one image use the slab.

    Attributes:
        into: where every part of the image of every page is read to, parts first; array (parts * pages,).
        rows: per shape, the distance of slots, axes of layers and pieces, and what does not fold into axes: an array
            (n, 2) of (slab, destination) in slot 0 and page 0.
    """

    image: _Image
    size: int
    into: Addresses
    rows: tuple[tuple[_Shape, int, list[Axis], NDArray[np.int64]], ...]


def split(edge: Edge, limit: int) -> tuple[Edge, Edge]:
    """The families of an edge that move directly, and those that are staged in chunks of up to `limit` bytes."""
    staged = tuple(family for family in edge.families if _fits(family, limit) and staging_pays(family))
    direct = tuple(family for family in edge.families if family not in staged)
    return replace(edge, families=direct), replace(edge, families=staged)


def staging_pays(family: Family) -> bool:
    """Whether the runs that staging saves per source page cost more than the bytes that it reads."""
    image = _image(family, 0, 1 if family.whole else family.source.page_tokens)
    saved = _spans_per_page(family) * run_count(family) - len(image.start)
    return saved * RUN_COST_BYTES > int(image.length.sum())


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


def chunks(paired: Iterable[tuple[Family, Spans]], limit: int) -> Iterator[Chunk]:
    """The work of moving `paired` through a slab, in order, each chunk at most `limit` bytes of it.

    Every family must fit: a page of one of its layers takes at most `limit` bytes (`split` sees to it).
    """
    for family, spans in paired:
        if not len(spans.tokens):
            continue
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
            yield from _alike_chunks(family, spans, bounds[i : j + 1], int(low[i]), int(high[i]), limit)


def _alike_chunks(family: Family, spans: Spans, bounds: Addresses, low: int, high: int, limit: int) -> Iterator[Chunk]:
    """Chunks of consecutive source pages with one image; page k has the spans bounds[k] to bounds[k + 1]."""
    image = _image(family, low, high)
    if image.size > limit:
        for half in _halves(family):
            yield from _alike_chunks(half, spans, bounds, low, high, limit)
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


def _fits(family: Family, limit: int) -> bool:
    whole = 1 if family.whole else family.source.page_tokens
    single = (replace(family, bundles=(_layers(bundle, 0, 1),)) for bundle in family.bundles)
    return all(_image(one, 0, whole).size <= limit for one in single)


def _run_count(bundle: Bundle, tokens: int) -> float:
    """About how many runs move `tokens` tokens of a pair of pages; of many layers, only some are looked at."""
    rows = sum(prod(axis.size for axis in piece.axes[:-1]) * tokens for piece in bundle.pieces)
    some = min(len(bundle.layers), max(1, _ESTIMATE_RUNS // max(1, rows)))
    return len(join([bundle_runs(_layers(bundle, 0, some), 0, 0, tokens)])) * len(bundle.layers) / some


def _image(family: Family, low: int, high: int) -> _Image:
    """What must be read of a source page for its tokens [low, high)."""
    start, length = [], []
    for bundle in family.bundles:
        for piece in bundle.pieces:
            _, outer, reach = _read_through(piece, high - low, _gap(family))
            places = np.add.outer(bundle.source, _grid(outer)[0] + piece.source + low * piece.token.source).ravel()
            start.append(places)
            length.append(np.full(len(places), reach, dtype=np.int64))
    begin, size = np.concatenate(start), np.concatenate(length)
    order = np.argsort(begin, kind="stable")
    begin, size = begin[order], size[order]
    end = np.maximum.accumulate(begin + size)
    first = np.concatenate(([0], np.flatnonzero(begin[1:] > end[:-1]) + 1))
    return _Image(begin[first], end[np.append(first[1:] - 1, len(end) - 1)] - begin[first])


def _gap(family: Family) -> int:
    """The longest gap, in bytes, that is read rather than left out. A state is large, moves once per request and lies
    there without gaps but for other ranks' shares, which may be most of it: those are never read."""
    return 0 if family.kind is GroupKind.STATE else RUN_COST_BYTES


def _read_through(piece: Piece, tokens: int, gap: int) -> tuple[tuple[Stretch, ...], tuple[Stretch, ...], int]:
    """Axes (without TOKEN) that lie in one stretch of the source together with `tokens` tokens, the others, and the
    stretch's bytes.

    An axis is read through if the gaps between its elements are at most `gap` bytes: reading them then costs less than
    more runs would. Everything up to the TOKEN axis always is, so that any part of a page's tokens lies in the same
    stretches as the whole.
    """
    token = Stretch(tokens, piece.token.source, piece.token.destination)
    reach: int = piece.itemsize
    inner: list[Stretch] = []
    outer: list[Stretch] = []
    for axis in sorted((axis for axis in (token, *piece.axes) if axis.size > 1), key=lambda axis: axis.source):
        if outer or (axis.source > token.source and axis.source - reach > gap):
            outer.append(axis)
        else:
            reach += (axis.size - 1) * axis.source
            inner.append(axis)
    return tuple(axis for axis in inner if axis is not token), tuple(outer), reach


def _grid(axes: tuple[Stretch, ...]) -> tuple[Addresses, Addresses]:
    """Offsets of every index of these axes, on both sides; one zero for no axes."""
    source = destination = np.zeros(1, dtype=np.int64)
    for axis in reversed(axes):
        steps = np.arange(axis.size, dtype=np.int64)
        source = np.add.outer(source, steps * axis.source).ravel()
        destination = np.add.outer(destination, steps * axis.destination).ravel()
    return source, destination


def _place(image: _Image, page_stride: int, slots: int) -> _Placed:
    """Lay out `slots` images in the order in which the source has them: page after page, or part after part."""
    if image.start[-1] + image.length[-1] - image.start[0] <= page_stride:
        room = image.length
        stride = np.full(len(room), image.size, dtype=np.int64)
    else:
        room = image.length * slots
        stride = image.length
    return _Placed(np.cumsum(room) - room, stride, image.size * slots)


def _lay_out(family: Family, image: _Image, low: int, high: int, slots: int) -> _Layout:
    placed = _place(image, family.source.page_stride, slots)
    into = placed.base[:, None] + np.multiply.outer(placed.stride, np.arange(slots, dtype=np.int64))
    rows = _rows(family, image, placed, low, high)
    return _Layout(image, placed.size, into.ravel(), tuple((*key, *fold(places)) for key, places in rows.items()))


def _chunk(family: Family, layout: _Layout, low: int, spans: Spans, first: Addresses) -> Chunk:
    """One chunk of pages; page k of it, in slot k, has the spans first[k] to first[k + 1]."""
    image, slots = layout.image, len(first) - 1
    pages = spans.source_page[first[:-1]] * family.source.page_stride
    source = np.add.outer(image.start, pages).ravel()
    reads = join([Runs(source, layout.into, np.repeat(image.length, slots))])
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
    return Chunk(layout.size, reads, tuple(copies))


def _rows(
    family: Family, image: _Image, placed: _Placed, low: int, high: int
) -> dict[tuple[_Shape, int], NDArray[np.int64]]:
    """By shape and distance of the slots: (slab, destination) of every piece of every layer, in slot 0 and page 0."""
    rows: dict[tuple[_Shape, int], list[NDArray[np.int64]]] = {}
    for bundle in family.bundles:
        of_bundle: dict[tuple[_Shape, int], list[NDArray[np.int64]]] = {}
        for piece in bundle.pieces:
            inner, outer, _ = _read_through(piece, high - low, _gap(family))
            axes = tuple((axis.size, axis.source, axis.destination) for axis in inner)
            shape = _Shape(piece.itemsize, axes, (piece.token.source, piece.token.destination))
            theirs, ours = _grid(outer)
            source = np.add.outer(bundle.source, theirs + piece.source + low * piece.token.source)
            part = np.searchsorted(image.start, source, side="right") - 1
            slab = source - image.start[part] + placed.base[part]
            both = np.stack((slab, np.add.outer(bundle.destination, ours + piece.destination)), axis=2)
            # Parts of different length only differ between layers where some of them lie side by side.
            for stride in np.unique(placed.stride[part]).tolist():
                mine = (placed.stride[part] == stride).all(axis=1)
                if mine.all():
                    of_bundle.setdefault((shape, stride), []).append(both)
                else:
                    rows.setdefault((shape, stride), []).append(both[placed.stride[part] == stride])
        for key, members in of_bundle.items():
            rows.setdefault(key, []).append(np.concatenate(members, axis=1).reshape(-1, 2))
    return {key: np.concatenate(members) for key, members in rows.items()}
