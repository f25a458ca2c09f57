"""From a recurrent layer's page to logical tensors.

A page holds the layer's states one after the other, dense and without gaps: the convolution state, whose channels are
the sub-projections of the layer (q, k, v or x, B, C) one after the other, and the recurrent state by head. Sharding
acts on each sub-projection and on the heads, so each is a tensor of its own; whether channels or taps come first (DS
or SD) is only a matter of strides.

Source: docs/design/state-caches.md, which cites vLLM 0.32 by line.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from vllm_pd_connector.errors import UnsupportedCache
from vllm_pd_connector.geometry.manifest import Axis, AxisName, Role, Tensor

if TYPE_CHECKING:
    from vllm_pd_connector.geometry.sharding import Interval


@dataclass(frozen=True, slots=True)
class StatePage:
    """Where the pages of one recurrent layer lie; strides, offsets and sizes are bytes.

    `offset` is from the start of `segment` to page 0, `size` what the states of one page take without padding.
    """

    layer: str
    group: int
    segment: int
    offset: int
    pages: int
    page_stride: int
    size: int


@dataclass(frozen=True, slots=True)
class Projection:
    """The channels of one sub-projection that this rank holds, as an interval of `total` in the whole model."""

    role: Role
    channels: Interval
    total: int


@dataclass(frozen=True, slots=True)
class Convolution:
    """The convolution state: sub-projections in page order, `taps` per channel; `dim_first` is DS, otherwise SD."""

    projections: tuple[Projection, ...]
    taps: int
    dim_first: bool
    dtype: str
    itemsize: int

    @property
    def channels(self) -> int:
        return sum(len(projection.channels) for projection in self.projections)

    @property
    def nbytes(self) -> int:
        return self.channels * self.taps * self.itemsize


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The recurrent state: per head a matrix whose axes are stored in the order given, outermost first."""

    heads: Interval
    total_heads: int
    axes: tuple[tuple[AxisName, int], ...]
    dtype: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        return len(self.heads) * prod(size for _, size in self.axes) * self.itemsize


def state_tensors(page: StatePage, convolution: Convolution | None, recurrent: Recurrent | None) -> tuple[Tensor, ...]:
    """One tensor per sub-projection, and the recurrent state; a layer may have one of the two alone.

    Raises:
        UnsupportedCache: the states do not fill the page's content exactly.
    """
    start = convolution.nbytes if convolution is not None else 0
    expected = start + (recurrent.nbytes if recurrent is not None else 0)
    if expected != page.size:
        raise UnsupportedCache(
            f"{page.layer}: its states take {expected} bytes but a page holds {page.size}; this kind of layer stores "
            "something that this version does not know"
        )
    tensors = _projections(page, convolution) if convolution is not None else []
    if recurrent is not None:
        tensors.append(_recurrent(page, start, recurrent))
    return tuple(tensors)


def _projections(page: StatePage, convolution: Convolution) -> list[Tensor]:
    tensors = []
    item, taps, channels = convolution.itemsize, convolution.taps, convolution.channels
    first = 0
    for projection in convolution.projections:
        if convolution.dim_first:
            start, channel, tap = first * taps * item, taps * item, item
        else:
            start, channel, tap = first * item, item, channels * item
        held = projection.channels
        axes = (
            Axis(AxisName.CHANNEL, len(held), channel, held.start, projection.total),
            Axis(AxisName.TAP, taps, tap, 0, taps),
        )
        tensors.append(_tensor(page, projection.role, start, convolution.dtype, item, axes))
        first += len(held)
    return tensors


def _recurrent(page: StatePage, start: int, state: Recurrent) -> Tensor:
    stride = state.itemsize
    axes = []
    for name, size in reversed(state.axes):
        axes.append(Axis(name, size, stride, 0, size))
        stride *= size
    axes.append(Axis(AxisName.HEAD, len(state.heads), stride, state.heads.start, state.total_heads))
    return _tensor(page, Role.SSM, start, state.dtype, state.itemsize, tuple(reversed(axes)))


def _tensor(page: StatePage, role: Role, start: int, dtype: str, itemsize: int, axes: tuple[Axis, ...]) -> Tensor:
    return Tensor(
        layer=page.layer,
        role=role,
        group=page.group,
        dtype=dtype,
        itemsize=itemsize,
        segment=page.segment,
        offset=page.offset + start,
        pages=page.pages,
        page_stride=page.page_stride,
        pages_per_block=1,
        page_tokens=0,
        axes=axes,
    )
