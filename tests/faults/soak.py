"""Many requests through one prefill and one decode instance with few blocks: nothing wrong or left, and none grows.

    python tests/faults/soak.py [--requests N] [--seconds S] [--seed S] [--mode pull|push] [--transport nixl|mooncake]
                                [--into DIR]

AT_ONCE clients ask this project's router for prompts of random lengths with answers of random lengths and random
priorities; one in ten leaves at a random moment, one in ten asks an instance itself, without a hand-over. The pool has
room for a few of them, so prefills wait for leases to end, requests for blocks, and running ones are preempted. A run
has ROUNDS rounds at least and none above ROUND_S seconds. After each nothing may be left on either instance, workers
give free memory back, and what every process has is looked at (`system/memory.py`). A run ends after N requests or S
seconds, whichever comes first; its servers' start does not count. Exit code 0 if every answer was right, nothing was
left, nobody died and no process grew.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from examples.launch import Servers  # noqa: E402
from tests.faults.asked import End, Outcome  # noqa: E402
from tests.faults.plan import Fault  # noqa: E402
from tests.faults.results import PROBLEMS, Result, count, table  # noqa: E402
from tests.faults.strikes.operating import ask_workers  # noqa: E402
from tests.faults.system.memory import LEAST_SAMPLES, Memory  # noqa: E402
from tests.faults.world import World  # noqa: E402
from tests.support.servers.workload import OUTPUT_TOKENS, Prompt, prompts  # noqa: E402

AT_ONCE = 10
ROUND_S, ROUNDS = 30.0, 2 * LEAST_SAMPLES
LEAST_REQUESTS, LEAST_S = 20 * ROUNDS, 5.0 * ROUNDS
LONGEST, PROMPTS = 1500, 160
BLOCKS = 66
"""Of 32 tokens: the longest prompt takes three quarters of a pool."""
FLAGS = ("--num-gpu-blocks-override", str(BLOCKS), "--scheduling-policy", "priority", "--max-num-seqs", "8")
QUIET = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}
"""Instead of 1024: it would fill for 1800 requests, with 285 MiB, of vLLM without a connector, too."""
UNHURRIED = {"handshake_timeout": 10.0, "transfer_timeout": 60.0, "confirm_timeout": 10.0, "kv_lease_duration": 10.0}
"""In place of a campaign's short ones, for nothing here may fail. What clients left is waited for that long."""
QUEUE_S = 300.0
"""How long a request may wait its turn: pools are full, and others go before it."""


def asked(seed: int) -> list[Prompt]:
    """Prompts of all lengths, short ones more often."""
    rng = random.Random(seed)
    return prompts(f"soak {seed}", [round(LONGEST ** rng.random()) for _ in range(PROMPTS)])


