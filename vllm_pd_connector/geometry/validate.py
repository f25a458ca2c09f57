"""Is a manifest consistent with itself? The gate that every manifest, above all a received one, passes first.

What holds after `validate`, and what the rest of the package relies on without checking again:

- every byte of every tensor lies inside its segment, and every address fits a signed 64-bit integer;
- no two elements of a tensor share a byte. The rule is that strides nest: sorted by size, each stride is at least
  the span of everything below it. All permutations and packings of a dense buffer nest;
- no two segments share a byte, and no two tensors of one group do. Different groups may (a dual view), their blocks
  are never in use at once;
- pages, blocks and tokens agree between tensors and groups.

Overlap is decided by folding: tensors whose ranges intersect are taken modulo their largest common stride, which
removes one axis, until plain ranges remain. That is linear in the number of tensors times the number of axes, knows
no layout, and errs only towards refusing. Strides without a common period would take work that doubles with every
tensor; it is bounded, and what is not decided by then is refused. Python integers throughout, so nothing overflows.

Layers look alike and so do ranks: a form of a tensor is looked at once in a manifest, where tensors lie once in all
manifests of an instance. Of 80 layers on 8 ranks that leaves a third of the time, in which nothing else is transferred.
"""

from __future__ import annotations

import ipaddress
import re
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from vllm_pd_connector.errors import InvalidManifest
from vllm_pd_connector.geometry.manifest import (
    MANIFEST_VERSION,
    WHOLE,
    Axis,
    AxisName,
    Coordinates,
    Group,
    GroupKind,
    LivenessAddress,
    Manifest,
    Role,
    Segment,
    Tensor,
)
from vllm_pd_connector.geometry.sharding import context_rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_SEGMENTS = 4096
MAX_GROUPS = 256
MAX_TENSORS = 4096  # of one rank; they are looked at in one piece of the transfer thread's work
MAX_AXES = 4
MAX_RANKS = 1024
MAX_TEXT = 4096
MAX_FACT = 1 << 16
MAX_ENDPOINT = 1 << 20
MAX_ADDRESS = 64
MAX_FILES = 64
"""Of a model's configuration. What ranks and sides say of each is compared."""
ADDRESS_LIMIT = 1 << 62
# Ranges looked at per tensor to decide overlap; layouts that share their strides take fewer than ten.
MAX_FOLDED = 32


def validate(manifest: Manifest, proven: set[object] | None = None) -> None:
    """Check a manifest against itself.

    Args:
        proven: where tensors lie in manifests that were checked before; this one's places are added.

    Raises:
        InvalidManifest: names the first field that is wrong, its value and what it should be.
    """
    if manifest.version != MANIFEST_VERSION:
        _refuse("version", manifest.version, f"this software reads version {MANIFEST_VERSION}; use equal releases")
    if not re.fullmatch(r"[0-9a-f]{32}", manifest.incarnation):
        _refuse("incarnation", manifest.incarnation[:64], "must be 32 lower-case hex digits")
    for field in ("engine_id", "transport"):
        _check_text(field, getattr(manifest, field))
    # Rope parameters have lists of numbers; and what differs is printed for every request.
    facts = {f"model.{name}": getattr(manifest.model, name) for name in manifest.model.__struct_fields__}
    for field, value in (("software", manifest.software), *facts.items()):
        if isinstance(value, str) and len(value) > MAX_FACT:
            _refuse(field, f"{len(value)} characters long", f"at most {MAX_FACT}")
    if (files := len(manifest.configuration)) > MAX_FILES:
        _refuse("software", f"{files} files of the configuration", f"at most {MAX_FILES}")
    if len(manifest.endpoint) > MAX_ENDPOINT:
        _refuse("endpoint", f"{len(manifest.endpoint)} bytes", f"at most {MAX_ENDPOINT}")
    _check_coordinates(manifest.parallel)
    for field, count, limit in (
        ("segments", len(manifest.segments), MAX_SEGMENTS),
        ("groups", len(manifest.groups), MAX_GROUPS),
        ("tensors", len(manifest.tensors), MAX_TENSORS),
    ):
        if not 1 <= count <= limit:
            _refuse(field, f"{count} entries", f"must have 1 to {limit}")
    for i, segment in enumerate(manifest.segments):
        _check_segment(f"segments[{i}]", segment)
    if manifest.scratch is not None:
        _check_segment("scratch", manifest.scratch)
    if manifest.life is not None:
        _check_life(manifest.life)
    _check_apart(manifest)
    for i, group in enumerate(manifest.groups):
        _check_group(f"groups[{i}]", group, manifest.parallel)
    _check_overlaps(manifest, _check_tensors(manifest), set() if proven is None else proven)
    if unknown := sorted(set(manifest.draft_layers).difference(tensor.layer for tensor in manifest.tensors)):
        _refuse("draft_layers", unknown[0][:MAX_TEXT], "must name layers of tensors")


