"""Which steps' forwards are done; told by the thread that launches them, asked by the transfer thread.

A device may compute a forward long after it was launched, and ends them in the order of their launches: when a step is
done, all before it are. Nobody says when that is, so it is asked again and again, as running transfers are
(`worker.poll_interval`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from vllm_pd_connector.worker.poll_interval import pause

if TYPE_CHECKING:
    from collections.abc import Callable


class StepClock:
    """See the module. All methods can be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = 0
        self._running: deque[tuple[int, Callable[[], bool], float]] = deque()

    def launched(self, step: int, is_done: Callable[[], bool]) -> None:
        """The forward of `step` was launched; `is_done` tells, from any thread, whether it has ended."""
        with self._lock:
            self._running.append((step, is_done, time.monotonic()))
            self._look()

    def done(self) -> int:
        """The latest step that is done, and all before it."""
        with self._lock:
            self._look()
            return self._done

    def pause(self, step: int) -> float | None:
        """Seconds until `done` should be asked for this step; None if it was not launched: who launches it will say
        so."""
        with self._lock:
            self._look()
            if step <= self._done:
                return 0.0
            launched_at = next((at for running, _, at in self._running if running >= step), None)
            return None if launched_at is None else pause(time.monotonic() - launched_at)

    def _look(self) -> None:
        while self._running and self._running[0][1]():
            self._done = self._running.popleft()[0]