class Soak:
    """One run; `results` has a result for each round."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.results: list[Result] = []
        self.memory = Memory()
        self.seen: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._lock = threading.Lock()

    @property
    def requests(self) -> int:
        return sum(sum(result.ends.values()) for result in self.results)

    def round(self, requests: int, seconds: float) -> Result:
        """Ask at most so many requests for so many seconds, and look at what is left."""
        number, began = len(self.results), time.monotonic()
        result = Result(Fault("soak", f"round {number}", "", 0.0, number))
        left = iter(range(requests))

        def client() -> None:
            while time.monotonic() < began + seconds:
                with self._lock:
                    if next(left, None) is None:
                        return
                    salt = self._rng.random()
                outcome = self._ask(random.Random(salt))
                with self._lock:
                    result.judge([outcome], "")
                    if outcome.end is End.REFUSED:
                        result.problems["no recovery"].append(f"refused: {outcome.detail}")

        with ThreadPoolExecutor(AT_ONCE) as pool:
            for done in [pool.submit(client) for _ in range(AT_ONCE)]:
                done.result()
        result.touched = sum(result.ends.values())
        result.problems["died"] += [f"{name} is gone" for name in self.world.dead()]
        if not result.problems["died"]:
            result.problems["leaked"] += self.world.leaks()
        result.seconds = time.monotonic() - began
        self.results.append(result)
        return result

    def _ask(self, rng: random.Random) -> Outcome:
        world = self.world
        assert world.router is not None
        prompt = rng.choice(world.prompts)
        fields = {"max_tokens": rng.randint(1, OUTPUT_TOKENS), "priority": rng.randint(-1, 1)}
        where = rng.random()
        with self._lock:
            self.seen["left" if where < 0.1 else "plain" if where < 0.2 else "handed over"] += 1
        if where < 0.1:
            return world.leave(world.router, prompt, None, rng.random() ** 2, **fields)
        if where < 0.2:
            return world.ask(rng.choice(world.instances), prompt, None, QUEUE_S, **fields)
        return world.ask(world.router, prompt, None, QUEUE_S, **fields)

    def sample(self) -> None:
        """Of every process what it has, and of workers what they use of it."""
        for instance in self.world.instances:
            for number, told in enumerate(ask_workers(instance, "tidy_memory")):
                self.memory.add(f"{instance.name} worker {number}, allocated", self.requests, sum(told.values()))
        roots = {instance.name: instance.pid for instance in self.world.instances}
        assert self.world.router is not None
        self.memory.sample({**roots, "router": self.world.router.process.pid}, self.requests)


def run(soak: Soak, requests: int, seconds: float, note: Path) -> None:
    """Rounds until there were so many requests, or after so many seconds, or something went wrong."""
    until = time.monotonic() + seconds
    most, longest = math.ceil(requests / ROUNDS), min(ROUND_S, seconds / ROUNDS)
    while soak.requests < requests and time.monotonic() < until:
        result = soak.round(min(most, requests - soak.requests), min(longest, until - time.monotonic()))
        soak.sample()
        print(f"{soak.requests:7} requests, {result.seconds:5.1f} s: {dict(result.ends)}", *result.sentences[:10],
              sep="\n      ! ", flush=True)  # fmt: skip
        with note.open("a") as file:
            file.write(json.dumps(result.record()) + "\n")
        if result.sentences:
            return


def pressure(world: World) -> dict[str, float]:
    """What the pools went through: preemptions, receives, and leases that were lost."""
    series = ("num_preemptions_total", "pd_receives_total", "pd_leases_expired_total")
    found: Counter[str] = Counter()
    for instance in world.instances:
        for line in instance.metrics().splitlines():
            found.update({name: float(line.split()[-1]) for name in series if line.startswith(f"vllm:{name}{{")})
    return dict(found)


def at_least(least: float, kind: type[int] | type[float], why: str) -> Callable[[str], float]:
    """A number for an option, or a usage error."""

    def read(text: str) -> float:
        if not (number := kind(text)) >= least:
            raise argparse.ArgumentTypeError(f"{text}: it must be {least:g} or more, {why}")
        return number

    return read


def parser() -> argparse.ArgumentParser:
    few = f"or {LEAST_SAMPLES} rounds after the warm-up, by which memory is judged, say nothing"
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--requests", type=at_least(LEAST_REQUESTS, int, few), default=100_000)
    made.add_argument("--seconds", type=at_least(LEAST_S, float, few), default=86400.0)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--mode", choices=("pull", "push"), default="pull")
    made.add_argument("--transport", choices=("nixl", "mooncake"), default="nixl")
    made.add_argument("--into", type=Path, help="directory for what is written down (default: one under out/soak)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    directory = options.into or ROOT / "out" / "soak" / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
    extra: dict[str, Any] = {"mode": options.mode, "transport": options.transport, **UNHURRIED}
    began = time.monotonic()
    with Servers(directory / "logs") as servers:
        world = World(servers, extra=extra, routed=True, flags=FLAGS, asked=asked(options.seed), relayed=False,
                      environment=QUIET)  # fmt: skip
        soak = Soak(world, options.seed)
        try:
            run(soak, options.requests, options.seconds, directory / "results.jsonl")
            went_through = pressure(world) if not world.dead() else {}
        finally:
            world.close()
    counts = count(soak.results)
    grown = soak.memory.problems()
    print(table("soak", {f"{options.transport}, {options.mode}": {**counts, "faults": len(soak.results)}}))
    print(soak.memory.table())
    print(f"{soak.requests} requests in {time.monotonic() - began:.0f} s, seed {options.seed}; {dict(soak.seen)}; "
          f"{went_through}", *grown, sep="\n! ")  # fmt: skip
    record = {"counts": counts, "requests": soak.requests, "seconds": time.monotonic() - began, "grown": grown,
              "pressure": went_through, "memory": soak.memory.samples()}  # fmt: skip
    (directory / "result.json").write_text(json.dumps(record))
    return int(bool(grown) or not soak.requests or any(counts[name] for name in PROBLEMS))


if __name__ == "__main__":
    sys.exit(main())
