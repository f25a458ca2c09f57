"""What many instances and many requests cost: decode and prefill instances without sockets, by a made-up clock.

Every decode instance is one worker's receives (`worker.receive`) and the scheduler half's renewer, every prefill
instance its lease table, its push table and its part of the side channel's answers; between them go the real messages,
encoded and decoded, and a loopback transport copies real bytes of what is read. Time is made up: messages take
LATENCY_S, a read takes READ_S in the mean, and each worker looks every TURNS_S. Only how much a turn does is as in
the product: what it can in a millisecond of the real clock. So a request costs what it costs, and nobody waits.

Prompts are as long as those of the conversation trace that was published with Mooncake (FAST 2025,
github.com/kvcache-ai/Mooncake, FAST25-release/traces; 12031 requests, 12035 tokens in the mean): its quantiles.
A quarter of the requests is written by the prefill side while it computes them, the others are read. A third of them
waits before it is begun; leases are renewed until a request is reported. One prefill instance in eight is replaced by
another life of it under way, and what comes from it then fails. Anything else that fails ends the run.

The last fleet is the most instances with the most requests in flight, for a shorter time (`simulated_s`).

Besides: the scheduler half's steps, the push table's cost of one order with many pushes under way, memory, open files,
and what manifests of many ranks cost.

    python benchmarks/scale.py [--instances 4 16 64] [--peers 64 256] [--in-flight 10 100 1000] [--ranks 8 1024]
"""

from __future__ import annotations

import argparse
import gc
import logging
import resource
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.fleet_prefill import Clock, Meter, Prefill  # noqa: E402
from benchmarks.fleet_world import REASONS, WAIT, Decode  # noqa: E402
from benchmarks.report import write  # noqa: E402
from benchmarks.scale_parts import file_cases, manifest_cases, memory_cases, order_cost  # noqa: E402
from benchmarks.scale_steps import step_cost  # noqa: E402
from vllm_pd_connector.scheduler.leases import lease_renewer  # noqa: E402

SECONDS = 6.0  # of a fleet's time, of which the second half is measured
TURNS_S = 0.02
ALONE_REQUESTS = 2400  # so few last longer, in seconds times requests in flight
WHOLE_SECONDS, WHOLE_TURNS_S = 2.4, 0.04  # of the largest fleet


def fleet(
    peers: int, decoders: int, in_flight: int, seconds: float = SECONDS, turns_s: float = TURNS_S
) -> dict[str, Any]:
    """A fleet of so many prefill and so many decode instances for so many seconds of its time; what the second half of
    them cost."""
    clock = Clock()
    with patch.object(lease_renewer, "time", clock):
        row = _fleet(clock, peers, decoders, in_flight, seconds, turns_s)
    gc.unfreeze()
    gc.collect()
    return row


def _fleet(clock: Clock, peers: int, decoders: int, in_flight: int, seconds: float, turns_s: float) -> dict[str, Any]:
    serving, stepping = Meter(), Meter()
    prefills = [Prefill(clock, number, serving, stepping) for number in range(peers)]
    decodes = [Decode(clock, number, prefills, in_flight, turns_s) for number in range(decoders)]
    began, cpu, ended_before = clock.now, time.process_time(), [0]

    def num_ended() -> int:
        return sum(decode.good + decode.failed.total() for decode in decodes)

    def warm() -> None:
        """Links are made, and what the first requests of a shape compute is known: from here on it is measured."""
        ended_before[0] = num_ended()
        serving.times.clear()
        stepping.times.clear()
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
        gc.freeze()  # a worker's collector looks at what one worker has, not at a whole fleet
        for decode in decodes:
            decode.turn()
        clock.run_until(clock.now + turns_s)
    failed = sum((decode.failed for decode in decodes), Counter[str]())
    assert set(failed) <= {"restart"}, f"requests failed for another reason than a restart: {failed}"
    size = {"peers": peers, "decoders": decoders, "in_flight": in_flight, "simulated_s": seconds}
    ended = num_ended() - ended_before[0]
    row = {"case": "fleet", **size, **costs(decodes, serving, stepping, ended)}
    row |= {f"failed_by_{reason}": failed[reason] for reason in REASONS}
    row |= {"written": sum(decode.pushed for decode in decodes)}
    row |= {"processor_s": round(time.process_time() - cpu, 1), "memory_mb": resident_mb()}
    for decode in decodes:
        decode.renewer.close()
        decode.link.close()
    return row


def costs(decodes: list[Decode], serving: Meter, stepping: Meter, ended: int) -> dict[str, Any]:
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
        "side_channel_us_per_request": round(1e6 * serving.total / ended, 1),
        "prefill_steps_us_per_request": round(1e6 * stepping.total / ended, 1),
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


def fleets(instances: list[int], peers: list[int], in_flight: list[int]) -> Iterator[dict[str, Any]]:
    """A decode instance alone, as it is in its own process, with more peers and with more in flight; more instances, in
    one process; the most of all."""
    few, usual = instances[0], in_flight[len(in_flight) // 2]
    alone = [(few, 1, count) for count in in_flight] + [(count, 1, usual) for count in peers]
    for size in dict.fromkeys(alone):
        yield fleet(*size, max(SECONDS, min(ALONE_REQUESTS / size[2], 10 * SECONDS)))
    for count in instances:
        yield fleet(count, count, usual)
    yield fleet(instances[-1], instances[-1], in_flight[-1], WHOLE_SECONDS, WHOLE_TURNS_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", nargs="+", type=int, default=[4, 16, 64], help="of each role")
    parser.add_argument("--peers", nargs="+", type=int, default=[64, 256], help="of one decode instance")
    parser.add_argument("--in-flight", nargs="+", type=int, default=[10, 100, 1000], help="at each decode instance")
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 256, 1024], help="of an instance")
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "bench" / "scale.json")
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # of the requests that a restart fails
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, 65535), files))  # as `vllm serve` does
    most = max(options.instances + options.peers)
    steps = ((count, peers) for count in options.in_flight for peers in (4, 64, 256) if peers <= min(count, most))
    parts: dict[str, list[dict[str, Any]]] = {}
    for name, rows in (
        ("steps", (step_cost(*size) for size in steps)),
        ("fleets", fleets(options.instances, options.peers, options.in_flight)),
        ("pushes", map(order_cost, options.in_flight)),
        ("memory", memory_cases()),
        ("files", file_cases()),
        ("manifests", manifest_cases(options.ranks)),
    ):
        parts[name] = []
        for row in rows:
            parts[name].append(row)
            print(row, flush=True)
    write(options.json, parts)


if __name__ == "__main__":
    main()
