"""Lines between workers: small ordered messages, and the knowledge that the other process is there.

For transports whose library moves bytes but cannot tell that a peer died before something was asked of it, nor send a
message of any bytes without blocking. An `Exchange` listens at one address with one thread, which sleeps unless a
socket has something to say. Whoever dials says the exchange's name first and is answered with it, so that a line leads
to that incarnation and not to what listens on its port today, and only who was given the name (it is random and travels
in a manifest) can send. After that, messages flow from the dialler to the exchange, in order.

    frame := length (4 bytes, big endian) payload           the exchange's name is the only frame that it sends

Strangers may dial as well. Who does not say the name within `GREETING_SECONDS` is hung up on, and the one that has been
silent longest when more than `MAX_STRANGERS` have not said it. When the process has no descriptor left for who dials
next, nobody is taken for `PAUSE_SECONDS`: they wait in the kernel's queue.

A line is lost when the other process ends or closes (at once), or when its machine does not acknowledge for
`SILENCE_SECONDS` (the kernel's keep-alive, so a half-open connection is found without traffic of ours). A process that
is merely stopped keeps its lines: its kernel answers. What a lost line had not delivered is gone.
"""

from __future__ import annotations

import errno
import hmac
import itertools
import logging
import os
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from vllm_pd_connector.errors import PeerLost, ProtocolError, TransferError

logger = logging.getLogger(__name__)

MAX_NAME_BYTES = 256
MAX_MESSAGE_BYTES = 16 << 20
MAX_WAITING_BYTES = 64 << 20
SILENCE_SECONDS = 15
GREETING_SECONDS = 10.0
MAX_STRANGERS = 256
PAUSE_SECONDS = 1.0

# Errors that the other end's kernel tells; others (ETIMEDOUT, EHOSTUNREACH …) are those of a network that fell silent.
_TOLD = (errno.ECONNRESET, errno.ECONNREFUSED)
_RECEIVE_BYTES = 256 << 10

# A refusal of a machine nearby comes within this time; `dial` does not wait longer for one.
_NEAR_MILLISECONDS = 3


class LineState(Enum):
    """A line is DIALLING until the exchange said its name, then OPEN, then LOST; LOST is for ever."""

    DIALLING = "dialling"
    OPEN = "open"
    LOST = "lost"


@dataclass(eq=False, slots=True)
class Line:
    """The dialler's end. `state`, `reason` and `ended` are read by any thread and written by the exchange's, or by
    `give_up`. `ended`: the loss was told from the other end, which is no more; else it fell silent and may be well."""

    peer: str
    deadline: float
    wake: Callable[[], None]
    socket: socket.socket
    state: LineState = LineState.DIALLING
    reason: str = ""
    ended: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _greeting: bytearray = field(init=False)
    _waiting: bytearray = field(default_factory=bytearray)
    _received: bytearray = field(default_factory=bytearray)
    _leaving: bool = False

    def __post_init__(self) -> None:
        self._greeting = bytearray(_frame(self.peer.encode()))

    def send(self, payload: bytes) -> None:
        """Queue a message; it leaves when the line is open and the peer has room.

        Raises:
            PeerLost: the line is lost.
            TransferError: the message is too large, or too much waits for a peer that does not take it.
        """
        if len(payload) > MAX_MESSAGE_BYTES:
            raise TransferError(f"message of {len(payload)} bytes to {self.peer}, at most {MAX_MESSAGE_BYTES} are sent")
        if self.state is LineState.LOST:
            raise PeerLost(self.reason)
        with self._lock:
            if len(self._waiting) + len(payload) > MAX_WAITING_BYTES:
                raise TransferError(
                    f"{len(self._waiting)} bytes wait for {self.peer}, which takes none; it is stopped or overloaded",
                    retryable=True,
                )
            self._waiting += _frame(payload)
        self.wake()

    def hang_up(self) -> None:
        """End the line when what waits has been sent."""
        with self._lock:
            self._leaving = True
        self.wake()

    def give_up(self, reason: str) -> None:
        """Take a line that is open for lost, since its peer is of no use for another reason; the exchange ends it."""
        self.lose(reason)
        self.wake()

    # The exchange's thread alone calls what follows, and `dial` before that thread knows the line.

    def readable(self) -> None:
        """Take the exchange's name, or see the end."""
        try:
            received = self.socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            happened = "cannot be reached" if self.state is LineState.DIALLING else "cannot be reached any more"
            return self.lose(f"{self.peer} {happened}: {error.strerror or error}", error.errno in _TOLD)
        if not received:
            return self.lose(
                f"{self.peer} is gone: another process listens in its place"
                if self.state is LineState.DIALLING
                else f"{self.peer} closed the connection: its process ended or its transport was closed",
                ended=True,
            )
        self._received += received
        answer = _frame(self.peer.encode())
        if not answer.startswith(self._received):
            return self.lose(f"{self.peer} is gone: another process listens in its place", ended=True)
        if len(self._received) == len(answer):
            self.state = LineState.OPEN

    def writable(self) -> None:
        """Send what may go: the greeting, and what waits once the line is open."""
        with self._lock:
            outgoing = self._outgoing()
            if not outgoing:
                return
            try:
                sent = self.socket.send(memoryview(outgoing)[: 1 << 20])
            except OSError:
                return  # not connected yet, no room now, or a loss that reading will tell
            del outgoing[:sent]

    def wants_to_write(self) -> bool:
        return bool(self._outgoing())

    def _outgoing(self) -> bytearray:
        if self._greeting or self.state is not LineState.OPEN:
            return self._greeting
        return self._waiting

    def finished(self) -> bool:
        return self._leaving and not (self._waiting and self.state is not LineState.LOST)

    def lose(self, reason: str, ended: bool = False) -> None:
        if self.state is not LineState.LOST:
            self.reason, self.ended, self.state = reason, ended, LineState.LOST


