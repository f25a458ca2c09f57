"""What must move between two ranks: which part of which tensor, from which source rank.

For one destination rank and all ranks of the source instance, `make_plan` intersects the boxes that both sides hold
of every logical tensor, picks one owner among the sources that hold equal boxes, and proves that every destination
element has exactly one writer. What one source rank contributes is an `Edge`: all that `bind` needs, and no manifest.

An edge is made of *pairings*: tensors whose pages are cut alike on both sides (same groups, page strides and page
tokens), so that a pair of pages moves all of them. In a pairing, layers that look alike share one `LayerBatch`: the
slices of one layer, and for every layer where it starts. `patterns` makes runs of them.

Owners: the layers of the destinations that need the same replicated box are laid out on one line, which is cut into
equal parts, one per replica. So all replicas serve the same share, with few edges and long stretches of layers.

Under context parallelism a source holds a share of the tokens. Shares are one more axis of the boxes: a destination
needs all of them, and those without a token of its own (`interleave.meet`) are left out after the proof.
The manifests must have passed `check_pd_topology`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_pd_connector.bounded import at_once
from vllm_pd_connector.errors import IncompatiblePeer
from vllm_pd_connector.geometry.interleave import meet
from vllm_pd_connector.geometry.manifest import (
    WHOLE,
    Axis,
    AxisName,
    Coordinates,
    Group,
    GroupKind,
    Manifest,
    Rank,
    Tensor,
    TokenShare,
)
from vllm_pd_connector.geometry.sharding import (
    Box,
    Interval,
    box_of,
    context_rank,
    describe_rank,
    intersect,
    logical_axes,
    require_one_writer,
    share_box,
)
from vllm_pd_connector.geometry.topology import drafted_alone, pair_differences

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm_pd_connector.bounded import Pieces
    from vllm_pd_connector.geometry.runs import Addresses, Runs


@dataclass(frozen=True, slots=True)
class Paging:
    """How one side's pages follow from token positions and block ids; the stride is in bytes.

    `page_tokens` is what a page has slots for, all of them of tokens that `share` holds.
    """

    group: int
    page_tokens: int
    pages_per_block: int
    page_stride: int
    share: TokenShare = WHOLE


@dataclass(frozen=True, slots=True)
class StridedAxis:
    """`size` elements along one axis, strided in bytes on both sides."""

    size: int
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The part of one tensor that moves: offsets in bytes from where its layer starts.

    `token` has the strides along the TOKEN axis and the destination's page tokens, or zeros where there is none.
    """

    source: int
    destination: int
    itemsize: int
    token: StridedAxis
    axes: tuple[StridedAxis, ...]


@dataclass(frozen=True, slots=True)
class LayerBatch:
    """Pieces of one layer, and the addresses in page 0 from which they count, for every layer that looks alike."""

    slices: tuple[TensorSlice, ...]
    layers: tuple[str, ...]
    source: Addresses
    destination: Addresses


