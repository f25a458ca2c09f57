"""Spans are made where vLLM hands on trace headers, below the client's, and reach a collector; elsewhere nothing is."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from tests.support.otlp import Collector, OTLPSpanExporter
from tests.support.worker.decode_instance import decode, prefill
from tests.support.worker.writer import CONFIG, Target, Writer, freed
from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.observability import tracing
from vllm_pd_connector.protocol.lease import End, Given
from vllm_pd_connector.protocol.wire.push_messages import Taken
from vllm_pd_connector.scheduler.leases.spans import PrefillSpans

__all__ = ["decode", "prefill"]

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}
LONG_S = 20.0
SKEW_NS = 5 * 10**8
"""Two clocks are read one after the other for the beginning and the end of a span: so much may lie between."""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """The tracer that vLLM would have set for the process, exporting there."""
    provider = TracerProvider()
    with Collector() as collector:
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(collector.endpoint, insecure=True)))
        monkeypatch.setattr(trace, "get_tracer", lambda name: provider.get_tracer(name))
        yield collector
        provider.shutdown()


def test_nothing_is_made_without_headers(collector):
    assert tracing.begin("pd.receive", None, 0.0) is None and tracing.begin("pd.receive", {}, 0.0) is None


@pytest.mark.parametrize("told", ["", "00-zz-zz-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 10_000])
def test_headers_that_are_none_make_a_span_without_a_parent(collector, told):
    span = tracing.begin("pd.receive", {"traceparent": told}, time.monotonic())
    assert span is not None
    span.link(told)
    span.end(time.monotonic())
    made = collector.wait_for({"pd.receive"}, span.traceparent.split("-")[1], LONG_S)["pd.receive"]
    assert not made.parent and not made.links


def test_a_part_that_takes_no_time_ends_where_it_began(collector, monkeypatch):
    """However far apart the clocks are when they are looked at again."""
    looks = iter(range(10**18, 0, -1000))
    monkeypatch.setattr(tracing, "wall_ns", lambda _: next(looks))
    span = tracing.begin("pd.receive", HEADERS, 5.0)
    span.child("pd.confirm", 5.0, 5.0)
    span.end(5.0)
    made = collector.wait_for({"pd.confirm"}, TRACE, LONG_S)["pd.confirm"]
    assert made.began == made.ended


def test_a_trace_that_is_not_sampled_is_named_to_nobody(collector):
    span = tracing.begin("pd.receive", {"traceparent": f"00-{TRACE}-{CLIENT}-00"}, 0.0)
    assert span is not None and span.traceparent == ""


def test_a_tracer_that_fails_costs_no_request(prefill, decode, collector, monkeypatch, caplog):
    span = tracing.begin("pd.receive", HEADERS, 0.0)
    assert span is not None
    monkeypatch.setattr(tracing._headers, "extract", lambda carrier: 1 / 0)
    monkeypatch.setattr(span._span, "end", lambda end_time: 1 / 0)
    assert tracing.begin("pd.receive", HEADERS, 0.0) is None
    span.link(HEADERS["traceparent"])
    span.end(1.0)
    decode.loop.submit([replace(prefill.request("a"), trace=HEADERS)], [])
    assert decode.wait_for("a") == [True]


def test_a_receive_s_phases_are_spans_of_the_client_s_trace(prefill, decode, collector):
    decode.loop.submit([replace(prefill.request("a"), trace=HEADERS, waited_s=1.5)], [])
    assert decode.wait_for("a") == [True]
    parts = {"pd.queue", "pd.handshake", "pd.transfer", "pd.confirm"}
    spans = collector.wait_for({"pd.receive", *parts}, TRACE, LONG_S)
    whole = spans["pd.receive"]
    assert whole.parent == CLIENT and not whole.failed
    assert (whole.attributes["pd.request"], whole.attributes["pd.peer"]) == ("a", "p-0")
    assert whole.attributes["pd.bytes"] == str(decode.bytes)
    assert {spans[name].parent for name in parts} == {whole.id}
    assert spans["pd.queue"].ended - spans["pd.queue"].began >= 1.5e9 - SKEW_NS
    assert whole.began <= spans["pd.queue"].began + SKEW_NS
    assert spans["pd.transfer"].ended <= spans["pd.confirm"].ended + SKEW_NS <= whole.ended + 2 * SKEW_NS
    until_given: list[Given] = prefill.server.take_given()
    assert [given.taken.trace for given in until_given] == [f"00-{TRACE}-{whole.id}-01"]


def test_a_failed_receive_is_a_failed_span(prefill, decode, collector):
    decode.transport.faults.failures.append(TransferError("a cable was pulled"))
    decode.loop.submit([replace(prefill.request("a"), trace=HEADERS)], [])
    assert decode.wait_for("a") == [False]
    assert collector.wait_for({"pd.receive"}, TRACE, LONG_S)["pd.receive"].failed


def test_who_was_written_into_is_told_with_its_span_and_by_what_was_written(collector):
    with contextlib.closing(Writer(CONFIG)) as writer, contextlib.closing(Target(CONFIG)) as target:
        writer.whole()
        target.loop.submit([replace(target.request(writer), trace=HEADERS)], [])
        assert target.wait_for("d") == [True]
        spans = collector.wait_for({"pd.receive", "pd.queue", "pd.transfer", "pd.confirm"}, TRACE, LONG_S)
        whole = spans["pd.receive"]
        assert {spans[f"pd.{part}"].parent for part in ("queue", "transfer", "confirm")} == {whole.id}
        ends = [spans[f"pd.{part}"].ended for part in ("queue", "transfer", "confirm")]
        assert all(first <= second + SKEW_NS for first, second in itertools.pairwise(ends))
        freed(writer, "a")
        [given] = writer.server.take_given()
    assert (given.request_id, given.taken.engine_id, given.whole) == ("p-a", "decode-1", True)
    assert given.taken.moved.bytes == target.bytes > 0 and given.taken.trace == f"00-{TRACE}-{whole.id}-01"


def request(request_id: str = "p-1") -> Any:
    return SimpleNamespace(request_id=request_id, trace_headers=HEADERS)


def test_a_held_prefill_is_linked_with_the_spans_of_its_readers(collector):
    spans, reader = PrefillSpans(), "c7ad6b7169203331"
    spans.started(request())
    spans.held(request())
    spans.over("p-1")
    spans.given([Given("p-1", Taken("d", trace=f"00-{TRACE}-{reader}-01"), True), Given("x", Taken("d"), True)])
    spans.ended("p-1", End.READ)
    found = collector.wait_for({"pd.prefill", "pd.hold"}, TRACE, LONG_S)
    assert found["pd.hold"].links == {reader} and found["pd.hold"].attributes["pd.ended"] == "read"
    assert {span.parent for span in found.values()} == {CLIENT} and not any(span.failed for span in found.values())
    assert found["pd.prefill"].ended <= found["pd.hold"].began + SKEW_NS


def test_a_prefill_that_was_aborted_and_a_lease_that_expired_are_failures(collector):
    spans = PrefillSpans()
    spans.started(request())
    spans.over("p-1")
    spans.held(request("p-2"))
    spans.ended("p-2", End.UNCLAIMED)
    found = collector.wait_for({"pd.prefill", "pd.hold"}, TRACE, LONG_S)
    assert all(span.failed for span in found.values())
    assert not spans._computing and not spans._held
