"""Parts of `scale.py` that need no fleet: orders of a push, memory, manifests, files.

A peer of 80 layers has eight ranks here, and the decode worker all heads: it reads from each of them.
"""

from __future__ import annotations

import gc
import os
import secrets
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from ipaddress import ip_address
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.bind import make_worker  # noqa: E402
from benchmarks.fleet_prefill import Meter, Watches  # noqa: E402
from vllm_pd_connector.config import Config  # noqa: E402
from vllm_pd_connector.errors import ProtocolError  # noqa: E402
from vllm_pd_connector.geometry.blocks import BlockTable  # noqa: E402
from vllm_pd_connector.geometry.manifest import LivenessAddress, Manifest, Segment  # noqa: E402
from vllm_pd_connector.geometry.plan import make_plan  # noqa: E402
from vllm_pd_connector.geometry.topology import check_pd_topology  # noqa: E402
from vllm_pd_connector.metadata import ReadFrom, ReceiveRequest  # noqa: E402
from vllm_pd_connector.observability.stats import PDStats  # noqa: E402
from vllm_pd_connector.protocol.lease import LeaseTable  # noqa: E402
from vllm_pd_connector.protocol.peer import PeerKey  # noqa: E402
from vllm_pd_connector.protocol.push.table import PushTable  # noqa: E402
from vllm_pd_connector.protocol.wire import messages as m  # noqa: E402
from vllm_pd_connector.protocol.wire.fields import LeaseRef, Reading  # noqa: E402
from vllm_pd_connector.protocol.wire.push_messages import (  # noqa: E402
    AwaitCommands,
    InstanceAddress,
    PrefillRef,
    PushInto,
    WriteCommand,
)
from vllm_pd_connector.sidechannel.client import SideChannelClient  # noqa: E402
from vllm_pd_connector.transport.loopback import LoopbackTransport  # noqa: E402
from vllm_pd_connector.worker.outbox import Outbox  # noqa: E402
from vllm_pd_connector.worker.peers.event_queue import EventQueue  # noqa: E402
from vllm_pd_connector.worker.peers.process_watch import ProcessWatches  # noqa: E402
from vllm_pd_connector.worker.push.driver import Pushes, PushSetup  # noqa: E402
from vllm_pd_connector.worker.push.step_clock import StepClock  # noqa: E402
from vllm_pd_connector.worker.receive.driver import Receives  # noqa: E402
from vllm_pd_connector.worker.staging.stager import Stager  # noqa: E402

PEERS, RANKS = 8, 8
BLOCKS = 4
TABLE = (BlockTable.of(0, range(1, 95)),)  # of the mean prompt
SERVERS = """
import os, sys
from vllm_pd_connector.sidechannel.server import SideChannelServer
servers = [SideChannelServer("127.0.0.1", 0, "p", "0" * 32) for _ in range(int(sys.argv[1]))]
print(*(server.port for server in servers), flush=True)
for _ in sys.stdin:
    print(len(os.listdir("/proc/self/fd")), flush=True)
for server in servers:
    server.close()
"""
"""A process of side channels that says how many files it has open."""


