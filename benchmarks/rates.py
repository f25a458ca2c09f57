"""Time to first token and time between tokens against the rate of requests: 1P1D against two plain instances.

Both kinds have two instances on the same cores and a router in front: this project's for 1P1D; for the plain instances
the clients take turns between the two, which costs nothing. Requests arrive at random times (exponential gaps, the same
for both), with prompts of mixed lengths, stream their answer, and are measured at the client. Where a rate is more than
an instance can do, queues grow for as long as the run lasts: the figures of such a rate say that, and no more.

    python benchmarks/rates.py [--rates 0.5 1 2 4] [--seconds 20] [--into out/bench/rates.json]

Writes JSON, a table in Markdown and a plot beside it. On few cores prefill and decode share the processor, so what P/D
is for, that neither disturbs the other, shows only in the time between tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.report import write  # noqa: E402
from examples.launch import Server, Servers, router_spec, vllm_spec  # noqa: E402
from examples.make_models import MODELS, make  # noqa: E402

LENGTHS = (32, 900)
"""Shortest and longest prompt, in tokens; lengths are spread evenly in the logarithm."""
OUTPUT_TOKENS = 24
LIMIT = 120.0
"""Seconds after which a request counts as failed."""


@dataclass(frozen=True, slots=True)
class Request:
    """When it is sent, in seconds from the start, and its prompt."""

    at: float
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds: to the first token, and the gaps between the others."""

    first: float
    gaps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One kind at one rate. Times are milliseconds; `failed` counts requests without an answer."""

    kind: str
    rate: float
    requests: int
    failed: int
    first_median: float
    first_p95: float
    gap_median: float
    gap_p95: float


def arrivals(rate: float, seconds: float, name: str = "rates") -> list[Request]:
    """Requests of one run, the same for every kind; those of another name share no prompt with them."""
    generator = random.Random(f"{name} {rate}")
    requests, at = [], generator.expovariate(rate)
    while at < seconds:
        length = round(LENGTHS[0] * (LENGTHS[1] / LENGTHS[0]) ** generator.random())
        requests.append(Request(at, tuple(generator.randrange(256) for _ in range(length))))
        at += generator.expovariate(rate)
    return requests


async def ask(client: aiohttp.ClientSession, url: str, model: str, request: Request, start: float) -> Timing | None:
    """Send one request at its time and stream its answer; None if it failed."""
    await asyncio.sleep(max(0.0, start + request.at - time.monotonic()))
    body: dict[str, Any] = {"model": model, "prompt": list(request.prompt), "max_tokens": OUTPUT_TOKENS}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True}
    sent, moments = time.monotonic(), []
    try:
        async with asyncio.timeout(LIMIT), client.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                return None
            async for line in response.content:
                if line.startswith(b"data: {") and b'"error"' in line[:20]:
                    return None
                if line.startswith(b"data: {"):
                    moments.append(time.monotonic())
    except (aiohttp.ClientError, TimeoutError):
        return None
    if not moments:
        return None
    gaps = tuple(1e3 * (after - before) for before, after in itertools.pairwise(moments))
    return Timing(1e3 * (moments[0] - sent), gaps)


async def measure(
    kind: str, url_of: Callable[[int], str], model: str, rate: float, seconds: float, name: str = "rates"
) -> Point:
    """One rate."""
    requests = arrivals(rate, seconds, name)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        start = time.monotonic()
        found = await asyncio.gather(
            *(ask(client, url_of(number), model, one, start) for number, one in enumerate(requests))
        )
    done = [timing for timing in found if timing is not None]
    first = [timing.first for timing in done] or [float("nan")]
    gaps = [gap for timing in done for gap in timing.gaps] or [float("nan")]
    spread = (np.percentile(values, share) for values in (first, gaps) for share in (50, 95))
    return Point(kind, rate, len(requests), len(requests) - len(done), *(round(float(value), 2) for value in spread))


def run(kind: str, rates: Sequence[float], seconds: float, servers: Servers) -> list[Point]:
    """All rates of one kind, on fresh servers."""
    model = MODELS["gqa"]
    roles = {"1P1D": ("kv_producer", "kv_consumer"), "two plain": (None, None)}[kind]
    specs = [
        vllm_spec(
            f"{kind.replace(' ', '-')}-{number}",
            make(model),
            flags=model.flags,
            transfer={"kv_connector": "PDConnector", "kv_role": role} if role else None,
        )
        for number, role in enumerate(roles)
    ]
    instances: list[Server] = servers.start(*specs)
    if kind == "1P1D":
        instances += servers.start(router_spec("router", [instances[0].url], [instances[1].url]))
        urls = [instances[-1].url]
    else:
        urls = [instance.url for instance in instances]

    async def main() -> list[Point]:
        def url_of(number: int) -> str:
            return urls[number % len(urls)]

        await measure(kind, url_of, model.name, 1.0, 6.0, "first")  # which are slow
        return [await measure(kind, url_of, model.name, rate, seconds) for rate in rates]

    try:
        return asyncio.run(main())
    finally:
        servers.stop(*instances)


def table(points: Sequence[Point]) -> str:
    head = "| kind | requests/s | first token, median | p95 | between tokens, median | p95 | failed |"
    rows = [
        f"| {p.kind} | {p.rate:g} | {p.first_median:.0f} ms | {p.first_p95:.0f} ms | {p.gap_median:.1f} ms | "
        f"{p.gap_p95:.1f} ms | {p.failed} of {p.requests} |"
        for p in points
    ]
    return "\n".join([head, "|---|---|---|---|---|---|---|", *rows])


def plot(points: Sequence[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4))
    for panel, name, title in zip(
        panels, ("first", "gap"), ("time to first token", "time between tokens"), strict=True
    ):
        for color, kind in enumerate(dict.fromkeys(p.kind for p in points)):
            line = [p for p in points if p.kind == kind]
            rates = [p.rate for p in line]
            panel.plot(rates, [getattr(p, f"{name}_median") for p in line], "o-", color=f"C{color}", label=kind)
            panel.plot(rates, [getattr(p, f"{name}_p95") for p in line], "x:", color=f"C{color}", label=f"{kind}, p95")
        panel.set(title=title, xlabel="requests per second", ylabel="ms", yscale="log")
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.5, 1.0, 2.0, 4.0], help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which requests arrive, for each rate")
    parser.add_argument("--into", type=Path, default=ROOT / "out" / "bench" / "rates.json")
    options = parser.parse_args()
    options.into.parent.mkdir(parents=True, exist_ok=True)
    with Servers(options.into.parent / "rates-logs") as servers:
        points = [p for kind in ("two plain", "1P1D") for p in run(kind, options.rates, options.seconds, servers)]
    write(options.into, {"rows": [asdict(point) for point in points]})
    text = table(points)
    options.into.with_suffix(".md").write_text(text + "\n")
    plot(points, options.into.with_suffix(".png"))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
