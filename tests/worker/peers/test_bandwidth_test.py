"""The self-test of mode auto: what it measures, against a transport whose speeds are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.geometry.runs import Runs
from vllm_pd_connector.transport.base import TransferStatus
from vllm_pd_connector.transport.loopback import LoopbackTransport
from vllm_pd_connector.worker.peers.bandwidth_test import (
    LEAST_RUN_COST,
    MOST_RUN_COST,
    RUN_BYTES,
    SCRATCH_BYTES,
    WARM_BYTES,
    Bandwidth,
    measure_bandwidth,
)

HERE, THERE = Segment(1 << 20, SCRATCH_BYTES, "cpu", 0), Segment(1 << 30, SCRATCH_BYTES, "cpu", 0)


@dataclass
class Timed:
    """Seconds per byte of reads and of writes, on a clock that only transfers move; the first of each also connects."""

    read_cost: float
    write_cost: float
    now: float = 0.0
    connecting: float = 0.3
    per_run: float = 0.0
    log: list[tuple[str, int, int, int]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def read(self, peer: object, runs: Runs) -> float:
        return self._start("read", runs, self.read_cost)

    def write(self, peer: object, runs: Runs) -> float:
        return self._start("write", runs, self.write_cost)

    def _start(self, kind: str, runs: Runs, cost: float) -> float:
        first = kind not in {name for name, *_ in self.log}
        self.log.append((kind, int(runs.source[0]), int(runs.destination[0]), int(runs.length[0])))
        several = self.per_run * len(runs) if len(runs) > 1 else 0.0
        return self.now + runs.total_bytes * cost + several + (self.connecting if first else 0.0)

    def poll(self, transfer: float) -> TransferStatus:
        self.now = min(transfer, self.now + 0.1) if self.now < transfer else self.now
        return TransferStatus.DONE if self.now >= transfer else TransferStatus.RUNNING


def run(*arguments: Any, connected: Callable[[], bool] = lambda: True) -> Bandwidth:
    """The self-test, resumed until it returns."""
    test = measure_bandwidth(*arguments[:4], connected, 1.0, *arguments[4:])
    while True:
        try:
            next(test)
        except StopIteration as end:
            return end.value


def test_both_directions_are_measured_without_the_cost_of_connecting():
    transport = Timed(2e-9, 1e-9)
    bandwidth = run(transport, object(), HERE, THERE, transport.clock)
    assert bandwidth.read == pytest.approx(0.5e9) and bandwidth.write == pytest.approx(1e9)
    assert bandwidth.prefers_push and not Bandwidth(2.0, 2.0).prefers_push
    half = SCRATCH_BYTES // 2
    for kind, source, destination, length in transport.log:
        assert length in (WARM_BYTES, half, RUN_BYTES)
        expected = (THERE.address, HERE.address + half) if kind == "read" else (HERE.address, THERE.address + half)
        assert (source, destination) == expected


@pytest.mark.parametrize(
    ("seconds", "cost"), [(20e-6, 20000), (2e-6, 2000), (1e-9, LEAST_RUN_COST), (1, MOST_RUN_COST)]
)
def test_what_a_run_costs_is_told_in_bytes_that_could_be_read_meanwhile(seconds: float, cost: int) -> None:
    transport = Timed(1e-9, 1e-9, per_run=seconds)
    assert run(transport, object(), HERE, THERE, transport.clock).run_cost == pytest.approx(cost, rel=0.05)


def test_a_transfer_that_takes_for_ever_ends_the_test():
    transport = Timed(1e-6, 1e-9)
    with pytest.raises(TransferError, match=r"longer than 0.5 s"):
        run(transport, object(), HERE, THERE, transport.clock)
    assert transport.now >= transport.log[-1][3] * 1e-6, "a transfer that ran was left alone"


def test_opening_a_connection_may_take_longer_but_not_for_ever():
    transport = Timed(2e-9, 1e-9, connecting=0.9)
    assert run(transport, object(), HERE, THERE, transport.clock).prefers_push
    transport = Timed(2e-9, 1e-9, connecting=1.1)
    with pytest.raises(TransferError, match=r"longer than 1 s"):
        run(transport, object(), HERE, THERE, transport.clock)


def test_nothing_is_started_with_a_peer_that_was_disconnected():
    transport = Timed(2e-9, 1e-9)
    with pytest.raises(TransferError, match="disconnected"):
        run(transport, object(), HERE, THERE, transport.clock, connected=lambda: not transport.log)
    assert len(transport.log) == 1


def test_real_bytes_move_between_scratch_memories():
    memories = [np.full(SCRATCH_BYTES, fill, dtype=np.uint8) for fill in (1, 2)]
    here, there = (Segment(memory.ctypes.data, SCRATCH_BYTES, "cpu", 0) for memory in memories)
    local, remote = LoopbackTransport(), LoopbackTransport()
    for transport, segment in ((local, here), (remote, there)):
        transport.register([segment])
    bandwidth = run(local, local.connect(remote.describe(), [there]), here, there)
    half = SCRATCH_BYTES // 2
    assert (memories[0][half:] == 2).all() and (memories[1][half:] == 1).all()
    assert bandwidth.read > 0 and bandwidth.write > 0
    for transport in (local, remote):
        transport.close()
