"""Whether the thread that launches forwards computes.

While it does, it needs the interpreter and a core, and what the transfer thread takes of both makes steps longer: then
that thread's sleeps stay as long as the kernel makes them. While it does not, as where a decode instance only waits for
caches, nobody is disturbed by one that sleeps no longer than it asks for, and over TCP the peer is kept from falling
asleep: a tenth of the speed where that is high, next to nothing where it is not (docs/design/transports.md, Pauses).

The kernel counts the processor time of each thread, and another thread of the process may ask for it. Microbatches
(`--enable-dbo`) have threads of their own, new ones in each step, for which the one that is seen here only waits: then
nothing is known.

Source: vLLM 0.32, `v1/worker/gpu_ubatch_wrapper.py` (`_run_ubatches`).
"""

from __future__ import annotations

import math
import threading
import time

SAMPLE_S = 0.002
"""The kernel is asked so often at most: a microsecond each time."""

BUSY_SHARE = 0.1
"""Of the time between two samples; a thread that only waits takes less."""

QUIET_S = 0.05
"""So long nothing was seen of it where it only waits: an engine that computes launches again sooner, and between two
launches nobody is to be taken for idle who is busy at once after it."""


class ForwardThread:
    """See the module. `here` is called in that thread, `idle` in another.

    Args:
        microbatches: whether forwards are launched by others, for which it waits.
    """

    def __init__(self, *, microbatches: bool = False) -> None:
        self._microbatches = microbatches
        self._ident: int | None = None
        self._clock: int | None = None
        self._sampled_at = 0.0
        self._used: float | None = None
        self._busy_at = math.inf  # infinite: it is not known

    def here(self) -> None:
        """The calling thread launches forwards."""
        if (ident := threading.get_ident()) != self._ident and not self._microbatches:
            self._used = None  # that of another thread
            self._ident, self._clock = ident, time.pthread_getcpuclockid(ident)

    def idle(self, now: float) -> bool:
        """Whether it has hardly used a processor for QUIET_S; `now` is time.monotonic(). No, while that is not known:
        until it was seen and sampled for so long, and where it has ended."""
        if now >= self._sampled_at + SAMPLE_S and self._clock is not None:
            self._sample(now, self._clock)
        return now >= self._busy_at + QUIET_S

    def _sample(self, now: float, clock: int) -> None:
        try:
            used = time.clock_gettime(clock)
        except OSError:  # the thread has ended
            self._busy_at = math.inf
            return
        elapsed, self._sampled_at = now - self._sampled_at, now
        before, self._used = self._used, used
        if before is None or used - before >= BUSY_SHARE * elapsed:
            self._busy_at = now
