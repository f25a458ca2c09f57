"""A TCP proxy on the way of a liveness link."""

from __future__ import annotations

import socket


class Proxy:
    """Between a dialler and the hub at `port`: takes one connection, and closes both of its sides in good order.

    It dials from another address than its dialler: towards two listeners, the kernel gives two connections of one
    address the same port by chance (one pair in 14,000), and the hub would see the dialler's own end.
    """

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._hub = port
        self._ends: list[socket.socket] = []

    def carry(self) -> None:
        """The greeting and its answer."""
        self._listener.settimeout(60)
        ends = [self._listener.accept()[0], self._dial()]
        for one, other in (ends, ends[::-1]):
            one.settimeout(60)
            other.sendall(one.recv(1024))
        self._ends += ends

    def _dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._hub), source_address=("127.0.0.2", 0))

    def close(self) -> None:
        for end in (*self._ends, self._listener):
            end.close()
