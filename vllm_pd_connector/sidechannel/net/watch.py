"""Messages that never end: how much of one a socket takes in before its connection is cut.

zmq bounds the bytes of a part (MAXMSGSIZE) and the number of whole messages that wait (RCVHWM). The parts of a message
whose end has not come are neither: libzmq collects them in its pipe, where nobody sees them before the last is there,
and would collect until memory is full. Draft socket types of single parts collect in the same pipe, and with CURVE the
flag that says "more" is encrypted. So the kernel is asked, which counts the bytes of each connection: a socket that
has not handed a message to its owner since takes in at most what its queue holds, and one message more. Whoever sends
more than that is in a message without end, and is cut off (`shutdown`); zmq then drops what it had collected.

A thread learns of connections from the sockets' monitors, sleeps while none of them says anything, and looks at those
that do every LOOK_S. The owner only says from which connection a message came (`took`). Nothing here is on the way of
a message.

Source: libzmq 4.3.5, `src/pipe.cpp` (`pipe_t::write`, `rollback`), `src/session_base.cpp` (`clean_pipes`).
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import math
import os
import select
import socket
import struct
import termios
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.wake import Wake

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

LOOK_S = 0.02
SLACK_BYTES = 64 << 10  # greetings, framing, what encryption adds

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
_ARMED = select.EPOLLIN | select.EPOLLET | select.EPOLLONESHOT
_INFO_BYTES = 136
_RECEIVED_AT = 128  # tcpi_bytes_received in struct tcp_info, Linux 4.1 and later
_RESET = struct.pack("ii", 1, 0)
_LOG_EVERY_S = 10.0

_names = itertools.count()


def allowance(queued: int, message_bytes: int) -> int:
    """Bytes that a connection may bring while its owner takes nothing: a full queue of messages, and one more."""
    return (queued + 1) * (message_bytes + SLACK_BYTES)


@dataclass(slots=True)
class _Connection:
    """`base` is what had come when a message of it was last seen to be taken, `got` what had come at the last look."""

    name: str
    other_end: object
    allowed: int
    taken: int
    base: int = 0
    got: int = 0


class Watch:
    """Cuts off who sends messages without end to the sockets of one context, and tells of connections that were lost.
    Used by the thread that owns these sockets; closed before the context ends.

    Args:
        lost: set when a connection was lost.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], lost: Wake | None = None) -> None:
        self._context = context
        self._tell = lost
        self._wake = Wake()
        self._new: deque[tuple[zmq.Socket[bytes], str, int]] = deque()
        self._taken: dict[int, int] = {}  # messages by the number of their connection's descriptor
        self._cut: set[str] = set()
        self._lost: set[str] = set()
        self._connections: dict[int, _Connection] = {}
        self._busy: set[int] = set()
        self._monitors: dict[zmq.Socket[bytes], tuple[str, int]] = {}
        self._epoll = select.epoll()
        self._log_at = -math.inf
        self._closing = False
        self._thread: threading.Thread | None = None

    def add(self, watched: zmq.Socket[bytes], allowed: int) -> str:
        """Watch the connections that a socket will have, each of which may bring `allowed` bytes without a message;
        returns a name for it. It ends when the socket is closed.

        Raises:
            ZMQError: no socket is left.
            ProtocolError: no thread is left.
        """
        self._begin_to_run()
        name = f"inproc://pd-watch-{next(_names)}"
        watched.monitor(name, _EVENTS)
        monitor = self._context.socket(zmq.PAIR)
        monitor.connect(name)
        self._new.append((monitor, name, allowed))
        self._wake.set()
        return name

    def _begin_to_run(self) -> None:
        """Start the thread with the first socket, so that a process that has none has no thread."""
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name="pd-watch", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # and the next socket's may start
            raise ProtocolError(f"side channel: no thread is left: {error}; raise the limit of threads") from error
        self._thread = thread

    def took(self, part: zmq.Frame) -> None:
        """A whole message has been taken, of which this is a part."""
        with contextlib.suppress(zmq.ZMQError):  # it has come by no connection
            number = int(part.get(zmq.SRCFD))
            self._taken[number] = self._taken.get(number, 0) + 1

    def was_cut(self, name: str) -> bool:
        """Whether a connection of this socket was cut."""
        return name in self._cut

    def has_lost(self, name: str) -> bool:
        """Whether a connection of this socket has ended."""
        return name in self._lost

    def close(self) -> None:
        """End the thread. May be called twice."""
        if self._closing:
            return
        self._closing = True
        if self._thread is not None:
            self._wake.set()
            self._thread.join()
        self._wake.close()
        self._epoll.close()

    # Everything below runs in the thread.

    def _run(self) -> None:
        look_at = math.inf
        while not self._closing:
            try:
                self._sleep(look_at)
                now = time.monotonic()
                self._hear_of_connections()
                for number, _ in self._epoll.poll(0):
                    if number in self._connections:
                        self._busy.add(number)
                if self._busy and look_at == math.inf:
                    look_at = now + LOOK_S
                elif now >= look_at:
                    for number in list(self._busy):
                        self._look(number)
                    look_at = now + LOOK_S if self._busy else math.inf
            except Exception:  # without this thread nothing bounds what unauthenticated peers send
                logger.exception("side channel: its connections could not be looked at")
                time.sleep(LOOK_S)
        for monitor in (*self._monitors, *(new[0] for new in self._new)):
            monitor.close(linger=0)

    def _sleep(self, until: float) -> None:
        poller = zmq.Poller()
        poller.register(self._wake.fileno(), zmq.POLLIN)
        poller.register(self._epoll.fileno(), zmq.POLLIN)
        for monitor in self._monitors:
            poller.register(monitor, zmq.POLLIN)
        poller.poll(None if until == math.inf else max(0, math.ceil(1e3 * (until - time.monotonic()))))
        self._wake.clear()

    def _hear_of_connections(self) -> None:
        while self._new:
            monitor, name, allowed = self._new.popleft()
            self._monitors[monitor] = name, allowed
        for monitor, (name, allowed) in list(self._monitors.items()):
            with contextlib.suppress(zmq.Again):
                while True:
                    told = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
                    if told["event"] == zmq.EVENT_MONITOR_STOPPED:
                        monitor.close(linger=0)
                        del self._monitors[monitor]
                        self._cut.discard(name)
                        self._lost.discard(name)
                        break
                    if told["event"] != zmq.EVENT_DISCONNECTED:
                        self._begin(told, name, allowed)
                    elif self._tell is not None:
                        self._lost.add(name)
                        self._tell.set()

    def _begin(self, told: Mapping[str, Any], name: str, allowed: int) -> None:
        number, port = int(told["value"]), int(told["endpoint"].rpartition(b":")[2])
        try:
            with _opened(number) as connection:
                other_end = connection.getpeername()
                accepted = told["event"] == zmq.EVENT_ACCEPTED
                # It may have ended, and its number be that of a connection that is none of these.
                if port != (connection.getsockname() if accepted else other_end)[1]:
                    return
            self._connections[number] = _Connection(name, other_end, allowed, self._taken.get(number, 0))
            try:
                self._epoll.register(number, _ARMED)
            except FileExistsError:
                self._epoll.modify(number, _ARMED)
        except OSError:  # it has ended
            self._forget(number)

    def _look(self, number: int) -> None:
        one = self._connections[number]
        taken = self._taken.get(number, 0)  # before the bytes are counted
        try:
            with _opened(number) as connection:
                if connection.getpeername() != one.other_end:
                    raise OSError("another connection has the number")
                got = _read_of(connection)
                if taken != one.taken:
                    one.taken, one.base = taken, got
                elif got - one.base > one.allowed:
                    self._log(one, got - one.base)
                    self._cut.add(one.name)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)  # else it may wait for us
                    connection.shutdown(socket.SHUT_RDWR)
                    self._forget(number)
                    return
            if got == one.got:
                self._busy.discard(number)
                self._epoll.modify(number, _ARMED)
            one.got = got
        except OSError:  # it has ended
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._connections.pop(number, None)
        self._busy.discard(number)

    def _log(self, one: _Connection, size: int) -> None:
        now = time.monotonic()
        if now - self._log_at >= _LOG_EVERY_S:
            self._log_at = now
            logger.warning(
                "side channel: %s was cut off: %d bytes came from there without the end of a message, %d are the most "
                "(further ones are silent for %g s)",
                one.other_end,
                size,
                one.allowed,
                _LOG_EVERY_S,
            )


def _opened(number: int) -> socket.socket:
    """zmq's connection of this number under a number of ours, so that it stays the same while we look at it.

    Raises:
        OSError: there is none.
    """
    own = os.dup(number)
    try:
        opened = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
    if opened.family not in (socket.AF_INET, socket.AF_INET6):
        opened.close()
        raise OSError(f"descriptor {number} is no connection to a host")
    return opened


def _read_of(connection: socket.socket) -> int:
    """Bytes that zmq has read of a connection."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    [received] = struct.unpack_from("=Q", info, _RECEIVED_AT)
    [unread] = struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, b"\0\0\0\0"))
    return int(received) - int(unread)
