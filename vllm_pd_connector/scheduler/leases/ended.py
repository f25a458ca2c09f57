"""Leases that ended without a reader: what the log says of each."""

from __future__ import annotations

from vllm_pd_connector.protocol.lease import End

EXPIRED = {
    End.UNCLAIMED: "The router sent no decode request with its parameters, or too late: see its log, or raise "
    "kv_lease_duration if it needs longer between the two legs",
    End.EXPIRED: "The decode instance that had asked for it fell silent: see whether it lives and reaches this one, or "
    "raise kv_lease_duration if it stands still for longer",
    End.OVER_LIMIT: "Its decode request waited for all that time: decode has too few blocks, or waits for an instance "
    "that waits for it; raise kv_lease_limit if requests may queue that long",
}
"""Why blocks are freed that nobody read, and what to do about it."""
