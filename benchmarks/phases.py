"""Where the time to the first token goes: from the router's arrival to its first byte, by who spends it.

One prefill and one decode instance behind `vllm-pd proxy`, which introduced them; prompts one by one, as in `pull.py`.
Every line is the mean over all requests of what one of the processes counted of itself (`/metrics`), and is part of
the line that it names; what nobody counts is the rest: HTTP, sockets between processes, waiting for a processor.

    python benchmarks/phases.py [--requests 100] [--mode pull|push] [--into out/bench/phases.json]
"""

from __future__ import annotations

import argparse
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from pull import body, event_times, prompts  # noqa: E402

from benchmarks.report import markdown, write  # noqa: E402
from examples.launch import Server, Servers, router_spec, vllm_spec  # noqa: E402
from examples.make_models import MODELS, make  # noqa: E402

Sums = Mapping[tuple[str, str], tuple[float, float]]
"""Of a process's histograms: sum in seconds and count, by name and by `phase`, empty where there is none."""

ROUTER, PHASE = "vllm_pd_proxy_seconds", "vllm:pd_phase_seconds"
QUEUE, STEP = "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds"
FIRST_TOKEN = "vllm:time_to_first_token_seconds"
LINES = (
    # what, who counted it, which of its histograms, and in which line it is
    ("first byte at the router", "router", (ROUTER, "first_byte"), "client's first token"),
    ("prefill's answer", "router", (ROUTER, "prefill"), "first byte at the router"),
    ("prefill's queue", "prefill", (QUEUE, ""), "prefill's answer"),
    ("prefill's step", "prefill", (STEP, ""), "prefill's answer"),
    ("decode's first token", "decode", (FIRST_TOKEN, ""), "first byte at the router"),
    ("decode's queue, caches included", "decode", (QUEUE, ""), "decode's first token"),
    ("receive", "decode", (PHASE, "total"), "decode's queue, caches included"),
    ("receive: until it is bound", "decode", (PHASE, "queue"), "receive"),
    ("receive: given to the transport", "decode", (PHASE, "post"), "receive"),
    ("receive: bytes", "decode", (PHASE, "transfer"), "receive"),
    ("receive: confirmed", "decode", (PHASE, "confirm"), "receive"),
    ("decode's step", "decode", (STEP, ""), "decode's first token"),
)


def sums(server: Server) -> Sums:
    """The histograms of a process now."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for sample in (sample for family in families for sample in family.samples):
        name, _, kind = sample.name.rpartition("_")
        if kind in ("sum", "count"):
            key = name, sample.labels.get("phase", "")
            total, count = found.get(key, (0.0, 0.0))
            found[key] = (total + sample.value, count) if kind == "sum" else (total, count + sample.value)
    return found


def means(before: Mapping[str, Sums], after: Mapping[str, Sums]) -> list[dict[str, Any]]:
    """A row for each line: milliseconds per request in the mean, and how many times it was counted."""
    rows = []
    for what, who, key, within in LINES:
        (first, had), (last, has) = before[who].get(key, (0.0, 0.0)), after[who].get(key, (0.0, 0.0))
        mean = round(1e3 * (last - first) / (has - had), 2) if has > had else float("nan")
        rows.append({"what": what, "part of": within, "mean ms": mean, "counted": int(has - had)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--mode", choices=("pull", "push"), default="pull")
    parser.add_argument("--into", type=Path, default=ROOT / "out" / "bench" / "phases.json")
    options = parser.parse_args()
    model = MODELS["gqa"]
    roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
    with Servers(options.into.parent / "phases-logs") as servers:
        extra = {"mode": options.mode}
        transfers = {
            side: {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": extra}
            for side, role in roles.items()
        }
        instances = servers.start(
            *(vllm_spec(f"phases-{side}", make(model), flags=model.flags, transfer=transfers[side]) for side in roles)
        )
        spec = router_spec("phases-router", [instances[0].url], [instances[1].url])
        [router] = servers.start(spec.__class__(spec.name, (*spec.command, "--introduce", "on"), spec.port))
        processes = {"router": router, "prefill": instances[0], "decode": instances[1]}
        for prompt in prompts(10, 0):  # the first requests are slow
            event_times(router.url, body(model.name, prompt))
        before = {who: sums(server) for who, server in processes.items()}
        asked = [event_times(router.url, body(model.name, prompt))[0] for prompt in prompts(options.requests, 1)]
        after = {who: sums(server) for who, server in processes.items()}
    client = {"what": "client's first token", "part of": "", "counted": len(asked)}
    rows = [client | {"mean ms": round(1e3 * sum(asked) / len(asked), 2)}, *means(before, after)]
    print(markdown(rows))
    write(options.into, {"model": model.name, "mode": options.mode, "rows": rows})


if __name__ == "__main__":
    main()
