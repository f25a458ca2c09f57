"""Where the time to the first token goes: from the router's arrival to its first byte, by who spends it.

One prefill and one decode instance behind `vllm-pd proxy`; prompts one by one, as in `pull.py`. Every line is the mean
over all requests of what one of the processes counted of itself (`/metrics`), or what one line is more than others, and
is part of the line that it names; what nobody counts is the rest: HTTP, sockets between processes, waiting for a
processor. The first request is apart: its decode instance does not know the prefill instance yet, and nobody introduced
them. Before all that the same prompts go to an instance without a connector.

    python benchmarks/phases.py [--requests 100] [--mode pull|push] [--into out/bench/phases.json]
"""

from __future__ import annotations

import argparse
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from pull import body, event_times, prompts  # noqa: E402

from benchmarks.report import markdown, write  # noqa: E402
from examples.launch import Server, Servers, router_spec, vllm_spec  # noqa: E402
from examples.make_models import MODELS, Model, make  # noqa: E402

Sums = Mapping[tuple[str, str], tuple[float, float]]
"""Of a process's histograms: sum in seconds and count, by name and by `phase`, empty where there is none."""

ROUTER, PHASE = "vllm_pd_proxy_seconds", "vllm:pd_phase_seconds"
QUEUE, STEP = "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds"
FIRST_TOKEN = "vllm:time_to_first_token_seconds"
CLIENT = "client's first token"
LINES = (
    # what, who counted it, which of its histograms, and in which line it is
    ("first byte at the router", "router", (ROUTER, "first_byte"), CLIENT),
    ("prefill's answer", "router", (ROUTER, "prefill"), "first byte at the router"),
    ("prefill's first token", "prefill", (FIRST_TOKEN, ""), "prefill's answer"),
    ("prefill's queue", "prefill", (QUEUE, ""), "prefill's first token"),
    ("vLLM's step, prefill", "prefill", (STEP, ""), "prefill's first token"),
    ("decode's first token", "decode", (FIRST_TOKEN, ""), "first byte at the router"),
    ("decode's queue, caches included", "decode", (QUEUE, ""), "decode's first token"),
    ("receive", "decode", (PHASE, "total"), "decode's queue, caches included"),
    ("receive: until it is bound", "decode", (PHASE, "queue"), "receive"),
    ("receive: bytes", "decode", (PHASE, "transfer"), "receive"),
    ("receive: given to the transport", "decode", (PHASE, "post"), "receive: bytes"),
    ("receive: confirmed", "decode", (PHASE, "confirm"), "receive"),
    ("vLLM's step, decode", "decode", (STEP, ""), "decode's first token"),
)
BETWEEN = (
    # what, of which line it is what others leave, and these
    ("router, and HTTP of decode's leg", "first byte at the router", ("prefill's answer", "decode's first token")),
    ("decode's admission: before and behind the receive", "decode's queue, caches included", ("receive",)),
)
FIRST = (
    ("first request: decode's first token", "decode", (FIRST_TOKEN, ""), "first request: client's first token"),
    ("first request: receive", "decode", (PHASE, "total"), "first request: decode's first token"),
    ("first request: until it is bound", "decode", (PHASE, "queue"), "first request: receive"),
    ("first request: handshake", "decode", (PHASE, "handshake"), "first request: until it is bound"),
)
"""Of the request that links the two instances. The handshake is connecting; before it the peer's manifests are asked
for, which is in the time until the receive is bound."""
PLAIN = {"prefill's first token": FIRST_TOKEN, "prefill's queue": QUEUE, "vLLM's step, prefill": STEP}
"""Lines beside which stands what a plain instance takes for the same."""


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


def mean(before: Sums, after: Sums, key: tuple[str, str]) -> tuple[float, int]:
    """Milliseconds per observation between two looks at a process, NaN without any, and how many there were."""
    (first, had), (last, has) = before.get(key, (0.0, 0.0)), after.get(key, (0.0, 0.0))
    return round(1e3 * (last - first) / (has - had), 2) if has > had else float("nan"), int(has - had)


