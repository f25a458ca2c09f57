"""Whether pushes end where every process of P and D competes for two cores: the pairs that once failed at deadlines.

A request waits at decode while its prefill computes, several workers on each side, more than there are cores, and
nothing makes vLLM's workers polite: they poll as they do for users. The router hands over concurrently, so decode waits
from the first moment. Of the REQUESTS prompts each is sent by itself, then all again AT_ONCE at a time. Every deadline
is the default. A plain instance with decode's ranks answers the same prompts in the same run: what vLLM's own steps
take on such a machine; and the tokens are compared with its.

    python benchmarks/busy_pairs.py [--pairs mla gqa6] [--requests 18] [--into out/bench/busy_pairs.json]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import urllib.error
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.report import markdown, write  # noqa: E402
from examples.launch import Servers, Spec, post, router_spec, vllm_spec  # noqa: E402
from examples.make_models import MODELS, make  # noqa: E402

AT_ONCE = 6
OUTPUT_TOKENS = 8
PATIENCE_S = 300.0
LENGTHS = (40, 900)
"""Shortest and longest prompt, in tokens."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two instances of a model: tensor-parallel sizes and block sizes in tokens, prefill's first."""

    family: str
    tp: tuple[int, int]
    blocks: tuple[int, int]
    transport: str

    @property
    def name(self) -> str:
        blocks = "" if self.blocks[0] == self.blocks[1] else f", blocks {self.blocks[0]} → {self.blocks[1]}"
        return f"{self.family}, TP {self.tp[0]} → {self.tp[1]}{blocks}, {self.transport}"


PAIRS = {
    "mla": Pair("mla", (1, 2), (16, 16), "nixl"),
    "gqa6": Pair("gqa6", (3, 2), (64, 32), "mooncake"),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds to the whole answer, and its text; None with what failed."""

    seconds: float
    text: str | None
    error: str = ""


def prompts(count: int) -> list[list[int]]:
    """The same in every run, and no two with a common prefix."""
    draw = random.Random(24)
    return [[draw.randrange(256) for _ in range(draw.randint(*LENGTHS))] for _ in range(count)]


def ask(url: str, model: str, prompt: Sequence[int]) -> Answer:
    body = {"model": model, "prompt": list(prompt), "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    try:
        answer = post(f"{url}/v1/completions", body, timeout=PATIENCE_S)
    except urllib.error.HTTPError as error:
        return Answer(
            time.perf_counter() - began, None, f"HTTP {error.code}: {error.read(500).decode(errors='replace')}"
        )
    except OSError as error:
        return Answer(time.perf_counter() - began, None, str(error))
    return Answer(time.perf_counter() - began, answer["choices"][0]["text"])


def specs(pair: Pair) -> tuple[Spec, Spec, Spec]:
    """The prefill, decode and plain instance of a pair."""
    model = MODELS[pair.family]

    def spec(side: str, role: str | None, tp_size: int, block: int) -> Spec:
        extra = {"transport": pair.transport, "mode": "push"}
        transfer = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": extra}
        flags = (*model.flags, "--block-size", str(block), "--no-enable-prefix-caching")
        return vllm_spec(
            f"busy-{pair.family}-{side}",
            make(model),
            flags=flags,
            tp_size=tp_size,
            transfer=transfer if role else None,
            environment=dict(model.environment),
        )

    return (
        spec("prefill", "kv_producer", pair.tp[0], pair.blocks[0]),
        spec("decode", "kv_consumer", pair.tp[1], pair.blocks[1]),
        spec("plain", None, pair.tp[1], pair.blocks[1]),
    )


def rounds(url: str, model: str, asked: Sequence[Sequence[int]]) -> Iterator[tuple[str, list[Answer]]]:
    """The prompts one by one, and again several at a time."""
    yield "one by one", [ask(url, model, prompt) for prompt in asked]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield f"{AT_ONCE} at a time", list(pool.map(lambda prompt: ask(url, model, prompt), asked))


def measure(pair: Pair, count: int, logs: Path) -> list[dict[str, Any]]:
    """A row for each way of asking: of the pair, and of the plain instance."""
    prefill, decode, plain = specs(pair)
    asked, name = prompts(count), MODELS[pair.family].name
    answers: dict[tuple[str, str], list[Answer]] = {}
    with Servers(logs) as servers:
        [alone] = servers.start(plain)
        answers |= {("plain, decode's ranks", how): found for how, found in rounds(alone.url, name, asked)}
        servers.stop(alone)
        instances = servers.start(prefill, decode)
        router = router_spec(f"busy-{pair.family}-router", [instances[0].url], [instances[1].url])
        command = (*router.command, "--handoff", "concurrent")
        [router_server] = servers.start(router.__class__(router.name, command, router.port))
        answers |= {("pd, pushed", how): found for how, found in rounds(router_server.url, name, asked)}
    return [row(pair, variant, how, answers) for variant, how in answers]


def row(pair: Pair, variant: str, how: str, answers: dict[tuple[str, str], list[Answer]]) -> dict[str, Any]:
    found, plain = answers[variant, how], answers["plain, decode's ranks", "one by one"]
    for one in found:
        if one.error:
            print(f"  {pair.name}, {variant}, {how}: {one.error}", flush=True)
    ended = [1e3 * one.seconds for one in found if one.text is not None] or [float("nan")]
    return {
        "pair": pair.name,
        "variant": variant,
        "asked": how,
        "sent": len(found),
        "answered": sum(one.text is not None for one in found),
        "as the plain instance's": sum(
            a.text is not None and a.text == b.text for a, b in zip(found, plain, strict=True)
        ),
        "median ms": round(median(ended), 1),
        "longest ms": round(max(ended), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--requests", type=int, default=18)
    parser.add_argument("--into", type=Path, default=ROOT / "out" / "bench" / "busy_pairs.json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.pairs:
        rows += measure(PAIRS[name], options.requests, options.into.parent / "logs")
        print(markdown(rows), flush=True)
    write(options.into, {"rows": rows})


if __name__ == "__main__":
    main()
