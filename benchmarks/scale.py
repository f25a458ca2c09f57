"""What many instances and many requests cost: decode workers and prefill instances without sockets, by a made-up clock.

Every decode instance is one worker's receives (`worker.receive`), every prefill instance its lease table and its part
of the side channel's answers; between them go the real messages, encoded and decoded, and a loopback transport copies
real bytes. Only time is made up: messages take LATENCY_S, a prompt's bytes take their time over a link that all of a
worker's requests share, and each worker takes a turn every TURN_S. So a request costs what it costs, and nobody waits.

Prompts are as long as those of the conversation trace that was published with Mooncake (FAST 2025,
github.com/kvcache-ai/Mooncake, FAST25-release/traces; 12031 requests, 12035 tokens in the mean): its quantiles.
A part of the requests waits before it is read, and renews its leases; one prefill instance in eight is replaced by
another life of it under way, and what is read from it then fails and is not counted.

Besides: the push table's cost of one order with many pushes under way, and what manifests of many ranks cost.

    python benchmarks/scale.py [--instances 4 16 64] [--peers 64 256] [--in-flight 10 100 1000] [--whole]
"""

from __future__ import annotations

import argparse
import gc
import logging
import resource
import secrets
import sys
import time
import tracemalloc
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.bind import make_worker  # noqa: E402
from benchmarks.fleet_prefill import Clock, Meter, Prefill  # noqa: E402
from benchmarks.fleet_world import TURN_S, WAIT, Decode  # noqa: E402
from benchmarks.report import write  # noqa: E402
from vllm_pd_connector.geometry.blocks import BlockTable  # noqa: E402
from vllm_pd_connector.geometry.manifest import (  # noqa: E402
    Manifest,
)
from vllm_pd_connector.geometry.plan import make_plan  # noqa: E402
from vllm_pd_connector.geometry.topology import check_pd_topology  # noqa: E402
from vllm_pd_connector.protocol.lease import LeaseTable  # noqa: E402
from vllm_pd_connector.protocol.push.table import PushTable  # noqa: E402
from vllm_pd_connector.protocol.wire.fields import MAX_REPLY_FRAME  # noqa: E402
from vllm_pd_connector.protocol.wire.push_messages import (  # noqa: E402
    AwaitCommands,
    InstanceAddress,
    PrefillRef,
    PushInto,
)
from vllm_pd_connector.scheduler.leases import lease_renewer  # noqa: E402

SECONDS = 6.0  # of which the second half is measured


def fleet(peers: int, decoders: int, in_flight: int, seconds: float = SECONDS) -> dict[str, Any]:
    """A fleet of so many prefill and so many decode instances for so many seconds of its time; what the second half of
    them cost."""
    clock = Clock()
    with patch.object(lease_renewer, "time", clock):
        return _fleet(clock, peers, decoders, in_flight, seconds)


def _fleet(clock: Clock, peers: int, decoders: int, in_flight: int, seconds: float) -> dict[str, Any]:
    serving = Meter()
    prefills = [Prefill(clock, number, serving) for number in range(peers)]
    decodes = [Decode(clock, number, prefills, in_flight) for number in range(decoders)]
    began, cpu, ended_before = clock.now, time.process_time(), [0]

    def num_ended() -> int:
        return sum(decode.good + decode.failed.total() for decode in decodes)

    def warm() -> None:
        """Links are made, and what the first requests of a shape compute is known: from here on it is measured."""
        gc.collect()
        gc.freeze()  # a worker's collector looks at one worker's links, not at those of a whole fleet
        ended_before[0] = num_ended()
        serving.times.clear()
        for decode in decodes:
            for meter in decode.meters:
                meter.times.clear()
            decode.calls.asked = decode.renewing.asked = decode.calls.linked = 0
            decode.late.clear()

    clock.after(seconds / 2, warm)
    restarts = deque((began + seconds * (0.2 + 0.2 * i / peers), prefills[i]) for i in range(0, peers, 8))
    while clock.now < began + seconds:
        if restarts and restarts[0][0] <= clock.now:
            restarts.popleft()[1].begin_life()
        for decode in decodes:
            decode.turn()
        clock.run_until(clock.now + TURN_S)
    failed = sum((decode.failed for decode in decodes), Counter[str]())
    assert set(failed) <= {"restart"}, f"requests failed for another reason than a restart: {failed}"
    size = {"peers": peers, "decoders": decoders, "in_flight": in_flight, "simulated_s": seconds}
    ended = num_ended() - ended_before[0]
    row = {"case": "fleet", **size, **costs(decodes, serving, ended), "failed_by_restart": failed["restart"]}
    row |= {"pushed": sum(decode.pushed for decode in decodes)}
    row |= {"processor_s": round(time.process_time() - cpu, 1), "memory_mb": resident_mb()}
    for decode in decodes:
        decode.renewer.close()
        decode.link.close()
    return row