def _refuse(field: str, value: object, rule: str) -> NoReturn:
    raise InvalidManifest(f"manifest field {field} is {value}: {rule}")


def _check_text(field: str, value: str) -> None:
    if not 1 <= len(value) <= MAX_TEXT:
        _refuse(field, f"{len(value)} characters long", f"must have 1 to {MAX_TEXT}")


def _check_coordinates(parallel: Coordinates) -> None:
    for name in ("tp", "pp", "dp", "dcp", "pcp"):
        rank, size = getattr(parallel, f"{name}_rank"), getattr(parallel, f"{name}_size")
        if not 1 <= size <= MAX_RANKS:
            _refuse(f"parallel.{name}_size", size, f"must be 1 to {MAX_RANKS}")
        if not 0 <= rank < size:
            _refuse(f"parallel.{name}_rank", rank, f"must be below {name}_size {size}")
    ranks = parallel.tp_size * parallel.pcp_size
    if ranks > MAX_RANKS:
        _refuse("parallel.pcp_size", parallel.pcp_size, f"times tp_size {parallel.tp_size} must be 1 to {MAX_RANKS}")
    if ranks % parallel.dcp_size:
        _refuse("parallel.dcp_size", parallel.dcp_size, f"must divide the {ranks} tensor and prefill-context ranks")
    rank = context_rank(parallel.dcp_size, parallel.pcp_rank, parallel.pcp_size, parallel.tp_rank)
    if parallel.dcp_rank != rank:
        rule = f"must be {rank}: groups are made of neighbouring tensor ranks, prefill-context ranks first"
        _refuse("parallel.dcp_rank", parallel.dcp_rank, rule)
    if not 1 <= parallel.interleave < ADDRESS_LIMIT:
        _refuse("parallel.interleave", parallel.interleave, "must be positive")


def _check_segment(field: str, segment: Segment) -> None:
    if segment.address < 0 or segment.length < 1 or segment.address + segment.length > ADDRESS_LIMIT:
        _refuse(field, f"{segment.length} bytes at {segment.address}", f"must lie inside [0, {ADDRESS_LIMIT})")
    if segment.device not in ("cpu", "cuda"):
        _refuse(f"{field}.device", segment.device[:64], "must be cpu or cuda")
    if not 0 <= segment.device_id < 1 << 31:
        _refuse(f"{field}.device_id", segment.device_id, "must be a device number")


def _check_life(life: LivenessAddress) -> None:
    try:
        ipaddress.ip_address(life.address)
        known = len(life.address) <= MAX_ADDRESS
    except ValueError:
        known = False
    if not known:
        _refuse("life.address", life.address[:MAX_ADDRESS], "must be an IP address, its zone of few letters")
    if not 1 <= life.port <= 65535:
        _refuse("life.port", life.port, "must be in 1..65535")
    if not re.fullmatch(r"[!-~]{1,128}", life.name):
        _refuse("life.name", life.name[:64], "must be 1 to 128 printable ASCII characters")


def _check_apart(manifest: Manifest) -> None:
    """Tensors are compared within a segment only, so no byte may belong to two segments."""
    named = [(f"segments[{i}]", segment) for i, segment in enumerate(manifest.segments)]
    if manifest.scratch is not None:
        named.append(("scratch", manifest.scratch))
    named.sort(key=lambda entry: (entry[1].device, entry[1].device_id, entry[1].address))
    for (name, one), (field, other) in pairwise(named):
        if (one.device, one.device_id) == (other.device, other.device_id) and other.address < one.address + one.length:
            rule = f"must not share bytes with {name}, {one.length} bytes at {one.address}"
            _refuse(field, f"{other.length} bytes at {other.address}", rule)


def _check_group(field: str, group: Group, parallel: Coordinates) -> None:
    if not 1 <= group.num_blocks < ADDRESS_LIMIT:
        _refuse(f"{field}.num_blocks", group.num_blocks, "must be positive")
    if not (group.kind is not GroupKind.STATE) <= group.block_tokens < ADDRESS_LIMIT:
        _refuse(f"{field}.block_tokens", group.block_tokens, "must be positive")
    _check_share(f"{field}.share", group, parallel)
    windowed = group.kind in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL)
    if not windowed <= group.window < (ADDRESS_LIMIT if windowed else 1):
        _refuse(f"{field}.window", group.window, f"a {group.kind} group has {'a' if windowed else 'no'} window")


