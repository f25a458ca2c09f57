"""Whether a host refuses connections to a port, asked without waiting for it.

A refusal proves that the process that listened there has ended. Silence proves nothing: an attempt that is not answered
at once is looked at again when its owner next wonders.
"""

from __future__ import annotations

import errno
import select
import socket

PATIENCE_S = 0.002  # of one look; a host nearby has answered by then


class Knock:
    """One attempt at a time. Not thread-safe."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host.strip("[]"), port
        self._socket: socket.socket | None = None

    def refused(self) -> bool:
        """Whether an attempt was refused; begins one, and looks at it for PATIENCE_S at most.

        A host that is a name is looked up by the system, which may take longer.
        """
        try:
            code = self._look() if self._socket is not None else self._begin()
        except OSError:  # the name is not known now
            code = errno.EHOSTUNREACH
        if code != errno.EINPROGRESS:
            self.close()
        return code == errno.ECONNREFUSED

    def _begin(self) -> int:
        family, kind, _, _, address = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind)
        self._socket.setblocking(False)
        code = self._socket.connect_ex(address)
        return self._look() if code == errno.EINPROGRESS else code

    def _look(self) -> int:
        assert self._socket is not None
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        if not poll.poll(1e3 * PATIENCE_S):
            return errno.EINPROGRESS
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
