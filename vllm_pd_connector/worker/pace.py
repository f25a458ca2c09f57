"""How long to sleep before looking at a running transfer again.

Transports are polled. A fixed interval either wakes a core a thousand times for a long transfer or doubles the time of
a short one; an interval that grows with the transfer's age costs a fixed share of its time, whatever that is. It stops
growing early because some transports move bytes only while they are looked at: NIXL over TCP, whose poster has no
thread, reads at half speed with 1 ms and at 0.7 to 0.9 of the bare library's with 0.25 ms.
"""

from __future__ import annotations

SHORTEST_S = 0.00005
LONGEST_S = 0.00025
SHARE = 1 / 16
OLD_S = 2.0
LONGEST_OF_OLD_S = 0.001
"""What is older has a peer that is slow or has stopped: looking at it often helps nobody."""


def pause(elapsed: float) -> float:
    """Seconds until the next look at a transfer that began `elapsed` seconds ago."""
    return min(max(elapsed * SHARE, SHORTEST_S), LONGEST_S if elapsed < OLD_S else LONGEST_OF_OLD_S)
