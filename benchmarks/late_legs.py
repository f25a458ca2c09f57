"""How much a push hides behind a prefill of one step, by when the decode leg comes.

The halves of both instances are real (the prefill's scheduler half, its side channel and transfer thread, the decode
worker's transfer thread), and so is the transport, over a link that is slowed to where moving the whole prompt takes as
long as its step. The forward is not: it takes its time layer by layer and no processor, as one on a device does. So
what is seen is the connector's own, where `overlap.py` has four servers on the same cores.

A leg that comes LATE seconds after the step was scheduled has its caches so much later than the step's end at best: the
link is busy until then. `exposed` is the time from the end of the prefill to the end of the receive, as a part of that
of a receive of which nothing was hidden. Needs root or the right to make namespaces.

    python benchmarks/late_legs.py [--requests 5] [--json results.json]
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from vllm.v1.core.block_pool import BlockPool

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))
sys.path.append(str(ROOT / "benchmarks"))

from overlap import EXPOSED_GOAL, INSIDE, enter_namespace, slow_down  # noqa: E402

from benchmarks.bind import ITEM  # noqa: E402
from benchmarks.engine_halves import connector, free_port, request, scheduled  # noqa: E402
from benchmarks.long_pairs import Layout, describe  # noqa: E402
from benchmarks.report import write  # noqa: E402
from vllm_pd_connector.compat.base import KVConnectorRole  # noqa: E402
from vllm_pd_connector.compat.blocks import prompt_digest  # noqa: E402
from vllm_pd_connector.config import Config  # noqa: E402
from vllm_pd_connector.geometry.blocks import BlockTable  # noqa: E402
from vllm_pd_connector.metadata import PushFrom, ReceiveRequest  # noqa: E402
from vllm_pd_connector.protocol.peer import PeerKey  # noqa: E402
from vllm_pd_connector.protocol.wire.push_messages import InstanceAddress, PrefillRef  # noqa: E402
from vllm_pd_connector.sidechannel.net.sockets import endpoint  # noqa: E402
from vllm_pd_connector.sidechannel.server import SideChannelServer  # noqa: E402
from vllm_pd_connector.transport.registry import create  # noqa: E402
from vllm_pd_connector.worker.outbox import Outbox  # noqa: E402
from vllm_pd_connector.worker.push.driver import PushSetup  # noqa: E402
from vllm_pd_connector.worker.push.step_clock import StepClock  # noqa: E402
from vllm_pd_connector.worker.push.waves import waves_of  # noqa: E402
from vllm_pd_connector.worker.transfer_loop import TransferLoop  # noqa: E402

LAYERS, CHANNELS, BLOCK_TOKENS, TOKENS = 16, 512, 128, 1920
STEP_S = 0.7
LATE = (None, 0.0, 0.025, 0.05, 0.1, 0.2, 0.4)
OPTIONS = {"ucx": {"TLS": "tcp", "NET_DEVICES": "lo"}}
LAYOUT = Layout("LBHNC", BLOCK_TOKENS)
BLOCKS = tuple(range(1, TOKENS // BLOCK_TOKENS + 1))
INTO = BLOCKS[7:] + BLOCKS[:7]
"""The decode instance's blocks: not those of the prefill, so that a block in the wrong place is seen."""
SIZE = TOKENS * LAYERS * 2 * CHANNELS * ITEM
NEVER = -1.0
"""In place of a delay: the leg comes when the prefill has ended."""


def make_memory() -> np.ndarray:
    """A worker's caches, zero: the prompt's blocks and block 0, which is nobody's."""
    return np.zeros(SIZE + BLOCK_TOKENS * LAYERS * 2 * CHANNELS * ITEM, dtype=np.uint8)


def by_block(memory: np.ndarray) -> np.ndarray:
    """Shape (layers, blocks, bytes)."""
    return memory.reshape(LAYERS, len(BLOCKS) + 1, -1)


class Prefill:
    """A prefill instance: its scheduler half and its worker's transfer loop."""

    def __init__(self, push_when: str) -> None:
        settings = {"side_channel_port": free_port(), "mode": "push", "push_when": push_when}
        self.half = connector(KVConnectorRole.SCHEDULER, "kv_producer", settings).scheduler
        self.pool = BlockPool(num_gpu_blocks=1024, enable_caching=False, hash_block_size=BLOCK_TOKENS)
        self.half.bind_block_pool(self.pool)
        self.half.producer.progress.tables = lambda _: [list(BLOCKS)]
        self.pool.get_new_blocks(len(BLOCKS))  # vLLM's own references
        self.memory, token = make_memory(), secrets.token_bytes(16)
        self.memory[:] = np.random.default_rng(0).integers(0, 256, len(self.memory), np.uint8)
        manifest = describe(LAYOUT, TOKENS, "kv_producer", self.memory, LAYERS, CHANNELS)
        manifest = msgspec.structs.replace(manifest, transport="nixl")
        layers = list(dict.fromkeys(tensor.layer for tensor in manifest.tensors))
        self.waves = waves_of(layers) if push_when == "layers" else ()
        home = endpoint("127.0.0.1", settings["side_channel_port"])
        setup = PushSetup(home, token, StepClock(), self.waves)
        config = Config(transport="nixl", mode="push", transport_options=OPTIONS)
        self.loop = TransferLoop(config, manifest, lambda: create("nixl", OPTIONS), Outbox(), 0, 1, setup)
        described = self.loop.start()
        manifest = msgspec.structs.replace(manifest, endpoint=described, scratch=self.loop.scratch, life=self.loop.life)
        self.half.serve([msgspec.msgpack.encode(manifest)], [token])
        self.step = 0

    @property
    def port(self) -> int:
        home = self.half.producer.home
        assert home is not None
        return home.port

    def schedule(self, asked: Any) -> None:
        self.half.on_new_request(asked)
        self.step = self.half.build_metadata(scheduled({asked.request_id: (0, TOKENS)})).step

    def compute(self) -> None:
        """The forward: a layer after the other."""
        begun = time.perf_counter()
        for layer in range(LAYERS):
            _sleep_until(begun + (layer + 1) * STEP_S / LAYERS)
            if self.waves:
                self.loop.step_launched(self.step, lambda: True, layer + 1)
        self.loop.step_launched(self.step, lambda: True)

    def finish(self, asked: Any) -> None:
        _, params = self.half.request_finished(asked, (list(BLOCKS),))
        assert params is not None, "nothing is handed over"

    def close(self) -> None:
        self.half.shutdown()
        self.loop.close()


