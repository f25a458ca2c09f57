"""How long to sleep before looking at a running transfer again.

Transports are polled. A fixed interval either wakes a core thousands of times for a long transfer or delays the end of
a short one; an interval that grows with the transfer's age costs a fixed share of its time, whatever that is. It grows
slowly, because some transports move bytes only while they are looked at: NIXL over TCP, whose poster has no thread,
reads 128 MiB at 0.6 of the bare library's speed with a look every millisecond, at 0.8 with one every 0.25 ms, and at
full speed with one every 0.1 ms (docs/design/transports.md). A look costs about 50 us.

Most transfers of less than a millisecond would be over for half of such an interval before that is seen. So the first
looks come after an eighth of a transfer's age, of which what the kernel adds to any sleep is a part.
"""

from __future__ import annotations

FIRST_S = 0.000005
YOUNG_SHARE = 1 / 8
WAKE_S = 0.00006
"""What the kernel adds: its timers' slack of 50 us and the waking."""

SHORTEST_S = 0.0001
"""Of a transfer that is not young any more: what is left of an eighth of its age would be longer."""

SHARE = 1 / 2000
LONGEST_S = 0.001
"""Of a transfer that is two seconds old: its peer is slow or has stopped, and looking at it often helps nobody."""


def pause(elapsed: float) -> float:
    """Seconds until the next look at a transfer that began `elapsed` seconds ago."""
    young = max(FIRST_S, min(elapsed * YOUNG_SHARE - WAKE_S, SHORTEST_S))
    return min(max(elapsed * SHARE, young), LONGEST_S)
