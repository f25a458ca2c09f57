"""The runs of one pair of pages, from which those of a request are made.

`pattern` turns a pairing and a pair of token offsets inside two pages into merged runs, valid for page 0 on both sides;
every other pair of pages only adds page strides. Patterns are kept with their pairing, the latest ones only.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from vllm_pd_connector.geometry.plan import StridedAxis
from vllm_pd_connector.geometry.runs import Runs, join

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_pd_connector.geometry.plan import LayerBatch, PagePairing, TensorSlice
    from vllm_pd_connector.geometry.runs import Addresses

MAX_CACHED_RUNS = 1 << 20


def pattern(pairing: PagePairing, source_token: int, destination_token: int, tokens: int) -> Runs:
    """Merged runs that move `tokens` tokens of all tensors of a pairing between page 0 of both sides.

    Token arguments count inside the pages; for pages that only move whole they are (0, 0, 1). Ordered by destination.
    """
    key = source_token, destination_token, tokens
    if (found := pairing.patterns.get(key)) is None:
        found = join(batch_runs(batch, *key) for batch in pairing.batches)
        cached = sum(map(len, pairing.patterns.values()))
        while pairing.patterns and cached + len(found) > MAX_CACHED_RUNS:
            cached -= len(pairing.patterns.pop(next(iter(pairing.patterns))))
        pairing.patterns[key] = found
    return found


def row_count(pairing: PagePairing, tokens: int) -> int:
    """Rows that `pattern` makes of `tokens` tokens before it merges any."""
    return sum(
        len(batch.layers) * prod(axis.size for axis in _rows(tensor_slice, tokens)[1])
        for batch in pairing.batches
        for tensor_slice in batch.slices
    )


def batch_runs(batch: LayerBatch, source_token: int, destination_token: int, tokens: int) -> Runs:
    """The part of `pattern` that is one batch's, merged within its layers."""
    layer = join(_slice_runs(tensor_slice, source_token, destination_token, tokens) for tensor_slice in batch.slices)
    return Runs(
        np.add.outer(batch.source, layer.source).ravel(),
        np.add.outer(batch.destination, layer.destination).ravel(),
        np.tile(layer.length, len(batch.layers)),
    )


def _slice_runs(tensor_slice: TensorSlice, source_token: int, destination_token: int, tokens: int) -> Runs:
    length, axes = _rows(tensor_slice, tokens)
    source, destination = grid(axes)
    return Runs(
        source + (tensor_slice.source + source_token * tensor_slice.token.source),
        destination + (tensor_slice.destination + destination_token * tensor_slice.token.destination),
        np.full(source.size, length, dtype=np.int64),
    )


def grid(axes: Sequence[StridedAxis]) -> tuple[Addresses, Addresses]:
    """Offsets of every index of these axes, the first of which is the fastest, on both sides; one zero for no axes."""
    source = destination = np.zeros(1, dtype=np.int64)
    for axis in reversed(axes):
        steps = np.arange(axis.size, dtype=np.int64)
        source = np.add.outer(source, steps * axis.source).ravel()
        destination = np.add.outer(destination, steps * axis.destination).ravel()
    return source, destination


def _rows(tensor_slice: TensorSlice, tokens: int) -> tuple[int, list[StridedAxis]]:
    """How many bytes of a slice lie together on both sides, and the axes of what lies apart, the innermost first."""
    token = StridedAxis(tokens, tensor_slice.token.source, tensor_slice.token.destination)
    axes = [axis for axis in sorted((token, *tensor_slice.axes), key=lambda axis: axis.destination) if axis.size > 1]
    length = tensor_slice.itemsize
    while axes and axes[0].source == axes[0].destination == length:
        length *= axes.pop(0).size
    return length, axes
