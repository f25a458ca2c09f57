"""What long prompts cost the transfer thread of a decode instance: between real halves, over real transports.

A prefill worker in a process of its own holds prompts of 32 k, 128 k and 512 k tokens, in blocks that do not follow
each other; a decode worker's transfer loop, in this process, reads each of them into blocks that do not either. Of
every receive: bytes, runs, descriptors, the whole time, the processor time of the thread, its longest turn (in which
nothing else is begun, ended or answered), and what the process has more of memory than before, the caches aside.
Each prompt is received several times, short ones more often; times are medians, and of the longest turns of each the
median and the longest of all.
Whether all of it grows with the bytes and no faster is the ratio of microseconds per MiB to those of the shortest.

Meanwhile the process's first thread launches steps, as a worker's does that decodes other requests: OPERATORS small
operators one after the other, every STEP_PAUSE_S. Of these the time alone and beside the receive, and what of it is no
waiting for a core (`ready`): here three busy threads share two, where one is left over only waiting for the interpreter
counts.

The model has LAYERS layers of one KV head of CHANNELS channels in 16 bits, as a rank of a tensor-parallel instance
has: 1 KiB a token. Its runs are shorter than those of most models, and so more.

    python benchmarks/long_prompts.py [--tokens 32768 …] [--transports nixl mooncake] [--json results.json]
"""

from __future__ import annotations

import argparse
import gc
import ipaddress
import multiprocessing
import resource
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.bind import ITEM, make_worker  # noqa: E402
from benchmarks.report import write  # noqa: E402
from vllm_pd_connector.config import Config  # noqa: E402
from vllm_pd_connector.geometry.blocks import BlockTable  # noqa: E402
from vllm_pd_connector.geometry.manifest import Manifest, Segment  # noqa: E402
from vllm_pd_connector.metadata import ReadFrom, ReceiveRequest  # noqa: E402
from vllm_pd_connector.protocol.peer import PeerKey  # noqa: E402
from vllm_pd_connector.protocol.wire.fields import LeaseRef  # noqa: E402
from vllm_pd_connector.sidechannel.server import SideChannelServer  # noqa: E402
from vllm_pd_connector.transport.registry import create  # noqa: E402
from vllm_pd_connector.worker.outbox import Outbox  # noqa: E402
from vllm_pd_connector.worker.peers.process_watch import ProcessWatches  # noqa: E402
from vllm_pd_connector.worker.transfer_loop import TransferLoop  # noqa: E402

LAYERS, CHANNELS = 16, 16
TOKENS = (32_768, 131_072, 524_288)
TRANSPORTS: dict[str, dict[str, Any]] = {
    "nixl": {"ucx": {"TLS": "tcp"}},
    "mooncake": {"protocol": "tcp", "address": "127.0.0.1"},
}
TURN_GOAL_MS = 5.0
OPERATORS, STEP_PAUSE_S, STEPS_ALONE = 200, 0.003, 100
LOOPBACK = ipaddress.ip_address("127.0.0.1")
PATIENCE_S = 300.0
LEAST_ROUNDS, MOST_ROUNDS, ROUNDS_S = 3, 15, 2.0
"""Receives of a prompt: these at least, and more while all took less."""


class Layout(NamedTuple):
    """A side's blocks: their tokens, and vLLM's name of the order of layers, blocks, heads, tokens and content."""

    name: str
    block_tokens: int


PAIRS = {
    "blocks of 16": (Layout("LBHNC", 16), Layout("LBHNC", 16)),
    "blocks of 128": (Layout("LBHNC", 128), Layout("LBHNC", 128)),
    "blocks of 16 → 64": (Layout("LBHNC", 16), Layout("LBHNC", 64)),
    "blocks of 64, a block's layers together → apart": (Layout("BLHNC", 64), Layout("LBHNC", 64)),
}


