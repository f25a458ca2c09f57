"""What the connector costs the threads of an engine in a step in which it has nothing to do.

Every step of an engine that serves other requests calls the same hooks: the scheduler thread builds the step's metadata
and reads the workers' report, the thread that launches forwards takes the metadata and asks for results. This calls
them on real halves with a real block pool, in vLLM's order, and times each side. No transfer thread runs; while it is
idle it sleeps, so it would not take the interpreter from the threads that are measured.

    python benchmarks/step.py [--reps 5000] [--json results.json]
"""

from __future__ import annotations

import argparse
import json
import pickle
import platform
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from vllm_pd_connector.compat.base import KVConnectorRole
from vllm_pd_connector.connector import PDConnector

BLOCK_TOKENS = 16
LEASES = 256
BLOCKS_OF_A_LEASE = 16
IDLE: Any = SimpleNamespace(num_scheduled_tokens={}, finished_req_ids=set())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_connector(role: KVConnectorRole, kv_role: str) -> PDConnector:
    """A connector of an instance with one worker and one full-attention group, as vLLM would build it."""
    transfer = SimpleNamespace(
        engine_id=kv_role,
        is_kv_producer=kv_role == "kv_producer",
        is_kv_consumer=kv_role == "kv_consumer",
        kv_connector_extra_config={"side_channel_port": free_port(), "kv_lease_duration": 3600.0},
    )
    parallel = SimpleNamespace(
        data_parallel_index=0,
        data_parallel_rank_local=None,
        local_engines_only=False,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
    )
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=parallel,
        model_config=SimpleNamespace(enable_sleep_mode=False),
        num_prefill_lookahead_tokens=0,
    )
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
    caches = SimpleNamespace(transfer_group_ids=(0,), transfer_groups=(SimpleNamespace(kv_cache_spec=spec),))
    return PDConnector(config, role, caches)


def hold_leases(scheduler: PDConnector, pool: BlockPool, count: int) -> None:
    """Finish `count` prefills that no reader fetches."""
    for number in range(count):
        request = SimpleNamespace(
            request_id=f"p-{number}",
            kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
            prompt_token_ids=list(range(BLOCKS_OF_A_LEASE * BLOCK_TOKENS)),
            num_prompt_tokens=BLOCKS_OF_A_LEASE * BLOCK_TOKENS,
            num_computed_tokens=BLOCKS_OF_A_LEASE * BLOCK_TOKENS,
            status=RequestStatus.FINISHED_LENGTH_CAPPED,
            prompt_embeds=None,
            prompt_is_token_ids=None,
            mm_features=[],
            lora_request=None,
        )
        ids = [block.block_id for block in pool.get_new_blocks(BLOCKS_OF_A_LEASE)]
        _, params = scheduler.request_finished_all_groups(request, (ids,))
        assert params is not None, "the lease is not held"


def measure(kv_role: str, leases: int, reps: int) -> list[dict[str, Any]]:
    """Microseconds per step of the scheduler's thread and of the thread that launches forwards."""
    scheduler = make_connector(KVConnectorRole.SCHEDULER, kv_role)
    worker = make_connector(KVConnectorRole.WORKER, kv_role)
    pool = BlockPool(num_gpu_blocks=LEASES * BLOCKS_OF_A_LEASE + 2, enable_caching=False, hash_block_size=BLOCK_TOKENS)
    scheduler.bind_gpu_block_pool(pool)
    scheduler.scheduler.serve([b"manifest"], [bytes(16)])
    hold_leases(scheduler, pool, leases)
    times: dict[str, list[float]] = {"scheduler thread": [], "forward thread": []}

    def timed(thread: str, action: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        value = action()
        times[thread][-1] += (time.perf_counter() - began) * 1e6
        return value

    def forward(metadata: Any) -> KVConnectorOutput:
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        stats, report = worker.get_kv_connector_stats(), worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        assert not results.finished_recving, "an idle step reports nothing"
        return KVConnectorOutput(kv_connector_stats=stats, kv_connector_worker_meta=report)

    for _ in range(reps):
        for values in times.values():
            values.append(0.0)
        metadata = timed("scheduler thread", lambda: scheduler.build_connector_meta(IDLE))
        sent = timed("scheduler thread", lambda m=metadata: pickle.dumps(m))
        metadata = timed("forward thread", lambda s=sent: pickle.loads(s))
        output = timed("forward thread", lambda m=metadata: forward(m))
        timed("scheduler thread", lambda o=output: scheduler.update_connector_output(o))
        timed("scheduler thread", scheduler.get_kv_connector_stats)
    scheduler.shutdown()
    rows = []
    for thread, values in times.items():
        p50, p95, p99 = (float(np.percentile(values, q)) for q in (50, 95, 99))
        case = f"{kv_role}, {leases} leases, {thread}"
        rows.append({"case": case, "median_us": p50, "p95_us": p95, "p99_us": p99, "reps": reps})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=5000)
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    rows = [
        *measure("kv_producer", 0, options.reps),
        *measure("kv_producer", LEASES, options.reps),
        *measure("kv_consumer", 0, options.reps),
    ]
    print(f"{'idle step':<48} {'median':>8} {'p95':>8} {'p99':>8}   microseconds")
    for row in rows:
        print(f"{row['case']:<48} {row['median_us']:8.1f} {row['p95_us']:8.1f} {row['p99_us']:8.1f}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        options.json.write_text(json.dumps({"environment": machine, "results": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
