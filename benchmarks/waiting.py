"""What a decode instance's processes burn while a request of theirs only waits for its caches.

The request's prefill has finished; then the prefill instance is stopped (SIGSTOP), and the decode leg is sent, so that
the decode instance has one request that waits and nothing to compute. Measured are the processor seconds per second of
its engine core and workers together (not of its HTTP server), idle and waiting; the time to the first token of plain
requests that arrive meanwhile, beside the same on the idle instance; and, once the prefill instance goes on, how long
the waiting request takes to its first token. It is the first request to its peer, since a known peer's memory may be
read without its help. Tensor-parallel sizes are the decode instance's.

As rival vLLM's in-tree NixlConnector with a sleeping progress thread and unpinned workers (see `quiet_nixl`), in turns
in the same run; each round has fresh servers.

    python benchmarks/waiting.py [--variants pd nixl-quiet] [--tp 1 2] [--rounds 2] [--into out/bench/waiting.json]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

import quiet_nixl  # noqa: E402
from pull import body, event_times, processor_seconds  # noqa: E402

from benchmarks.report import markdown, write  # noqa: E402
from examples.launch import Server, Servers, post, vllm_spec  # noqa: E402
from examples.make_models import MODELS, make  # noqa: E402

PROMPT_TOKENS = 300
IDLE_S = 3.0
WAITING_S = 3.0
"""Less than 5 s, after which the in-tree connector gives up its handshake."""
SETTLING_S = 1.5
"""vLLM's workers poll for a second after the last step."""
ARRIVING = 15
"""Plain requests whose first token is timed, on the idle instance and again while the other request waits. Where vLLM's
workers are as many as the cores, a quarter of them meets a stall of 40 ms on either."""


@dataclass(frozen=True, slots=True)
class Round:
    """One start of a variant's servers. Cores are processor seconds per second, times are milliseconds."""

    idle_cores: float
    waiting_cores: float
    arriving_idle: float
    arriving_waiting: float
    first_token_after: float


@dataclass(frozen=True, slots=True)
class Result:
    """Medians over the rounds of one variant, and the failed requests of all."""

    variant: str
    tp: int
    idle_cores: float
    waiting_cores: float
    arriving_idle: float
    arriving_waiting: float
    first_token_after: float
    failed: int


def engine_seconds(server: Server) -> float:
    """Processor seconds so far of a server's processes except the first one, which serves HTTP."""
    return processor_seconds(server) - processor_seconds(server, alone=True)


def cores(server: Server, seconds: float) -> float:
    """Cores that the engine core and the workers of a server keep busy in the next seconds."""
    before, began = engine_seconds(server), time.monotonic()
    time.sleep(seconds)
    return (engine_seconds(server) - before) / (time.monotonic() - began)


def arriving(server: Server, model: str) -> float:
    """Median milliseconds to the first token of plain requests that come one by one, with pauses between."""
    times = []
    for number in range(ARRIVING):
        time.sleep(0.05)
        times.append(event_times(server.url, body(model, [number] * 20, max_tokens=1))[0])
    return statistics.median(times) * 1e3


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    os.killpg(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(server.process.pid, signal.SIGCONT)


def measure(connector: str, environment: dict[str, str], name: str, tp: int, logs: Path) -> Round | None:
    """Start a pair, measure everything, stop it; None if a request failed."""
    model = MODELS["gqa"]

    def spec(side: str, role: str, tp_size: int) -> object:
        transfer = {"kv_connector": connector, "kv_role": role}
        made = {"flags": model.flags, "transfer": transfer, "environment": environment, "tp_size": tp_size}
        return vllm_spec(f"waiting-{name}-tp{tp}-{side}", make(model), **made)

    with Servers(logs) as servers:
        prefill, decode = servers.start(spec("prefill", "kv_producer", 1), spec("decode", "kv_consumer", tp))
        for server in (prefill, decode):
            event_times(server.url, body(model.name, [0] * 40))
        time.sleep(SETTLING_S)
        idle = cores(decode, IDLE_S)
        arriving_idle = arriving(decode, model.name)
        prompt = [token % 256 for token in range(PROMPT_TOKENS)]
        keep = {"do_remote_decode": True, "do_remote_prefill": False}
        leg = post(f"{prefill.url}/v1/completions", body(model.name, prompt, max_tokens=1, kv_transfer_params=keep))
        asked = body(model.name, prompt, kv_transfer_params=leg["kv_transfer_params"])
        time.sleep(SETTLING_S)
        with ThreadPoolExecutor(1) as pool:
            with stopped(prefill):
                sent, answer = time.perf_counter(), pool.submit(event_times, decode.url, asked)
                time.sleep(0.3)
                waiting = cores(decode, WAITING_S)
                if answer.done():
                    print(f"  {name}: the request had its caches before the prefill instance stood still")
                    return None
                arriving_waiting = arriving(decode, model.name)
                went_on = time.perf_counter() - sent
            try:
                after = answer.result()[0] - went_on
            except (RuntimeError, OSError) as error:
                print(f"  {name}: {error}", flush=True)
                return None
    return Round(*(round(value, 3) for value in (idle, waiting, arriving_idle, arriving_waiting, after * 1e3)))


def summary(name: str, tp: int, rounds: Sequence[Round | None]) -> Result:
    done = [one for one in rounds if one is not None]

    def median(value: Callable[[Round], float]) -> float:
        return round(statistics.median(map(value, done)), 3) if done else float("nan")

    return Result(
        name,
        tp,
        idle_cores=median(lambda one: one.idle_cores),
        waiting_cores=median(lambda one: one.waiting_cores),
        arriving_idle=median(lambda one: one.arriving_idle),
        arriving_waiting=median(lambda one: one.arriving_waiting),
        first_token_after=median(lambda one: one.first_token_after),
        failed=len(rounds) - len(done),
    )


def row(result: Result) -> dict[str, Any]:
    """A line of the table; times in milliseconds."""
    return {
        "variant": result.variant,
        "tp": result.tp,
        "cores, idle": round(result.idle_cores, 2),
        "cores, waiting": round(result.waiting_cores, 2),
        "a new request's first token, idle": result.arriving_idle,
        "same, waiting": result.arriving_waiting,
        "first token after the prefill instance goes on": result.first_token_after,
        "failed": result.failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    connectors = {"pd": "PDConnector", "nixl-quiet": "NixlConnector"}
    parser.add_argument("--variants", nargs="+", choices=list(connectors), default=list(connectors))
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2], help="tensor-parallel sizes of decode")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each variant's servers")
    parser.add_argument("--into", type=Path, default=ROOT / "out" / "bench" / "waiting.json")
    options = parser.parse_args()
    options.into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        environments = {"pd": {}, "nixl-quiet": quiet_nixl.environment(Path(directory))}
        rounds: dict[tuple[str, int], list[Round | None]] = {(n, tp): [] for tp in options.tp for n in options.variants}
        for number in range(options.rounds):
            for (name, tp), taken in rounds.items():
                print(f"round {number + 1}, {name}, TP {tp} …", flush=True)
                logs = options.into.parent / "logs"
                taken.append(measure(connectors[name], environments[name], name, tp, logs))
                print(markdown([row(summary(name, tp, taken[-1:]))]), flush=True)
    rows = [row(summary(name, tp, taken)) for (name, tp), taken in rounds.items()]
    samples = {f"{name} TP {tp}": [asdict(one) for one in taken if one] for (name, tp), taken in rounds.items()}
    print(f"\nA decode instance that waits for caches:\n\n{markdown(rows)}\n")
    write(options.into, {"rows": rows, "rounds": samples})


if __name__ == "__main__":
    main()
