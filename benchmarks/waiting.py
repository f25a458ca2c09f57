"""What a decode instance's processes burn while a request of theirs only waits for its caches.

Measured are the processor seconds per second of the decode instance's engine core and workers together (not of its HTTP
server), idle and waiting. It has one request that waits and nothing to compute, in two cases:

- nothing moves: the request's prefill has finished; then the prefill instance is stopped (SIGSTOP), and the decode leg
  is sent. Also measured are the time to the first token of plain requests that arrive meanwhile, beside the same on the
  idle instance; and, once the prefill instance goes on, how long the waiting request takes to its first token. It is
  the first request to its peer, since a known peer's memory may be read without its help.
- bytes move: a longer prompt is read over a link so slow that it takes seconds; then the link is fast again. Here no
  plain requests arrive, since the slow link is also theirs, and the first token is no figure: what is on the way is
  lost when the limit is lifted.

Tensor-parallel sizes are the decode instance's. As rival vLLM's in-tree NixlConnector with a sleeping progress thread
and unpinned workers (see `quiet_nixl`), in turns in the same run; each round has fresh servers. A round in which a case
failed is made again, up to twice, and every failure is counted.

Everything runs in a network namespace of its own, as in `overlap.py`, with NIXL confined to TCP. Needs root or the
right to make namespaces.

    python benchmarks/waiting.py [--variants pd nixl-quiet] [--tp 1 2] [--rounds 2] [--into out/bench/waiting.json]
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

import quiet_nixl  # noqa: E402
from overlap import INSIDE, enter_namespace, slow_down  # noqa: E402
from pull import body, event_times, processor_seconds  # noqa: E402

from benchmarks.report import markdown, write  # noqa: E402
from examples.launch import Server, Servers, post, vllm_spec  # noqa: E402
from examples.make_models import MODELS, make  # noqa: E402

PROMPT_TOKENS, LONG_TOKENS = 300, 1900
"""Of the request whose prefill instance stands still, and of the one that is read over a slow link."""
SLOW_MBIT = 20.0
"""Over which the long prompt's 15.6 MB take six seconds."""
IDLE_S = 3.0
WAITING_S, ARRIVING_S = 2.0, 1.5
"""Together less than the 5 s after which the in-tree connector gives up its handshake, by a second, in which the
prefill instance answers."""
SETTLING_S = 1.5
"""vLLM's workers poll for a second after the last step."""
ARRIVING = 15
"""Plain requests whose first token is timed, on the idle instance and again while the other request waits; fewer where
ARRIVING_S are over."""
GOAL_CORES = 0.2
ATTEMPTS = 3
"""At most so many starts for one round."""
CONNECTORS = {"pd": "PDConnector", "nixl-quiet": "NixlConnector"}
TCP = {"TLS": "tcp", "NET_DEVICES": "lo"}
STILL, MOVING = "nothing moves", "bytes move"


@dataclass(frozen=True, slots=True)
class Round:
    """One case of one start. Cores are processor seconds per second, times are milliseconds, NaN if not measured.
    `failed`: the request got no caches in the end."""

    case: str
    idle_cores: float
    waiting_cores: float
    arriving_idle: float
    arriving_waiting: float
    first_token_after: float
    failed: bool


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
    times: list[float] = []
    until = time.monotonic() + ARRIVING_S
    while len(times) < ARRIVING and (not times or time.monotonic() < until):
        time.sleep(0.05)
        times.append(event_times(server.url, body(model, [len(times)] * 20, max_tokens=1))[0])
    return statistics.median(times) * 1e3


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    # Stopped processes take no SIGTERM: who ends this one must not leave them so.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        os.killpg(server.process.pid, signal.SIGSTOP)
        yield
    finally:
        os.killpg(server.process.pid, signal.SIGCONT)
        signal.signal(signal.SIGTERM, before)


@contextmanager
def slow_link() -> Iterator[None]:
    slow_down(SLOW_MBIT)
    try:
        yield
    finally:
        slow_down(None)


