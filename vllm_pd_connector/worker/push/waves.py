"""Waves of layers: what is written of a step before the step has ended (`push_when` "layers").

vLLM calls `save_kv_layer` when a layer's forward has written its pages. Layers that follow each other make a wave,
which goes out when all of it was written: fewer marks on a device, fewer and longer transfers, and what is left to move
when the step ends is about one wave. Layers that vLLM does not call it for go when the step has ended, but for
recurrent states: they were computed where a later layer was, and go with its wave (`with_earlier`).
"""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vllm_pd_connector.geometry.plan import Edge, LayerBatch

logger = init_logger(__name__)

MAX_WAVES = 16


def waves_of(layers: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The layers, in the order of the forward, in up to `MAX_WAVES` waves of about equally many."""
    count = min(MAX_WAVES, len(layers))
    cuts = [len(layers) * i // count for i in range(count + 1)] if count else []
    return tuple(tuple(layers[begin:end]) for begin, end in pairwise(cuts))


def with_earlier(waves: Iterable[Sequence[str]], settled_by: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """The waves, each with the layers that are written where it is: `settled_by` names for each of those the layer
    whose launch comes after its own."""
    return tuple((*wave, *(layer for layer, by in settled_by.items() if by in wave)) for wave in waves)


_SAID = threading.Lock()
"""Taken for good by who says it, whichever thread that is."""


def say_that_a_step_announced_none() -> None:
    """Once in a process: whoever asked for layers gets steps."""
    if _SAID.acquire(blocking=False):
        logger.warning(
            'push_when: "layers", but a step announced no layers, as where its whole forward is one CUDA graph: what '
            "it computes is written when it has ended; start with --compilation-config that leaves attention out of "
            "the graph"
        )


class WaveCount:
    """Counts the waves of the step that is being launched; belongs to the thread that launches it."""

    def __init__(self, waves: Iterable[Sequence[str]]) -> None:
        self._waves = tuple(frozenset(wave) for wave in waves)
        self._step = 0
        self._whole = 0
        self._left: frozenset[str] = frozenset()

    def launched(self, step: int, layer: str) -> int | None:
        """A layer of a step was launched: how many waves are whole, from the first on, if it completes one.

        A layer out of order completes nothing, nor does any after it: the step's end says so for all of them.
        """
        if step != self._step:
            self._step, self._whole = step, 0
            self._left = self._waves[0] if self._waves else frozenset()
        left = self._left
        if layer not in left:
            return None
        if len(left) > 1:
            self._left = left - {layer}
            return None
        self._whole += 1
        self._left = self._waves[self._whole] if self._whole < len(self._waves) else frozenset()
        return self._whole


def of_layers(edge: Edge, wanted: Callable[[str], bool]) -> Edge:
    """The part of an edge that moves the layers that are wanted."""
    pairings = []
    for pairing in edge.pairings:
        batches = tuple(_of_layers(batch, wanted) for batch in pairing.batches if any(map(wanted, batch.layers)))
        if batches:
            pairings.append(replace(pairing, batches=batches, patterns={}))
    return replace(edge, pairings=tuple(pairings))


def _of_layers(batch: LayerBatch, wanted: Callable[[str], bool]) -> LayerBatch:
    which = [wanted(layer) for layer in batch.layers]
    layers = tuple(layer for layer, chosen in zip(batch.layers, which, strict=True) if chosen)
    return replace(batch, layers=layers, source=batch.source[which], destination=batch.destination[which])
