"""A collector of OpenTelemetry spans, over gRPC as vLLM exports by default: what came, by name.

gRPC starts its threads again in every child of a fork. One that is about to become a server has its descriptors closed,
and such a thread, which waits on one, then ends the process: about one start in a hundred. So gRPC is told to leave
forks alone, in this process only.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple, Self
from unittest import mock

with mock.patch.dict(os.environ, GRPC_ENABLE_FORK_SUPPORT="0"):
    import grpc
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OTLPSpanExporter
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    grpc.server(ThreadPoolExecutor(max_workers=1)).stop(None)  # it is read with the first of these


class Span(NamedTuple):
    """One span; ids are hexadecimal, `parent` is empty for a root, times are nanoseconds since the epoch."""

    name: str
    trace: str
    id: str
    parent: str
    began: int
    ended: int
    links: frozenset[str]
    attributes: dict[str, str]
    failed: bool


class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]  # generated
    """Listens at `endpoint` while the context lasts."""

    def __init__(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(max_workers=4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"http://127.0.0.1:{port}"
        self._spans: list[Span] = []
        self._more = threading.Condition()

    def Export(self, request: Any, context: Any) -> Any:  # the service's word
        spans = [
            Span(
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                frozenset(link.span_id.hex() for link in span.links),
                {one.key: one.value.string_value or str(one.value.int_value) for one in span.attributes},
                span.status.code == 2,
            )
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]
        with self._more:
            self._spans += spans
            self._more.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, names: set[str], trace: str, timeout_s: float) -> dict[str, Span]:
        """The spans of a trace by name, the latest of each, when all of `names` are there.

        Raises:
            TimeoutError: they did not come.
        """

        def found() -> dict[str, Span]:
            return {span.name: span for span in self._spans if span.trace == trace}

        with self._more:
            if not self._more.wait_for(lambda: names <= found().keys(), timeout_s):
                raise TimeoutError(f"{names - found().keys()} did not come; there are {sorted(found())}")
            return found()

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(None).wait()
