"""All copies of a chunk in one launch: a Triton kernel over an array of descriptors.

A descriptor is a row of a table in the device's memory: two addresses, how many elements there are, and for each axis
its size and two strides. A program of the kernel moves BLOCK elements of one row; a second table says which. It finds
an element's index on every axis by division, innermost first, as numpy's `unravel_index` does. Elements are integers,
as wide as both sides of a copy allow (`views.elements`); copies of another width are another launch, of which a chunk
has mostly one.

Both tables go to the device in one copy from pinned memory. Strides and addresses are bytes in 64 bits. Indices are in
32 bits where they fit, because a GPU divides those several times faster.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_pd_connector.worker.staging.views import elements

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from vllm_pd_connector.geometry.staging.strided_copy import Copy

BLOCK = 1024
LOOK_UP_EVERY = 64
"""Rows, of which each takes some microseconds to make."""
WIDTHS = (1, 2, 4, 8)
_AXIS, _FIXED = 3, 4
"""Numbers per axis (size, step in the source, step in the destination), and before them (source, destination, elements,
axes)."""


# Triton compiles a kernel again for an integer or an address that 16 divides, and for 1: tables of any size are to run
# what `compile_all` has compiled.
@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["rows", "programs"])  # type: ignore[untyped-decorator]
def _move(rows, programs, length, WIDTH: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = programs + 2 * tl.program_id(0)
    row = rows + tl.load(program) * length
    if WIDE:
        at = tl.load(program + 1) + tl.arange(0, BLOCK).to(tl.int64)
    else:
        at = tl.load(program + 1).to(tl.int32) + tl.arange(0, BLOCK)
    inside = at < tl.load(row + 2)
    source = tl.full([BLOCK], tl.load(row), tl.int64)
    destination = tl.full([BLOCK], tl.load(row + 1), tl.int64)
    axes = tl.load(row + 3).to(tl.int32)
    for axis in range(0, axes):
        numbers = row + 4 + 3 * axis
        size = tl.load(numbers)
        if not WIDE:
            size = size.to(tl.int32)
        outer = at // size
        index = (at - outer * size).to(tl.int64)
        source += index * tl.load(numbers + 1)
        destination += index * tl.load(numbers + 2)
        at = outer
    if WIDTH == 8:
        kind = tl.pointer_type(tl.int64)
    elif WIDTH == 4:
        kind = tl.pointer_type(tl.int32)
    elif WIDTH == 2:
        kind = tl.pointer_type(tl.int16)
    else:
        kind = tl.pointer_type(tl.int8)
    tl.store(destination.to(kind), tl.load(source.to(kind), mask=inside), mask=inside)


def by_kernel(base: int, copies: Iterable[Copy], device: Any, *, gather: bool) -> Iterator[object]:
    """A launch on the current stream for each width of elements; yields the tables, which it reads, and before them now
    and then nothing, so that whoever goes on with it can look up in between."""
    of_width: dict[int, list[list[int]]] = defaultdict(list)
    for number, copy in enumerate(copies, 1):
        width, row = descriptor(base, copy, gather=gather)
        of_width[width].append(row)
        if number % LOOK_UP_EVERY == 0:
            yield None
    for width, rows in of_width.items():
        yield _launch(width, rows, device)


def compile_all(device: Any) -> None:
    """Have the kernel ready for copies of every width, with launches that move nothing."""
    for width in WIDTHS:
        for wide in (False, True):
            _launch(width, [[0, 0, 0, 0]], device, wide=wide)


def descriptor(base: int, copy: Copy, *, gather: bool) -> tuple[int, list[int]]:
    """The width of a copy's elements in bytes, and its row, as long as its axes need."""
    width, axes = elements(base, copy)
    from_, to = (2, 1) if gather else (1, 2)
    ends = (0, base + copy.staging, copy.cache)
    row, count = [ends[from_], ends[to], 0, len(axes)], 1
    for axis in reversed(axes):
        row += [axis[0], axis[from_], axis[to]]
        count *= axis[0]
    row[2] = count
    return width, row


def tables(rows: list[list[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows padded to one length, and for each program (row, first element)."""
    longest = max(map(len, rows))
    table = np.array([row + [0] * (longest - len(row)) for row in rows], dtype=np.int64)
    blocks = np.maximum(-(-table[:, 2] // BLOCK), 1)
    row = np.repeat(np.arange(len(rows)), blocks)
    block = np.arange(len(row)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    return table, np.stack((row, block * BLOCK), axis=1)


def _launch(width: int, rows: list[list[int]], device: Any, *, wide: bool | None = None) -> object:
    table, programs = tables(rows)
    host = torch.from_numpy(np.concatenate((table.ravel(), programs.ravel()))).pin_memory()
    there = host.to(device, non_blocking=True)
    if wide is None:
        wide = int(table[:, 2].max()) > np.iinfo(np.int32).max - BLOCK
    _move[(len(programs),)](there, there[table.size :], table.shape[1], WIDTH=width, WIDE=wide, BLOCK=BLOCK)
    return host, there
