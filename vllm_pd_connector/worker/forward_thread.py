"""Whether the thread that launches forwards computes now.

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

import threading
import time

SAMPLE_S = 0.002
"""The kernel is asked so often at most: a microsecond each time."""

BUSY_SHARE = 0.1
"""Of the time between two samples; a thread that only waits takes less."""


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
        self._idle = False

    def here(self) -> None:
        """The calling thread launches forwards."""
        if (ident := threading.get_ident()) != self._ident and not self._microbatches:
            self._ident, self._clock = ident, time.pthread_getcpuclockid(ident)

    def idle(self, now: float) -> bool:
        """Whether it has hardly used a processor of late; `now` is time.monotonic(). No, while that is not known: until
        it was seen and two samples were taken, and where it has ended."""
        if now < self._sampled_at + SAMPLE_S or self._clock is None:
            return self._idle
        try:
            used = time.clock_gettime(self._clock)
        except OSError:  # the thread has ended
            self._idle = False
            return False
        elapsed, self._sampled_at = now - self._sampled_at, now
        before, self._used = self._used, used
        self._idle = before is not None and used - before < BUSY_SHARE * elapsed
        return self._idle
