"""The dialler's end of a liveness link (`transport.liveness`), which reads and writes it in the hub's thread."""

from __future__ import annotations

import contextlib
import errno
import selectors
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.transport.greeting import ASKS, answered, framed, place_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

# The error that the other end's kernel tells. Others (ETIMEDOUT, EHOSTUNREACH …) are those of a network that fell
# silent; a reset is what a packet filter answers, too, and a process that ends closes a link without one.
_TOLD = (errno.ECONNREFUSED,)

RECEIVE_BYTES = 4096


class LivenessState(Enum):
    """A link is DIALLING until the hub said its name, then OPEN, then LOST; LOST is for ever."""

    DIALLING = "dialling"
    OPEN = "open"
    LOST = "lost"


@dataclass(eq=False, slots=True)
class LivenessLink:
    """The dialler's end. `state`, `reason`, `ended` and `closed_at` are read by any thread and written by the
    hub's, or by `give_up`. `ended`: the loss was told from the other end, which is no more; else it fell silent, or
    something in between told it, and it may be well. `closed_at`: when an open line was closed in good order from
    there, which no packet filter does. `asks`: from where it is seen to dial; `direct` is whether that is its own end,
    None if it did not ask."""

    peer: str
    deadline: float
    wake: Callable[[], None]
    socket: socket.socket
    state: LivenessState = LivenessState.DIALLING
    reason: str = ""
    ended: bool = False
    closed_at: float | None = None
    leaving: bool = False
    asks: bool = False
    direct: bool | None = None
    _unsent: bytes = field(init=False)
    _received: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self._unsent = framed(self.peer.encode() + ASKS * self.asks)

    def hang_up(self) -> None:
        """End the link."""
        self.leaving = True
        self.wake()

    def give_up(self, reason: str) -> None:
        """Take a link that is open for lost, since its peer is of no use for another reason; the hub ends it."""
        self.lose(reason)
        self.wake()

    # The hub's thread alone calls what follows, and `dial` before that thread knows the link.

    def readable(self) -> None:
        """Take the hub's name, or see the end."""
        try:
            received = self.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            happened = "cannot be reached" if self.state is LivenessState.DIALLING else "cannot be reached any more"
            return self.lose(f"{self.peer} {happened}: {error.strerror or error}", error.errno in _TOLD)
        if not received:
            if self.state is LivenessState.OPEN:
                self.closed_at = time.monotonic()
            between = ", or a proxy in between did" if self.direct is False else ""
            return self.lose(
                f"{self.peer} is gone: another process listens in its place"
                if self.state is LivenessState.DIALLING
                else f"{self.peer} closed the connection: its process ended or its transport was closed{between}",
                ended=not between,
            )
        self._received += received
        try:
            seen = answered(bytes(self._received), self.peer.encode(), self.asks)
        except ProtocolError:
            return self.lose(f"{self.peer} is gone: another process listens in its place", ended=True)
        if seen is not None:
            try:
                own, there = self.socket.getsockname(), self.socket.getpeername()
            except OSError as error:  # a reset came right behind the answer
                return self.lose(f"{self.peer} cannot be reached any more: {error.strerror or error}")
            if own == there:  # a port of ours where nobody listens
                return self.lose(f"{self.peer} cannot be reached: the connection leads to this process itself")
            self.direct = seen == place_of(own) if self.asks else None
            self.state = LivenessState.OPEN

    def writable(self) -> None:
        """Send what is left of the greeting."""
        if self._unsent:
            with contextlib.suppress(OSError):  # not connected yet, no room now, or a loss that reading will tell
                self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def interest(self) -> int:
        """What the selector is to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)

    def lose(self, reason: str, ended: bool = False) -> None:
        if self.state is not LivenessState.LOST:
            self.reason, self.ended, self.state = reason, ended, LivenessState.LOST
