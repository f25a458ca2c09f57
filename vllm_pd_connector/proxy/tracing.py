"""Spans of the router: one per request, below the client's, and in it one per leg and one until the first byte.

Each leg brings its instance the leg's span as parent, so what vLLM and PDConnector tell of it hangs there. Without an
endpoint nothing is made, and the client's own trace headers are passed on.

Exported as vLLM exports (`vllm/tracing/otel.py`): over gRPC, or HTTP with OTEL_EXPORTER_OTLP_TRACES_PROTOCOL.
OpenTelemetry is an extra of this package (`tracing`), and imported only here and only with an endpoint.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
SERVICE = "vllm-pd-proxy"
Prepare = Any
"""`legs.Prepare`."""


class Untraced:
    """A request of which nothing is told."""

    def leg(self, role: str) -> AbstractContextManager[Callable[[Prepare], Prepare]]:
        """A leg, while the context lasts; what is given has the leg's headers name its span."""
        return nullcontext(lambda prepare: prepare)

    def first_byte(self) -> None:
        """The answer's first byte is there."""

    def end(self, status: int) -> None:
        """The client has this status."""


class Tracer:
    """Begins the spans of requests.

    Args:
        endpoint: of a collector, None to tell nobody.

    Raises:
        InvalidConfig: OpenTelemetry is not installed, or the environment names a protocol that is none.
    """

    def __init__(self, endpoint: str | None) -> None:
        self._provider = None if endpoint is None else _provider(endpoint)

    def begin(self, headers: Mapping[str, str], request_id: str, path: str) -> Untraced:
        """A request of a client with these headers."""
        if self._provider is None:
            return Untraced()
        return Traced(self._provider.get_tracer("vllm_pd_connector.proxy"), headers, request_id, path)

    def close(self) -> None:
        """Export what is left; takes up to some seconds."""
        if self._provider is not None:
            self._provider.shutdown()


class Traced(Untraced):
    """A request whose spans are exported."""

    def __init__(self, tracer: Any, headers: Mapping[str, str], request_id: str, path: str) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace, self._tracer, self._headers = trace, tracer, TraceContextTextMapPropagator()
        known = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        self._began = time.time_ns()
        self._span = tracer.start_span(
            f"POST {path}",
            context=self._headers.extract(known),
            kind=trace.SpanKind.SERVER,
            attributes={"pd.request": request_id.encode(errors="replace").decode(), "url.path": path},
            start_time=self._began,
        )
        self._below = trace.set_span_in_context(self._span)

    @contextmanager
    def leg(self, role: str) -> Iterator[Callable[[Prepare], Prepare]]:
        span = self._tracer.start_span(role, context=self._below, kind=self._trace.SpanKind.CLIENT)
        told: dict[str, str] = {}
        self._headers.inject(told, self._trace.set_span_in_context(span))

        def named(prepare: Prepare) -> Prepare:
            def prepared(instance: Any) -> tuple[Any, dict[str, str]]:
                body, headers = prepare(instance)
                span.set_attribute("pd.instance", instance.url)
                return body, {**headers, **told}

            return prepared

        try:
            yield named
        except BaseException as error:
            span.set_status(self._trace.StatusCode.ERROR, f"{type(error).__name__}: {error}"[:500])
            raise
        finally:
            span.end()

    def first_byte(self) -> None:
        self._tracer.start_span("first_byte", context=self._below, start_time=self._began).end()

    def end(self, status: int) -> None:
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._span.set_status(self._trace.StatusCode.ERROR)
        self._span.end()


def _provider(endpoint: str) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise InvalidConfig(
            f"--otlp-traces-endpoint: {error.name} is missing; pip install vllm-pd-connector[tracing]"
        ) from error
    protocol = os.environ.get(PROTOCOL, "grpc")
    if protocol not in ("grpc", "http/protobuf"):
        raise InvalidConfig(f"{PROTOCOL} is {protocol!r}: it must be one of grpc, http/protobuf")
    exporter = OverGrpc(endpoint=endpoint, insecure=True) if protocol == "grpc" else OverHttp(endpoint=endpoint)
    service = os.environ.get("OTEL_SERVICE_NAME", SERVICE)
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