def costs(decodes: list[Decode], serving: Meter, ended: int) -> dict[str, Any]:
    """Of requests and of turns, in the half that is measured."""

    def us(*names: str) -> float:
        return 1e6 * sum(getattr(decode, name).total for decode in decodes for name in names)

    def ms(kinds: Iterable[list[float]]) -> tuple[float, float]:
        values = [value for values in kinds for value in values]
        return round(1e3 * median(values), 2), round(1e3 * max(values), 2)

    links = sum(decode.calls.linked for decode in decodes)
    turn_ms, late_ms = ms(d.turns.times for d in decodes), ms(d.late for d in decodes)
    reading = sum(len(d.rests.times) for d in decodes) * decodes[0].in_flight * (1 - WAIT)
    return {
        "ended": ended,
        "decode_us_per_request": round(us("begins", "binds", "ends", "answers") / ended, 1),
        "renewer_us_per_request": round(us("renewals") / ended, 1),
        "prefill_us_per_request": round(1e6 * serving.total / ended, 1),
        "messages_per_request": round(sum(d.calls.asked + d.renewing.asked for d in decodes) / ended, 2),
        "links": links,
        "us_per_link": round(us("links") / links, 1) if links else None,
        "turn_ms": turn_ms[0],
        "turn_ms_longest": turn_ms[1],
        "deadlines_us_per_reading": round(us("rests") / reading, 2),
        "seen_late_ms": late_ms[0],
        "seen_late_ms_longest": late_ms[1],
    }


