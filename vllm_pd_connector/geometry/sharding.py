"""Which slice of a sharded axis each tensor-parallel rank holds, and what slices have in common.

vLLM splits KV heads evenly over the ranks when there are at least as many heads as ranks, and gives each head to
`tp_size // num_heads` neighbouring ranks when there are fewer. `shard` is the only place that knows this rule; the
planner only intersects the intervals that manifests declare, as boxes (one interval per logical axis, `box_of`), and
`require_one_writer` proves that the pieces it chose fill a destination exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from vllm_pd_connector.errors import IncompatiblePeer, InvalidTopology
from vllm_pd_connector.geometry.manifest import Axis, AxisName, TokenShare

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


# Of tensors there are some in a model, and for each a shard of it on each rank.
_FORMS = 1024


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """Half-open range [start, stop) of elements on one axis, in global indices."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    def intersect(self, other: Interval) -> Interval | None:
        """The common part, or None if there is none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Interval(start, stop) if start < stop else None


Box = tuple[Interval, ...]
"""One interval per logical axis; two boxes are only comparable when they name the same axes in the same order."""


def shard(extent: int, tp_size: int, tp_rank: int) -> Interval:
    """Slice of an axis of `extent` elements (heads) that rank `tp_rank` of `tp_size` holds.

    Raises:
        InvalidTopology: neither number divides the other, or the rank is outside the group.

    Source: vLLM 0.32, `ModelConfig.get_num_kv_heads` and the weight loader of `QKVParallelLinear`.
    """
    if extent < 1 or tp_size < 1:
        raise InvalidTopology(f"{extent} heads over tensor-parallel size {tp_size}: both must be at least 1")
    if not 0 <= tp_rank < tp_size:
        raise InvalidTopology(f"tensor-parallel rank {tp_rank} is outside its group of {tp_size}")
    if extent % tp_size == 0:
        size = extent // tp_size
        return Interval(tp_rank * size, (tp_rank + 1) * size)
    if tp_size % extent == 0:
        head = tp_rank // (tp_size // extent)
        return Interval(head, head + 1)
    raise InvalidTopology(
        f"{extent} heads cannot be split over tensor-parallel size {tp_size}: one must divide the other — "
        "choose another --tensor-parallel-size"
    )


def context_rank(size: int, pcp_rank: int, pcp_size: int, tp_rank: int) -> int:
    """Rank in its decode-context parallel group, of `size` neighbouring ranks: prefill-context parallel ones first.

    Source: vLLM 0.32, `initialize_model_parallel` (the DCP groups).
    """
    return (tp_rank * pcp_size + pcp_rank) % size


def describe_rank(rank: tuple[int, int, int]) -> str:
    """A worker's (pipeline, prefill-context, tensor) rank in words."""
    pipeline, context, tensor = rank
    return f"pp{pipeline} pcp{context} tp{tensor}" if context else f"pp{pipeline} tp{tensor}"


def logical_axes(axes: Iterable[Axis]) -> list[Axis]:
    """The axes that a box is made of: all but TOKEN, in an order that both sides share."""
    return sorted((axis for axis in axes if axis.name is not AxisName.TOKEN), key=lambda axis: axis.name)


@lru_cache(maxsize=_FORMS)
def box_of(axes: tuple[Axis, ...]) -> Box:
    """The part of the logical tensor that these axes hold."""
    return tuple(Interval(axis.start, axis.start + axis.size) for axis in logical_axes(axes))


@lru_cache(maxsize=_FORMS)
def extents_of(axes: tuple[Axis, ...]) -> tuple[tuple[str, int], ...]:
    """(axis name, extent in the whole model) of every logical axis."""
    return tuple((str(axis.name), axis.total) for axis in logical_axes(axes))


def shares_of(share: TokenShare) -> tuple[tuple[str, int], ...]:
    """Where ranks take turns with the tokens, that is one more axis of what they hold: its name and extent."""
    return (("share", share.size),) if share.size > 1 else ()


def share_box(share: TokenShare) -> Box:
    """The part of that axis that one rank holds."""
    return (Interval(share.rank, share.rank + 1),) if share.size > 1 else ()


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None if there is none."""
    common = tuple(x.intersect(y) for x, y in zip(a, b, strict=True))
    return None if None in common else tuple(part for part in common if part is not None)


def volume(box: Box) -> int:
    """Number of elements in a box."""
    return prod(len(interval) for interval in box)


def describe(box: Box) -> str:
    return " x ".join(map(str, box))


def require_one_writer(name: str, destination: Box, pieces: Sequence[Box]) -> None:
    """Prove that `pieces`, parts of `destination`, cover every element of it exactly once.

    Disjoint parts of a box fill it if and only if their volumes add up to its volume. Along some axes all intervals are
    equal or apart, as shares of tokens are: only pieces that have these in common are compared (`_require_disjoint`).
    Else ranks whose heads are cut in another way for each share would all be compared with each other.

    Raises:
        IncompatiblePeer: an element has no source writer, or multiple writers; names the tensor and the interval.
    """
    apart = [i for i in range(len(destination)) if _lie_apart({piece[i] for piece in pieces})]
    beside: dict[Box, list[Box]] = {}
    for piece in pieces:
        beside.setdefault(tuple(piece[i] for i in apart), []).append(piece)
    for some in beside.values():
        _require_disjoint(name, some)
    if sum(map(volume, pieces)) != volume(destination):
        held = ", ".join(map(describe, sorted(pieces))) or "nothing"
        raise IncompatiblePeer(
            f"{name}: no source writer for a part of {describe(destination)}; the peer's ranks hold {held} — "
            "all ranks of the peer must be present and serve the same model"
        )


def _lie_apart(intervals: Iterable[Interval]) -> bool:
    ordered = sorted(intervals)
    return all(one.stop <= other.start for one, other in pairwise(ordered))


def _require_disjoint(name: str, pieces: Sequence[Box]) -> None:
    """They are compared in the order of the axis that they divide, where each only meets its neighbours."""
    axis = max(range(len(pieces[0])), key=lambda i: len({piece[i] for piece in pieces}), default=0)
    along = slice(axis, axis + 1)  # a box may have no axis at all
    ordered = sorted(pieces, key=lambda piece: (piece[along], piece))
    for i, piece in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if other[along] and other[axis].start >= piece[axis].stop:
                break
            if (common := intersect(piece, other)) is not None:
                raise IncompatiblePeer(
                    f"{name}: multiple writers for {describe(common)} — the peer's ranks declare overlapping shards; "
                    "start every rank of it with the same parallel sizes"
                )
