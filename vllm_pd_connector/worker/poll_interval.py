"""How long to sleep before looking at a running transfer again.

Transports are polled. A fixed interval either wakes a core thousands of times for a long transfer or delays the end of
a short one; an interval that grows with the transfer's age costs a fixed share of its time, whatever that is.

Some transports move bytes only while they are looked at: NIXL over TCP, whose poster has no thread, reads 128 MiB at
0.6 of the bare library's speed with a look every millisecond, at 0.8 with one every 0.25 ms, and at full speed with one
every 0.1 ms (docs/design/transports.md). A link that is slow by itself needs no such looks, and they would take a fifth
of a core on each worker while a request waits. What was given to the transport and has not ended has moved at most so
fast as all of it would have within its age; so the age is as many intervals as BYTES_PER_LOOK go into it. A look costs
50 us of a core, and a few times as much where nothing of it is in a cache any more.

Most transfers of less than a millisecond would be over for half of such an interval before that is seen. So of a young
transfer, too, the interval is a share of its age, to which the kernel adds what it adds to any sleep (`WAKE_S`). Not to
sleep at all would show the end of 1 MiB 60 us sooner, and the thread would hold the interpreter meanwhile.

Where the transport says that bytes came in its last call (`TransferStatus.MOVING`), no age is needed: the next look is
FIRST_S later.
"""

from __future__ import annotations

FIRST_S = 0.000005
WAKE_S = 0.00006
"""What the kernel adds: the waking and, unless no forward is disturbed (`forward_thread`), 50 us of timers' slack."""

SHORTEST_S = 0.0001
"""Of a transfer that is not young any more: SHARE of its age would be longer."""

BYTES_PER_LOOK = 128 << 10
"""At full speed, 0.1 ms bring more."""
SHARE = 1 / 64
"""Of a transfer's age, at most: its end is seen one to two hundredths late."""
LONGEST_S = 0.002
"""Of a transfer whose peer is slow or has stopped: looking at it often helps nobody."""
OLD_SHARE, LONGEST_OF_OLD_S = 1 / 128, 0.016
"""Of an old one, if that is longer: then its end is seen four thousandths late, in the mean."""
MANY_BYTES = 256 << 20


def pause(elapsed: float, moving: int = MANY_BYTES) -> float:
    """Seconds until the next look at a transfer that began `elapsed` seconds ago, and to which so many bytes were given
    since; many where they are not known."""
    young = max(FIRST_S, min(elapsed * SHARE, SHORTEST_S))
    share = min(BYTES_PER_LOOK / max(moving, 1), SHARE)
    longest = max(LONGEST_S, min(elapsed * OLD_SHARE, LONGEST_OF_OLD_S))
    return min(max(elapsed * share, young), longest)
