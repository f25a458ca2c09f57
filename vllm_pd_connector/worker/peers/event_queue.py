"""One event at a time: what comes of one waits until it has been handled.

A read that fails cuts its link, which fails all that is read there, which gives leases back. If each called the next,
machines would be entered again half way through their actions. So whatever one of links, receives and pushes has for
another, or for itself, is put here.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class EventQueue:
    """See the module; one for the transfer thread."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._handling = False

    def put(self, handle: Callable[[], None]) -> None:
        """Handle an event when those before it have been; on return, unless this is called while one is handled."""
        self._waiting.append(handle)
        self.drain()

    def drain(self) -> None:
        """Handle what waits, also what a defect in the handling of another event has left."""
        if self._handling:
            return
        self._handling = True
        try:
            while self._waiting:
                self._waiting.popleft()()
        finally:
            self._handling = False
