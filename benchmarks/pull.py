"""Time from a decode instance's receipt of a request to its first token, when the cache is pulled.

In one run, on one machine, with one model: this connector; vLLM's in-tree NixlConnector as shipped; the same with a
sleeping progress thread and without pinning (see `quiet_nixl`); and a plain instance without a connector. For each
pair the client runs the prefill leg itself, outside of the measured time, and streams the decode leg from the decode
instance: the time is from sending that request to its first token. Requests at once come in waves, eight prefill legs
and then eight decode legs: with both instances on the same cores, decoding beside a prefill would measure the cores.
A decode leg for which no caches came counts as failed, as far as the connector tells. Also measured: the first request
to a new peer, of 300 tokens, also to one that was introduced before (`vllm-pd introduce`), and the
processor time that the idle servers burn. The variants take turns for several rounds, each with fresh servers, every
second round backwards, so that neither whatever else the machine does in a minute nor who comes first favours one.

The plain instance computes the whole prompt, so its first token is no rival; its tail, its decode step and its idle
cost are what the others are compared with. Medians of different starts differ more than those of one: the ratios to the
first rival come with the range that most resampled starts give.

    python benchmarks/pull.py [--variants pd nixl-quiet …] [--seldom plain …] [--rounds 2] [--idle 20] [--into …]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

import quiet_nixl  # noqa: E402

from benchmarks.accuracy.compare import received  # noqa: E402
from benchmarks.report import markdown, write  # noqa: E402
from examples.launch import Server, Servers, post, vllm_spec  # noqa: E402
from examples.make_models import MODELS, make  # noqa: E402

LENGTHS = (16, 1900)
"""Shortest and longest prompt, in tokens; lengths are spread evenly in the logarithm."""
FIRST_LENGTH = 300
"""Of the first request."""

OUTPUT_TOKENS = 8
AT_ONCE = 8
RESAMPLED = 1000
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds."""

    median: float
    p95: float
    p99: float
    worst: float
    requests: int


@dataclass(frozen=True, slots=True)
class Result:
    """One variant. Times in milliseconds; `idle_cores` in processor seconds per second, per worker process.

    `lowest` and `highest` are medians of single starts.
    """

    variant: str
    starts: int
    first_request: float
    first_worst: float
    idle_machine: Spread
    lowest: float
    highest: float
    at_once: Spread
    decode_step: float
    idle_cores: float | None
    failed: int


@dataclass(frozen=True, slots=True)
class Round:
    """What one start of a variant's servers gave, in seconds."""

    first_request: float
    first_tokens: list[float]
    first_tokens_at_once: list[float]
    decode_steps: list[float]
    idle_cores: float | None
    failed: int


def spread(seconds: Sequence[float]) -> Spread:
    """Not a number where nothing was served."""
    median, p95, p99, worst = np.percentile(seconds or [float("nan")], [50, 95, 99, 100]) * 1e3
    return Spread(*(round(float(value), 1) for value in (median, p95, p99, worst)), requests=len(seconds))


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of random tokens, no two with a common prefix worth caching."""
    generator = random.Random(seed)
    low, high = map(np.log, LENGTHS)
    lengths = np.exp(np.linspace(low, high, count)).round().astype(int).tolist()
    generator.shuffle(lengths)
    return [[generator.randrange(256) for _ in range(length)] for length in lengths]


def body(model: str, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    } | fields


def events(url: str, request: Mapping[str, Any]) -> list[tuple[float, bytes]]:
    """The events of a streamed completion: seconds from sending it, and the event's JSON.

    Raises:
        RuntimeError: an HTTP error, a stream without tokens or one that broke off.
    """
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=180)
    try:
        connection.connect()
        content = json.dumps({**request, "stream": True})
        started = time.perf_counter()
        connection.request("POST", "/v1/completions", content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {response.read()[:300]!r}")
        lines = [(time.perf_counter() - started, line) for line in response if line.startswith(b"data: {")]
    finally:
        connection.close()
    if broken := [line for _, line in lines if not line.startswith(b'data: {"id"')]:
        raise RuntimeError(f"a stream that broke off: {broken[0][:300]!r}")
    if not lines:
        raise RuntimeError("a stream without tokens")
    return [(seconds, line.removeprefix(b"data: ")) for seconds, line in lines]


def event_times(url: str, request: Mapping[str, Any]) -> list[float]:
    """Only the seconds of `events`."""
    return [round(seconds, 6) for seconds, _ in events(url, request)]


def processor_seconds(server: Server, *, alone: bool = False) -> float:
    """User and system time so far of all processes of a server's group, or of its first process alone."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The second field is the command in brackets and may hold spaces.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == server.process.pid and (not alone or int(stat.parent.name) == server.process.pid):
            total += int(fields[11]) + int(fields[12])
    return total / TICKS_PER_SECOND