def resident_mb() -> int:
    """Megabytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1_000_000


def order_cost(in_flight: int, reps: int = 200) -> dict[str, Any]:
    """Of an order to write more of one prefill, with so many pushes under way, and of a round of its thread."""
    table, now = PushTable(1, 30.0), 0.0
    blocks = (BlockTable.of(0, range(1, 95)),)
    home, digest = InstanceAddress("d", "ab" * 16, "127.0.0.1", 5600), "0" * 16
    for number in range(in_flight):
        table.started(f"r-{number}", f"t-{number}", 12000, digest, now)
        name = PrefillRef(f"t-{number}", None)
        table.register(
            PushInto(name, home, 0, 0, 0, 0, 1, secrets.token_bytes(16), blocks, 0, 12000, digest), (b"d", number), now
        )
    seen, orders, rounds = 0, Meter(), Meter()
    for rep in range(reps):
        name_ = f"r-{rep % in_flight}"
        orders(lambda name_=name_, rep=rep: table.progressed(name_, blocks, 128 * (1 + rep // in_flight), rep))
        seen += 2 if rep < in_flight else 1
        table.await_commands(AwaitCommands(bytes(16), 0, seen), (b"w", rep), now)
        rounds(lambda: (table.tick(now), table.replies.take(), table.next_deadline()))
    return {
        "case": "push table",
        "in_flight": in_flight,
        "order_us": round(1e6 * median(orders.times), 1),
        "round_us": round(1e6 * median(rounds.times), 1),
    }


def memory_cases() -> Iterator[dict[str, Any]]:
    """Bytes of a lease at the prefill side, and of a linked peer of 80 layers at the decode side."""
    table = (BlockTable.of(0, range(1, 95)),)
    leases, count = LeaseTable(600.0), 2000
    gc.collect()
    tracemalloc.start()
    for number in range(count):
        copied = BlockTable(0, bytes(bytearray(table[0].packed)))
        leases.hold(f"cmpl-{number:032}", secrets.token_bytes(16), 0.0, 30.0, (copied,))
    yield {"case": "a lease of 94 blocks", "bytes": tracemalloc.get_traced_memory()[0] // count}
    tracemalloc.stop()
    mine, theirs = make_worker(0, 1), [make_worker(rank, 8) for rank in range(8)]
    gc.collect()
    tracemalloc.start()
    plans = [make_plan(mine, theirs) for _ in range(10)]
    per_plan = tracemalloc.get_traced_memory()[0] // len(plans)
    tracemalloc.stop()
    yield {"case": "the plan of a peer, 80 layers, tp 8 to 1", "bytes": per_plan}


def manifest_cases() -> Iterator[dict[str, Any]]:
    """An instance of many ranks as a decode worker meets it: bytes on the wire, milliseconds to check and to plan."""
    local = make_worker(0, 1)
    for ranks in (8, 64, 256, 1024):
        remote = [make_worker(rank % 8, 8) for rank in range(min(ranks, 8))]
        encoded = [msgspec.msgpack.encode(manifest) for manifest in remote]
        size = sum(map(len, encoded)) * ranks // len(encoded)
        decoder = msgspec.msgpack.Decoder(Manifest)
        decode = Meter()
        for _ in range(5):
            decode(lambda decoder=decoder, encoded=encoded: [decoder.decode(one) for one in encoded])
        row = {
            "case": "manifests of 80 layers",
            "ranks": ranks,
            "bytes": size,
            "fits_one_reply": size < MAX_REPLY_FRAME,
            "decode_ms": round(1e3 * min(decode.times) * ranks / len(encoded), 1),
        }
        if ranks <= 8:
            check, plan = Meter(), Meter()
            for _ in range(5):
                check(lambda remote=remote: check_pd_topology(local, remote))
                plan(lambda remote=remote: make_plan(local, remote))
            row |= {"check_ms": round(1e3 * min(check.times), 1), "plan_ms": round(1e3 * min(plan.times), 1)}
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", nargs="+", type=int, default=[4, 16, 64], help="of each role")
    parser.add_argument("--peers", nargs="+", type=int, default=[64, 256], help="of as few decode instances as above")
    parser.add_argument("--in-flight", nargs="+", type=int, default=[10, 100, 1000], help="at each decode instance")
    parser.add_argument("--whole", action="store_true", help="the most of both together, too: minutes, gigabytes")
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "bench" / "scale.json")
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # of the requests that a restart fails
    few, usual = options.instances[0], options.in_flight[len(options.in_flight) // 2]
    sizes = [(count, count, usual) for count in options.instances] + [(count, few, usual) for count in options.peers]
    sizes += [(few, few, in_flight) for in_flight in options.in_flight]
    if options.whole:
        sizes.append((options.instances[-1], options.instances[-1], options.in_flight[-1]))
    fleets = []
    for peers, decoders, in_flight in dict.fromkeys(sizes):
        fleets.append(fleet(peers, decoders, in_flight))
        print(fleets[-1], flush=True)
        gc.unfreeze()
        gc.collect()
    pushes = [order_cost(in_flight) for in_flight in options.in_flight]
    parts = {"fleets": fleets, "pushes": pushes, "memory": [*memory_cases()], "manifests": [*manifest_cases()]}
    for name in ("pushes", "memory", "manifests"):
        for row in parts[name]:
            print(row)
    write(options.json, parts)


if __name__ == "__main__":
    main()
