"""An event that ends a thread's sleep, beside whatever else it waits for."""

from __future__ import annotations

import os


class Wake:
    """An event that other threads set and one loop waits for; setting it twice is setting it once."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        """Make the present or next `wait` return; callable from any thread."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)