def idle_cores(servers: Sequence[Server], seconds: float) -> float | None:
    """Cores that idle servers keep busy, per server; these instances have one worker each. None in no time."""
    if not seconds:
        return None
    before, started = sum(map(processor_seconds, servers)), time.monotonic()
    time.sleep(seconds)
    burnt = sum(map(processor_seconds, servers)) - before
    return round(burnt / (time.monotonic() - started) / len(servers), 3)


class Variant:
    """One way to serve; `prefilled` runs a prompt's prefill leg and tells what to send to the decode instance.
    `introduced`: the instances are linked before the first request, as the router does (`vllm-pd introduce`)."""

    def __init__(self, name: str, connector: str | None, environment: Mapping[str, str], *, introduced: bool = False):
        self.name = name
        self._introduced = introduced
        self._connector = connector
        self._environment = environment

    def start(self, servers: Servers, model: str) -> list[Server]:
        path, flags = make(MODELS[model]), MODELS[model].flags
        if self._connector is None:
            return servers.start(vllm_spec(f"{self.name}", path, flags=flags))
        roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
        return servers.start(
            *(
                vllm_spec(
                    f"{self.name}-{side}",
                    path,
                    flags=flags,
                    transfer={"kv_connector": self._connector, "kv_role": role},
                    environment=self._environment,
                )
                for side, role in roles.items()
            )
        )

    def begin(self, running: Sequence[Server]) -> None:
        """What a router does before it takes requests."""
        if self._introduced:
            command = [sys.executable, "-m", "vllm_pd_connector.cli", "introduce", *(server.url for server in running)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def prefilled(self, running: Sequence[Server], model: str, prompt: Sequence[int]) -> dict[str, Any]:
        """Run the prefill leg; the body of the decode leg."""
        if self._connector is None:
            return body(model, prompt)
        keep = {"do_remote_decode": True, "do_remote_prefill": False}
        answer = post(f"{running[0].url}/v1/completions", body(model, prompt, max_tokens=1, kv_transfer_params=keep))
        return body(model, prompt, kv_transfer_params=handed_over(answer))

    def computed(self, running: Sequence[Server], legs: int) -> int:
        """How many of so many decode legs got no caches, and were computed by decode; of a rival nobody tells."""
        return max(legs - received([running[-1].url]).ended, 0) if self._connector == "PDConnector" else 0


def handed_over(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What a prefill's answer tells decode.

    Raises:
        RuntimeError: nothing is held, so decode would compute the prompt and be timed as if it had got it.
    """
    params = answer.get("kv_transfer_params")
    if not isinstance(params, dict) or not params.get("do_remote_prefill"):
        raise RuntimeError(f"the prefill instance holds nothing: {params!r}")
    return params


def measure(variant: Variant, model: str, requests: int, seed: int, logs: Path, idle: float) -> Round:
    """Start a variant, measure everything, stop it."""
    with Servers(logs) as servers:
        running = variant.start(servers, model)
        for server in running:
            # The first forward of a process is slow, whatever the connector; it is not what is measured.
            event_times(server.url, body(model, [0] * 40))
        variant.begin(running)

        failed = 0

        def tried(call: Callable[[Any], Answer], argument: Any) -> Answer | None:
            nonlocal failed
            try:
                return call(argument)
            except (RuntimeError, OSError) as error:
                failed += 1
                print(f"  {variant.name}: {error}", flush=True)
                return None

        def prefilled(prompt: Sequence[int]) -> dict[str, Any] | None:
            return tried(lambda given: variant.prefilled(running, model, given), prompt)

        def decoded(leg: dict[str, Any] | None) -> list[float] | None:
            return tried(lambda given: event_times(running[-1].url, given), leg) if leg else None

        def first_tokens(answers: Iterable[list[float] | None]) -> list[float]:
            return [times[0] for times in answers if times]

        generator = random.Random(seed)
        middle = [generator.randrange(256) for _ in range(FIRST_LENGTH)]
        [first] = first_tokens([decoded(prefilled(middle))]) or [float("nan")]
        answers = [decoded(prefilled(prompt)) for prompt in prompts(requests, seed + 1)]
        steps = [b - a for times in answers if times for a, b in itertools.pairwise(times)]
        at_once: list[float] = []
        with ThreadPoolExecutor(AT_ONCE) as pool:
            # In waves: the two instances share the cores here, and the prefill legs are not what is measured.
            asked = prompts(requests, seed + 2)
            for begin in range(0, requests, AT_ONCE):
                legs = list(pool.map(prefilled, asked[begin : begin + AT_ONCE]))
                at_once += first_tokens(pool.map(decoded, legs))
        served = [*first_tokens(answers), *at_once]
        failed += variant.computed(running, len(served) + (first == first))
        return Round(first, first_tokens(answers), at_once, steps, idle_cores(running, idle), failed)


def summary(name: str, rounds: Sequence[Round]) -> Result:
    """All rounds of a variant together; the first request and the idle cost are medians over the rounds."""

    def pooled(times: Callable[[Round], list[float]]) -> list[float]:
        return [time for one in rounds for time in times(one)]

    starts = [round(float(np.median(one.first_tokens)) * 1e3, 1) for one in rounds if one.first_tokens]
    starts = starts or [float("nan")]
    first = [one.first_request for one in rounds if one.first_request == one.first_request] or [float("nan")]
    idle = [one.idle_cores for one in rounds if one.idle_cores is not None]
    return Result(
        name,
        starts=len(rounds),
        first_request=round(float(np.median(first)) * 1e3, 1),
        first_worst=round(max(first) * 1e3, 1),
        idle_machine=spread(pooled(lambda one: one.first_tokens)),
        lowest=min(starts),
        highest=max(starts),
        at_once=spread(pooled(lambda one: one.first_tokens_at_once)),
        decode_step=spread(pooled(lambda one: one.decode_steps)).median,
        idle_cores=round(float(np.median(idle)), 3) if idle else None,
        failed=sum(one.failed for one in rounds),
    )


def row(result: Result) -> dict[str, Any]:
    """A variant's line of the table; times in milliseconds."""
    idle = {} if result.idle_cores is None else {"idle cores per worker": result.idle_cores}
    return {
        "variant": result.variant,
        "starts": result.starts,
        "median": result.idle_machine.median,
        "of the lowest start": result.lowest,
        "of the highest": result.highest,
        "p95": result.idle_machine.p95,
        "p99": result.idle_machine.p99,
        f"median, {AT_ONCE} at once": result.at_once.median,
        "p95, same": result.at_once.p95,
        "p99, same": result.at_once.p99,
        "first request": result.first_request,
        "its worst": result.first_worst,
        "decode step": result.decode_step,
        **idle,
        "failed": result.failed,
    }


def ratios(rounds: Mapping[str, Sequence[Round]], to: str) -> list[dict[str, Any]]:
    """Of each other variant's median first token to that of `to`, and what 95 % of resampled starts give."""
    draw = random.Random(0)

    def median(starts: Sequence[Round]) -> float:
        return float(np.median([time for one in starts for time in one.first_tokens] or [float("nan")]))

    rows = []
    for name in rounds:
        if name == to or not rounds[name]:
            continue
        drawn = [
            median(draw.choices(rounds[name], k=len(rounds[name])))
            / median(draw.choices(rounds[to], k=len(rounds[to])))
            for _ in range(RESAMPLED)
        ]
        low, high = np.percentile(drawn, (2.5, 97.5))
        ratio = median(rounds[name]) / median(rounds[to])
        rows.append(
            {"variant": name, "to": to, "ratio": round(ratio, 2), "from": round(low, 2), "up to": round(high, 2)}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = ("pd", "pd-introduced", "nixl", "nixl-quiet", "plain")
    parser.add_argument("--variants", nargs="+", choices=names, default=list(names))
    parser.add_argument("--model", choices=MODELS, default="gqa")
    parser.add_argument("--requests", type=int, default=100, help="per variant, one by one and again all at once")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each variant's servers")
    parser.add_argument("--seldom", nargs="+", choices=names, default=[], help="have half as many starts")
    help_ = "seconds in which idle servers are watched in the first two rounds; 0: not"
    parser.add_argument("--idle", type=float, default=20.0, help=help_)
    parser.add_argument("--into", type=Path, default=ROOT / "out" / "bench" / "pull.json")
    options = parser.parse_args()
    options.into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        variants = {
            "pd": Variant("pd", "PDConnector", {}),
            "pd-introduced": Variant("pd-introduced", "PDConnector", {}, introduced=True),
            "nixl": Variant("nixl", "NixlConnector", {}),
            "nixl-quiet": Variant("nixl-quiet", "NixlConnector", quiet_nixl.environment(Path(directory))),
            "plain": Variant("plain", None, {}),
        }
        rounds: dict[str, list[Round]] = {name: [] for name in options.variants}
        for number in range(options.rounds):
            idle = options.idle if number < 2 else 0.0
            for name in options.variants[:: -1 if number % 2 else 1]:
                if name in options.seldom and number % 4 > 1:  # as often first as last
                    continue
                taken = rounds[name]
                print(f"round {number + 1}, {name}: {2 * options.requests} requests …", flush=True)
                logs = options.into.parent / "logs"
                taken.append(measure(variants[name], options.model, options.requests, 3 * number, logs, idle))
                print(markdown([row(summary(name, taken[-1:]))]), flush=True)
    rows = [row(summary(name, taken)) for name, taken in rounds.items()]
    facts = {"model": options.model, "prompt_tokens": LENGTHS, "unit": "ms", "rounds": options.rounds}
    samples = {name: [asdict(one) for one in taken] for name, taken in rounds.items()}
    print(f"\nMilliseconds from the decode request to its first token:\n\n{markdown(rows)}\n")
    rivals = [name for name in ("nixl-quiet", "nixl") if rounds.get(name)]
    against = {"ratios": ratios(rounds, rivals[0])} if rivals else {}
    write(options.into, {**facts, "rows": rows, **against, "seconds": samples})


if __name__ == "__main__":
    main()
