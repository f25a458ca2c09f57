"""The spans of prefills for other instances: until the prefill is handed over, and while it is held.

The second is linked with the spans of those who got it, which may be of another trace.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.blocks import trace_headers
from vllm_pd_connector.observability import tracing
from vllm_pd_connector.protocol.lease import End

if TYPE_CHECKING:
    from vllm_pd_connector.compat.types import Request
    from vllm_pd_connector.protocol.lease import Given


class PrefillSpans:
    """By request id; nothing is kept of requests without a trace."""

    def __init__(self) -> None:
        self._computing: dict[str, tracing.Span] = {}
        self._held: dict[str, tracing.Span] = {}

    def started(self, request: Request) -> None:
        """A prefill for a decode instance arrived."""
        self._begin(self._computing, "pd.prefill", request)

    def held(self, request: Request) -> None:
        """What it computed is held for a reader."""
        if (span := self._computing.pop(request.request_id, None)) is not None:
            span.end(time.monotonic())
        self._begin(self._held, "pd.hold", request)

    def over(self, request_id: str) -> None:
        """The request ended, however: what is not held will not be."""
        if (span := self._computing.pop(request_id, None)) is not None:
            span.end(time.monotonic(), "it ended without a cache that could be handed over")

    def given(self, given: list[Given]) -> list[Given]:
        """Readers got what they came for; returns it."""
        for one in given:
            if one.taken.trace and (span := self._held.get(one.request_id)) is not None:
                span.link(one.taken.trace)
        return given

    def ended(self, request_id: str, reason: End) -> None:
        """Its lease ended."""
        if (span := self._held.pop(request_id, None)) is not None:
            good = reason in (End.READ, End.RELEASED)
            span.end(time.monotonic(), "" if good else f"the lease {reason.value}", ended=reason.name.lower())

    def _begin(self, among: dict[str, tracing.Span], name: str, request: Request) -> None:
        headers = trace_headers(request)
        if (span := tracing.begin(name, headers, time.monotonic(), request=request.request_id)) is not None:
            among[request.request_id] = span
