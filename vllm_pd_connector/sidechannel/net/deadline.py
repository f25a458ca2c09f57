"""Connections that end by a moment, however slowly their bytes come: a socket's own time-out begins anew with each."""

from __future__ import annotations

import socket
import time
from typing import Any


class DeadlineSocket(socket.socket):
    """Takes the connection over from `other`; reads and writes fail with TimeoutError when `seconds` have passed.

    What is read goes through `recv_into`, as it does in the standard library's HTTP, both ends.
    """

    def __init__(self, other: socket.socket, seconds: float) -> None:
        super().__init__(other.family, other.type, other.proto, fileno=other.detach())
        self._until = time.monotonic() + seconds

    def recv_into(self, *args: Any) -> int:
        self._allow()
        return super().recv_into(*args)

    def sendall(self, *args: Any) -> None:
        self._allow()
        super().sendall(*args)

    def _allow(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left)
