"""A bell between the workers of an instance and its scheduler half: "this receive is over here", or "an end is in my
outbox, take a step".

A datagram socket in the abstract namespace, which only processes of this host (of this network namespace) reach, so
each rings with the secret that its worker handed over when it described itself; anything else is ignored. A worker
rings HERE when it learns the bell, RECEIVED for each receive that went well and of which there is no more to say, and
ENDED for each other end. Who has rung once can wake the scheduler half: a worker on
another host never has, and is waited for in short steps.

A ring may get lost where many come at once, because the kernel queues few datagrams. Then others are there, and the
step that they cause takes all results.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

HERE, RECEIVED, ENDED = b"h", b"r", b"e"
"""What a worker's message begins with; its secret of SECRET_BYTES follows, and of a receive its attempt and request's
name: names may be used again."""

SECRET_BYTES = 16
LONGEST = 1024
"""Bytes of a message."""

PAUSE_S = 1.0


class Bell:
    """Listens from construction until `close`; `heard` is called in the bell's thread with every message."""

    def __init__(self, heard: Callable[[bytes], None]) -> None:
        self.address = f"pd-bell-{secrets.token_hex(8)}"
        self._heard = heard
        self._closing = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(_abstract(self.address))
        self._thread = threading.Thread(target=self._listen, name="pd-bell", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        failing = False
        while True:
            try:
                message, failing = self._socket.recv(LONGEST), False
            except OSError as error:  # the kernel has no memory, say: without this thread engines would wait in vain
                if not failing:
                    logger.warning("what workers ring for cannot be received: %s; it is tried again", error)
                message, failing = b"", True
                time.sleep(PAUSE_S)
            if self._closing:
                return
            if failing:
                continue
            try:
                self._heard(message)
            except Exception:  # what one message meets must not keep all later ones from being heard
                logger.exception("what a worker rang for was not taken")

    def close(self) -> None:
        """End the thread. May be called twice."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(BlockingIOError):  # where this is one too many, the thread is about to look
            self._socket.sendto(b"", socket.MSG_DONTWAIT, _abstract(self.address))
        self._thread.join()
        self._socket.close()


def ring(address: str, message: bytes) -> None:
    """Ring the bell at `address`, if it is there and has room and this process has a free descriptor; never waits.
    Callable from any thread."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as caller:
        caller.setblocking(False)
        caller.sendto(message, _abstract(address))


def _abstract(address: str) -> bytes:
    return b"\0" + address.encode()
