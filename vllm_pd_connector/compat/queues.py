"""How a worker waits for the engine core's next word, and the engine core for theirs: calmly where it will be long in
coming.

A worker of several polls the shared-memory queue without pause for a second after each message, so that the next step
begins at once. While a decode instance only waits for caches a message comes a few times in a second at most, and the
polling keeps a core per worker from whoever moves those caches: the worker's own transfer thread for one, which needs
the interpreter. A calm worker sleeps on the queue's notifications instead, which come as soon as the message is there.
The engine core polls for what workers answer in the same way, and sleeps in a step whose workers rested before it.

Source: vLLM 0.32 and 0.33, `distributed/device_communicators/shm_broadcast.py` (`SpinCondition.wait`),
and `v1/executor/multiproc_executor.py` (`collective_rpc`: the thread that schedules reads the answers).
"""

from __future__ import annotations

import math
import time
from typing import Any

SHARE = 0.25
LONGEST_NAP_MS = 20
"""A nap lasts a share of the time since the last message, so that one which was not told of comes late by no more than
that. A notification that closely follows another may be lost: ZeroMQ's publisher has room for one, and looks about once
in a millisecond whether that was taken."""

_calm_from = -math.inf
_installed = False


def rest_until_next_message() -> None:
    """Have each reader of this process sleep instead of polling until it has read its next message."""
    global _calm_from
    _install()
    _calm_from = time.monotonic()


def _nap_ms(elapsed_s: float) -> int:
    return min(max(int(elapsed_s * 1000 * SHARE), 1), LONGEST_NAP_MS)


def _install() -> None:
    """Take the place of vLLM's wait, once in a process, and leave all that it does beside polling to it."""
    global _installed
    if _installed:
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    wait = SpinCondition.wait

    def calm_wait(self: Any, timeout_ms: int | None = None) -> None:
        now = time.monotonic()
        if self.last_read > _calm_from or now > self.last_read + self.busy_loop_s:
            wait(self, timeout_ms)
            return
        nap = _nap_ms(now - _calm_from)
        last_read, self.last_read = self.last_read, -math.inf
        try:
            wait(self, nap if timeout_ms is None else min(timeout_ms, nap))
        finally:
            self.last_read = last_read

    SpinCondition.wait = calm_wait
    _installed = True
