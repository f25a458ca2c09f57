"""From what vLLM hands over per layer to logical tensors.

vLLM gives every attention layer as one view [B, H, N, C] (pages, heads, tokens, content) whose strides already tell
which of its six physical layouts was chosen, so one codec per *content* is enough and none per layout:

    key_value           C holds K then V of one token and head
    key_value_scaled    C holds K, its scale, V and its scale of one token and head
    key_value_regions   a page holds K of all tokens and heads, the scales of K, then V and the scales of V likewise
    cpu_attention       per page and head, N*C bytes hold K transposed [D, N], then V [N, D]
    latent              C holds one vector per token, the same on every rank (MLA, shared indexers)
    values_then_scales  a page's N*C bytes hold the values of all its tokens, then the scales of all
    ring                N slots that a request writes in turns, one page for as long as it lives
    opaque              anything else: the page is bytes in a form that only equal descriptions share

Recurrent states are described by their owner directly as tensors without a TOKEN axis.

Source: vLLM 0.32 `v1/kv_cache_interface.py` (`compute_layout_strides`), `v1/attention/backends/cpu_attn.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec.structs import replace as replace_struct

from vllm_pd_connector.errors import UnsupportedCache
from vllm_pd_connector.geometry.manifest import Axis, AxisName, Role, Tensor
from vllm_pd_connector.geometry.sharding import Interval

if TYPE_CHECKING:
    from fractions import Fraction


@dataclass(frozen=True, slots=True)
class PageView:
    """One layer's cache as vLLM's [B, H, N, C] view.

    Attributes:
        offset: bytes from the start of `segment` to element [0, 0, 0, 0].
        shape: (pages, heads, tokens, content bytes).
        strides: bytes between neighbours along each axis of `shape`.
        pages_per_block: consecutive pages that make up one logical block of the group.
        heads: global indices of the KV heads in this view; `total_heads` is their number in the whole model.
        state_tokens: how many tokens each of the view's N stored states stands for, less than one where a token has
            several. Only whole pages of such states are moved, so only `opaque` takes them.
    """

    layer: str
    group: int
    segment: int
    offset: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    dtype: str
    itemsize: int
    pages_per_block: int
    heads: Interval
    total_heads: int
    state_tokens: int | Fraction = 1


def key_value(view: PageView, key_size: int, value_size: int) -> tuple[Tensor, Tensor]:
    """K and V side by side in the content dimension; sizes are elements per head.

    Raises:
        UnsupportedCache: the content is not exactly K and V of these sizes.
    """
    _require_content(view, (key_size + value_size) * view.itemsize)
    _, head_stride, token_stride, _ = view.strides
    return (
        _tensor(view, Role.KEY, 0, token_stride, head_stride, key_size, view.itemsize),
        _tensor(view, Role.VALUE, key_size * view.itemsize, token_stride, head_stride, value_size, view.itemsize),
    )


def key_value_scaled(view: PageView, values: int, scales: int) -> tuple[Tensor, ...]:
    """K, its scale, V, its scale in the content dimension; `values` and `scales` are bytes of one side of one head.

    Raises:
        UnsupportedCache: the content is not exactly that.
    """
    _require_content(view, 2 * (values + scales))
    _, head_stride, token_stride, _ = view.strides
    tensors = []
    sides = ((Role.KEY, Role.KEY_SCALE, 0), (Role.VALUE, Role.VALUE_SCALE, values + scales))
    for role, scale, start in sides:
        elements = values // view.itemsize
        tensors.append(_tensor(view, role, start, token_stride, head_stride, elements, view.itemsize))
        of_scale = replace(view, dtype="scale", itemsize=scales)
        tensors.append(_tensor(of_scale, scale, start + values, token_stride, head_stride, 1, scales))
    return tuple(tensors)


def key_value_regions(view: PageView, values: int, scales: int) -> tuple[Tensor, ...]:
    """A page in four regions: K, the scales of K, V, the scales of V, each over all heads and tokens; `values` and
    `scales` are bytes of one side of one token and head. The view has two slots a head, and a region the slots' order:
    the heads one after the other, or the tokens.

    Raises:
        UnsupportedCache: other sizes, or the slots of a page are not side by side.
    """
    _, slots, tokens, content = view.shape
    heads, size = len(view.heads), values + scales
    by_head, by_token = (tokens * size, size, 1), (size, slots * size, 1)
    if content != size or slots != 2 * heads or view.strides[1:] not in (by_head, by_token):
        raise UnsupportedCache(
            f"{view.layer}: slots of shape {view.shape[1:]} with byte strides {view.strides[1:]} are not those of "
            f"{heads} heads and {size} bytes a token; a page of values and scales is one contiguous piece"
        )
    tensors, start = [], 0
    for role, scale in ((Role.KEY, Role.KEY_SCALE), (Role.VALUE, Role.VALUE_SCALE)):
        for part, channels in ((role, values), (scale, scales)):
            steps = (heads * channels, channels) if view.strides[1:] == by_token else (channels, tokens * channels)
            tensors.append(_tensor(view, part, start, *steps, channels, 1))
            start += heads * tokens * channels
    return tuple(tensors)


def cpu_attention(view: PageView, head_size: int) -> tuple[Tensor, Tensor]:
    """CPU_ATTN's page: per head K transposed [head_size, tokens], then V [tokens, head_size].

    Raises:
        UnsupportedCache: the content is not 2 * head_size elements, or the bytes of one head are not contiguous.
    """
    _require_content(view, 2 * head_size * view.itemsize)
    _, _, tokens, content = view.shape
    _, head_stride, token_stride, _ = view.strides
    if tokens > 1 and token_stride != content:
        raise UnsupportedCache(
            f"{view.layer}: token stride is {token_stride} bytes but a token has {content}; CPU attention reads the "
            "bytes of one head as one contiguous piece — use the LBHNC layout"
        )
    row = head_size * view.itemsize
    return (
        _tensor(view, Role.KEY, 0, view.itemsize, head_stride, head_size, tokens * view.itemsize),
        _tensor(view, Role.VALUE, tokens * row, row, head_stride, head_size, view.itemsize),
    )


def latent(view: PageView, size: int, role: Role = Role.LATENT) -> tuple[Tensor]:
    """One vector of `size` elements per token, replicated on all ranks (MLA's latent and rope part, an indexer key).

    Raises:
        UnsupportedCache: more than one head, or the content is not one vector of this size.
    """
    _require_one_head(view)
    _require_content(view, size * view.itemsize)
    return (_tensor(view, role, 0, view.strides[2], view.strides[1], size, view.itemsize),)


_SCALES_OF = {Role.INDEX: Role.INDEX_SCALE, Role.LATENT: Role.LATENT_SCALE}


def values_then_scales(view: PageView, values: int, scales: int, role: Role) -> tuple[Tensor, Tensor]:
    """A page that holds the values of all its tokens first and all their scales behind; both are bytes per token.

    Raises:
        UnsupportedCache: more than one head, other sizes, or the bytes of a page are not contiguous.
    """
    _require_one_head(view)
    _require_content(view, values + scales)
    tokens = view.shape[2]
    if tokens > 1 and view.strides[2] != values + scales:
        raise UnsupportedCache(
            f"{view.layer}: token stride is {view.strides[2]} bytes but a token has {values + scales}; a page of "
            "values and scales is one contiguous piece"
        )
    of_bytes = replace(view, itemsize=1)
    return (
        _tensor(of_bytes, role, 0, values, view.strides[1], values, 1),
        _tensor(of_bytes, _SCALES_OF[role], tokens * values, scales, view.strides[1], scales, 1),
    )


def ring(view: PageView, role: Role) -> tuple[Tensor]:
    """The slots of a request's ring, of which it has one page: a state, without a TOKEN axis. All ranks hold it.

    Raises:
        UnsupportedCache: the content's elements are not side by side.
    """
    _require_content(view, view.shape[3])
    _, heads, slots, content = view.shape
    _, head_stride, slot_stride, _ = view.strides
    channels = content // view.itemsize
    axes = (
        Axis(AxisName.HEAD, heads, head_stride, view.heads.start, view.total_heads),
        Axis(AxisName.TAP, slots, slot_stride, 0, slots),
        Axis(AxisName.CHANNEL, channels, view.itemsize, 0, channels),
    )
    return (replace_struct(_with_axes(view, role, 0, axes, view.itemsize), page_tokens=0),)


def in_planes(view: PageView) -> bool:
    """Whether the two halves of a page lie apart, each beside those of all other pages: K and V of AMD's shuffled
    caches, or two heads, in vLLM's layout LHBNC."""
    pages, heads, tokens, content = view.shape
    page_stride, head_stride, token_stride, stride = view.strides
    dense = stride == 1 and (tokens == 1 or token_stride == content) and page_stride == tokens * content
    return heads == 2 and dense and head_stride >= pages * page_stride


def opaque(view: PageView, description: str) -> tuple[Tensor, ...]:
    """A page of unknown inner form; it moves whole, and only to a peer with an equal description. One that is
    `in_planes` is two pages.

    The heads that the page belongs to are kept as an interval of bytes, so that equal tensor-parallel sizes pair
    rank with rank and unequal ones are refused.

    Raises:
        UnsupportedCache: no description, or the page is not one contiguous piece.
    """
    if not description:
        raise UnsupportedCache(f"{view.layer}: an opaque page needs a description of its inner form")
    if in_planes(view):
        half = (view.shape[0], 1, *view.shape[2:])
        shares = replace(view, shape=half, heads=_half(view.heads), total_heads=view.total_heads // 2)
        return tuple(
            replace_struct(_of_bytes(replace(shares, offset=view.offset + i * view.strides[1]), description), role=role)
            for i, role in enumerate((Role.KEY, Role.VALUE))
        )
    expected = 1
    for size, stride in sorted(zip(view.shape[1:], view.strides[1:], strict=True), key=lambda axis: axis[::-1]):
        if size > 1 and stride != expected:
            raise UnsupportedCache(
                f"{view.layer}: an opaque page must be contiguous, but strides {view.strides} of shape {view.shape} "
                "leave gaps — use a layout that keeps a layer's block together (LBHNC or LBNHC)"
            )
        expected *= size
    return (_of_bytes(view, description),)


def _of_bytes(view: PageView, description: str) -> Tensor:
    _, heads, tokens, content = view.shape
    per_head = tokens * content
    axis = Axis(
        AxisName.BYTE,
        size=heads * per_head,
        stride=1,
        start=view.heads.start * per_head,
        total=view.total_heads * per_head,
    )
    return _with_axes(view, Role.OPAQUE, 0, (axis,), itemsize=1, description=description)


def _half(heads: Interval) -> Interval:
    """What a rank has of one plane, where it has two slots in all: one, behind those of the ranks before it."""
    return Interval(heads.start // 2, heads.start // 2 + 1)


def _require_one_head(view: PageView) -> None:
    if view.shape[1] != 1 or view.total_heads != 1:
        raise UnsupportedCache(
            f"{view.layer}: a latent cache has one head, this view has {view.shape[1]} of {view.total_heads}"
        )


def _require_content(view: PageView, content: int) -> None:
    if view.shape[3] != content or view.strides[3] != 1:
        raise UnsupportedCache(
            f"{view.layer}: content is {view.shape[3]} bytes with stride {view.strides[3]}, expected {content} with "
            "stride 1 — describe this cache as opaque, or add a codec for it"
        )
    if view.shape[1] != len(view.heads):
        raise UnsupportedCache(f"{view.layer}: the view has {view.shape[1]} heads but the rank holds {view.heads}")


def _tensor(
    view: PageView, role: Role, offset: int, token_stride: int, head_stride: int, channels: int, channel_stride: int
) -> Tensor:
    tokens = view.shape[2]
    axes = (
        Axis(AxisName.TOKEN, size=tokens, stride=token_stride, start=0, total=tokens),
        Axis(AxisName.HEAD, len(view.heads), head_stride, view.heads.start, view.total_heads),
        Axis(AxisName.CHANNEL, size=channels, stride=channel_stride, start=0, total=channels),
    )
    return _with_axes(view, role, offset, axes, view.itemsize)


def _with_axes(
    view: PageView, role: Role, offset: int, axes: tuple[Axis, ...], itemsize: int, description: str = ""
) -> Tensor:
    return Tensor(
        layer=view.layer,
        role=role,
        group=view.group,
        dtype=view.dtype,
        itemsize=itemsize,
        segment=view.segment,
        offset=view.offset + offset,
        pages=view.shape[0],
        page_stride=view.strides[0],
        pages_per_block=view.pages_per_block,
        page_tokens=int(view.shape[2] * view.state_tokens),
        axes=axes,
        opaque=description,
    )
