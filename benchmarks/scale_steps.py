"""What a step costs the scheduler half of a decode instance with many requests in flight from many peers.

The halves are those of `step.py`. One prefill instance holds all leases and answers at as many addresses of this host
as there are peers, so the renewer's thread has a connection to each, and renews beside the steps that are measured.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.engine_halves import PROMPT, Engine, request  # noqa: E402
from benchmarks.step import DECODING, IDLE, hold_leases  # noqa: E402
from vllm_pd_connector.sidechannel.net import sockets  # noqa: E402
from vllm_pd_connector.sidechannel.net.sockets import endpoint  # noqa: E402

REPS = 300
NOTHING = KVConnectorOutput()


class Loading:
    """A decode instance with requests that wait for their caches."""

    def __init__(self, in_flight: int, peers: int) -> None:
        count = in_flight + REPS
        hosts = [f"127.0.{number // 200}.{1 + number % 200}" for number in range(peers)]

        def bind_all(router: Any, _: str, port: int) -> None:
            for host in hosts:
                router.bind(endpoint(host, port))

        with patch.object(sockets, "_bind", bind_all):
            self.holder = Engine("kv_producer", requests=count, kv_lease_duration=15.0)
        self.answers = hold_leases(self.holder, count)
        for number, answer in enumerate(self.answers):
            answer["remote_host"] = hosts[number % peers]
        self.engine = Engine("kv_consumer", requests=count)
        self.half = self.engine.scheduler
        self._going: deque[tuple[Any, list[Any]]] = deque()
        self._next = 0

    def arrive(self) -> None:
        """Another request has come, and was given its blocks."""
        new = request(self._next, self.answers[self._next], status=RequestStatus.WAITING)
        blocks = self.engine.blocks()
        self.half.on_new_request(new)
        tokens, _ = self.half.get_num_new_matched_tokens(new, 0)
        assert tokens == len(PROMPT), "nothing is loaded"
        self.half.update_state_after_alloc(new, KVCacheBlocks((blocks,)), tokens)
        self._going.append((new, blocks))
        self._next += 1

    def step(self, output: Any, came: KVConnectorOutput = NOTHING) -> None:
        """A step of the engine."""
        self.half.build_connector_meta(output)
        self.half.update_connector_output(came)
        self.half.get_kv_connector_stats()

    def change(self) -> None:
        """A step in which the oldest request is reported, after another has come; what is left of it ends with it."""
        self.arrive()
        old, blocks = self._going.popleft()
        self.step(DECODING, KVConnectorOutput(finished_recving={old.request_id}))
        self.half.update_state_after_alloc(old, KVCacheBlocks((blocks,)), 0)
        self.half.request_finished_all_groups(old, ([block.block_id for block in blocks],))
        self.engine.pool.free_blocks(blocks)

    def close(self) -> None:
        self.half.shutdown()
        self.holder.scheduler.shutdown()


def us(act: Callable[[], object]) -> float:
    """The median of REPS calls."""
    times = []
    for _ in range(REPS):
        began = time.perf_counter()
        act()
        times.append(1e6 * (time.perf_counter() - began))
    return round(median(times), 1)


def step_cost(in_flight: int, peers: int) -> dict[str, Any]:
    """Of a step in which requests decode and others wait for their caches; of one in which a request comes and one is
    reported, with what the half is told of both; and of one that computes nothing, as there is nothing to compute."""
    loading = Loading(in_flight, peers)
    for _ in range(in_flight):
        loading.arrive()
    assert len(loading.half.build_connector_meta(DECODING).receives) == in_flight
    gc.collect()
    gc.freeze()  # as vLLM's engine core does when it has started
    try:
        return {
            "case": "decode instance",
            "in_flight": in_flight,
            "peers": peers,
            "scheduler_us": us(lambda: loading.step(DECODING)),
            "one_comes_one_ends_us": us(loading.change),
            "nothing_computed_us": us(lambda: loading.step(IDLE)),
        }
    finally:
        gc.unfreeze()
        loading.close()
