"""An event that ends a thread's sleep, beside whatever else it waits for; the one way to wake a thread here.

The bell (`sidechannel.bell`) is another thing: it goes from one process to another.
"""

from __future__ import annotations

import os
import threading


class Wake:
    """An event that other threads set and one loop waits for; setting it twice is setting it once."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_set = False
        self._closed = False
        self._lock = threading.Lock()  # a descriptor's number may be another's once it is closed

    def set(self) -> None:
        """Make the present or next wait return; callable from any thread, and without effect after `close`. It costs
        next to nothing where the loop was woken and has not taken the event back yet."""
        if self._is_set:
            return
        with self._lock:
            if not self._closed:
                self._is_set = True
                os.eventfd_write(self._fd, 1)

    def clear(self) -> bool:
        """Take the event back; whether it was set. What it was set for until this returns is to be looked at then."""
        try:
            return os.eventfd_read(self._fd) > 0
        except BlockingIOError:
            return False
        finally:
            self._is_set = False  # last: who finds it set has its say before the look, and nothing is left to read

    def fileno(self) -> int:
        """Readable while the event is set."""
        return self._fd

    def close(self) -> None:
        """May be called twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)
