"""What is told of a receive: what is counted of it when it ends, and its span."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_pd_connector.observability import tracing
from vllm_pd_connector.observability.stats import Phase

if TYPE_CHECKING:
    from vllm_pd_connector.metadata import ReceiveRequest
    from vllm_pd_connector.observability.stats import PDStats
    from vllm_pd_connector.worker.receive.active import ActiveReceive

_SPANS = (Phase.QUEUE, Phase.TRANSFER, Phase.CONFIRM)


def count_good(active: ActiveReceive, stats: PDStats, now: float) -> None:
    """A receive has ended well."""
    moved, peer = active.taken.moved, active.link.engine_id
    stats.observe_phase(Phase.TOTAL, now - active.began)
    stats.count("receives")
    stats.count("bytes", moved.bytes)
    stats.count("runs", moved.runs)
    stats.count("descriptors", moved.descriptors)
    stats.count("verified", int(active.verified))
    stats.observe_size("bytes", moved.bytes)
    stats.observe_size("descriptors", moved.descriptors)
    stats.of_peer("peer_bytes", peer, moved.bytes)
    stats.of_peer("peer_receives", peer)


def count_failed(active: ActiveReceive, stats: PDStats) -> None:
    """A receive has failed."""
    stats.fail(active.kind)
    stats.of_peer("peer_failures", active.link.engine_id)


def begin_span(request: ReceiveRequest, rank: int, now: float) -> tracing.Span | None:
    """The span of a receive on this rank, from when its request arrived here."""
    return tracing.begin("pd.receive", request.trace, now - request.waited_s, request=request.request_id, rank=rank)


def end_span(active: ActiveReceive, now: float, error: str) -> None:
    """It is reported: its phases are spans below it, and so is the handshake if it waited for one."""
    if (span := active.span) is None:
        return
    for phase, began, ended in active.phases:
        if phase in _SPANS:
            span.child(f"pd.{phase}", began - active.request.waited_s if phase is Phase.QUEUE else began, ended)
    if (handshake := active.link.handshake) is not None and handshake[1] >= active.began:
        span.child(f"pd.{Phase.HANDSHAKE}", *handshake)
    span.end(now, error, prefill=active.prefill, peer=active.link.engine_id, bytes=active.taken.moved.bytes)
