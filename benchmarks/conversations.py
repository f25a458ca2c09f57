"""What a conversation's later turns cost: time to the first token, and tokens that prefill computes.

Conversations of five turns, one by one, through a prefill and a decode instance. Every turn's prompt is the last one's,
its answer, and what the client says next. The prefill instance has no prefix cache: it stands for another of several
than the one that had the last turn. The time to the first token is that of the prefill leg and the decode instance's
own (`vllm:time_to_first_token_seconds`) together; what prefill computes is `vllm:prompt_tokens_by_source`. It fails (1)
if a variant's answers are not the first one's.

    off          PDConnector: every turn is prefilled whole
    on           PDConnector with `conversations`
    on-push      the same in mode push
    nixl-quiet   vLLM's in-tree NixlConnector with `bidirectional_kv_xfer` (see `quiet_nixl`)

    python benchmarks/conversations.py [--model gqa] [--conversations 4] [--into out/bench/conversations.json]
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

import quiet_nixl  # noqa: E402
from pull import body, handed_over  # noqa: E402

from benchmarks.report import write  # noqa: E402
from examples.launch import Server, Servers, post, vllm_spec  # noqa: E402
from examples.make_models import MODELS, make  # noqa: E402

TURNS, FIRST_TOKENS, SAID_TOKENS, ANSWER_TOKENS = 5, 1000, 60, 40
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "off": ("PDConnector", {}),
    "on": ("PDConnector", {"conversations": True}),
    "on-push": ("PDConnector", {"conversations": True, "mode": "push"}),
    "nixl-quiet": ("NixlConnector", {"bidirectional_kv_xfer": True}),
}


def series(server: Server, name: str, label: str = "") -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        page = answer.read().decode()
    return sum(map(float, re.findall(rf"^vllm:{name}\{{[^}}]*{label}[^}}]*\}} (\S+)$", page, re.MULTILINE)))


def computed(server: Server) -> float:
    return series(server, "prompt_tokens_by_source_total", 'source="local_compute"')


def conversation(prefill: Server, decode: Server, model: str, seed: int, both_ways: bool) -> dict[str, list[Any]]:
    """One conversation: per turn the milliseconds to the first token, tokens that prefill computed, and the answer."""
    generator, prompt, kept = random.Random(seed), list[int](), dict[str, Any](ASK)
    found: dict[str, list[Any]] = {"first_token_ms": [], "computed": [], "answers": []}
    for turn in range(TURNS):
        prompt += [generator.randrange(256) for _ in range(SAID_TOKENS if turn else FIRST_TOKENS)]
        before, waited, began = computed(prefill), series(decode, "time_to_first_token_seconds_sum"), time.monotonic()
        handed = post(f"{prefill.url}/v1/completions", body(model, prompt, max_tokens=1, kv_transfer_params=kept))
        spent = time.monotonic() - began
        params = handed_over(handed)
        request = body(model, prompt, max_tokens=ANSWER_TOKENS, kv_transfer_params=params, return_token_ids=True)
        answer = post(f"{decode.url}/v1/completions", request)
        tokens = answer["choices"][0]["token_ids"]
        spent += series(decode, "time_to_first_token_seconds_sum") - waited
        found["first_token_ms"].append(round(1e3 * spent, 2))
        found["computed"].append(round(computed(prefill) - before))
        found["answers"].append(tokens)
        kept = (answer.get("kv_transfer_params") or ASK) if both_ways else ASK
        prompt += tokens
    return found


def row(variant: str, runs: dict[str, list[Any]]) -> dict[str, Any]:
    """A variant's figures by turn: the median and the longest time to the first token, and the tokens that prefill
    computed, the most in any conversation."""
    times, computed = ([list(turn) for turn in zip(*runs[key], strict=True)] for key in ("first_token_ms", "computed"))
    return {
        "variant": variant,
        "conversations": len(runs["computed"]),
        **{f"first token {turn}, ms": round(statistics.median(each), 1) for turn, each in enumerate(times, 1)},
        "longest of turns 2 on, ms": round(max(map(max, times[1:])), 1),
        **{f"computed {turn}": max(each) for turn, each in enumerate(computed, 1)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--model", choices=MODELS, default="gqa")
    parser.add_argument("--conversations", type=int, default=4, help="per variant, after one that is not counted")
    parser.add_argument("--into", type=Path, default=ROOT / "out" / "bench" / "conversations.json")
    arguments = parser.parse_args()
    model, results, rows = MODELS[arguments.model], dict[str, Any](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as directory, Servers(Path(directory)) as servers:
        quiet = quiet_nixl.environment(Path(directory))
        for name in arguments.variants:
            connector, extra = VARIANTS[name]
            roles = ("kv_both", "kv_both") if connector == "NixlConnector" else ("kv_producer", "kv_consumer")
            specs = [
                vllm_spec(
                    f"{name}-{side}",
                    make(model),
                    flags=[*model.flags, "--block-size", str(model.block_size), *flags],
                    transfer={"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": extra},
                    environment={**model.environment, **(quiet if connector == "NixlConnector" else {})},
                )
                for side, role, flags in zip(
                    ("prefill", "decode"), roles, (["--no-enable-prefix-caching"], []), strict=True
                )
            ]
            prefill, decode = servers.start(*specs)
            try:
                runs = [
                    conversation(prefill, decode, make(model).name, seed, bool(extra))
                    for seed in range(arguments.conversations + 1)
                ][1:]
            finally:
                servers.stop(prefill, decode)
            results[name] = {key: [run[key] for run in runs] for key in runs[0]}
            rows.append(row(name, results[name]))
            print(rows[-1], flush=True)
    answers = [result.pop("answers") for result in results.values()]
    for line, each in zip(rows, answers, strict=True):
        line["as the first variant's"] = sum(own == first for own, first in zip(each, answers[0], strict=True))
    write(arguments.into, {"model": arguments.model, "rows": rows, "runs": results})
    return 0 if all(each == answers[0] for each in answers) else 1


if __name__ == "__main__":
    raise SystemExit(main())
