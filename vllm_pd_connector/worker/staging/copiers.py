"""Carrying out strided copies between staging buffer and cache, zeroing in the cache, and the staging buffer's memory,
on the CPU; and which copier is for which caches.

A copy is two views of the same shape with different strides, over memory that is only known by address, and one
assignment. On the CPU numpy makes it: elements are the contiguous items of a copy, of any size, and it is fast (and
single-threaded, which leaves the other cores to the forward) as long as items are not small. Items of a few bytes,
as in a transposed K, go through a scratch tile that stays in the cache, else each of them costs a cache line.
On a GPU it is `cuda`.

Figures: docs/design/conversion.md, `benchmarks/convert.py`.
"""

from __future__ import annotations

import time
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.worker.staging.base import Memory
from vllm_pd_connector.worker.staging.cuda import CudaCopier, by_torch
from vllm_pd_connector.worker.staging.views import ArrayAt, cache_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from vllm_pd_connector.geometry.staging.strided_copy import Copy
    from vllm_pd_connector.worker.staging.base import Copier, Copying

_PAGE = 4096
_SMALL_ITEM = 16


def copier_for(segments: Sequence[Segment], *, copies: bool = True, states: bool = False) -> Copier:
    """The copier for caches in these segments, which lie on one device; `copies`: that `begin` will be called;
    `states`: that there are recurrent states among the caches."""
    device = next((segment for segment in segments if segment.device != "cpu"), None)
    if device is None:
        return CpuCopier()
    return CudaCopier(device.device_id, None if copies else by_torch, states=states)


class _Now:
    """Copies that the calling thread makes itself."""

    launched = False

    def __init__(self, copies: Iterator[None]) -> None:
        self._copies = copies

    def advance(self, until: float) -> bool:
        return all(time.monotonic() < until for _ in self._copies)

    def stop(self) -> None:
        self._copies = iter(())


class CpuCopier:
    """numpy, in the calling thread."""

    def allocate(self, length: int, purpose: str) -> Memory:
        try:
            # Touched here, so that no turn of the transfer thread waits for the kernel to find it.
            owner = np.full(length + _PAGE, 0, dtype=np.uint8)
        except MemoryError as error:
            raise TransferError(f"{purpose}: there is no memory for {length} bytes") from error
        address = -(-owner.ctypes.data // _PAGE) * _PAGE
        return Memory(Segment(address, length, "cpu", 0), owner)

    def begin(self, base: int, copies: Iterable[Copy], *, gather: bool = False) -> Copying:
        def each() -> Iterator[None]:
            for copy in copies:
                self.copy(base, copy, gather=gather)
                yield

        return _Now(each())

    def copy(self, base: int, copy: Copy, *, gather: bool = False) -> None:
        """Make one copy."""
        kind = f"<u{copy.item}" if copy.item in (1, 2, 4, 8) else f"|V{copy.item}"
        from_, to = (2, 1) if gather else (1, 2)
        axes = sorted(copy.axes, key=lambda axis: -axis[to])
        shape = tuple(size for size, _, _ in axes)
        addresses = (0, base + copy.staging, copy.cache)
        source, destination = (
            np.asarray(ArrayAt(addresses[side], kind, shape, tuple(axis[side] for axis in axes)))
            for side in (from_, to)
        )
        along = next((i for i, axis in enumerate(axes) if axis[from_] == copy.item), None)
        if copy.item > _SMALL_ITEM or along is None or along == len(shape) - 1:
            np.copyto(destination, source)
        else:
            _copy_transposed(destination, source, along)

    def blank(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            np.asarray(cache_array(copy))[...] = 0

    def arrived(self) -> None:
        return


def _copy_transposed(destination: NDArray[Any], source: NDArray[Any], along: int) -> None:
    """Copy where the destination is contiguous along the last axis and the source along axis `along`."""
    source, destination = (np.moveaxis(array, along, -2) for array in (source, destination))
    scratch = np.empty(source.shape[:-3:-1], dtype=source.dtype)  # (last axis, axis `along`), as the source has it
    for index in product(*map(range, source.shape[:-2])):
        np.copyto(scratch, source[index].T)
        np.copyto(destination[index], scratch.T)
