"""What an operator sees of a real pair behind the router: one trace from the client to both instances, counts that
agree on both sides, the tables of `vllm-pd top` and `/ui`, and the record of a request, moved again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.launch import Server, Spec, post, router_spec, vllm_spec
from examples.make_models import MODELS, make
from tests.support.otlp import Collector, Span
from tests.support.ports import free_port
from tests.support.servers.cluster import PATIENCE, until
from tests.support.servers.pairs import Pairs
from tests.support.servers.workload import completion, prompts
from vllm_pd_connector import __version__
from vllm_pd_connector.observability.stats import FailureKind, NotHeld
from vllm_pd_connector.routing.overview import Look, read

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

FAMILY = "gqa"
TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SPANS = {
    "POST /v1/completions", "prefill", "decode", "first_byte",
    "pd.prefill", "pd.hold", "pd.receive", "pd.queue", "pd.handshake", "pd.transfer", "pd.confirm",
}  # fmt: skip
EXPORTED_S = 60.0


def records_of(logs: Path, mode: str, side: str) -> Path:
    """Where an instance's records of receives go."""
    return logs / f"seen-{mode}-{side}-records"


@contextmanager
def fleet(pairs: Pairs, mode: str, collector: Collector) -> Iterator[tuple[Server, Server, Server, str]]:
    """A prefill and a decode instance, a router before them, and where its operators ask."""
    model, admin = MODELS[FAMILY], free_port()

    def instance(side: str, role: str) -> Spec:
        return vllm_spec(
            f"seen-{mode}-{side}",
            make(model),
            flags=[*model.flags, "--block-size", str(model.block_size), "--otlp-traces-endpoint", collector.endpoint],
            transfer={
                "kv_connector": "PDConnector",
                "kv_role": role,
                "engine_id": side,
                "kv_connector_extra_config": {
                    "mode": mode,
                    "nixl_series": True,
                    "trace_dir": str(records_of(pairs.servers.logs, mode, side)),
                    **PATIENCE,
                },
            },
            environment=model.environment,
        )

    prefill, decode = pairs.servers.start(instance("prefill", "kv_producer"), instance("decode", "kv_consumer"))
    spec = router_spec(f"seen-{mode}-router", [prefill.url], [decode.url])
    more = ("--admin-port", str(admin), "--otlp-traces-endpoint", collector.endpoint)
    [router] = pairs.servers.start(replace(spec, command=(*spec.command, *more)))
    try:
        yield prefill, decode, router, f"http://127.0.0.1:{admin}"
    finally:
        pairs.servers.stop(prefill, decode, router)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_request_is_seen_from_the_client_to_both_instances(pairs: Pairs, mode: str) -> None:
    pairs.end()
    first, second = prompts("seen", (150, 170))
    with Collector() as collector, fleet(pairs, mode, collector) as (prefill, decode, router, admin):
        headers = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}
        assert post(f"{router.url}/v1/completions", completion(FAMILY, first), headers=headers)["choices"]
        _check_spans(collector.wait_for({*SPANS, "llm_request"}, TRACE, EXPORTED_S))
        until(lambda: look(prefill).values["given_requests_total"] == 1, "the prefill side to count what it gave")
        _check_counts(look(prefill), look(decode))
        _check_first_lines(prefill, decode, mode)
        _check_tables(prefill, decode, admin)
        page(f"{admin}/ui")
        records = records_of(decode.log.parent, mode, "decode")
        tool("trace", "next", str(records))
        post(f"{router.url}/v1/completions", completion(FAMILY, second))
        _check_record(records, mode)
        until(
            lambda: _shows_a_rate(page(f"{admin}/ui"), prefill.log.with_name(f"ui-{mode}.html")), "the page to show it"
        )
        if mode == "pull":
            _check_bench(router, prefill, decode)


