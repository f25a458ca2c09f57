"""The soak without servers: vLLM's schedulers, both halves of a prefill and a decode instance, and bytes in RAM.

    python tests/faults/soak_halves.py [--requests N] [--seconds S] [--seed S] [--legs pull|push|"push at once"]
                                       [--transport loopback|nixl|mooncake] [--samples N] [--into FILE]

All in one process, so that 100 000 requests take minutes, and what Python holds can be counted. As in the soak prompts
have random lengths and priorities, one request in ten is aborted at a random moment, one in ten has no hand-over, and
pools have room for a few. Where both legs are sent at once nobody has priority, or the two pools could come to wait for
each other (docs/sizing.md). Each look of a forward at the caches is compared (`tests.support.scheduler.worked`). Exit
code 0 if all was right, nothing was left and neither the process nor the number of its objects, threads and open files
grew. That is judged by the second half of a run: before it an instance has all that it remembers of leases that ended,
so a run of fewer than LEAST_REQUESTS is none.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from vllm.v1.request import RequestStatus  # noqa: E402

from tests.faults.system.memory import Trend, judge, resident  # noqa: E402
from tests.support.scheduler.cores import Core  # noqa: E402
from tests.support.scheduler.engines import BLOCK, KEEP  # noqa: E402
from tests.support.scheduler.worked import WorkedEngine  # noqa: E402

AT_ONCE = 10
BLOCKS = 66
LONGEST = 48 * BLOCK
"""Three quarters of a pool, as in the soak."""
OUTPUT = 16
UNHURRIED = {"kv_lease_duration": 10.0, "handshake_timeout": 40.0, "confirm_timeout": 40.0}
"""Nothing here may fail, however busy the machine is."""
STUCK_S = 60.0
LEGS = ("pull", "push", "push at once")
FETCH = {"do_remote_decode": False, "do_remote_prefill": True}
LEAST_REQUESTS = 12_000
"""In half of which 4096 leases have ended, whose ends a prefill instance can explain (`protocol/lease.py`)."""
MOST = {"objects": 2000.0, "threads": 2.0, "files": 4.0}
"""By which these may grow in the second half of a run."""


@dataclass(slots=True)
class Asked:
    """A client's request: its prompt and how it goes on, its legs' names where they run."""

    prompt: list[int]
    tokens: int
    priority: int
    plain: bool
    leaves_after: float
    began: float = field(default_factory=time.monotonic)
    prefill: str = ""
    decode: str = ""


class Halves:
    """A pair of engines and the router before them. `ends` counts requests, `problems` what must not be."""

    def __init__(self, seed: int, legs: str, transport: str) -> None:
        self._rng = random.Random(seed)
        self._pushes, self._at_once = legs != "pull", legs == "push at once"
        mode = "push" if self._pushes else "pull"
        extra: dict[str, Any] = {"mode": mode, "transport": transport, **UNHURRIED}
        if transport == "mooncake":
            extra["transport_options"] = {"protocol": "tcp", "address": "127.0.0.1"}
        arguments: dict[str, Any] = {"scheduling": "fcfs" if self._at_once else "priority", "step_tokens": 512}
        self.prefill = WorkedEngine("kv_producer", "HND", BLOCKS, extra, **arguments)
        core = Core(lambda: WorkedEngine("kv_consumer", "NHD", BLOCKS, extra, **arguments))  # which hears its worker
        self.decode: Any = core.engine
        self.prompts = [
            [self._rng.randrange(256) for _ in range(round(LONGEST ** self._rng.random()))] for _ in range(160)
        ]
        self.ends: Counter[str] = Counter()
        self.problems: list[str] = []
        self._live: dict[str, Asked] = {}
        self._asked = 0

    @property
    def requests(self) -> int:
        return self.ends.total()

    def run(self, requests: int, until: float) -> None:
        """Ask so many, or as many as until then, and wait for all of them."""
        last, ended = self._asked + requests, time.monotonic()
        while self._live or (self._asked < last and time.monotonic() < until):
            while len(self._live) < AT_ONCE and self._asked < last and time.monotonic() < until:
                self._ask()
            before = self.requests
            for engine in (self.prefill, self.decode):
                worked = engine.turn()
                self._hear(engine)
                if not worked:
                    time.sleep(0.0001)
            self._leave()
            if self.requests > before:
                ended = time.monotonic()
            if time.monotonic() > ended + STUCK_S:
                raise AssertionError(f"nothing has ended for {STUCK_S:g} s: {list(self._live.values())}")
        for engine in (self.prefill, self.decode):
            self.problems += engine.wrong
            engine.wrong.clear()

    def settle(self) -> None:
        """Leases of those that left run out; then nothing is left."""
        until = time.monotonic() + STUCK_S
        while self.prefill.held() or self.decode.held():
            if time.monotonic() > until:
                raise AssertionError(f"held: {self.prefill.held()} and {self.decode.held()} blocks")
            self.prefill.turn()
            self.decode.turn()
        self.prefill.check_empty()
        self.decode.check_empty()
        for engine in (self.prefill, self.decode):
            for kept in (engine.told, engine.scheduled, engine.said):
                kept.clear()

    def _ask(self) -> None:
        rng, self._asked = self._rng, self._asked + 1
        name, where = f"r{self._asked}", rng.random()
        asked = Asked(
            prompt=rng.choice(self.prompts),
            tokens=rng.randint(1, OUTPUT),
            priority=rng.randint(-1, 1),
            plain=where < 0.1,
            leaves_after=0.02 * rng.random() ** 2 if where > 0.9 else STUCK_S,
        )
        self._live[name] = asked
        if asked.plain:
            self._decode(name, asked, None)
            return
        asked.prefill = f"{name}-p"
        self.prefill.add(asked.prefill, asked.prompt, self._keep(name), max_tokens=1, priority=asked.priority)
        if self._at_once:
            home = self.prefill.connector.scheduler.producer.home
            place = {"remote_engine_id": home.engine_id, "remote_host": home.host, "remote_port": home.port}
            self._decode(name, asked, {**FETCH, "transfer_id": name, **place})

    def _keep(self, name: str) -> dict[str, Any]:
        return {**KEEP, "transfer_id": name} if self._pushes else dict(KEEP)

    def _decode(self, name: str, asked: Asked, params: Any) -> None:
        asked.decode = f"{name}-d"
        self.decode.add(asked.decode, asked.prompt, params, max_tokens=asked.tokens, priority=asked.priority)

    def _hear(self, engine: WorkedEngine) -> None:
        for said in engine.said:
            if said.finish_reason is None:
                continue
            name, _, leg = said.request_id.partition("-")
            if (asked := self._live.get(name)) is None:
                continue
            if str(said.finish_reason) != "length":
                self._end(name, str(said.finish_reason))
                self.problems.append(f"{said.request_id} ended with {said.finish_reason}")
            elif leg == "d":
                self._end(name, "right")
            elif not self._at_once:
                self._decode(name, asked, json.loads(json.dumps(said.kv_transfer_params)))
        engine.said.clear()

    def _leave(self) -> None:
        now = time.monotonic()
        for name, asked in list(self._live.items()):
            if now >= asked.began + asked.leaves_after:
                for engine, leg in ((self.prefill, asked.prefill), (self.decode, asked.decode)):
                    if leg in engine.scheduler.requests:
                        engine.scheduler.finish_requests(leg, RequestStatus.FINISHED_ABORTED)
                self._end(name, "left")

    def _end(self, name: str, how: str) -> None:
        del self._live[name]
        self.ends[how] += 1

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


@dataclass(slots=True)
class Kept:
    """What the process holds, by the number of requests so far."""

    trends: dict[str, Trend] = field(default_factory=dict)
    types: list[Counter[str]] = field(default_factory=list)

    def sample(self, requests: int) -> dict[str, int]:
        gc.collect()
        objects = gc.get_objects()
        found = {
            "bytes": resident(os.getpid()),
            "objects": len(objects),
            "threads": threading.active_count(),
            "files": len(os.listdir("/proc/self/fd")),
        }
        self.types.append(Counter(type(one).__qualname__ for one in objects))
        for name, number in found.items():
            self.trends.setdefault(name, Trend()).add(requests, number)
        return found

    def problems(self) -> list[str]:
        if (last := self.trends["bytes"].requests[-1]) < LEAST_REQUESTS:
            return [f"{last} requests, not {LEAST_REQUESTS}: too few to tell what grows from what fills once"]
        wrong = [judge("memory", self.trends["bytes"])]
        wrong += [
            f"{name} grew by {self.trends[name].growth():.0f}, not less than {most:g}"
            for name, most in MOST.items()
            if self.trends[name].growth() >= most
        ]
        return [text for text in wrong if text]

    def grown(self) -> list[tuple[str, int]]:
        """Types of which there are more than in the middle of the run."""
        middle, last = self.types[len(self.types) // 2], self.types[-1]
        return (last - middle).most_common(12)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=86400.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--legs", choices=LEGS, default="pull")
    parser.add_argument("--transport", choices=("loopback", "nixl", "mooncake"), default="nixl")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--into", type=Path, help="file for what is written down, as JSON")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    until = began + options.seconds
    halves, kept = Halves(options.seed, options.legs, options.transport), Kept()
    each = max(1, options.requests // options.samples)
    try:
        while halves.requests < options.requests and time.monotonic() < until and not halves.problems:
            halves.run(min(each, options.requests - halves.requests), until)
            halves.settle()
            held, said = kept.sample(halves.requests), (dict(halves.ends), dict(halves.decode.counted))
            print(f"{halves.requests:7} requests, {time.monotonic() - began:6.0f} s:", *said, held, flush=True)
    finally:
        halves.close()
    wrong = [*halves.problems[:20], *kept.problems()]
    print(f"more than in the middle: {kept.grown()}", *wrong, sep="\n! ")
    if options.into:
        trends = {name: [trend.requests, trend.bytes] for name, trend in kept.trends.items()}
        options.into.write_text(json.dumps({"ends": halves.ends, "problems": wrong, "kept": trends}))
    return int(bool(wrong) or not halves.requests)


if __name__ == "__main__":
    sys.exit(main())