@contextmanager
def first_in_line() -> Iterator[None]:
    """This thread gets a core whenever it wants one, if the system allows. Else engines that poll without pause, which
    are more than two cores with TP 2, may keep it from one until the rival's 5 s are over. It hardly ever wants one."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


class Pair:
    """A prefill and a decode instance of one variant, and what is measured on them."""

    def __init__(self, servers: Servers, variant: str, tp: int, environment: Mapping[str, str]) -> None:
        self._model = model = MODELS["gqa"]
        connector = CONNECTORS[variant]
        ours: dict[str, Any] = {"kv_connector_extra_config": {"transport_options": {"ucx": TCP}}}
        extra = ours if variant == "pd" else {}
        outside = {f"UCX_{key}": value for key, value in TCP.items()} | dict(environment)

        def spec(side: str, role: str, tp_size: int) -> Any:
            transfer = {"kv_connector": connector, "kv_role": role, **extra}
            made: dict[str, Any] = {"flags": model.flags, "transfer": transfer, "environment": outside}
            return vllm_spec(f"waiting-{variant}-tp{tp}-{side}", make(model), tp_size=tp_size, **made)

        self._prefill, self._decode = servers.start(
            spec("prefill", "kv_producer", 1), spec("decode", "kv_consumer", tp)
        )
        for server in (self._prefill, self._decode):
            event_times(server.url, body(model.name, [0] * 40))
        time.sleep(SETTLING_S)
        with first_in_line():
            self._idle = cores(self._decode, IDLE_S)
            self._arriving_idle = arriving(self._decode, model.name)

    def _prefilled(self, tokens: int) -> dict[str, Any]:
        """The decode leg of a prompt whose prefill has finished."""
        prompt = [token % 251 for token in range(tokens, 0, -1)]
        keep = {"do_remote_decode": True, "do_remote_prefill": False}
        asked = body(self._model.name, prompt, max_tokens=1, kv_transfer_params=keep)
        leg = post(f"{self._prefill.url}/v1/completions", asked)
        time.sleep(SETTLING_S)
        return body(self._model.name, prompt, kv_transfer_params=leg["kv_transfer_params"])

    def case(self, case: str) -> Round | None:
        """Measure a case; None if its request was over too early."""
        asked = self._prefilled(PROMPT_TOKENS if case == STILL else LONG_TOKENS)
        came = after = float("nan")
        failed = False
        with ThreadPoolExecutor(1) as pool:
            with first_in_line(), stopped(self._prefill) if case == STILL else slow_link():
                sent, answer = time.perf_counter(), pool.submit(event_times, self._decode.url, asked)
                time.sleep(0.3)
                waiting = cores(self._decode, WAITING_S)
                if answer.done():
                    why, late = answer.exception() or "served", time.perf_counter() - sent
                    print(f"  {case}: over before that was measured, within {late:.1f} s: {why}", flush=True)
                    return None
                if case == STILL:
                    came = arriving(self._decode, self._model.name)
                went_on = time.perf_counter() - sent
            try:
                after = 1e3 * (answer.result()[0] - went_on)
            except (RuntimeError, OSError) as error:
                print(f"  {case}: {error}", flush=True)
                failed = True
        if case == STILL:
            figures = (self._idle, waiting, self._arriving_idle, came, after)
        else:  # lifting the limit loses what was on the way, so the rest says nothing
            figures = (self._idle, waiting, came, came, came)
        return Round(case, *(round(value, 3) for value in figures), failed=failed)


def served(rounds: Sequence[Round | None]) -> bool:
    """Whether a request of these got its caches."""
    return any(one is not None and not one.failed for one in rounds)


def measure(variant: str, tp: int, environment: Mapping[str, str], logs: Path) -> dict[str, list[Round | None]]:
    """One round: every case once, and again on fresh servers while one has failed. By case, what each start gave."""
    taken: dict[str, list[Round | None]] = {STILL: [], MOVING: []}
    for _ in range(ATTEMPTS):
        with Servers(logs) as servers:
            pair = Pair(servers, variant, tp, environment)
            for case, rounds in taken.items():  # the first one is the first request to its peer
                if not served(rounds):
                    rounds.append(pair.case(case))
        if all(map(served, taken.values())):
            break
    return taken


def row(case: str, variant: str, tp: int, rounds: Sequence[Round | None]) -> dict[str, Any]:
    """A line of the table: medians of what the rounds have, also of those whose request failed in the end; times in
    milliseconds."""

    def median(value: Callable[[Round], float]) -> float:
        had = [value(one) for one in rounds if one is not None]
        return statistics.median([figure for figure in had if not math.isnan(figure)] or [float("nan")])

    return {
        "case": case,
        "variant": variant,
        "tp": tp,
        "cores, idle": round(median(lambda one: one.idle_cores), 2),
        "cores, waiting": round(median(lambda one: one.waiting_cores), 2),
        "goal": GOAL_CORES,
        "a new request's first token, idle": median(lambda one: one.arriving_idle),
        "same, waiting": median(lambda one: one.arriving_waiting),
        "first token after it goes on": median(lambda one: one.first_token_after),
        "measured": sum(one is not None for one in rounds),
        "failed": sum(one is None or one.failed for one in rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--variants", nargs="+", choices=list(CONNECTORS), default=list(CONNECTORS))
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2], help="tensor-parallel sizes of decode")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each variant's servers")
    parser.add_argument("--into", type=Path, default=ROOT / "out" / "bench" / "waiting.json")
    options = parser.parse_args()
    if INSIDE not in os.environ:
        enter_namespace()
    options.into.parent.mkdir(parents=True, exist_ok=True)
    taken: dict[tuple[str, str, int], list[Round | None]] = {
        (case, name, tp): [] for case in (STILL, MOVING) for tp in options.tp for name in options.variants
    }
    with tempfile.TemporaryDirectory() as directory:
        environments = {"pd": {}, "nixl-quiet": quiet_nixl.environment(Path(directory))}
        for number in range(options.rounds):
            for name, tp in ((name, tp) for tp in options.tp for name in options.variants):
                print(f"round {number + 1}, {name}, TP {tp} …", flush=True)
                found = measure(name, tp, environments[name], options.into.parent / "logs")
                for case, rounds in found.items():
                    taken[case, name, tp] += rounds
                print(markdown([row(case, name, tp, rounds) for case, rounds in found.items()]), flush=True)
    rows = [row(*about, rounds) for about, rounds in taken.items()]
    samples = {
        f"{case}, {name} TP {tp}": [asdict(one) for one in rounds if one] for (case, name, tp), rounds in taken.items()
    }
    print(f"\nA decode instance that waits for caches:\n\n{markdown(rows)}\n")
    write(options.into, {"rows": rows, "rounds": samples})


if __name__ == "__main__":
    main()