def tool(*words: str) -> dict[str, Any]:
    """What a command answers."""
    command = [sys.executable, "-m", "vllm_pd_connector.cli", *words, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return dict(json.loads(ended.stdout))


def _check_record(records: Path, mode: str) -> None:
    """The request after the order is recorded, and no other, and its bytes move again without the servers."""
    until(lambda: any(records.glob("trace-*.jsonl")), "the request's record")
    [file] = records.glob("trace-*.jsonl")
    [record] = tool("trace", "show", str(file))["records"]
    assert (record["ok"], record["way"]) == (True, mode) and record["moved"]["bytes"] > 0
    assert record["plan"]["allowed"] and {"queue", "transfer"} <= {stage["name"] for stage in record["stages"]}
    [again] = tool("trace", "replay", str(file))["replays"]
    assert again["wrong"] == [] and (mode == "push" or again["moved"]["bytes"] == record["moved"]["bytes"])


def _check_bench(router: Server, prefill: Server, decode: Server) -> None:
    """The same load by way of both instances, and on one alone."""
    before = look(prefill).values["given_requests_total"]
    words = ["--requests", "6", "--prompt-tokens", "200", "--answer-tokens", "8", "--at-once", "2", "--json"]
    command = [sys.executable, "-m", "vllm_pd_connector.cli", "bench", f"pd={router.url}", f"plain={decode.url}"]
    ended = subprocess.run([*command, *words], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    pd, plain = json.loads(ended.stdout)["setups"]
    assert (pd["name"], pd["completed"], plain["name"], plain["completed"]) == ("pd", 6, "plain", 6)
    assert 0 < pd["p50_ttft_ms"] <= pd["p99_ttft_ms"] < pd["p99_e2el_ms"] and plain["p50_ttft_ms"] > 0
    until(lambda: look(prefill).values["given_requests_total"] >= before + 6, "the first set-up's caches to be counted")


def _shows_a_rate(text: str, kept: Path) -> bool:
    """Whether something moved between the last two looks; the page is kept, for who wants to see it."""
    kept.write_text(text)
    return re.search(r"<td>[1-9][\d.]* [kM]B/s</td>", text) is not None


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def look(server: Server) -> Look:
    return read(page(f"{server.url}/metrics"), server.url, 0.0)


def _check_spans(spans: dict[str, Span]) -> None:
    whole = spans["POST /v1/completions"]
    assert whole.parent == CLIENT
    assert {spans[name].parent for name in ("prefill", "decode", "first_byte")} == {whole.id}
    assert {spans[name].parent for name in ("pd.prefill", "pd.hold")} == {spans["prefill"].id}
    assert spans["pd.receive"].parent == spans["decode"].id
    assert {spans[f"pd.{p}"].parent for p in ("queue", "handshake", "transfer", "confirm")} == {spans["pd.receive"].id}
    assert spans["pd.hold"].links == {spans["pd.receive"].id}, "the prefill's lease is linked with who read it"
    assert not [name for name, span in spans.items() if span.failed]
    assert not [name for name, span in spans.items() if span.began > span.ended]
    assert spans["pd.receive"].ended <= spans["first_byte"].ended


def _check_counts(prefill: Look, decode: Look) -> None:
    moved = decode.values["received_bytes_total"]
    assert moved > 0 and prefill.values["given_bytes_total"] == moved
    assert prefill.links == {("to", "decode", "nixl"): moved} and decode.links == {("from", "prefill", "nixl"): moved}
    kinds = {f"{of}{kind.value}" for kind in FailureKind for of in ("", "push ")}
    assert set(prefill.failures) == set(decode.failures) == kinds | {f"not held: {reason.value}" for reason in NotHeld}
    assert not any(prefill.failures.values()) and not any(decode.failures.values())
    assert prefill.engines[0].version == decode.engines[0].version == __version__


def _check_first_lines(prefill: Server, decode: Server, mode: str) -> None:
    for server, role in ((prefill, "kv_producer"), (decode, "kv_consumer")):
        said = re.findall(
            rf"vllm_pd_connector (\S+) with vLLM \S+: {role}, mode {mode}, transport nixl, engine", _log(server)
        )
        assert said == [__version__]
    assert "vllm:nixl_bytes_transferred_count" in page(f"{decode.url}/metrics")


def _log(server: Server) -> str:
    return server.log.read_text(errors="replace")


def _check_tables(prefill: Server, decode: Server, admin: str) -> None:
    command = [sys.executable, "-m", "vllm_pd_connector.cli", "top", "--router", admin, "--json", "--interval", "0.2"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
    assert {row["url"]: row["role"] for row in told["instances"]} == {
        prefill.url: "kv_producer",
        decode.url: "kv_consumer",
    }
    links = {(row["url"], row["way"], row["peer"]) for row in told["links"]}
    assert links == {(prefill.url, "to", decode.url), (decode.url, "from", prefill.url)}
    text = page(f"{admin}/ui")
    assert all(f"<td>{url}</td>" in text for url in (prefill.url, decode.url))
