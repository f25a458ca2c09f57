"""Spans become runs, some thousands at a time.

A span is tokens that lie inside one page on both sides (`bind.pair` finds them). Spans with the same offsets inside
their pages share one pattern of the plan; the pattern times the page addresses is the result, with pages as the fast
axis so that long stretches of consecutive pages come out as one run.

A request of half a million tokens has half a million runs and more, which take tens of milliseconds to be made and to
be given to a transport; so they are made as they are asked for (`Slices`), and whoever moves them looks around in
between. A short request is one slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from vllm_pd_connector.errors import BindError
from vllm_pd_connector.geometry.patterns import pattern, row_count
from vllm_pd_connector.geometry.runs import Addresses, Runs, concatenate, join

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from vllm_pd_connector.geometry.plan import PagePairing

# A request that takes more runs is refused: each costs microseconds, more in all than any transfer has time for, and
# the memory for their list would be a peer's to choose, by strides that tear every element from its neighbours.
MAX_RUNS = 1 << 25

SLICE_RUNS = 8192
"""About so many runs are made at a time: one to two milliseconds, with what a transport needs to look through them."""

WINDOW = 2 * SLICE_RUNS
"""So many spans are looked through at a time for where a slice ends: of more that would take longer than a slice."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Arrays of shape (n,), in order of token positions: pages on both sides, where and how many tokens inside them.

    `first_valid_token` is 0, or the token position before which a destination block that takes part stays unfilled.
    """

    source_page: Addresses
    destination_page: Addresses
    source_token: Addresses
    destination_token: Addresses
    tokens: Addresses
    first_valid_token: int = 0

    @property
    def kind(self) -> tuple[Addresses, Addresses, Addresses]:
        """Spans with the same offsets and number of tokens have the same runs, but for the pages."""
        return self.source_token, self.destination_token, self.tokens

    def part(self, first: int, stop: int) -> Spans:
        """The spans [first, stop), as views."""
        return Spans(
            self.source_page[first:stop],
            self.destination_page[first:stop],
            self.source_token[first:stop],
            self.destination_token[first:stop],
            self.tokens[first:stop],
        )

    def take(self, index: NDArray[np.intp], first_valid_token: int) -> Spans:
        """The spans at an array of indices, in its order."""
        return Spans(
            self.source_page[index],
            self.destination_page[index],
            self.source_token[index],
            self.destination_token[index],
            self.tokens[index],
            first_valid_token,
        )


@dataclass(frozen=True, slots=True)
class Slices:
    """The runs of paired spans, each of which has at least one; iterating makes them, up to about SLICE_RUNS at a time.
    `single`: they are few, and one slice.

    Raises:
        BindError: more runs than can be moved.
    """

    paired: tuple[tuple[PagePairing, Spans], ...]
    single: bool = False

    @classmethod
    def of(cls, paired: Iterable[tuple[PagePairing, Spans]]) -> Slices:
        some = tuple((pairing, spans) for pairing, spans in paired if len(spans.tokens))
        most = 0
        for pairing, spans in some:
            most += _most_runs(pairing, _fullest(pairing, spans), len(spans.tokens))
            require_movable(pairing, most)
        return cls(some, single=0 < most <= SLICE_RUNS // 2)

    def __bool__(self) -> bool:
        return bool(self.paired)

    def __iter__(self) -> Iterator[Runs]:
        if self.single:
            yield concatenate(_runs(pairing, spans) for pairing, spans in self.paired)
            return
        parts: list[Runs] = []
        for pairing, spans in self.paired:
            for some in _portions(pairing, spans):
                runs = _runs(pairing, some)
                if parts and sum(map(len, parts)) + len(runs) > SLICE_RUNS:
                    yield concatenate(parts)
                    parts = []
                parts.append(runs)
                if sum(map(len, parts)) > SLICE_RUNS // 2:  # so that what follows is not made in the same turn
                    yield concatenate(parts)
                    parts = []
        if parts:
            yield concatenate(parts)


def runs_of(paired: Iterable[tuple[PagePairing, Spans]]) -> Runs:
    """The runs of paired spans.

    Raises:
        BindError: more runs than can be moved.
    """
    return concatenate(Slices.of(paired))


def _fullest(pairing: PagePairing, spans: Spans) -> tuple[int, int, int]:
    """The kind of a span with most tokens, which has most runs or about as many."""
    if pairing.whole:
        return 0, 0, 1
    at = int(np.argmax(spans.tokens))
    return int(spans.source_token[at]), int(spans.destination_token[at]), int(spans.tokens[at])


def _most_runs(pairing: PagePairing, kind: tuple[int, int, int], spans: int) -> int:
    """About how many runs come of these spans at most; no list is made of more than can be moved."""
    rows = row_count(pairing, kind[2])
    return rows if rows > MAX_RUNS else len(pattern(pairing, *kind)) * spans


def require_movable(pairing: PagePairing, runs: int) -> None:
    """Refuse more runs than can be moved, of a request's pairings up to this one.

    Raises:
        BindError: they are more.
    """
    if runs > MAX_RUNS:
        raise BindError(
            f"source group {pairing.source.group} to destination group {pairing.destination.group}: "
            f"{runs} runs for one request, at most {MAX_RUNS} can be moved; start both sides with the same layout and "
            "block size, or with staging_bytes in which they are converted"
        )


def _portions(pairing: PagePairing, spans: Spans) -> Iterator[Spans]:
    """The spans in portions of about SLICE_RUNS runs; consecutive pages that make long runs stay together, as far as
    they lie within the same WINDOW of spans."""
    rows = pattern(pairing, *_fullest(pairing, spans))
    again = len(rows) - int(np.count_nonzero(_fills_pages(pairing, rows)))  # runs of a page that follows another
    for first in range(0, len(spans.tokens), WINDOW):
        some = spans if len(spans.tokens) <= WINDOW else spans.part(first, first + WINDOW)
        begins = np.insert(_broken(some.source_page, some.destination_page), 0, True)
        count = np.cumsum(np.where(begins, len(rows), again))
        cuts = count.searchsorted(np.arange(SLICE_RUNS, int(count[-1]), SLICE_RUNS), "right")
        bounds = np.unique(np.concatenate(([0], cuts, [len(count)]))).tolist()
        for begin, end in pairwise(bounds):
            yield some.part(begin, end)


def _runs(pairing: PagePairing, spans: Spans) -> Runs:
    """The pattern of each kind of span at all its pages, joined where one kind of span continues another.

    A run of one span can only continue in the next span. Between spans of one kind it does so by filling its page on
    both sides, which `_stretches` sees from the page numbers; only runs next to a change of kind need comparing.
    """
    source, destination = spans.source_page, spans.destination_page
    one = np.ones(len(source), dtype=np.int64)
    change = None if pairing.whole or len(source) == 1 else _changes(spans)
    if change is None or not change.any():  # as of most requests, and of short ones every call of numpy counts
        kind = (0, 0, 1) if pairing.whole else (part.item(0) for part in spans.kind)
        pages = _Stretches(source, destination, one, np.zeros(len(source), dtype=np.bool_))
        return concatenate(_spread(pairing, *rows) for rows in _rows(pairing, pattern(pairing, *kind), pages))
    changing = np.append(change, False) | np.insert(change, 0, False)
    kinds = np.stack(spans.kind)
    apart: list[Runs] = []
    touching: list[Runs] = []
    for kind in dict.fromkeys(zip(*kinds[:, np.insert(change, 0, True)].tolist(), strict=True)):
        alike = np.flatnonzero((kinds == np.array(kind)[:, None]).all(axis=0))
        pages = _Stretches(source, destination, one, changing).take(alike)
        for rows, stretches in _rows(pairing, pattern(pairing, *kind), pages):
            for chosen, out in ((~stretches.changing, apart), (stretches.changing, touching)):
                if chosen.any():
                    out.append(_spread(pairing, rows, stretches.take(np.flatnonzero(chosen))))
    return concatenate([*apart, join(touching)] if touching else apart)


def _changes(spans: Spans) -> NDArray[np.bool_]:
    """Which spans but the first are of another kind than the one before."""
    change = np.zeros(len(spans.tokens) - 1, dtype=np.bool_)
    for part in spans.kind:
        change |= part[1:] != part[:-1]
    return change


def _fills_pages(pairing: PagePairing, rows: Runs) -> NDArray[np.bool_]:
    """Which rows of a pattern go on in the next page on both sides."""
    fills: NDArray[np.bool_] = (rows.length == pairing.source.page_stride) & (
        rows.length == pairing.destination.page_stride
    )
    return fills


def _broken(source: Addresses, destination: Addresses) -> NDArray[np.bool_]:
    """Which pages but the first do not follow the one before on both sides."""
    broken: NDArray[np.bool_] = (np.diff(source) != 1) | (np.diff(destination) != 1)
    return broken


@dataclass(frozen=True, slots=True)
class _Stretches:
    """Arrays of shape (n,): `count` consecutive pages on both sides; is another kind of span next to them?"""

    source: Addresses
    destination: Addresses
    count: Addresses
    changing: NDArray[np.bool_]

    def take(self, index: NDArray[np.intp]) -> _Stretches:
        return _Stretches(self.source[index], self.destination[index], self.count[index], self.changing[index])


def _rows(pairing: PagePairing, runs: Runs, pages: _Stretches) -> list[tuple[Runs, _Stretches]]:
    """The rows of a pattern, and single pages, or stretches of them for those that fill a page."""
    dense = _fills_pages(pairing, runs)
    fill = np.count_nonzero(dense)
    if fill == len(runs):
        return [(runs, _stretches(pages))]
    rest = runs.take(np.flatnonzero(~dense)), pages
    return [rest] if not fill else [(runs.take(np.flatnonzero(dense)), _stretches(pages)), rest]


def _stretches(pages: _Stretches) -> _Stretches:
    if len(pages.source) == 1:
        return pages
    first = np.flatnonzero(np.insert(_broken(pages.source, pages.destination), 0, True))
    count = np.diff(np.append(first, len(pages.source)))
    changing = np.logical_or.reduceat(pages.changing, first)
    return _Stretches(pages.source[first], pages.destination[first], count, changing)


def _spread(pairing: PagePairing, runs: Runs, stretches: _Stretches) -> Runs:
    """The rows of a pattern at stretches of pages, with the stretches as the fast axis."""
    return Runs(
        np.add.outer(runs.source, stretches.source * pairing.source.page_stride).ravel(),
        np.add.outer(runs.destination, stretches.destination * pairing.destination.page_stride).ravel(),
        np.multiply.outer(runs.length, stretches.count).ravel(),
    )
