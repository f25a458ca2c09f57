"""What long prompts cost the transfer thread of a prefill instance that pushes them: `long_prompts` the other way.

Both halves of the prefill instance are in this process, its scheduler half and side channel and its worker's transfer
loop; a decode worker with its transfer loop is in another one. A prompt is computed in one step, nobody wants it before
that, and it is written when the decode leg has come: all of it is to be written at once. Each row has processes of its
own. Blocks do not follow each other on either side. After each push the bytes that came are counted; that they are in
their places is what the tests ask, and `late_legs` of every block.

Turns are those of the transfer thread that writes: the longest turn of the push that makes the link (`contact_ms`),
the median of the others' longest and the longest of all, of its processor time; how many were over the goal, and in how
many of these another process, which only copies within its own memory, was slowed at that moment, too (`witness`).
`ms` is from the decode leg to the end of the receive, `thread_ms` the processor time of that thread.

    python benchmarks/long_pushes.py [--tokens 32768 …] [--transports nixl mooncake] [--json results.json]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import secrets
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from vllm.v1.core.block_pool import BlockPool

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))
sys.path.append(str(ROOT / "benchmarks"))

from benchmarks.engine_halves import connector, free_port, request, scheduled  # noqa: E402
from benchmarks.long_pairs import (  # noqa: E402
    BYTES_PER_TOKEN,
    CHANNELS,
    FILLED,
    PAIRS,
    PATIENCE_S,
    TRANSPORTS,
    Layout,
    describe,
    make_memory,
    scattered,
)
from benchmarks.long_receive import LEAST_ROUNDS, ROUNDS_S, TURN_GOAL_MS, Turns  # noqa: E402
from benchmarks.report import write  # noqa: E402
from benchmarks.witness import Moment, Witness  # noqa: E402
from vllm_pd_connector.compat.base import KVConnectorRole  # noqa: E402
from vllm_pd_connector.compat.blocks import prompt_digest  # noqa: E402
from vllm_pd_connector.config import Config  # noqa: E402
from vllm_pd_connector.geometry.manifest import Manifest  # noqa: E402
from vllm_pd_connector.metadata import PushFrom, ReceiveRequest  # noqa: E402
from vllm_pd_connector.protocol.peer import PeerKey  # noqa: E402
from vllm_pd_connector.protocol.wire.push_messages import InstanceAddress, PrefillRef  # noqa: E402
from vllm_pd_connector.sidechannel.net.sockets import endpoint  # noqa: E402
from vllm_pd_connector.sidechannel.server import SideChannelServer  # noqa: E402
from vllm_pd_connector.transport.registry import create  # noqa: E402
from vllm_pd_connector.worker.outbox import Outbox  # noqa: E402
from vllm_pd_connector.worker.push.driver import PushSetup  # noqa: E402
from vllm_pd_connector.worker.push.step_clock import StepClock  # noqa: E402
from vllm_pd_connector.worker.transfer_loop import TransferLoop  # noqa: E402

TOKENS = (32_768, 131_072, 524_288)
PUSHED = ("blocks of 16", "blocks of 128", "blocks of 16 → 64", "blocks of 16, NHD → HND")
"""In runs of a block's layer, short and long, of the smaller block, and converted."""
MOST_ROUNDS = 10
CONTEXT = multiprocessing.get_context("forkserver")
"""Processes begin with what they need imported, and with nothing else done."""


