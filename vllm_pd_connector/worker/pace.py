"""How long to sleep before looking at a running transfer again.

Transports are polled. A fixed interval either wakes a core a thousand times for a long transfer or doubles the time of
a short one; an interval that grows with the transfer's age costs a fixed share of its time, whatever that is. It stops
growing early because some transports move bytes only while they are looked at: NIXL over TCP, whose poster has no
thread, reads at half speed with 1 ms and at 0.7 to 0.9 of the bare library's with 0.25 ms.
"""

from __future__ import annotations

LONGEST_S = 0.00025
SHORTEST_S = 0.00005
SHARE = 1 / 16


def pause(elapsed: float) -> float:
    """Seconds until the next look at a transfer that began `elapsed` seconds ago."""
    return min(max(elapsed * SHARE, SHORTEST_S), LONGEST_S)
