"""Which steps' forwards are done, and of the next one how many waves of layers; told by the thread that launches them,
asked by the transfer thread.

A device may compute a forward long after it was launched, and ends what was launched in that order: when a step is
done, all before it are, and when a wave is, the waves before it. Nobody says when that is, so it is asked again and
again, as running transfers are (`worker.poll_interval`).

To rouse a thread that sleeps costs the thread that launches as much as several layers may. So the sleeper is told of a
step's first wave and of its end, and looks for the waves between them itself: when the next should come by what the
last one took, and then each time a sixteenth of that has passed, or of the time since.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from vllm_pd_connector.worker.poll_interval import SHORTEST_S, pause

if TYPE_CHECKING:
    from collections.abc import Callable


_LATE_SHARE = 1 / 16

_Launched = tuple[int, "int | None", "Callable[[], bool]", float]
"""Of a step so many waves of layers, or with None the whole of it; whether that is done; when it was launched. No class
of its own: to make one takes ten times as long, and every layer may be a wave."""


class StepClock:
    """See the module. `launched` is for the one thread that launches forwards, all else for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Whoever takes something out of `_running` holds it; to append needs none."""
        self._done = 0
        self._ahead = 0, 0
        self._running: deque[_Launched] = deque()
        self._latest = 0, 0.0, 0.0
        """Of which step something was launched last, when, and what that wave took if it was not the step's first."""

    def launched(self, step: int, is_done: Callable[[], bool], waves: int | None = None) -> bool:
        """The forward of `step` was launched, or of its layers so many `waves`; `is_done` tells, from any thread,
        whether that has ended. Returns whether who sleeps must be told: no, where `pause` lets it look for this."""
        now = time.monotonic()
        before, at, _ = self._latest
        goes_on = step == before
        self._latest = step, now, now - at if goes_on else 0.0
        if goes_on and waves is not None:  # the most of them: nothing but this
            self._running.append((step, waves, is_done, now))
            return False
        with self._lock:
            self._look()  # nobody else may ask, and what is done is not kept
            asked = goes_on and bool(self._running)
            self._running.append((step, waves, is_done, now))
            self._look()
        return not asked

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
        """Seconds until it should be asked for this step, of which that many waves are known to be done; None if none
        of it was launched: who launches that will say so."""
        with self._lock:
            self._look()
            if step <= self._done or (step, waves) < self._ahead:
                return 0.0
            now = time.monotonic()
            running = (self._running[i] for i in range(len(self._running)))  # others may be appended meanwhile
            launched_at = next((at for number, _, _, at in running if number >= step), None)
            if launched_at is not None:
                return pause(now - launched_at, 0)  # nothing moves before it is computed
            latest, at, wave_s = self._latest
            if step != latest:
                return None
            return max(wave_s - (now - at), max(wave_s, now - at) * _LATE_SHARE, SHORTEST_S)

    def _look(self) -> None:
        while self._running and self._running[0][2]():
            step, waves, _, _ = self._running.popleft()
            self._ends(step, waves)

    def _ends(self, step: int, waves: int | None) -> None:
        if waves is None:
            self._done = step
        else:
            self._ahead = step, waves