def worker(layout: Layout, tokens: int, heads: int, engine: str, memory: np.ndarray, transport: str) -> Manifest:
    made = describe(layout, tokens, engine, memory, channels=CHANNELS // heads, heads=heads)
    return msgspec.structs.replace(made, transport=transport)


class Prefill:
    """A prefill instance, whose worker's turns are timed."""

    def __init__(self, name: str, tokens: int, transport: str) -> None:
        layout, heads, options = PAIRS[name].theirs, PAIRS[name].heads, TRANSPORTS[transport]
        self.tokens = tokens
        table = scattered(layout, tokens, 1)
        self.blocks = list(map(int, table.ids))
        port = free_port()
        settings = {"side_channel_port": port, "mode": "push"}
        self.half = connector(KVConnectorRole.SCHEDULER, "kv_producer", settings, layout.block_tokens).scheduler
        self.pool = BlockPool(len(self.blocks) + 1, enable_caching=False, hash_block_size=layout.block_tokens)
        self.half.bind_block_pool(self.pool)
        self.half.producer.progress.tables = lambda _: [self.blocks]
        self.pool.get_new_blocks(len(self.blocks))  # vLLM's own references
        self.memory, token = make_memory(layout, tokens, FILLED), secrets.token_bytes(16)
        manifest = worker(layout, tokens, heads, "kv_producer", self.memory, transport)
        setup = PushSetup(endpoint("127.0.0.1", port), token, StepClock(), ())
        config = Config(transport=transport, mode="push", transport_options=options)
        self.loop = TransferLoop(config, manifest, lambda: create(transport, options), Outbox(), 0, 1, setup)
        described = self.loop.start()
        manifest = msgspec.structs.replace(manifest, endpoint=described, scratch=self.loop.scratch, life=self.loop.life)
        self.half.serve([msgspec.msgpack.encode(manifest)], [token])
        self.turns = Turns(self.loop)

    def compute(self, asked: Any) -> None:
        """The prompt's one step, and its end."""
        self.half.on_new_request(asked)
        step = self.half.build_metadata(scheduled({asked.request_id: (0, self.tokens)})).step
        self.loop.step_launched(step, lambda: True)
        _, params = self.half.request_finished(asked, (self.blocks,))
        assert params is not None, "nothing is handed over"

    @property
    def port(self) -> int:
        home = self.half.producer.home
        assert home is not None
        return home.port

    def close(self) -> None:
        self.half.shutdown()
        self.loop.close()


def decode(pipe: Connection, name: str, tokens: int, transport: str, port: int) -> None:
    """Main of a decode worker's process: for a name and a digest, how many seconds a receive took, until None comes."""
    layout, heads, options = PAIRS[name].ours, PAIRS[name].heads, TRANSPORTS[transport]
    memory, outbox, table = make_memory(layout, tokens, 0), Outbox(), scattered(layout, tokens, 2)
    manifest = worker(layout, tokens, heads, "decode", memory, transport)
    config = Config(transport=transport, mode="push", transport_options=options)
    loop = TransferLoop(config, manifest, lambda: create(transport, options), outbox, 0, 1)
    manifest = msgspec.structs.replace(manifest, endpoint=loop.start(), scratch=loop.scratch, life=loop.life)
    server = SideChannelServer("127.0.0.1", 0, "decode", secrets.token_hex(16))
    server.set_manifests([msgspec.msgpack.encode(manifest)])
    home = InstanceAddress("decode", server._incarnation, "127.0.0.1", server.port)
    pipe.send(None)
    while (asked := pipe.recv()) is not None:
        request_id, digest = asked
        memory[:] = 0
        source = PushFrom(PeerKey("127.0.0.1", port, ""), "kv_producer", PrefillRef(request_id, None), home, digest)
        began = time.perf_counter()
        loop.submit([ReceiveRequest(request_id, source, (table,), 0, tokens)], [])
        while request_id not in (results := outbox.take_results()).finished_recving:
            assert time.perf_counter() - began < PATIENCE_S, "the receive does not end"
            time.sleep(0.0005)
        took = time.perf_counter() - began
        assert request_id not in results.failed_recving, "the receive failed"
        came = int(np.count_nonzero(memory == FILLED))
        assert came == tokens * BYTES_PER_TOKEN, f"{came} bytes arrived"
        pipe.send(took)
    loop.close()
    server.close()


def push(prefill: Prefill, pipe: Connection, number: int) -> float:
    """Seconds from the decode leg of a prompt that was computed to the end of its receive."""
    name = f"push-{number}"
    asked = request(0, {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name})
    prompt = np.random.default_rng(number).integers(0, 256, prefill.tokens).tolist()
    asked = SimpleNamespace(**{**vars(asked), "request_id": f"p-{number}", "prompt_token_ids": prompt})
    asked.num_prompt_tokens = asked.num_computed_tokens = prefill.tokens
    prefill.compute(asked)
    digest = prompt_digest(asked, prefill.tokens)
    gc.freeze()  # the prompt is the engine core's, which is another process than the worker's
    prefill.turns.begin()
    pipe.send((name, digest))
    assert pipe.poll(PATIENCE_S), "the decode worker says nothing"
    return float(pipe.recv())


def measure(name: str, tokens: int, transport: str) -> dict[str, Any]:
    """A row, of pushes over a link that was made by the first; `over_goal` are the moments at which a turn was longer
    than the goal."""
    prefill = Prefill(name, tokens, transport)
    pipe, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=decode, args=(theirs, name, tokens, transport, prefill.port), daemon=True)
    process.start()
    theirs.close()
    try:
        assert pipe.poll(PATIENCE_S), "the decode worker does not start"
        pipe.recv()
        gc.collect()
        push(prefill, pipe, 0)
        contact = prefill.turns.longest
        took: list[float] = []
        longest: list[float] = []
        worked: list[float] = []
        turns, over = 0, list[Moment]()
        while len(took) < LEAST_ROUNDS or (sum(took) < ROUNDS_S and len(took) < MOST_ROUNDS):
            took.append(push(prefill, pipe, len(took) + 1))
            longest.append(prefill.turns.longest)
            worked.append(prefill.turns.in_all)
            turns, over = turns + prefill.turns.count, over + prefill.turns.over
        pipe.send(None)
        process.join(10.0)
    finally:
        process.kill()
        prefill.close()
    return {
        "pair": name,
        "transport": transport,
        "prompt": f"{tokens} tokens",
        "MiB": tokens * BYTES_PER_TOKEN >> 20,
        "pushes": len(took),
        "ms": round(1e3 * float(np.median(took)), 1),
        "thread_ms": round(1e3 * float(np.median(worked)), 1),
        "contact_ms": round(1e3 * contact, 2),
        "longest_turn_ms": round(1e3 * float(np.median(longest)), 2),
        "longest_of_all_ms": round(1e3 * max(longest), 2),
        "goal_ms": TURN_GOAL_MS,
        "turns": turns,
        "over_goal": over,
    }


def tell(pipe: Connection, name: str, tokens: int, transport: str) -> None:
    """Main of the process that prefills; not a daemon, since it starts the one that decodes."""
    pipe.send(measure(name, tokens, transport))


def row_of(name: str, tokens: int, transport: str, witness: Witness) -> dict[str, Any]:
    """A row, from processes that end with it."""
    witness.saw(())
    pipe, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=tell, args=(theirs, name, tokens, transport))
    process.start()
    theirs.close()
    row = witness.judged(pipe.recv())
    process.join(10.0)
    process.kill()
    print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=tuple(TRANSPORTS))
    parser.add_argument("--pairs", nargs="+", choices=PUSHED, default=PUSHED)
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "bench" / "long_pushes.json")
    options = parser.parse_args()
    CONTEXT.set_forkserver_preload(["benchmarks.long_receive"])
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), *filter(None, (os.environ.get("PYTHONPATH"),))))
    with contextlib.closing(Witness()) as witness:
        rows = [
            row_of(name, tokens, transport, witness)
            for transport in options.transports
            for name in options.pairs
            for tokens in options.tokens
        ]
    write(options.json, {"witness_slow": witness.slow, "rows": rows})


if __name__ == "__main__":
    main()