def order_cost(in_flight: int, reps: int = 200) -> dict[str, Any]:
    """Of an order to write more of one prefill, with so many pushes under way, and of a round of its thread else."""
    table, now = PushTable(1, 30.0), 0.0
    blocks = TABLE
    home, digest = InstanceAddress("d", "ab" * 16, "127.0.0.1", 5600), "0" * 16
    for number in range(in_flight):
        table.started(f"r-{number}", f"t-{number}", 12000, digest, now)
        name = PrefillRef(f"t-{number}", None)
        table.register(
            PushInto(name, home, 0, 0, 0, 0, 1, secrets.token_bytes(16), blocks, 0, 12000, digest), (b"d", number), now
        )
    seen, orders, rounds = 0, Meter(), Meter()
    for rep in range(reps):
        step = f"r-{rep % in_flight}", blocks, 128 * (1 + rep // in_flight), rep
        orders(lambda step=step: (table.progressed(*step), table.tick(now)))
        seen += 2 if rep < in_flight else 1
        table.await_commands(AwaitCommands(bytes(16), 0, seen), (b"w", rep), now)
        rounds(lambda: (table.tick(now), table.replies.take(), table.next_deadline()))
    return {
        "case": "push table",
        "in_flight": in_flight,
        "order_us": round(1e6 * median(orders.times), 1),
        "round_us": round(1e6 * median(rounds.times), 1),
        "turn_us": round(1e6 * waiting_turn_s(in_flight), 1),
    }


def waiting_turn_s(in_flight: int, reps: int = 200) -> float:
    """Seconds of a turn of a prefill worker's transfer thread, and of asking when the next is due, with so many pushes
    that wait for a step."""
    ours, transport, memory = small(0, 1, "p", "a" * 32)
    theirs = [small(rank, 2, "d", "d" * 32) for rank in range(2)]
    encoded = tuple(msgspec.msgpack.encode(described) for described, *_ in theirs)
    calls: Any = Answering({"tcp://127.0.0.1:1": m.encode(1, m.Manifests("d", "d" * 32, encoded))})
    watches: Any = Watches()
    config = Config(transport="loopback", staging_bytes=0, mode="push")
    setup, stager = PushSetup("home", bytes(16), StepClock()), Stager(transport, ours.segments, 0)
    pushes = Pushes(config, ours, transport, stager, calls, watches, EventQueue(), setup, 0, PDStats())
    pushes._orders.own = (msgspec.msgpack.encode(ours),)
    home, tables = InstanceAddress("d", "d" * 32, "127.0.0.1", 1), (BlockTable.of(0, (1, 2, 3)),)
    for number in range(in_flight):
        name, attempt = PrefillRef(f"t-{number}", None), secrets.token_bytes(16)
        pushes._begin(PushInto(name, home, 0, 0, 0, 0, 2, attempt, tables, 0, 48, "0" * 16), time.monotonic())
        pushes._obey(WriteCommand(attempt, tables, 16, 1, final=False), time.monotonic())
    turns, far = Meter(), time.monotonic() + 1000.0
    while any(push.machine.next_step is None for push in pushes._pushes.values()):
        pushes.turn(time.monotonic(), far)
    for _ in range(reps):
        turns(lambda: (pushes.turn(now := time.monotonic(), far), pushes.next_deadline(now)))
    assert len(pushes._pushes) == in_flight and pushes.waiting, "they do not wait"
    del memory, theirs
    return median(turns.times)


def bytes_of(make: Callable[[], object]) -> int:
    """Bytes of what this makes, and keeps."""
    gc.collect()
    tracemalloc.start()
    kept = make()
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    return size


def memory_cases() -> Iterator[dict[str, Any]]:
    """Bytes of a lease at the prefill side, and of a peer of 80 layers at the decode side."""
    count = 2000
    names = [LeaseRef(f"cmpl-{number:032}", secrets.token_bytes(16)) for number in range(count)]

    def leases(*, renewed: bool) -> LeaseTable:
        table = LeaseTable(600.0)
        for ref in names:
            copied = BlockTable(0, bytes(bytearray(TABLE[0].packed)))
            table.hold(f"{ref.request_id}", bytes(bytearray(ref.nonce)), 0.0, 30.0, (copied,))
            if renewed:
                table.renew((Reading(ref.request_id, ref.nonce, secrets.token_bytes(16)),), 1.0)
        return table

    yield {"case": "a lease of 94 blocks", "bytes": bytes_of(lambda: leases(renewed=False)) // count}
    yield {"case": "the same, renewed by who reads it", "bytes": bytes_of(lambda: leases(renewed=True)) // count}
    mine, theirs = make_worker(0, 1), [make_worker(rank, RANKS) for rank in range(RANKS)]
    plans = bytes_of(lambda: [make_plan(mine, theirs) for _ in range(PEERS)])
    yield {"case": "the plan of a peer, 80 layers, tp 8 to 1", "bytes": plans // PEERS}
    yield {"case": "such a peer, linked to be read from", "bytes": linked_peer_bytes()}


def small(rank: int, ranks: int, engine: str, incarnation: str) -> tuple[Manifest, LoopbackTransport, np.ndarray]:
    """A worker of 80 layers with few blocks, with its transport and its memory."""
    made = make_worker(rank, ranks, tokens=16, blocks=BLOCKS)
    memory, transport = np.zeros(made.segments[0].length, dtype=np.uint8), LoopbackTransport(serves=ranks > 1)
    segments = (Segment(memory.ctypes.data, len(memory), "cpu", 0),)
    transport.register(segments)
    life = LivenessAddress("127.0.0.1", 1, f"{incarnation}{rank}")
    about: dict[str, Any] = {"engine_id": engine, "incarnation": incarnation, "segments": segments, "life": life}
    return msgspec.structs.replace(made, endpoint=transport.describe(), **about), transport, memory


class Answering:
    """`PendingCalls` that hand a peer's manifests over at once."""

    def __init__(self, answers: dict[str, bytes]) -> None:
        self._answers = answers

    def ask(self, endpoint: str, request: m.Request, timeout_s: float, handler: Any = None) -> None:
        if isinstance(request, m.GetManifests):
            handler(m.decode_reply(self._answers[endpoint])[1], time.monotonic())  # and is silent to all else

    def give_back(self, endpoint: str, make: Any, timeout_s: float) -> None:
        """Nobody is told: see `ask`."""


def linked_peer_bytes() -> int:
    """What a decode worker holds of a peer that it is linked to: its machine, manifests as far as they are kept, plan,
    edges, connected ranks, watches. What all peers share is made by one before them."""
    manifest, transport, memory = small(0, 1, "d", "d" * 32)
    keys, answers, kept = [], {}, []
    for number in range(PEERS + 1):
        engine, incarnation = f"p-{number}", secrets.token_hex(16)
        ranks = [small(rank, RANKS, engine, incarnation) for rank in range(RANKS)]
        encoded = tuple(msgspec.msgpack.encode(described) for described, *_ in ranks)
        keys.append((PeerKey("127.0.0.1", 1 + number, incarnation), engine))
        answers[f"tcp://127.0.0.1:{1 + number}"] = m.encode(1, m.Manifests(engine, incarnation, encoded))
        kept.append(ranks)
    calls: Any = Answering(answers)
    nothing: Any = None
    watches: Any = Watches()
    config = Config(transport="loopback", staging_bytes=0)
    stager = Stager(transport, manifest.segments, 0)
    outbox = Outbox()
    common = (config, manifest, transport, stager, calls, watches, EventQueue(), nothing, outbox, 0, 1, None, None)
    receives = Receives(*common)

    def link(number: int) -> None:
        key, engine = keys[number]
        source = ReadFrom(key, engine, LeaseRef("r", bytes(16)), (BlockTable.of(0, [1]),))
        receives.begin(ReceiveRequest("r", source, source.blocks, 0, 16), now := time.monotonic())
        while receives._links._connecting:
            receives.tick(now)
        receives.abort("r", now)  # the link stays
        receives._linked.clear()
        assert receives._links._links[key, engine, False].ranks, "it is not linked"

    link(PEERS)
    size = bytes_of(lambda: [link(number) for number in range(PEERS)])
    del memory, kept
    return size // PEERS


def manifest_cases(sizes: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Instances of so many ranks as a decode worker meets them: bytes on the wire, milliseconds to encode, to decode,
    to check and to plan; whether their side channel can serve it, or what its instance says."""
    local, decoder = make_worker(0, 1), msgspec.msgpack.Decoder(Manifest)
    for ranks in sizes:
        made = [make_worker(rank, ranks) for rank in range(ranks)]
        encode, decode, check, plan = (Meter() for _ in range(4))
        for _ in range(3):
            encoded = encode(lambda made=made: [msgspec.msgpack.encode(manifest) for manifest in made])
            remote = decode(lambda encoded=encoded: [decoder.decode(one) for one in encoded])
            allowed = check(lambda remote=remote: check_pd_topology(local, remote))
            assert allowed.allowed, allowed.reason
            plan(lambda remote=remote: make_plan(local, remote))
        try:
            m.encode(0, m.Manifests("p", "0" * 32, tuple(encoded)))
            refused = ""
        except ProtocolError as error:
            refused = str(error)
        times = {"encode": encode, "decode": decode, "check": check, "plan": plan}
        yield {
            "case": "manifests of 80 layers",
            "ranks": ranks,
            "bytes": sum(map(len, encoded)),
            **{f"{name}_ms": round(1e3 * min(meter.times), 1) for name, meter in times.items()},
            "served": refused or "yes",
        }


def file_cases(count: int = 20) -> Iterator[dict[str, Any]]:
    """Open files that a side channel and a client each have for the other, of real ones."""
    words = [sys.executable, "-c", SERVERS, str(count)]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as servers:
        assert servers.stdin is not None and servers.stdout is not None
        ports = servers.stdout.readline().split()

        def files() -> tuple[int, int]:
            print(file=servers.stdin, flush=True)
            assert servers.stdout is not None
            return int(servers.stdout.readline()), len(os.listdir("/proc/self/fd"))

        client = SideChannelClient()
        ask(client, ports[:1])
        before = files()
        ask(client, ports[1:])
        after = files()
        client.close()
        servers.stdin.close()
    there, here = ((new - old) / (count - 1) for old, new in zip(before, after, strict=True))
    yield {"case": "a client, at an instance's side channel", "files": round(there, 1)}
    yield {"case": "an instance that is asked, at a client", "files": round(here, 1)}
    yield {"case": "a worker that is watched, at either end", "files": round(watch_files(count), 1)}


def watch_files(count: int) -> float:
    """Files of a line between two workers at each of its ends; here both are in one process."""
    workers = [ProcessWatches(ip_address("127.0.0.1"), lambda: None) for _ in range(count)]
    watching = ProcessWatches(ip_address("127.0.0.1"), lambda: None)
    before = len(os.listdir("/proc/self/fd"))
    watches = [watching.watch(worker.own, time.monotonic()) for worker in workers]
    while not all(watch.here for watch in watches):
        time.sleep(0.005)
    after = len(os.listdir("/proc/self/fd"))
    for one in (watching, *workers):
        one.close()
    return (after - before) / count / 2


def ask(client: SideChannelClient, ports: list[str]) -> None:
    """Have an answer of each."""
    for port in ports:
        client.send(f"tcp://127.0.0.1:{port}", m.GetLeaseCount(), 30.0)
    while client.under_way():
        client.receive()
        time.sleep(0.005)
