"""How much a peer's transfers may have under way at once, by how long the library's calls take.

On one host UCX copies inside the call that posts, over TCP inside the one that looks, and that one copies all that has
come, of any transfer. So what runs with a peer is bounded by what the calls with it were seen to copy in `_RUN_S` of
the thread that calls: the costs that ended in them (`ranges.Batches` says what a descriptor costs), by their seconds.
Calls that copy nothing take next to no time (RDMA): there the window is as large as it may be.

Over TCP a look at reads takes what waits in the socket, and comes back; a call that posts or looks at writes goes on
while the peer makes room, for all of the window if the peer is quick. So where a peer is written to it is shorter.

No call says which of the two it is. Over TCP, too, a post ends in its own call when the peer is quick; but of 3,072 in
a row there never more than 8 did so, and on one host all.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

LEAST, MOST = 2 << 20, 256 << 20
"""Bytes of the window: its bounds. It begins with the least, of which the first call tells how long it takes."""

DESCRIPTOR, _INLINE_DESCRIPTOR = 1 << 20, 8 << 20
"""No descriptor is longer: a batch has one at least, and over TCP longer ones are written at 0.8 of the speed. Where
the call that posts copies, they move bytes as fast and need not be cut: there one may be a quarter of the window."""

_MOST_DESCRIPTORS = 256, 128
"""In a call that posts where posts copy, as on one host, and elsewhere: over TCP each takes 4 to 20 us, and a write is
copied, too, as far as the peer has room."""

_STRAIGHT = 16
"""So many posts that ended in their own calls, one after the other, say that posts copy."""

_RUN_S, _WRITTEN_S = 0.0035, 0.0025
EMPTY_S = 0.00003
"""A look that finds nothing takes so long at most, and says nothing of what copying takes."""

_PARTS = 4
"""A window of reads that looks copy is posted in so many batches: one that is all of it ends before the next is posted,
and meanwhile the peer has nothing to send. What posts copy has moved when they return."""

_REMEMBERED = 32 << 20
"""When so much has ended, what was seen counts half from then on."""

_SLOW_S, _TIMED = 0.003, 64
"""So many calls after one that seemed slow are timed by the thread's processor time, too."""

_STILL_S = 0.1
"""When nothing of a peer has ended for so long, half a window more is posted; and again twice as long after that, since
a slow link would get all there is, of which nothing ends before nearly all has come."""

Began = tuple[float, float | None]
"""When a call began: by the clock, and by the thread's processor time where that is asked for."""


@dataclass(eq=False, slots=True)
class Window:
    """Of one peer. `size` is in bytes, as `Batches` counts them. `running` is the cost of what was posted and has not
    ended, `ended` of what has, which took `spent` seconds. `straight`: so many of the last posts ended in their own
    calls, one after the other. So many calls are `timed` by this thread's processor time. `moved_at`: when something of
    the peer last ended, or was posted though nothing had, by the monotonic clock in seconds; that was done `unmoved`
    times since. `longest`: bytes of a descriptor at most. `writes`: something was written to the peer."""

    size: int = LEAST
    ended: float = LEAST
    spent: float = _RUN_S / 2
    running: int = 0
    straight: int = 0
    timed: int = 0
    moved_at: float = 0.0
    unmoved: int = 0
    longest: int = DESCRIPTOR
    writes: bool = False

    @property
    def copies(self) -> bool:
        """Whether posts are known to copy."""
        return self.straight >= _STRAIGHT

    @property
    def inline(self) -> bool:
        """Whether the next post may be long: the last one ended in its call, so that nothing runs that another copies.
        Of a peer that is written to that says nothing, unless posts are known to copy."""
        return self.copies or (self.straight > 0 and not self.writes)

    @property
    def descriptors(self) -> int:
        """How many a post may have."""
        return _MOST_DESCRIPTORS[not self.inline]

    def room(self, now: float) -> int:
        """What the next batch may cost; 0 while enough runs. What has stood still for a while does not keep others
        from being posted: its peer may be well, or it may never end."""
        if room := self._free():
            return room
        return self.size // 2 if now - self.moved_at > _STILL_S * 2**self.unmoved else 0

    def _free(self) -> int:
        free = self.size - self.running
        if self.inline or self.writes:
            return free if 2 * free >= self.size else 0
        part = max(self.size // _PARTS, self.longest)
        return part if free >= part else 0

    def posted(self, cost: int, began: Began | None, *, runs: bool, writes: bool) -> None:
        """A batch was given to the library, in a call that began so (None: that is not known); it ended in that call if
        it does not run on."""
        stands = not self._free()
        self.straight, self.writes = 0 if runs else self.straight + 1, self.writes or writes
        if runs:
            if stands or not self.running:
                self.moved_at = time.monotonic()
                self.unmoved += stands
            self.running += cost
        if began is not None:
            self._fit(began, 0 if runs else cost)
        self.longest = max(DESCRIPTOR, min(self.size // 4, _INLINE_DESCRIPTOR)) if self.inline else DESCRIPTOR

    def looked(self, ended: int, began: Began) -> None:
        """So much was found to have ended in a look that began so."""
        self.forget(ended)
        self._fit(began, ended)
        self.longest = min(self.longest, max(DESCRIPTOR, self.size // 4))

    def forget(self, cost: int) -> None:
        """So much runs no more, or is waited for no more."""
        self.running -= cost
        if cost:
            self.moved_at, self.unmoved = time.monotonic(), 0

    def begin(self) -> Began:
        """Call before a call of the library that may copy. To ask the kernel for a thread's processor time between two
        large copies takes 20 us, so that is done only for a while after a call that seemed slow."""
        return time.monotonic(), time.thread_time() if self.timed else None

    def _fit(self, began: Began, ended: int) -> None:
        """A call that took long by the clock may not have run all the time: the next ones tell."""
        clock, busy = began
        took = time.monotonic() - clock
        if took > _SLOW_S:
            self.timed = _TIMED
            if busy is None:
                return
            took = time.thread_time() - busy
        elif self.timed:
            self.timed -= 1
        run_s = _WRITTEN_S if self.writes and not self.inline else _RUN_S
        if took > run_s and ended:
            self.ended, self.spent = ended, took  # what was seen before is not so any more
        else:
            self.ended += ended
            if took > EMPTY_S:
                self.spent += took - EMPTY_S
            if self.ended > _REMEMBERED:
                self.ended, self.spent = self.ended / 2, self.spent / 2
        most = MOST * self.spent  # no division by what is next to nothing
        fits = self.ended * run_s
        self.size = MOST if fits >= most else max(LEAST, int(fits / self.spent))
