"""Leases that ended without a reader: what the log and the counts say of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.protocol.lease import End

if TYPE_CHECKING:
    from collections import Counter

logger = init_logger(__name__)

EXPIRED = {
    End.UNCLAIMED: "The router sent no decode request with its parameters, or too late: see its log, or raise "
    "kv_lease_duration if it needs longer between the two legs",
    End.EXPIRED: "The decode instance that had asked for it fell silent: see whether it lives and reaches this one, or "
    "raise kv_lease_duration if it stands still for longer",
    End.OVER_LIMIT: "Its decode request waited for all that time: decode has too few blocks, or waits for an instance "
    "that waits for it; raise kv_lease_limit if requests may queue that long",
}
"""Why blocks are freed that nobody read, and what to do about it."""


def note_expired(request_id: str, reason: End, counted: Counter[str]) -> None:
    """A lease has ended: say so if nobody read it, and count it by the names of `observability.stats`."""
    if reason in EXPIRED:
        counted["leases_expired"] += 1
        counted["leases_over_limit"] += reason is End.OVER_LIMIT
        line = "request %s: its lease %s; its blocks are freed. %s"
        logger.warning(line, request_id, reason.value, EXPIRED[reason])