def describe(
    layout: Layout, tokens: int, engine: str, memory: np.ndarray, layers: int = LAYERS, channels: int = CHANNELS
) -> Manifest:
    """A worker whose caches have room for a prompt of so many tokens."""
    blocks = tokens // layout.block_tokens + 1
    made = make_worker(0, 1, layout.name, layout.block_tokens, blocks, layers, heads=1, channels=channels)
    segments = (Segment(memory.ctypes.data, len(memory), "cpu", 0),)
    return msgspec.structs.replace(made, engine_id=engine, incarnation=secrets.token_hex(16), segments=segments)


def make_memory(layout: Layout, tokens: int, filled: int) -> np.ndarray:
    size = (tokens // layout.block_tokens + 1) * layout.block_tokens * LAYERS * 2 * CHANNELS * ITEM
    return np.full(size, filled, dtype=np.uint8)


def scattered(layout: Layout, tokens: int, seed: int) -> BlockTable:
    ids = np.random.default_rng(seed).permutation(np.arange(1, tokens // layout.block_tokens + 1))
    return BlockTable.of(0, ids.tolist())


class Place(NamedTuple):
    """Where a prefill instance is found, and what it holds its prompt under: once to connect, then to be measured."""

    port: int
    incarnation: str
    leases: tuple[LeaseRef, ...]


def prefill(pipe: Connection, layout: Layout, tokens: int, transport: str, options: Mapping[str, Any]) -> None:
    """Main of a process with a prefill worker, until the pipe is closed."""
    memory = make_memory(layout, tokens, 7)
    end, life = create(transport, options), ProcessWatches(LOOPBACK, lambda: None)
    manifest = describe(layout, tokens, "p-0", memory)
    end.register(manifest.segments)
    server = SideChannelServer("127.0.0.1", 0, "p-0", secrets.token_hex(16))
    manifest = msgspec.structs.replace(manifest, transport=transport, endpoint=end.describe(), life=life.own)
    server.set_manifests([msgspec.msgpack.encode(manifest)])
    leases = tuple(LeaseRef(f"r-{number}", secrets.token_bytes(16)) for number in range(1 + MOST_ROUNDS))
    for lease in leases:
        server.hold(lease.request_id, lease.nonce, PATIENCE_S)
    pipe.send(Place(server.port, server._incarnation, leases))
    try:
        pipe.recv()
    except EOFError:
        server.close()
        end.close()
        life.close()


class Turns:
    """Times the turns of a loop's thread."""

    def __init__(self, loop: TransferLoop) -> None:
        self.longest = self.in_all = 0.0
        self._turn = loop._turn
        loop._turn = self._timed  # type: ignore[method-assign]

    def _timed(self, now: float) -> None:
        began = time.thread_time()
        self._turn(now)
        took = time.thread_time() - began
        self.longest, self.in_all = max(self.longest, took), self.in_all + took


class Steps:
    """Launches steps in the calling thread; `took` has the milliseconds of each, `ready` those without what it waited
    for a core."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.took: list[float] = []
        self.ready: list[float] = []
        self._matrix, self._product = torch.ones(64, 64), torch.empty(64, 64)

    def launch(self) -> None:
        began, waited = time.perf_counter(), waited_for_core_s()
        for _ in range(OPERATORS):
            torch.mm(self._matrix, self._matrix, out=self._product)
        took, waited = time.perf_counter() - began, waited_for_core_s() - waited
        self.took.append(1e3 * took)
        self.ready.append(1e3 * (took - waited))
        time.sleep(STEP_PAUSE_S)


def waited_for_core_s() -> float:
    """How long the calling thread has been ready to run and had no core, in all."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def receive(pair: str, tokens: int, transport: str) -> dict[str, Any]:
    """Receives of a prompt between a pair that was connected before."""
    theirs, ours = PAIRS[pair]
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    options = TRANSPORTS[transport]
    process = context.Process(target=prefill, args=(child, theirs, tokens, transport, options), daemon=True)
    process.start()
    child.close()
    assert pipe.poll(PATIENCE_S), "the prefill process does not come up"
    place = pipe.recv()
    memory = make_memory(ours, tokens, 0)
    manifest = msgspec.structs.replace(describe(ours, tokens, "d-0", memory), transport=transport)
    outbox = Outbox()
    loop = TransferLoop(
        Config(transport=transport, transport_options=options),
        manifest,
        lambda: create(transport, options),
        outbox,
        0,
        1,
    )
    loop.start()
    turns = Turns(loop)
    table = scattered(theirs, tokens, 1), scattered(ours, tokens, 2)
    steps = Steps()

    def ask(lease: LeaseRef, stop: int) -> Mapping[str, Any]:
        name = lease.request_id
        source = ReadFrom(
            PeerKey("127.0.0.1", place.port, place.incarnation), "p-0", lease,
            (BlockTable.of(0, table[0].ids[: -(-stop // theirs.block_tokens)].tolist()),),
        )  # fmt: skip
        blocks = BlockTable.of(0, table[1].ids[: -(-stop // ours.block_tokens)].tolist())
        loop.submit([ReceiveRequest(name, source, (blocks,), 0, stop)], [])
        deadline = time.monotonic() + PATIENCE_S
        while name not in (results := outbox.take_results()).finished_recving:
            assert time.monotonic() < deadline, "the receive does not end"
            steps.launch()
        assert name not in results.failed_recving, "the receive failed"
        report = outbox.take_stats()
        assert report is not None
        return dict(report.data)

    try:
        ask(place.leases[0], max(theirs.block_tokens, ours.block_tokens))  # connects
        gc.collect()
        gc.freeze()  # as vLLM's workers do when they have started
        for _ in range(STEPS_ALONE):
            steps.launch()
        alone = np.median(steps.took[-STEPS_ALONE:])
        steps.took.clear()
        steps.ready.clear()
        took: list[float] = []
        worked: list[float] = []
        longest: list[float] = []
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for lease in place.leases[1:]:
            turns.longest, turns.in_all, began = 0.0, 0.0, time.perf_counter()
            counted = ask(lease, tokens)
            took.append(time.perf_counter() - began)
            worked.append(turns.in_all)
            longest.append(turns.longest)
            if len(took) >= LEAST_ROUNDS and sum(took) >= ROUNDS_S:
                break
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert (memory[LAYERS * ours.block_tokens * 2 * CHANNELS * ITEM :] == 7).any(), "nothing arrived"
    finally:
        gc.unfreeze()
        loop.close()
        pipe.close()
        process.join(10.0)
        process.kill()
    size = counted["bytes"]
    return {
        "pair": pair,
        "transport": transport,
        "prompt": f"{tokens} tokens",
        "MiB": size >> 20,
        "runs": counted["runs"],
        "descriptors": counted["descriptors"],
        "receives": len(took),
        "ms": round(1e3 * float(np.median(took)), 1),
        "thread_ms": round(1e3 * float(np.median(worked)), 1),
        "longest_turn_ms": round(1e3 * float(np.median(longest)), 2),
        "longest_of_all_ms": round(1e3 * max(longest), 2),
        "memory_MiB": round(grown / 1024, 1),
        "step_alone_ms": round(float(alone), 2),
        "step_ms": round(float(np.median(steps.took)), 2),
        "step_p90_ms": round(float(np.percentile(steps.took, 90)), 2),
        "step_ready_p90_ms": round(float(np.percentile(steps.ready, 90)), 2),
        "goal_ms": TURN_GOAL_MS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=tuple(TRANSPORTS))
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=tuple(PAIRS))
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "bench" / "long_prompts.json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for transport in options.transports:
        for pair in options.pairs:
            rows += series(pair, options.tokens, transport)
    write(options.json, {"layers": LAYERS, "channels": CHANNELS, "rows": rows})


def series(pair: str, lengths: Sequence[int], transport: str) -> list[dict[str, Any]]:
    rows = []
    for tokens in sorted(lengths):
        rows.append(receive(pair, tokens, transport))
        per_mib = [row["thread_ms"] / row["MiB"] for row in (rows[0], rows[-1])]
        rows[-1]["per_byte_ratio"] = round(per_mib[1] / per_mib[0], 2)
        print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    return rows


if __name__ == "__main__":
    main()
