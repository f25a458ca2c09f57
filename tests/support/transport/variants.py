"""What the conformance suite runs over: loopback in one process, NIXL and Mooncake between two processes.

NIXL runs twice: as it chooses on one host (cross-memory attach), and over TCP, which is what containers without that
permission and two hosts use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.support.transport.ends import InProcessPeer, ProcessPeer

MIB = 1 << 20
SIZE = 4 * MIB

AnyPeer = InProcessPeer | ProcessPeer


@dataclass(frozen=True)
class Variant:
    transport: str
    options: dict[str, Any]
    peer: type[AnyPeer]


VARIANTS = {
    "loopback": Variant("loopback", {}, InProcessPeer),
    "nixl": Variant("nixl", {}, ProcessPeer),
    "nixl-tcp": Variant("nixl", {"ucx": {"TLS": "tcp"}}, ProcessPeer),
    "mooncake": Variant("mooncake", {"protocol": "tcp"}, ProcessPeer),
}


def chosen(name: str) -> Variant:
    """The variant of that name, or the transport of that name, between two processes."""
    return VARIANTS.get(name) or Variant(name, {}, ProcessPeer)


def marked(names: Iterable[str]) -> list[Any]:
    """Variants as parameters, those of a library marked so."""
    return [
        pytest.param(name, marks=() if VARIANTS[name].transport == "loopback" else pytest.mark.libraries)
        for name in names
    ]


def scattered(count: int, length: int, source: int, destination: int, space: int = SIZE) -> list[tuple[int, int, int]]:
    """`count` pieces of `length` bytes, in another order on each side, that share no byte on either side."""
    rng = np.random.default_rng(count)
    slots = space // length
    order, reverse = rng.permutation(slots)[:count] * length, rng.permutation(slots)[:count] * length
    return [(source + int(a), destination + int(b), length) for a, b in zip(order, reverse, strict=True)]
