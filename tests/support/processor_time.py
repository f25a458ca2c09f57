"""Processor time of what a test looks at, and not of threads that earlier tests have left in its process."""

from __future__ import annotations

import threading
import time


def seconds_of(*threads: threading.Thread) -> float:
    """What these threads have used until now; they must be alive."""
    return sum(time.clock_gettime(time.pthread_getcpuclockid(_ident(thread))) for thread in threads)


def _ident(thread: threading.Thread) -> int:
    assert thread.ident is not None and thread.is_alive()
    return thread.ident
