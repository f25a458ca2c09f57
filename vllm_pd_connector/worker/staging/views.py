"""Memory at an address as an array: what numpy and torch make views of, and a copy's sides as integers of one width."""

from __future__ import annotations

from math import gcd
from typing import Any

from vllm_pd_connector.geometry.staging.strided_copy import Copy, CopyAxis


class ArrayAt:
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


def elements(base: int, copy: Copy) -> tuple[int, list[CopyAxis]]:
    """The widest integers, in bytes, that items on both sides are made of, and a copy's axes over them, outermost
    first. `base` is where its chunk lies."""
    width = gcd(8, copy.item, base + copy.staging, copy.cache, *(n for _, a, b in copy.axes for n in (a, b)))
    return width, [*copy.axes, (copy.item // width, width, width)]


def element_arrays(base: int, copy: Copy) -> tuple[ArrayAt, ArrayAt]:
    """(staging buffer, cache) as arrays of `elements`."""
    width, axes = elements(base, copy)
    kind = "|u1" if width == 1 else f"<i{width}"
    shape = tuple(axis[0] for axis in axes)
    return (
        ArrayAt(base + copy.staging, kind, shape, tuple(axis[1] for axis in axes)),
        ArrayAt(copy.cache, kind, shape, tuple(axis[2] for axis in axes)),
    )


def in_cache(copy: Copy) -> Copy:
    """A copy from what another names of the cache to itself."""
    return Copy(copy.cache, copy.cache, copy.item, tuple((size, step, step) for size, _, step in copy.axes))


def cache_array(copy: Copy) -> ArrayAt:
    """What a copy names of the cache; see `element_arrays`."""
    return element_arrays(0, in_cache(copy))[1]
