"""Caches that arrive wrong, silently: what an accuracy benchmark must be able to see.

Every transfer still moves as many bytes to the same places and ends well, but runs of equal length get each other's
bytes: keys for values, one layer's for another's. Reading other bytes of the same request is the mildest corruption
there is, and no error tells of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def corrupt_transfers() -> None:
    """Make every transport that is created from now on corrupt what it moves. May be called again."""
    from vllm_pd_connector.transport import registry

    create = registry.create
    if getattr(create, "corrupts", False):
        return

    def create_corrupting(*arguments: Any, **options: Any) -> Any:
        transport = create(*arguments, **options)
        kind = type(transport)
        for name in ("read", "write"):
            method = getattr(kind, name)
            if not getattr(method, "corrupts", False):
                setattr(kind, name, _with_exchanged_sources(method))
        return transport

    create_corrupting.corrupts = True  # type: ignore[attr-defined]
    registry.create = create_corrupting


def _with_exchanged_sources(method: Callable[..., Any]) -> Callable[..., Any]:
    def start(self: Any, peer: Any, runs: Any, *rest: Any) -> Any:
        return method(self, peer, exchanged(runs), *rest)

    start.corrupts = True  # type: ignore[attr-defined]
    return start


def exchanged(runs: Any) -> Any:
    """The same runs, each with the source of the next one of its length."""
    source = runs.source.copy()
    for length in np.unique(runs.length):
        [same] = np.nonzero(runs.length == length)
        source[same] = np.roll(runs.source[same], 1)
    return type(runs)(source, runs.destination, runs.length)