def means(
    before: Mapping[str, Sums], after: Mapping[str, Sums], lines: Sequence[tuple[str, str, tuple[str, str], str]]
) -> list[dict[str, Any]]:
    """A row for each line: milliseconds per request in the mean, and how many times it was counted."""
    rows = []
    for what, who, key, within in lines:
        ms, counted = mean(before[who], after[who], key)
        rows.append({"what": what, "part of": within, "counted": counted, "mean ms": ms})
    return rows


def with_between(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, and behind each line's last part what its parts leave."""
    by_name = {row["what"]: row for row in rows}
    for what, whole, parts in BETWEEN:
        left = by_name[whole]["mean ms"] - sum(by_name[part]["mean ms"] for part in parts)
        row = {"what": what, "part of": whole, "counted": by_name[whole]["counted"], "mean ms": round(left, 2)}
        rows = [*rows, row]
    order = [CLIENT, "first byte at the router", BETWEEN[0][0], *by_name]
    order.insert(order.index("receive"), BETWEEN[1][0])
    return sorted(rows, key=lambda row: order.index(row["what"]))


def client_ms(server: Server, model: str, prompts_: Sequence[Sequence[int]]) -> float:
    """Mean milliseconds to the first token of prompts one by one, as their client sees it."""
    asked = [event_times(server.url, body(model, prompt))[0] for prompt in prompts_]
    return round(1e3 * sum(asked) / len(asked), 2)


def plain(servers: Servers, model: Model, requests: int) -> dict[str, float]:
    """What an instance without a connector takes for the same prompts, in milliseconds, by line."""
    [server] = servers.start(vllm_spec("phases-plain", make(model), flags=model.flags))
    client_ms(server, model.name, prompts(10, 0))  # the first requests are slow
    before = sums(server)
    found = {CLIENT: client_ms(server, model.name, prompts(requests, 1))}
    after = sums(server)
    servers.stop(server)
    return found | {what: mean(before, after, (name, ""))[0] for what, name in PLAIN.items()}


def handed_over(servers: Servers, model: Model, requests: int, mode: str) -> list[dict[str, Any]]:
    """The rows of a pair behind a router."""
    roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
    transfers = {
        side: {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": {"mode": mode}}
        for side, role in roles.items()
    }
    instances = servers.start(
        *(vllm_spec(f"phases-{side}", make(model), flags=model.flags, transfer=transfers[side]) for side in roles)
    )
    spec = router_spec("phases-router", [instances[0].url], [instances[1].url])
    [router] = servers.start(spec.__class__(spec.name, (*spec.command, "--introduce", "off"), spec.port))
    processes = {"router": router, "prefill": instances[0], "decode": instances[1]}
    for server in instances:  # the first requests are slow
        client_ms(server, model.name, prompts(10, 2))

    def look() -> dict[str, Sums]:
        return {who: sums(server) for who, server in processes.items()}

    looks = [look()]
    first = client_ms(router, model.name, [[1] * 300])
    looks.append(look())
    client_ms(router, model.name, prompts(10, 0))
    looks.append(look())
    whole = client_ms(router, model.name, prompts(requests, 1))
    looks.append(look())
    rows = [{"what": CLIENT, "part of": "", "counted": requests, "mean ms": whole}]
    rows = with_between([*rows, *means(looks[2], looks[3], LINES)])
    rows.append({"what": f"first request: {CLIENT}", "part of": "", "counted": 1, "mean ms": first})
    return [*rows, *means(looks[0], looks[1], FIRST)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--mode", choices=("pull", "push"), default="pull")
    parser.add_argument("--into", type=Path, default=ROOT / "out" / "bench" / "phases.json")
    options = parser.parse_args()
    model = MODELS["gqa"]
    with Servers(options.into.parent / "phases-logs") as servers:
        alone = plain(servers, model, options.requests)
        rows = handed_over(servers, model, options.requests, options.mode)
    rows = [row | {"plain instance, mean ms": alone.get(row["what"])} for row in rows]
    print(markdown(rows))
    write(options.into, {"model": model.name, "mode": options.mode, "rows": rows})


if __name__ == "__main__":
    main()