def _check_share(field: str, group: Group, parallel: Coordinates) -> None:
    share, turn = group.share, parallel.share
    if share == WHOLE:
        return
    printed = f"rank {share.rank} of {share.size} by {share.interleave}"
    if share != turn:
        _refuse(field, printed, f"must be all tokens, or rank {turn.rank} of {turn.size} by {turn.interleave}")
    if group.kind is not GroupKind.FULL:
        _refuse(field, printed, f"a {group.kind} group is not interleaved")
    if group.block_tokens % (share.size * share.interleave):
        _refuse(field, printed, f"must divide the group's {group.block_tokens} tokens per block")


def _check_tensors(manifest: Manifest) -> list[_Bytes]:
    """Each of them by itself; the bytes of each."""
    seen: set[tuple[str, Role]] = set()
    forms: dict[object, _Bytes] = {}
    found = []
    for i, tensor in enumerate(manifest.tensors):
        if not 1 <= len(tensor.layer) <= MAX_TEXT:
            _check_text(f"tensors[{i}].layer", tensor.layer)
        name, field = (tensor.layer, tensor.role), f"tensors[{i}] ({tensor.layer} {tensor.role})"
        if name in seen:
            _refuse(field, "twice", "duplicate layer and role; skip layers that share another layer's cache")
        seen.add(name)
        if not 0 <= tensor.segment < len(manifest.segments):
            _refuse(f"{field}.segment", tensor.segment, f"there are {len(manifest.segments)} segments")
        numbers = tensor.group, tensor.itemsize, tensor.pages, tensor.page_stride, tensor.pages_per_block
        form = *numbers, tensor.page_tokens, tensor.dtype, tensor.opaque, tensor.axes
        alike = known if (known := forms.get(form)) is not None else _check_form(field, tensor, manifest)
        stop, length = tensor.offset + alike.stop, manifest.segments[tensor.segment].length
        if tensor.offset < 0 or stop > length:
            rule = f"bytes {tensor.offset} to {stop} leave the segment of {length}"
            _refuse(f"{field}.offset", tensor.offset, rule)
        if known is None:
            _check_nesting(field, tensor, alike)
            forms[form] = alike
        found.append(_Bytes(tensor.offset, stop, alike.axes, i))
    return found


def _check_form(field: str, tensor: Tensor, manifest: Manifest) -> _Bytes:
    """What does not depend on where a tensor lies; its bytes if it lay at 0."""
    _check_text(f"{field}.dtype", tensor.dtype)
    if not 0 <= tensor.group < len(manifest.groups):
        _refuse(f"{field}.group", tensor.group, f"there are {len(manifest.groups)} groups")
    for name in ("itemsize", "pages", "page_stride", "pages_per_block"):
        if not 1 <= getattr(tensor, name) < ADDRESS_LIMIT:
            _refuse(f"{field}.{name}", getattr(tensor, name), "must be positive")
    if len(tensor.opaque) > MAX_TEXT:
        _refuse(f"{field}.opaque", f"{len(tensor.opaque)} characters long", f"at most {MAX_TEXT}")
    _check_pages(field, tensor, manifest.groups[tensor.group])
    _check_axes(field, tensor)
    return _Bytes.of(tensor)


def _check_nesting(field: str, tensor: Tensor, bytes_: _Bytes) -> None:
    span = tensor.itemsize
    for stride, size in reversed(bytes_.axes):
        if stride < span:
            _refuse(field, f"strided by {stride} over {span} bytes", "two elements share a byte or interleave")
        span += (size - 1) * stride


def _check_pages(field: str, tensor: Tensor, group: Group) -> None:
    if tensor.pages != group.num_blocks * tensor.pages_per_block:
        rule = f"must be {group.num_blocks} blocks of {tensor.pages_per_block} pages"
        _refuse(f"{field}.pages", tensor.pages, rule)
    if group.kind is GroupKind.STATE:
        if tensor.page_tokens != 0 or tensor.pages_per_block != 1:
            shape = f"{tensor.page_tokens} tokens, {tensor.pages_per_block} pages per block"
            _refuse(f"{field}.page_tokens", shape, "a state has no tokens and one page per block")
    elif tensor.page_tokens < 1 or tensor.page_tokens * tensor.pages_per_block * group.share.size != group.block_tokens:
        held = f"{group.block_tokens} tokens per block over {group.share.size} ranks"
        rule = f"{tensor.pages_per_block} pages must hold the group's {held}"
        _refuse(f"{field}.page_tokens", tensor.page_tokens, rule)