@dataclass(frozen=True, slots=True, eq=False)
class PagePairing:
    """Tensors whose pages pair up alike.

    Attributes:
        kind: how the block tables of the two groups are read.
        whole: pages only move whole (states and opaque pages).
        alike: pages hold equally many tokens, strided alike on both sides, so a partly filled page may move whole.
    """

    kind: GroupKind
    source: Paging
    destination: Paging
    whole: bool
    alike: bool
    batches: tuple[LayerBatch, ...]
    patterns: dict[tuple[int, int, int], Runs] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """All that one source rank gives to one destination rank."""

    source: Rank
    destination: Rank
    source_groups: tuple[Group, ...]
    destination_groups: tuple[Group, ...]
    pairings: tuple[PagePairing, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One edge per source rank that contributes, ordered by rank. `absent` are the destination's tensors that no source
    gives, those of a drafter, each paired with itself: there is nothing to move, and nothing may be left there."""

    destination: Rank
    edges: tuple[Edge, ...]
    absent: tuple[PagePairing, ...] = ()

    @property
    def unfilled(self) -> frozenset[str]:
        """The layers of `absent`."""
        return frozenset(layer for family in self.absent for batch in family.batches for layer in batch.layers)

    def edge(self, source: Rank) -> Edge | None:
        """The edge from this source rank, or None if it gives nothing."""
        return next((edge for edge in self.edges if edge.source == source), None)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A box that the destination needs, and the sources (positions in a candidate list) that could write it."""

    box: Box
    replicas: tuple[int, ...]
    position: int  # of this destination among the destinations that need one of these replicas
    destinations: int


_Known = dict[tuple[StridedAxis, ...], tuple[StridedAxis, ...]]


class _Layout(NamedTuple):
    """A box inside the pages of both sides: the bytes where it begins, and its axes as in `TensorSlice`, that of tokens
    first. Equal axes of a plan are one object."""

    source: int
    destination: int
    axes: tuple[StridedAxis, ...]


class _Part(NamedTuple):
    """What one source writes of one tensor, before it is put into a pairing."""

    source: Tensor
    destination: Tensor
    layout: _Layout


def make_plan(destination: Manifest, sources: Sequence[Manifest]) -> Plan:
    """`planning`, with nothing done in between."""
    return at_once(planning(destination, sources))


def planning(destination: Manifest, sources: Sequence[Manifest]) -> Pieces[Plan]:
    """Which source rank writes which bytes of this destination rank; tensor by tensor, for many take milliseconds.

    Raises:
        IncompatiblePeer: an element without a source writer or with several, tensors that do not mean the same, or
            a source rank given twice.
    """
    ranks = [source.parallel.rank for source in sources]
    if twice := next((rank for rank, count in Counter(ranks).items() if count > 1), None):
        raise IncompatiblePeer(f"duplicate rank: {describe_rank(twice)} of the peer is given twice")
    same: _Known = {}
    chosen, absent = yield from _choosing(destination, sources, same)
    parts: list[list[_Part]] = [[] for _ in sources]
    layouts: dict[tuple[int, int], _Layout] = {}  # of tensors that were cut alike, and one of their writers
    for tensor, cut, candidates, layers in chosen:
        place = cut.position * len(layers) + layers[tensor.layer]
        writer = cut.replicas[place * len(cut.replicas) // (cut.destinations * len(layers))]
        owner, peer = candidates[writer]
        if (layout := layouts.get((id(cut), writer))) is None:
            layout = layouts[id(cut), writer] = _layout_of(peer.axes, tensor.axes, cut.box, same)
        parts[owner].append(_Part(peer, tensor, layout))
        yield
    here, edges = destination.parallel.rank, []
    for rank, source, mine in zip(ranks, sources, parts, strict=True):
        if mine:
            edges.append(Edge(rank, here, source.groups, destination.groups, _pairings(destination, source, mine)))
            yield
    return Plan(here, tuple(sorted(edges, key=lambda edge: edge.source)), _pairings(destination, destination, absent))


def _choosing(
    destination: Manifest, sources: Sequence[Manifest], same: _Known
) -> Pieces[tuple[list[tuple[Tensor, _Cut, list[tuple[int, Tensor]], dict[str, int]]], list[_Part]]]:
    """The boxes of every tensor, each with the sources that have that tensor and the layers that are laid out on one
    line with it, numbered; and what no source has."""
    holders: dict[tuple[str, str], list[tuple[int, Tensor]]] = {}
    for i, source in enumerate(sources):
        for tensor in source.tensors:
            holders.setdefault((tensor.layer, tensor.role), []).append((i, tensor))
        yield
    alone = drafted_alone([destination], sources) if sources else frozenset()
    known: dict[object, tuple[_Cut, ...]] = {}
    chosen, absent = [], []
    served: dict[tuple[int, ...], dict[str, int]] = {}  # by the replicas that can serve these layers
    for tensor in destination.tensors:
        # A state cannot be missing: decode would go on from nothing.
        if tensor.layer in alone and destination.groups[tensor.group].kind is not GroupKind.STATE:
            absent.append(_Part(tensor, tensor, _layout_of(tensor.axes, tensor.axes, box_of(tensor.axes), same)))
            continue
        candidates = holders.get((tensor.layer, tensor.role), [])
        shape = (_shape(tensor), tuple((i, _shape(peer)) for i, peer in candidates))
        if (cuts := known.get(shape)) is None:
            cuts = known[shape] = yield from _cutting(tensor, candidates, destination, sources)
        for cut in cuts:
            layers = served.setdefault(tuple(candidates[i][0] for i in cut.replicas), {})
            layers.setdefault(tensor.layer, len(layers))
            chosen.append((tensor, cut, candidates, layers))
        yield
    return chosen, absent


def _shape(tensor: Tensor) -> tuple[object, ...]:
    return tensor.group, tensor.dtype, tensor.itemsize, tensor.opaque, tensor.page_tokens, tensor.axes


def _cutting(
    tensor: Tensor, candidates: Sequence[tuple[int, Tensor]], destination: Manifest, sources: Sequence[Manifest]
) -> Pieces[tuple[_Cut, ...]]:
    """Split what the destination holds of a tensor into boxes with one set of equal writers each, and prove it."""
    name = f"{tensor.layer} {tensor.role}"
    wanted, share = box_of(tensor.axes), destination.groups[tensor.group].share
    replicas: dict[tuple[Box, TokenShare], list[int]] = {}
    for position, (i, peer) in enumerate(candidates):
        their_share = sources[i].groups[peer.group].share
        other = (box_of(peer.axes), their_share) != (wanted, share)
        if tensor.opaque and peer.opaque and other and _form(tensor, share) == _form(peer, their_share):
            continue  # another rank's whole page
        if found := pair_differences(tensor, destination.groups[tensor.group], peer, sources[i].groups[peer.group]):
            where = f"{sources[i].engine_id} {describe_rank(sources[i].parallel.rank)}"
            raise IncompatiblePeer(f"{name}: incompatible with {where}:", found)
        replicas.setdefault((box_of(peer.axes), their_share), []).append(position)
        yield
    cuts, pieces = [], []
    for (held, their_share), positions in replicas.items():
        if (common := intersect(wanted, held)) is not None:
            pieces.append((*common, *share_box(their_share)))
            if meet(share, their_share):
                place, count = _place(tensor.axes, destination.parallel, share, held, their_share)
                cuts.append(_Cut(common, tuple(positions), place, count))
        yield
    turns = max((their_share.size for _, their_share in replicas), default=1)
    every = (Interval(0, turns),) if turns > 1 else ()
    require_one_writer(name, (*wanted, *(share_box(share) if tensor.opaque else every)), pieces)
    return tuple(cuts)


def _form(tensor: Tensor, share: TokenShare) -> tuple[object, ...]:
    """What opaque pages that only lie on different ranks have in common."""
    axis = tensor.axes[0]
    return tensor.opaque, tensor.page_tokens, axis.size, axis.total, share.size, share.interleave


def _place(
    axes: Sequence[Axis], parallel: Coordinates, share: TokenShare, held: Box, theirs: TokenShare
) -> tuple[int, int]:
    """Which of the destination ranks that need a part of `held`, of its tokens `theirs`, this one is, of how many.

    The destination's shards are equal, and neighbouring ranks hold replicas of the same one, so its coordinates, its
    own interval and its own share tell everybody's.
    """
    shards, size, interval = 1, 1, Interval(0, 1)
    for axis, part in zip(logical_axes(axes), held, strict=True):
        if axis.size < axis.total:
            shards, size, interval = axis.total // axis.size, axis.size, part
    replicas = max(1, parallel.tp_size // shards)
    shared = {rank: meet(TokenShare(rank, share.size, share.interleave), theirs) for rank in range(share.size)}
    needing = [
        (context, rank)
        for context in range(parallel.pcp_size)
        for rank in range(parallel.tp_size)
        if interval.start - size < rank // replicas * size < interval.stop
        and shared[context_rank(share.size, context, parallel.pcp_size, rank)]
    ]
    mine = parallel.pcp_rank, parallel.tp_rank
    return (needing.index(mine) if mine in needing else 0), max(1, len(needing))


def _pairings(destination: Manifest, source: Manifest, parts: Iterable[_Part]) -> tuple[PagePairing, ...]:
    by_paging: dict[tuple[object, ...], list[_Part]] = {}
    for part in parts:
        key = *_pages_of(part.source), *_pages_of(part.destination), bool(part.destination.opaque)
        by_paging.setdefault(key, []).append(part)
    pairings = []
    for members in by_paging.values():
        first = members[0]
        theirs, ours = _paging(first.source, source), _paging(first.destination, destination)
        kind, opaque = destination.groups[ours.group].kind, bool(first.destination.opaque)
        batches = _batches(destination, source, members)
        strides = (
            s
            for batch in batches
            for tensor_slice in batch.slices
            for s in (tensor_slice.token, *tensor_slice.axes)
            if s.size > 1
        )
        alike = _alike(theirs, ours) and all(s.source == s.destination for s in strides)
        pairings.append(PagePairing(kind, theirs, ours, opaque or kind is GroupKind.STATE, alike, batches))
    return tuple(pairings)


def _pages_of(tensor: Tensor) -> tuple[int, int, int, int]:
    return tensor.group, tensor.page_tokens, tensor.pages_per_block, tensor.page_stride


def _paging(tensor: Tensor, manifest: Manifest) -> Paging:
    return Paging(*_pages_of(tensor), manifest.groups[tensor.group].share)


def _alike(theirs: Paging, ours: Paging) -> bool:
    """Whether a page of one side has the tokens of a page of the other: as many, and the same ones."""
    if theirs.page_tokens != ours.page_tokens or theirs.share == ours.share:
        return theirs.page_tokens == ours.page_tokens
    return all(side.share.size == 1 or side.share.interleave % side.page_tokens == 0 for side in (theirs, ours))


def _batches(destination: Manifest, source: Manifest, parts: Iterable[_Part]) -> tuple[LayerBatch, ...]:
    alike: dict[tuple[object, ...], tuple[tuple[TensorSlice, ...], list[tuple[str, int, int]]]] = {}
    for layer, some in groupby(parts, key=lambda part: part.destination.layer):
        members = list(some)
        starts = []
        for theirs, ours, layout in members:
            from_ = source.segments[theirs.segment].address + theirs.offset + layout.source
            to = destination.segments[ours.segment].address + ours.offset + layout.destination
            starts.append((from_, to))
        (first_from, first_to), looks = starts[0], []
        for (from_, to), part in zip(starts, members, strict=True):
            looks += [from_ - first_from, to - first_to, part.destination.itemsize, id(part.layout.axes)]
        if (found := alike.get(look := tuple(looks))) is None:
            slices = tuple(
                TensorSlice(from_ - first_from, to - first_to, ours.itemsize, layout.axes[0], layout.axes[1:])
                for (from_, to), (_, ours, layout) in zip(starts, members, strict=True)
            )
            found = alike[look] = slices, []
        found[1].append((layer, first_from, first_to))
    return tuple(
        LayerBatch(
            slices,
            tuple(layer for layer, _, _ in layers),
            np.array([theirs for _, theirs, _ in layers], dtype=np.int64),
            np.array([ours for _, _, ours in layers], dtype=np.int64),
        )
        for slices, layers in alike.values()
    )


def _layout_of(theirs: tuple[Axis, ...], ours: tuple[Axis, ...], box: Box, same: _Known) -> _Layout:
    """A box of two tensors; its axes are those of `same`, if they are there."""
    from_ = to = 0
    axes = []
    for a, b, part in zip(logical_axes(theirs), logical_axes(ours), box, strict=True):
        from_ += (part.start - a.start) * a.stride
        to += (part.start - b.start) * b.stride
        axes.append(StridedAxis(len(part), a.stride, b.stride))
    token = [next((axis for axis in side if axis.name is AxisName.TOKEN), None) for side in (theirs, ours)]
    a_stride, b_stride = (axis.stride if axis else 0 for axis in token)
    found = StridedAxis(token[1].size if token[1] else 0, a_stride, b_stride), *axes
    return _Layout(from_, to, same.setdefault(found, found))
