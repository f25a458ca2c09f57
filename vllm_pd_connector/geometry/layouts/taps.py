"""Convolution states of sides that draft unequal numbers of tokens: which taps move.

A convolution of width k looks back on k - 1 inputs. vLLM gives each state further taps behind those, one per draft
token. A prefill writes the first k - 1 taps and no other, and the first step of a decode reads these; the others are
scratch memory of later steps. So where two sides' states differ by nothing but those, the taps of the source go into
the first ones of the destination, and its further ones keep what they had.

Nothing moves into fewer taps: the prefill side's checksums (`verify`) are over all of its own, and its worker does not
know who asks.

What is for draft tokens each side's manifest tells (`Manifest.draft_taps`). A side that tells nothing pairs with equal
taps only: 0.1.0rc1, and kernels that do otherwise or were not read (`compat.model.recurrent`).

Source: docs/design/state-caches.md ("Taps"), which cites vLLM 0.32 by line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from vllm_pd_connector.geometry.manifest import AxisName, Manifest, Role, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONVOLUTIONS = frozenset((Role.CONV_Q, Role.CONV_K, Role.CONV_V, Role.CONV_X, Role.CONV_B, Role.CONV_C))


class _Taps(NamedTuple):
    """How many taps a state has, and how many of them, the first ones, a prefill writes."""

    total: int
    written: int


def cut_taps(manifests: Sequence[Manifest], others: Sequence[Manifest]) -> Sequence[Manifest]:
    """`manifests`, with the taps of their convolution states cut to those of `others` where these have fewer, if it is
    draft tokens alone that they have fewer for. The same objects where nothing is cut. Both must be valid."""
    if all(manifest.draft_taps is None for manifest in manifests):
        return manifests
    mine, theirs = _taps(manifests), _taps(others)
    fewer: dict[tuple[str, Role], int] = {}
    for name, here in mine.items():
        there = theirs.get(name)
        if here is not None and there is not None and here.written == there.written and here.total > there.total:
            fewer[name] = there.total
    return [_cut(manifest, fewer) for manifest in manifests] if fewer else manifests


def _taps(manifests: Sequence[Manifest]) -> dict[tuple[str, Role], _Taps | None]:
    """By layer and role; None where a rank that has the state does not tell, or ranks tell otherwise."""
    found: dict[tuple[str, Role], _Taps | None] = {}
    for manifest in manifests:
        drafts = manifest.draft_taps
        for tensor in manifest.tensors:
            if tensor.role in _CONVOLUTIONS:
                name, told = (tensor.layer, tensor.role), _told(tensor, drafts)
                found[name] = told if found.setdefault(name, told) == told else None
    return found


def _told(tensor: Tensor, drafts: int | None) -> _Taps | None:
    total = next((axis.total for axis in tensor.axes if axis.name is AxisName.TAP and axis.size == axis.total), 0)
    return None if drafts is None or tensor.page_tokens or drafts >= total else _Taps(total, total - drafts)


def _cut(manifest: Manifest, fewer: dict[tuple[str, Role], int]) -> Manifest:
    tensors = (
        _with_taps(tensor, fewer[tensor.layer, tensor.role]) if (tensor.layer, tensor.role) in fewer else tensor
        for tensor in manifest.tensors
    )
    return msgspec.structs.replace(manifest, tensors=tuple(tensors))


def _with_taps(tensor: Tensor, number: int) -> Tensor:
    """The tensor's first taps."""
    axes = (
        msgspec.structs.replace(axis, size=number, total=number) if axis.name is AxisName.TAP else axis
        for axis in tensor.axes
    )
    return msgspec.structs.replace(tensor, axes=tuple(axes))
