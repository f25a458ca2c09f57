"""Which steps' forwards are done, and of the next one how many waves of layers; told by the thread that launches them,
asked by the transfer thread.

A device may compute a forward long after it was launched, and ends what was launched in that order: when a step is
done, all before it are, and when a wave is, the waves before it. Nobody says when that is, so it is asked again and
again, as running transfers are (`worker.poll_interval`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from vllm_pd_connector.worker.poll_interval import pause

if TYPE_CHECKING:
    from collections.abc import Callable


class _Launched(NamedTuple):
    """The first `waves` waves of layers of a step, or with None the whole of it."""

    step: int
    waves: int | None
    is_done: Callable[[], bool]
    at: float


class StepClock:
    """See the module. All methods can be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = 0
        self._ahead = 0, 0
        self._running: deque[_Launched] = deque()

    def launched(self, step: int, is_done: Callable[[], bool], waves: int | None = None) -> bool:
        """The forward of `step` was launched, or of its layers so many `waves`; `is_done` tells, from any thread,
        whether that has ended. Returns whether who sleeps must be told: no, where more of the step was launched that is
        not known to be done, since that is asked for again soon (`pause`)."""
        with self._lock:
            told = bool(self._running) and self._running[-1].step == step
            self._running.append(_Launched(step, waves, is_done, time.monotonic()))
            self._look()
        return not told

    def done(self) -> int:
        """The latest step that is done, and all before it."""
        with self._lock:
            self._look()
            return self._done

    def ahead(self) -> tuple[int, int]:
        """The latest step of which waves of layers are done, and how many; it may be done itself."""
        with self._lock:
            self._look()
            return self._ahead

    def pause(self, step: int, waves: int = 0) -> float | None:
        """Seconds until it should be asked for this step, of which that many waves are known to be done; None if no
        more of it was launched: who launches that will say so."""
        with self._lock:
            self._look()
            if step <= self._done or (step, waves) < self._ahead:
                return 0.0
            launched_at = next((entry.at for entry in self._running if entry.step >= step), None)
            return None if launched_at is None else pause(time.monotonic() - launched_at)

    def _look(self) -> None:
        while self._running and self._running[0].is_done():
            entry = self._running.popleft()
            if entry.waves is None:
                self._done = entry.step
            else:
                self._ahead = entry.step, entry.waves
