"""The router's spans: below the client's, one for each leg, which the instance is given as its parent."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.support.otlp import Collector
from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import DONE, HANDS_OVER, answers
from vllm_pd_connector.errors import InvalidConfig
from vllm_pd_connector.proxy.tracing import PROTOCOL, Tracer

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{CLIENT}-01"
LONG_S = 20.0


@over_bench
async def test_legs_are_spans_below_the_client_s_and_above_the_instances(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
    with Collector() as collector:
        await bench.route([prefill.url], [decode.url], otlp_traces_endpoint=collector.endpoint)
        status, _, _ = await bench.ask(traceparent=TRACEPARENT)
        assert status == 200
        names = {"POST /v1/completions", "prefill", "decode", "first_byte"}
        await asyncio.to_thread(bench.router._tracer.close)
        spans = collector.wait_for(names, TRACE, LONG_S)
    whole = spans["POST /v1/completions"]
    assert whole.parent == CLIENT and whole.attributes["http.response.status_code"] == "200"
    assert {spans[name].parent for name in names - {whole.name}} == {whole.id}
    assert spans["prefill"].ended <= spans["decode"].began and spans["first_byte"].began == whole.began
    told = [instance.traces[0][0] for instance in (prefill, decode)]
    assert told == [f"00-{TRACE}-{spans[role].id}-01" for role in ("prefill", "decode")]
    assert spans["decode"].attributes["pd.instance"] == decode.url


@over_bench
async def test_a_leg_that_fails_is_a_failed_span(bench: Bench) -> None:
    prefill, decode = await bench.instance(answers({"error": {}}, 500)), await bench.instance(DONE)
    with Collector() as collector:
        await bench.route([prefill.url], [decode.url], otlp_traces_endpoint=collector.endpoint)
        status, _, _ = await bench.ask(traceparent=TRACEPARENT)
        await asyncio.to_thread(bench.router._tracer.close)
        spans = collector.wait_for({"POST /v1/completions", "prefill"}, TRACE, LONG_S)
    assert status == 500 and all(span.failed for span in spans.values()) and "decode" not in spans


@over_bench
async def test_without_a_collector_the_client_s_headers_are_passed_on(bench: Bench) -> None:
    prefill, decode = await bench.pair()
    await bench.ask(traceparent=TRACEPARENT)
    assert [i.traces[0][0] for i in (prefill, decode)] == [TRACEPARENT, TRACEPARENT]


def test_a_protocol_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROTOCOL, "carrier-pigeon")
    with pytest.raises(InvalidConfig, match="carrier-pigeon"):
        Tracer("http://127.0.0.1:4317")


def test_an_endpoint_without_opentelemetry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(InvalidConfig, match=r"vllm-pd-connector\[tracing\]"):
        Tracer("http://127.0.0.1:4317")
