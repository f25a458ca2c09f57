"""Which direction is faster to a peer, and what a run costs: short reads and a short write between scratch memories,
when a link is made.

One machine may write at 49 GB/s and read at 0.5, because a library has a fast way for one of the two only. So in mode
auto a decode worker tries both with the memory that a prefill worker sets aside for this (`Manifest.scratch`). The
first transfer of each kind is not measured: it opens connections. A test that fails or takes too long says nothing,
and the worker reads; scratch memory holds nothing, so a late transfer harms nobody. It waits for nothing: whoever runs
it resumes it now and then, and does other things between.

What a run costs is the time of many short reads over that of as many bytes in one, in bytes that could have been read
meanwhile: that is how conversion weighs runs against bytes (`geometry.staging.chunks`). It spans decades, from RDMA's
few kilobytes to a copy call for each run.

The worker measures its own write into the prefill instance, not that instance's write into itself: it is the kind of
operation that makes the difference, not the direction of the cable.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.runs import Runs
from vllm_pd_connector.transport.base import Transfer, TransferStatus, Transport, TransportPeer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from vllm_pd_connector.geometry.manifest import Segment

SCRATCH_BYTES = 8 << 20
WARM_BYTES = 64 << 10
LIMIT_S = 0.5

RUNS, RUN_BYTES = 1024, 512
"""Short reads at once, and the bytes of each: of a head of 128 channels with its K and V."""

LEAST_RUN_COST, MOST_RUN_COST = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second of reads from a peer and of writes to it; what a run of a read costs in bytes, 0 if unknown."""

    read: float
    write: float
    run_cost: int = 0

    @property
    def prefers_push(self) -> bool:
        return self.write > self.read

    def __str__(self) -> str:
        cost = f", a run costs as much as {self.run_cost} bytes" if self.run_cost else ""
        return f"reads {self.read / 1e9:.2f} GB/s, writes {self.write / 1e9:.2f} GB/s{cost}"


def measure_bandwidth(
    transport: Transport,
    peer: TransportPeer,
    here: Segment,
    there: Segment,
    connected: Callable[[], bool],
    warm_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[None, None, Bandwidth]:
    """Measure both directions; to be resumed until it returns. The first half of each scratch memory is a source, the
    second a destination.

    A transfer that takes too long is polled on until it has ended, because its peer cannot be forgotten before; whoever
    resumes this knows whether the peer's process has.

    Args:
        connected: whether the peer still is.
        warm_s: seconds that the first transfer of each kind may take.

    Raises:
        TransferError: one of the transfers failed or did not end in time, or the peer was disconnected.
    """
    half = min(here.length, there.length) // 2

    def measure(
        start: Callable[[TransportPeer, Runs], Transfer], source: int, destination: int
    ) -> Generator[None, None, float]:
        seconds = 0.0
        for length, limit in ((min(WARM_BYTES, half), warm_s), (half, LIMIT_S)):
            if not connected():
                raise TransferError("the peer was disconnected during the self-test")
            run = Runs(*(np.array([value], dtype=np.int64) for value in (source, destination, length)))
            seconds = yield from _wait(transport, clock, start(peer, run), limit)
        return half / max(seconds, 1e-6)

    read = yield from measure(transport.read, there.address, here.address + half)
    write = yield from measure(transport.write, here.address, there.address + half)
    if not connected():
        raise TransferError("the peer was disconnected during the self-test")
    steps = np.arange(RUNS, dtype=np.int64) * (half // RUNS)
    short = Runs(there.address + steps, here.address + half + steps, np.full(RUNS, RUN_BYTES, dtype=np.int64))
    seconds = yield from _wait(transport, clock, transport.read(peer, short), math.inf)
    cost = round(seconds * read / RUNS) - RUN_BYTES
    return Bandwidth(read, write, min(max(cost, LEAST_RUN_COST), MOST_RUN_COST))


def _wait(
    transport: Transport, clock: Callable[[], float], transfer: Transfer, limit: float
) -> Generator[None, None, float]:
    """Seconds that a transfer takes from now."""
    began = clock()
    while transport.poll(transfer) is not TransferStatus.DONE:
        yield
    if (seconds := clock() - began) > limit:
        raise TransferError(f"a transfer of the self-test took {seconds:.2f} s, longer than {limit:g} s")
    return seconds