class Decode:
    """A decode worker with the side channel at which it is found."""

    def __init__(self) -> None:
        self.memory, self.outbox = make_memory(), Outbox()
        manifest = describe(LAYOUT, TOKENS, "decode", self.memory, LAYERS, CHANNELS)
        manifest = msgspec.structs.replace(manifest, transport="nixl")
        config = Config(transport="nixl", mode="push", transport_options=OPTIONS)
        self.loop = TransferLoop(config, manifest, lambda: create("nixl", OPTIONS), self.outbox, 0, 1)
        manifest = msgspec.structs.replace(manifest, endpoint=self.loop.start(), life=self.loop.life)
        self.server = SideChannelServer("127.0.0.1", 0, "decode", secrets.token_hex(16))
        self.server.set_manifests([msgspec.msgpack.encode(manifest)])
        self.home = InstanceAddress("decode", self.server._incarnation, "127.0.0.1", self.server.port)

    def ask(self, name: str, asked: Any, port: int) -> None:
        digest = prompt_digest(asked, asked.num_prompt_tokens)
        source = PushFrom(PeerKey("127.0.0.1", port, ""), "kv_producer", PrefillRef(name, None), self.home, digest)
        table = BlockTable.of(0, INTO)
        self.loop.submit([ReceiveRequest(name, source, (table,), 0, TOKENS)], [])

    def wait(self, name: str) -> float:
        """When the receive had ended."""
        deadline = time.monotonic() + 60.0
        while name not in (results := self.outbox.take_results()).finished_recving:
            assert time.monotonic() < deadline, "the receive does not end"
            time.sleep(0.0005)
        assert name not in results.failed_recving, "the receive failed"
        return time.perf_counter()

    def close(self) -> None:
        self.loop.close()
        self.server.close()


def _sleep_until(moment: float) -> None:
    time.sleep(max(moment - time.perf_counter(), 0.0))


def one(prefill: Prefill, decode: Decode, name: str, late: float | None) -> float:
    """Seconds from the end of a prefill to that of its receive. None: the leg has come before the prefill."""
    asked = request(0, {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name})
    prompt = list(np.random.default_rng(len(name)).integers(0, 256, TOKENS))
    asked = SimpleNamespace(**{**vars(asked), "request_id": f"p-{name}", "prompt_token_ids": prompt})
    asked.num_prompt_tokens = asked.num_computed_tokens = TOKENS
    decode.memory[:] = 0
    if late is None:
        decode.ask(name, asked, prefill.port)
        time.sleep(0.05)
    prefill.schedule(asked)
    begun = time.perf_counter()

    def leg() -> None:
        _sleep_until(begun + late)
        decode.ask(name, asked, prefill.port)

    thread = threading.Thread(target=leg) if late is not None and late != NEVER else None
    if thread is not None:
        thread.start()
    prefill.compute()
    prefill.finish(asked)
    ended = time.perf_counter()
    if thread is not None:
        thread.join()
    if late == NEVER:
        decode.ask(name, asked, prefill.port)
    took = decode.wait(name) - ended
    check(by_block(prefill.memory), by_block(decode.memory))
    return took


def check(sent: np.ndarray, came: np.ndarray) -> None:
    """Raises AssertionError if a block of a layer is not where it belongs, or if anything else was written."""
    assert not came[:, 0].any(), "a block that is nobody's was written"
    for layer in range(LAYERS):
        for there, here in zip(BLOCKS, INTO, strict=True):
            assert np.array_equal(came[layer, here], sent[layer, there]), f"layer {layer}, block {here}: other bytes"


def series(push_when: str, requests: int) -> list[dict[str, Any]]:
    prefill, decode = Prefill(push_when), Decode()
    rows = []
    try:
        one(prefill, decode, f"{push_when}-warm", None)
        slow_down(8e-6 * SIZE / STEP_S)
        whole = float(np.median([one(prefill, decode, f"{push_when}-end-{i}", NEVER) for i in range(requests)]))
        for late in LATE:
            times = [one(prefill, decode, f"{push_when}-{late}-{i}", late) for i in range(requests)]
            row = {
                "push_when": push_when,
                "decode leg": "before" if late is None else f"{1e3 * late:.0f} ms after the step began",
                "after_ms": round(1e3 * float(np.median(times)), 1),
                "worst_ms": round(1e3 * max(times), 1),
                "whole_ms": round(1e3 * whole, 1),
                "exposed": round(float(np.median(times)) / whole, 3),
            }
            rows.append(row)
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    finally:
        slow_down(None)
        decode.close()
        prefill.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "bench" / "late_legs.json")
    options = parser.parse_args()
    if INSIDE not in os.environ:
        enter_namespace()
    rows = [row for push_when in ("layers", "steps") for row in series(push_when, options.requests)]
    write(options.json, {"step_ms": 1e3 * STEP_S, "bytes": SIZE, "goal": EXPOSED_GOAL, "rows": rows})


if __name__ == "__main__":
    main()
