"""Spans of OpenTelemetry, below the span of the client that vLLM's trace headers name.

vLLM starts a tracer in its engine core and in every worker where `--otlp-traces-endpoint` is set, and hands a request's
trace headers (W3C) on only then. So a span is begun where there are headers, it is exported as vLLM's own are, and
without the setting nothing is done here.

Times are those of `time.monotonic`, in which everything else is measured, and become wall-clock time when told.
Malformed headers make a span without a parent; they are a client's, and worth no request. Neither is a tracer that
fails: that is logged, and the request goes on without.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vllm_pd_connector.compat.base import init_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opentelemetry.context import Context

logger = init_logger(__name__)

_SCOPE = "vllm_pd_connector"
_Words = ParamSpec("_Words")
_Result = TypeVar("_Result")
_headers = TraceContextTextMapPropagator()


def _harmless(told: Callable[_Words, _Result]) -> Callable[_Words, _Result | None]:
    """What this raises is logged: it comes from a library, where an engine or a request would pay for it."""

    @functools.wraps(told)
    def tried(*args: _Words.args, **words: _Words.kwargs) -> _Result | None:
        try:
            return told(*args, **words)
        except Exception:
            logger.exception("a span was not told")
            return None

    return tried


def wall_ns(monotonic: float) -> int:
    """The time of day, in nanoseconds since the epoch, of a moment of `time.monotonic`."""
    return time.time_ns() - round((time.monotonic() - monotonic) * 1e9)


@dataclass(slots=True)
class Span:
    """One span that has begun. `traceparent` names it to others, empty if it is not recorded."""

    _span: Any
    traceparent: str

    @_harmless
    def child(self, name: str, began: float, ended: float) -> None:
        """A part of it that is over."""
        below = trace.set_span_in_context(self._span)
        at = wall_ns(began)  # once: two looks at the clocks differ, and it may be over at once
        span = trace.get_tracer(_SCOPE).start_span(name, context=below, start_time=at)
        span.end(end_time=at + round(1e9 * (ended - began)))

    @_harmless
    def link(self, traceparent: str) -> None:
        """Name another's span that it belongs with; what is none is passed over."""
        other = trace.get_current_span(_extract({"traceparent": traceparent})).get_span_context()
        if other.is_valid:
            self._span.add_link(other)

    @_harmless
    def end(self, now: float, error: str = "", **attributes: str | int) -> None:
        """It is over; `error` says why it failed, empty if it did not."""
        self._span.set_attributes({f"pd.{name}": value for name, value in attributes.items()})
        if error:
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end(end_time=wall_ns(now))


@_harmless
def begin(name: str, headers: Mapping[str, str] | None, began: float, **attributes: str | int) -> Span | None:
    """A span below the one that the headers name; None without headers. Attributes get the prefix `pd.`."""
    if not headers:
        return None
    span = trace.get_tracer(_SCOPE).start_span(
        name,
        context=_extract(headers),
        start_time=wall_ns(began),
        attributes={f"pd.{name}": value for name, value in attributes.items()},
    )
    carrier: dict[str, str] = {}
    if span.get_span_context().trace_flags.sampled:
        _headers.inject(carrier, trace.set_span_in_context(span))
    return Span(span, carrier.get("traceparent", ""))


def _extract(headers: Mapping[str, str]) -> Context:
    return _headers.extract(dict(headers))
