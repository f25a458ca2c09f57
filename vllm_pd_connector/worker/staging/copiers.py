"""Carrying out strided copies between staging buffer and cache, zeroing in the cache, and the staging buffer's memory,
on the CPU and on a GPU.

A copy is two views of the same shape with different strides, over memory that is only known by address, and one
assignment. On the CPU numpy makes it: elements are the contiguous items of a copy, of any size, and it is fast (and
single-threaded, which leaves the other cores to the forward) as long as items are not small. Items of a few bytes,
as in a transposed K, go through a scratch tile that stays in the cache, else each of them costs a cache line.
On a GPU torch makes it, with one kernel per copy on the transfer thread's stream.

Figures: docs/design/conversion.md, `benchmarks/convert.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.geometry.staging.strided_copy import Copy
from vllm_pd_connector.worker.staging.gpudirect import flusher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_PAGE = 4096
_SMALL_ITEM = 16


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that lives as long as this object."""

    segment: Segment
    owner: Any


class Copier(Protocol):
    """How this worker's kind of memory is copied."""

    def allocate(self, length: int) -> Memory:
        """Memory of `length` bytes on this copier's device.

        Raises:
            TransferError: there is none.
        """

    def copy(self, base: int, copy: Copy, *, gather: bool = False) -> None:
        """Start a copy whose `staging` counts from the address `base`: into the cache, or, to `gather`, out of it."""

    def blank(self, copy: Copy) -> None:
        """Start zeroing what a copy names of the cache."""

    def finish(self) -> None:
        """Return when all that was started is done."""

    def arrived(self) -> None:
        """Make what the transport brought, and reported, visible to what is started from now on.

        Raises:
            TransferError: it may not be.
        """


def copier_for(segments: Sequence[Segment]) -> Copier:
    """The copier for caches in these segments, which lie on one device."""
    device = next((segment for segment in segments if segment.device != "cpu"), None)
    return CpuCopier() if device is None else CudaCopier(device.device_id)


class _Array:
    """Memory at an address, as the array interface of numpy (and, on a GPU, of CUDA) describes it."""

    def __init__(self, address: int, kind: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "typestr": kind,
            "shape": shape,
            "strides": strides,
        }

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.__array_interface__


class CpuCopier:
    """numpy, in the calling thread."""

    def allocate(self, length: int) -> Memory:
        try:
            owner = np.empty(length + _PAGE, dtype=np.uint8)
        except MemoryError as error:
            raise TransferError(f"no memory for a staging slab of {length} bytes: lower staging_bytes") from error
        address = -(-owner.ctypes.data // _PAGE) * _PAGE
        return Memory(Segment(address, length, "cpu", 0), owner)

    def copy(self, base: int, copy: Copy, *, gather: bool = False) -> None:
        kind = f"<u{copy.item}" if copy.item in (1, 2, 4, 8) else f"|V{copy.item}"
        from_, to = (2, 1) if gather else (1, 2)
        axes = sorted(copy.axes, key=lambda axis: -axis[to])
        shape = tuple(size for size, _, _ in axes)
        addresses = (0, base + copy.staging, copy.cache)
        source, destination = (
            np.asarray(_Array(addresses[side], kind, shape, tuple(axis[side] for axis in axes))) for side in (from_, to)
        )
        along = next((i for i, axis in enumerate(axes) if axis[from_] == copy.item), None)
        if copy.item > _SMALL_ITEM or along is None or along == len(shape) - 1:
            np.copyto(destination, source)
        else:
            _copy_transposed(destination, source, along)

    def blank(self, copy: Copy) -> None:
        np.asarray(cache_array(copy))[...] = 0

    def finish(self) -> None:
        return

    def arrived(self) -> None:
        return


def _copy_transposed(destination: NDArray[Any], source: NDArray[Any], along: int) -> None:
    """Copy where the destination is contiguous along the last axis and the source along axis `along`."""
    source, destination = (np.moveaxis(array, along, -2) for array in (source, destination))
    scratch = np.empty(source.shape[:-3:-1], dtype=source.dtype)  # (last axis, axis `along`), as the source has it
    for index in product(*map(range, source.shape[:-2])):
        np.copyto(scratch, source[index].T)
        np.copyto(destination[index], scratch.T)


class CudaCopier:
    """torch, on a stream of its own: the engine's stream is never waited for."""

    def __init__(self, device_id: int) -> None:
        import torch

        self._torch = torch
        self._device = torch.device("cuda", device_id)
        self._stream = torch.cuda.Stream(self._device)
        self._flush = flusher(device_id)

    def allocate(self, length: int) -> Memory:
        try:
            owner = self._torch.empty(length, dtype=self._torch.uint8, device=self._device)
        except self._torch.OutOfMemoryError as error:
            raise TransferError(f"no GPU memory for a staging slab of {length} bytes: lower staging_bytes") from error
        return Memory(Segment(owner.data_ptr(), length, "cuda", self._device.index), owner)

    def copy(self, base: int, copy: Copy, *, gather: bool = False) -> None:
        with self._torch.cuda.stream(self._stream):
            staging, cache = (self._torch.as_tensor(array, device=self._device) for array in element_arrays(base, copy))
            if gather:
                staging.copy_(cache)
            else:
                cache.copy_(staging)

    def blank(self, copy: Copy) -> None:
        with self._torch.cuda.stream(self._stream):
            self._torch.as_tensor(cache_array(copy), device=self._device).zero_()

    def finish(self) -> None:
        self._stream.synchronize()

    def arrived(self) -> None:
        self._flush()


def element_arrays(base: int, copy: Copy) -> tuple[_Array, _Array]:
    """(staging buffer, cache) with the items of a copy as an axis of integers, the widest that both sides allow."""
    address = base + copy.staging
    numbers = [copy.item, address, copy.cache, *(n for _, a, b in copy.axes for n in (a, b))]
    width = gcd(8, *numbers)
    axes = [*copy.axes, (copy.item // width, width, width)]
    kind = "|u1" if width == 1 else f"<i{width}"
    shape = tuple(axis[0] for axis in axes)
    return (
        _Array(address, kind, shape, tuple(axis[1] for axis in axes)),
        _Array(copy.cache, kind, shape, tuple(axis[2] for axis in axes)),
    )


def cache_array(copy: Copy) -> _Array:
    """What a copy names of the cache; see `element_arrays`."""
    same = Copy(copy.cache, copy.cache, copy.item, tuple((size, step, step) for size, _, step in copy.axes))
    return element_arrays(0, same)[1]


def device_rows(address: int, stride: int, length: int, rows: NDArray[np.int64], device_id: int) -> NDArray[np.uint8]:
    """Bytes of a GPU's memory on the host, shape (len(rows), length): row i begins at `address + rows[i] * stride`."""
    import torch

    count = int(rows.max()) + 1 if len(rows) else 0
    array = _Array(address, "|u1", (count, length), (stride, 1))
    device = torch.device("cuda", device_id)
    picked = torch.as_tensor(array, device=device)[torch.as_tensor(rows, device=device)]
    found: NDArray[np.uint8] = picked.cpu().numpy()
    return found