def _check_axes(field: str, tensor: Tensor) -> None:
    axes = tensor.axes
    names = [axis.name for axis in axes]
    if not 1 <= len(axes) <= MAX_AXES or len(set(names)) != len(names):
        _refuse(f"{field}.axes", ", ".join(names[:16]), f"must be 1 to {MAX_AXES} different axes")
    if tensor.opaque:
        if names != [AxisName.BYTE] or axes[0].stride != 1 or tensor.itemsize != 1:
            _refuse(f"{field}.axes", ", ".join(names), "an opaque page is one BYTE axis of stride 1")
    elif AxisName.BYTE in names:
        _refuse(f"{field}.opaque", "empty", "a page of bytes needs a description of its inner form")
    elif (AxisName.TOKEN in names) != (tensor.page_tokens > 0):
        _refuse(f"{field}.axes", ", ".join(names), f"page_tokens is {tensor.page_tokens}")
    for axis in axes:
        _check_axis(f"{field}.{axis.name}", axis)
        if axis.name is AxisName.TOKEN and (axis.size, axis.total) != (tensor.page_tokens, tensor.page_tokens):
            rule = f"size and total must be the page's {tensor.page_tokens} tokens"
            _refuse(f"{field}.token", f"{axis.size} of {axis.total}", rule)
    if sum(axis.size < axis.total for axis in axes) > 1:
        _refuse(f"{field}.axes", "sharded along several axes", "at most one axis may be a part of its total")


def _check_axis(field: str, axis: Axis) -> None:
    if not 1 <= axis.size < ADDRESS_LIMIT or not 0 <= axis.stride < ADDRESS_LIMIT:
        _refuse(field, f"{axis.size} elements {axis.stride} bytes apart", "sizes are positive, strides not negative")
    if not 0 <= axis.start <= axis.start + axis.size <= axis.total < ADDRESS_LIMIT:
        _refuse(field, f"[{axis.start}, {axis.start + axis.size}) of {axis.total}", "must lie inside its total")


class _Bytes(NamedTuple):
    """The bytes of a tensor: [start, stop) is the range they lie in, `axes` (stride, size > 1) outermost first; `owner`
    is the tensor's number."""

    start: int
    stop: int
    axes: tuple[tuple[int, int], ...]
    owner: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Bytes:
        """Those of the first tensor, if it lies at 0."""
        axes = [(axis.stride, axis.size) for axis in tensor.axes if axis.size > 1]
        if tensor.pages > 1:
            axes.append((tensor.page_stride, tensor.pages))
        span = tensor.itemsize + sum(stride * (size - 1) for stride, size in axes)
        return cls(0, span, tuple(sorted(axes, reverse=True)), 0)


def _check_overlaps(manifest: Manifest, found: Sequence[_Bytes], proven: set[object]) -> None:
    together: dict[tuple[int, int], list[_Bytes]] = {}
    for tensor, bytes_ in zip(manifest.tensors, found, strict=True):
        together.setdefault((tensor.group, tensor.segment), []).append(bytes_)
    for items in together.values():
        if (places := tuple(items)) in proven:
            continue
        if (pair := _overlap(items)) is not None:
            a, b = (manifest.tensors[i] for i in sorted(pair))
            _refuse(
                f"tensors ({a.layer} {a.role}) and ({b.layer} {b.role})",
                f"overlapping in segment {a.segment}",
                "two tensors of one group must not share bytes, and strides must show that they do not",
            )
        proven.add(places)


def _overlap(items: Sequence[_Bytes]) -> tuple[int, int] | None:
    """Owners of two items that share a byte, or that cannot be shown not to; None if all are disjoint."""
    pending = [items]
    left = MAX_FOLDED * (len(items) + MAX_FOLDED)
    while pending:
        for cluster in _clusters(pending.pop()):
            left -= len(cluster)
            stride = max((item.axes[0][0] for item in cluster if item.axes), default=0)
            if left < 0 or stride == 0:
                return _two_owners(cluster)
            folded = []
            for item in cluster:
                axes, span = item.axes, item.stop - item.start
                if axes and axes[0][0] == stride:
                    span -= stride * (axes[0][1] - 1)
                    axes = axes[1:]
                if span > stride:
                    return _two_owners(cluster)
                start = (item.start - cluster[0].start) % stride
                folded.append(_Bytes(start, start + span, axes, item.owner))
                if start + span > stride:  # reaches into the next period: seen from there, it starts before it
                    folded.append(_Bytes(start - stride, start - stride + span, axes, item.owner))
            pending.append(folded)
    return None


def _two_owners(cluster: Sequence[_Bytes]) -> tuple[int, int]:
    first = cluster[0].owner
    return first, next(item.owner for item in cluster if item.owner != first)


def _clusters(items: Sequence[_Bytes]) -> Iterator[list[_Bytes]]:
    """Sets of items whose ranges chain together, where more than one owner takes part."""
    chained: list[list[_Bytes]] = []
    end = 0
    for item in sorted(items):
        if chained and item.start < end:
            chained[-1].append(item)
            end = max(end, item.stop)
        else:
            chained.append([item])
            end = item.stop
    return (cluster for cluster in chained if any(item.owner != cluster[0].owner for item in cluster))
