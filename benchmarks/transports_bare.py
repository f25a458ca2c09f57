"""The bare libraries that `transports.py` holds the connector against: each called directly, over the connection that
the connector made.

With connections of their own the same point had ratios from 0.55 to 1.66 from one pair of processes to the next: over
TCP one connection is faster than another for as long as it lives, whoever uses it.
"""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from other_process import PATIENCE_S, fill

from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.geometry.runs import Runs
from vllm_pd_connector.transport.nixl.bindings import NixlOptions
from vllm_pd_connector.transport.ranges import cut


class Memory:
    """`length` bytes of the pattern, on huge pages where the kernel allows: numpy asks for them."""

    def __init__(self, length: int) -> None:
        self.bytes = np.empty(length, dtype=np.uint8)
        fill(self.bytes)
        self.segment = Segment(self.bytes.ctypes.data, length, "cpu", 0)


class Bare(Protocol):
    """A library without the connector around it. `in_batches` is what `move` does, in batches of the size in which the
    port has to use it; those of a message up to `at_once` bytes are no more than one."""

    at_once: int

    def move(self, operation: str, runs: Runs) -> None: ...

    def in_batches(self, operation: str, runs: Runs) -> None: ...


class BareNixl:
    """The agent that posts, asked for a transfer's state all the time: the library is not slowed by a pause of ours."""

    at_once = 64 << 20

    def __init__(self, transport: Any, peer: Any) -> None:
        self._nixl = importlib.import_module("nixl")._bindings
        self._agent, self._peer, self._window = peer.agent.library, peer.name, peer.window
        self._ranges = {"read": (peer.ranges, transport._ranges), "write": (transport._ranges, peer.ranges)}

    def move(self, operation: str, runs: Runs) -> None:
        self._end(*self._post(operation, runs))

    def in_batches(self, operation: str, runs: Runs) -> None:
        """In batches as long as the port's are now, which is what a turn may copy, each posted as soon as the call for
        the one before has returned. All runs are as long."""
        pieces = cut(runs, *self._ranges[operation], self._window.longest)
        count = max(1, min(self._window.size, NixlOptions().batch_bytes) // pieces.length.item(0))
        batches = (slice(at, at + count) for at in range(0, len(pieces), count))
        parts = (Runs(pieces.source[some], pieces.destination[some], pieces.length[some]) for some in batches)
        for posted in [self._post(operation, part) for part in parts]:
            self._end(*posted)

    def _post(self, operation: str, runs: Runs) -> tuple[Any, Any]:
        def rows(address: Any) -> Any:
            table = np.empty((len(address), 3), dtype=np.int64)
            table[:, 0], table[:, 1], table[:, 2] = address, runs.length, 0
            return self._nixl.nixlXferDList(self._nixl.DRAM_SEG, table)

        reads = operation == "read"
        local, remote = (runs.destination, runs.source) if reads else (runs.source, runs.destination)
        opcode = self._nixl.NIXL_READ if reads else self._nixl.NIXL_WRITE
        handle = self._agent.createXferReq(opcode, rows(local), rows(remote), self._peer, b"", [])
        return handle, self._agent.postXferReq(handle, b"")

    def _end(self, handle: Any, status: Any) -> None:
        until = time.monotonic() + PATIENCE_S
        while status == self._nixl.NIXL_IN_PROG:
            assert time.monotonic() < until, "bare NIXL: a transfer that does not end"
            status = self._agent.getXferStatus(handle)
        self._agent.releaseXferReq(handle)


class BareMooncake:
    """The connector's engine."""

    BATCH, UNDER_WAY, at_once = 1000, 256, 0

    def __init__(self, transport: Any, peer: Any) -> None:
        self._engine, self._peer = transport._engine, peer.opening.segment

    def move(self, operation: str, runs: Runs) -> None:
        reads = operation == "read"
        local, remote = (runs.destination, runs.source) if reads else (runs.source, runs.destination)
        call = self._engine.batch_transfer_sync_read if reads else self._engine.batch_transfer_sync_write
        for at in range(0, len(runs), self.BATCH):
            batch = slice(at, at + self.BATCH)
            status = call(self._peer, local[batch].tolist(), remote[batch].tolist(), runs.length[batch].tolist())
            assert status == 0, f"Mooncake: status {status}"

    def in_batches(self, operation: str, runs: Runs) -> None:
        """In batches of one, as many under way as the port has, looked at without a pause."""
        reads, opcodes = operation == "read", importlib.import_module("mooncake.engine").TransferOpcode
        local, remote = (runs.destination, runs.source) if reads else (runs.source, runs.destination)
        opcode, running = opcodes.Read if reads else opcodes.Write, deque[int]()
        for ours, theirs, length in zip(local.tolist(), remote.tolist(), runs.length.tolist(), strict=True):
            while len(running) >= self.UNDER_WAY:
                self._end_some(running)
            running.append(self._engine.batch_transfer_async(self._peer, [ours], [theirs], [length], opcode))
        while running:
            self._end_some(running)

    def _end_some(self, running: deque[int]) -> None:
        while running and (status := self._engine.transfer_check_status(running[0])):
            assert status == 1, f"Mooncake: status {status}"
            running.popleft()


BARE: dict[str, Callable[[Any, Any], Bare]] = {"nixl": BareNixl, "mooncake": BareMooncake}
"""By the name of a transport: it and its peer."""