@dataclass(eq=False, slots=True)
class Arrival:
    """What came from a dialler: our `name`, for which it has until `deadline`, then messages."""

    name: bytes
    deadline: float
    greeted: bool = False
    _frames: bytearray = field(default_factory=bytearray)

    def take(self, received: bytes) -> list[bytes]:
        """The messages that are complete now.

        Raises:
            ProtocolError: the dialler is to be hung up on.
        """
        frames, messages = self._frames, []
        frames += received
        while len(frames) >= 4:
            length = int.from_bytes(frames[:4], "big")
            if length > (MAX_MESSAGE_BYTES if self.greeted else MAX_NAME_BYTES):
                raise ProtocolError(f"it announced a frame of {length} bytes")
            if len(frames) < 4 + length:
                break
            payload = bytes(frames[4 : 4 + length])
            del frames[: 4 + length]
            if self.greeted:
                messages.append(payload)
            elif not hmac.compare_digest(payload, self.name):
                raise ProtocolError("it asked for another process than this one")
            self.greeted = True
        return messages


class Exchange:
    """Listens at `address` under `name` and dials others; see the module.

    Raises:
        TransferError: nothing can listen at the address.
    """

    def __init__(self, address: str, name: str) -> None:
        self._name = name
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            self._listener.bind((address, 0))
            self._listener.listen(1024)
        except OSError as error:
            self._listener.close()
            raise TransferError(f"cannot listen at {address}: {error.strerror}; choose another address") from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._inbox: deque[bytes] = deque()
        self._new: deque[Line] = deque()
        self._lines: set[Line] = set()
        self._arriving: dict[socket.socket, Arrival] = {}
        self._strangers: dict[socket.socket, Arrival] = {}  # those of them that did not greet, oldest first
        self._paused_until = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._event, selectors.EVENT_READ, self._woken)
        self._event_lock = threading.Lock()
        self._closing = self._ended = False
        self._thread = threading.Thread(target=self._run, name="pd-lines", daemon=True)
        self._thread.start()

    def dial(self, address: str, port: int, peer: str, timeout: float) -> Line:
        """A line to the exchange named `peer`.

        It is LOST when it is not open within `timeout` seconds, and on return when the peer's machine refuses at once.

        Raises:
            TransferError: this process has no descriptor left.
        """
        try:
            made = socket.socket(self._family, socket.SOCK_STREAM)
        except OSError as error:
            raise TransferError(f"no connection to {peer} can be made: {error.strerror}", retryable=True) from error
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_silence(made)
        line = Line(peer, time.monotonic() + timeout, self._wake, made)
        failure = made.connect_ex((address, port))
        if failure == errno.EINPROGRESS:
            near = select.poll()  # select takes no descriptor above 1023
            near.register(made, select.POLLOUT)
            near.poll(_NEAR_MILLISECONDS)
            failure = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            line.lose(f"{peer} cannot be reached at {address} port {port}: {os.strerror(failure)}")
        self._new.append(line)
        self._wake()
        return line

    def messages(self) -> list[bytes]:
        """What arrived since the last call, oldest first."""
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def close(self) -> None:
        """End all lines. Returns when the thread has ended."""
        self._closing = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with self._event_lock:
            if not self._ended:
                os.eventfd_write(self._event, 1)

    def _run(self) -> None:
        while not self._closing:
            for key, ready in self._selector.select(self._patience()):
                key.data(ready)
            while self._new:
                self._lines.add(self._new.popleft())
            now = time.monotonic()
            for line in tuple(self._lines):
                self._look_after(line, now)
            self._look_after_strangers(now)
        self._end()

    def _patience(self) -> float | None:
        """Seconds until the first dialled line or greeting is overdue, or a pause is over."""
        deadlines = [line.deadline for line in self._lines if line.state is LineState.DIALLING]
        deadlines += [arrival.deadline for arrival in itertools.islice(self._strangers.values(), 1)]
        deadlines += [self._paused_until] * bool(self._paused_until)
        return max(min(deadlines) - time.monotonic(), 0.0) if deadlines else None

    def _woken(self, ready: int) -> None:
        os.eventfd_read(self._event)

    @staticmethod
    def _serve(line: Line, ready: int) -> None:
        if ready & selectors.EVENT_READ:
            line.readable()
        if ready & selectors.EVENT_WRITE:
            line.writable()

    def _look_after(self, line: Line, now: float) -> None:
        """Keep the selector's interest in a line up to date, and end what is over."""
        line.writable()
        if line.state is LineState.DIALLING and now >= line.deadline:
            line.lose(f"{line.peer} did not answer in time; it is stopped, or its address leads elsewhere")
        registered = line.socket in self._selector.get_map()
        if line.state is LineState.LOST or line.finished():
            if registered:
                self._selector.unregister(line.socket)
            line.lose("the line was ended here")
            line.socket.close()
            self._lines.discard(line)
            return
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.wants_to_write() else 0)
        if not registered:
            self._selector.register(line.socket, interest, partial(self._serve, line))
        elif (key := self._selector.get_key(line.socket)).events != interest:
            self._selector.modify(line.socket, interest, key.data)

    def _accept(self, ready: int) -> None:
        try:
            arrived, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # the dialler left again
            return
        except OSError as error:  # no descriptor or memory is left, and the listener stays readable
            logger.warning("nobody is taken for %s s who dials this worker: %s", PAUSE_SECONDS, error.strerror)
            self._selector.unregister(self._listener)
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            return
        arrived.setblocking(False)
        _notice_silence(arrived)
        arrival = Arrival(self._name.encode(), time.monotonic() + GREETING_SECONDS)
        self._arriving[arrived] = self._strangers[arrived] = arrival
        self._selector.register(arrived, selectors.EVENT_READ, partial(self._receive, arrived))

    def _look_after_strangers(self, now: float) -> None:
        """Hang up on who did not greet in time, or on the oldest if there are too many; go on after a pause."""
        while self._strangers:
            arrived, arrival = next(iter(self._strangers.items()))
            if now < arrival.deadline and len(self._strangers) <= MAX_STRANGERS:
                break
            self._hang_up_on(arrived)
        if self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _hang_up_on(self, arrived: socket.socket) -> None:
        self._selector.unregister(arrived)
        del self._arriving[arrived]
        self._strangers.pop(arrived, None)
        arrived.close()

    def _receive(self, arrived: socket.socket, ready: int) -> None:
        try:
            received = arrived.recv(_RECEIVE_BYTES)
            if not received:
                return self._hang_up_on(arrived)
            arrival = self._arriving[arrived]
            self._inbox.extend(arrival.take(received))
            if arrival.greeted and self._strangers.pop(arrived, None) is not None:
                arrived.send(_frame(arrival.name))
        except BlockingIOError:
            return
        except OSError:
            self._hang_up_on(arrived)
        except ProtocolError as error:
            logger.warning("hung up on a dialler: %s", error)
            self._hang_up_on(arrived)

    def _end(self) -> None:
        for line in (*self._lines, *self._new):
            line.writable()
            line.lose("the transport was closed here")
            line.socket.close()
        for arrived in self._arriving:
            arrived.close()
        self._listener.close()
        self._selector.close()
        with self._event_lock:  # its number may be another's from here on
            self._ended = True
            os.close(self._event)


def _frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def _notice_silence(connection: socket.socket) -> None:
    """Let the kernel end a connection whose other machine does not acknowledge for `SILENCE_SECONDS`."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_SECONDS // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_SECONDS // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_SECONDS * 1000)
