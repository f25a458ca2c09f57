"""Which direction is faster to a peer: a short read and a short write between scratch memories, when a link is made.

One machine may write at 49 GB/s and read at 0.5, because a library has a fast way for one of the two only. So in mode
auto a decode worker tries both with the memory that a prefill worker sets aside for this (`Manifest.scratch`). The
first transfer of each kind is not measured: it opens connections. A test that fails or takes too long says nothing,
and the worker reads; scratch memory holds nothing, so a late transfer harms nobody.

The worker measures its own write into the prefill instance, not that instance's write into itself: it is the kind of
operation that makes the difference, not the direction of the cable.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.geometry.runs import Runs
from vllm_pd_connector.transport.base import Peer, Status, Transfer, Transport

SCRATCH_BYTES = 8 << 20
WARM_BYTES = 64 << 10
LIMIT_S = 0.5
_PAUSE_S = 0.0002


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes per second of reads from a peer and of writes to it."""

    read: float
    write: float

    @property
    def prefers_push(self) -> bool:
        return self.write > self.read

    def __str__(self) -> str:
        return f"reads {self.read / 1e9:.2f} GB/s, writes {self.write / 1e9:.2f} GB/s"


def self_test(
    transport: Transport, peer: Peer, here: Segment, there: Segment, clock: Callable[[], float] = time.monotonic
) -> Figures:
    """Measure both directions. The first half of each scratch memory is a source, the second a destination.

    Raises:
        TransferError: one of the transfers failed or did not end in time.
    """
    half = min(here.length, there.length) // 2
    into, from_ = here.address + half, there.address
    read = _speed(transport, clock, lambda n: transport.read(peer, _run(from_, into, n)), half)
    out_of, to = here.address, there.address + half
    write = _speed(transport, clock, lambda n: transport.write(peer, _run(out_of, to, n)), half)
    return Figures(read, write)


def _run(source: int, destination: int, length: int) -> Runs:
    return Runs(*(np.array([value], dtype=np.int64) for value in (source, destination, length)))


def _speed(transport: Transport, clock: Callable[[], float], start: Callable[[int], Transfer], length: int) -> float:
    _wait(transport, clock, start(min(WARM_BYTES, length)))
    seconds = _wait(transport, clock, start(length))
    return length / max(seconds, 1e-6)


def _wait(transport: Transport, clock: Callable[[], float], transfer: Transfer) -> float:
    """Seconds that a transfer takes from now, at most about LIMIT_S."""
    began = clock()
    while transport.poll(transfer) is Status.RUNNING:
        if clock() - began > LIMIT_S:
            raise TransferError(f"a transfer of the self-test did not end within {LIMIT_S:g} s", terminal=False)
        time.sleep(_PAUSE_S)
    return clock() - began
