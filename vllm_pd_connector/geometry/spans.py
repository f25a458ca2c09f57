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

    def part(self, first: int, stop: int) -> Spans:
        """The spans [first, stop), as views."""
        return Spans(
            self.source_page[first:stop],
            self.destination_page[first:stop],
            self.source_token[first:stop],
            self.destination_token[first:stop],
            self.tokens[first:stop],
        )


@dataclass(frozen=True, slots=True)
class Slices:
    """The runs of paired spans, each of which has at least one; iterating makes them, up to about SLICE_RUNS at a time.

    Raises:
        BindError: more runs than can be moved.
    """

    paired: tuple[tuple[PagePairing, Spans], ...]

    @classmethod
    def of(cls, paired: Iterable[tuple[PagePairing, Spans]]) -> Slices:
        some = tuple((pairing, spans) for pairing, spans in paired if len(spans.tokens))
        for pairing, spans in some:
            _require_few(pairing, _fullest(pairing, spans), len(spans.tokens))
        return cls(some)

    def __bool__(self) -> bool:
        return bool(self.paired)

    def __iter__(self) -> Iterator[Runs]:
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


def _require_few(pairing: PagePairing, kind: tuple[int, int, int], spans: int) -> None:
    """Refuse more runs than can be moved, before any list of them is made."""
    runs = row_count(pairing, kind[2])
    if runs <= MAX_RUNS:
        runs = len(pattern(pairing, *kind)) * spans
    if runs > MAX_RUNS:
        raise BindError(
            f"source group {pairing.source.group} to destination group {pairing.destination.group}: "
            f"{runs} runs for one request, at most {MAX_RUNS} can be moved; start both sides with the same layout and "
            "block size, or with staging_bytes in which they are converted"
        )


def _portions(pairing: PagePairing, spans: Spans) -> Iterator[Spans]:
    """The spans in portions of about SLICE_RUNS runs; consecutive pages that make long runs stay together."""
    rows = pattern(pairing, *_fullest(pairing, spans))
    again = len(rows) - int(np.count_nonzero(_fills_pages(pairing, rows)))  # runs of a page that follows another
    begins = np.insert(_broken(spans.source_page, spans.destination_page), 0, True)
    count = np.cumsum(np.where(begins, len(rows), again))
    cuts = count.searchsorted(np.arange(SLICE_RUNS, int(count[-1]), SLICE_RUNS), "right")
    bounds = np.unique(np.concatenate(([0], cuts, [len(count)]))).tolist()
    for first, stop in pairwise(bounds):
        yield spans.part(first, stop)


def _runs(pairing: PagePairing, spans: Spans) -> Runs:
    """The pattern of each kind of span at all its pages, joined where one kind of span continues another.

    A run of one span can only continue in the next span. Between spans of one kind it does so by filling its page on
    both sides, which `_stretches` sees from the page numbers; only runs next to a change of kind need comparing.
    """
    kinds = np.stack((spans.source_token, spans.destination_token, spans.tokens))
    if pairing.whole:
        kinds = np.broadcast_to(np.array([[0], [0], [1]], dtype=np.int64), kinds.shape)
    change = (kinds[:, 1:] != kinds[:, :-1]).any(axis=0)
    changing = np.append(change, False) | np.insert(change, 0, False)
    apart: list[Runs] = []
    touching: list[Runs] = []
    first = kinds[:, np.insert(change, 0, True)]
    for source_token, destination_token, tokens in dict.fromkeys(zip(*first.tolist(), strict=True)):
        alike = (kinds == [[source_token], [destination_token], [tokens]]).all(axis=0)
        runs = pattern(pairing, source_token, destination_token, tokens)
        dense = _fills_pages(pairing, runs)
        count = np.ones(np.count_nonzero(alike), dtype=np.int64)
        single = _Stretches(spans.source_page[alike], spans.destination_page[alike], count, changing[alike])
        for rows, stretches in ((dense, _stretches(single)), (~dense, single)):
            for chosen, out in ((~stretches.changing, apart), (stretches.changing, touching)):
                if rows.any() and chosen.any():
                    out.append(_spread(pairing, runs, rows, stretches, chosen))
    return concatenate([*apart, join(touching)] if touching else apart)


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


def _stretches(pages: _Stretches) -> _Stretches:
    broken = _broken(pages.source, pages.destination)
    first = np.concatenate(([0], np.flatnonzero(broken) + 1))
    count = np.diff(np.append(first, len(pages.source)))
    changing = np.logical_or.reduceat(pages.changing, first)
    return _Stretches(pages.source[first], pages.destination[first], count, changing)


def _spread(
    pairing: PagePairing, runs: Runs, rows: NDArray[np.bool_], stretches: _Stretches, chosen: NDArray[np.bool_]
) -> Runs:
    """Chosen rows of a pattern at chosen stretches of pages, with the stretches as the fast axis."""
    source = stretches.source[chosen] * pairing.source.page_stride
    destination = stretches.destination[chosen] * pairing.destination.page_stride
    return Runs(
        np.add.outer(runs.source[rows], source).ravel(),
        np.add.outer(runs.destination[rows], destination).ravel(),
        np.multiply.outer(runs.length[rows], stretches.count[chosen]).ravel(),
    )
