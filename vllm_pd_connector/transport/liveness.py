"""Liveness links between workers: each knows that the other process is there.

For libraries that move bytes but cannot tell that a peer died before something is asked of it. A `LivenessHub` listens
at one address with one thread, which sleeps unless a socket has something to say. Whoever dials says the hub's name
first and is answered with it, so that a link leads to that incarnation and not to what listens on its port today, and
only who was given the name (it is random and travels in a manifest) stays. After that, neither side sends anything
(`transport.greeting` has the bytes).

Who says "?" behind the name is told besides from where it is seen to dial: from its own end of the connection, unless a
proxy or a translation of addresses is in between, which may close a link as a kernel does. So is asked who has a name
that begins with SAYS; the hubs of 0.1.0rc1 do not answer that. One proxy in 14,000 is not seen: one on the dialler's
machine with an address of its own, to which the kernel gave the dialler's port by chance.

Others may dial as well, unauthenticated. Who does not say the name within `GREETING_S` is hung up on, and the one that
has been silent longest when more than `MAX_UNAUTHENTICATED` have not said it. When `MAX_DIALLERS` are connected, or the
process has no descriptor left, nobody is taken for `PAUSE_S`: they wait in the kernel's queue. Who has said the name is
never hung up on for another: to it that is the end of this process, and that nothing is written by it any more.

A link is lost when the other process ends or closes (at once), or when its machine does not acknowledge for
`silence_s` (the kernel's keep-alive, so a half-open connection is found without traffic of ours). A process that
is merely stopped keeps its links: its kernel answers, and since nothing is sent after the greeting, none of it waits
for room there. A network that is away for less than that loses nobody; one that is away for longer loses peers whose
data network may be well, but most of their requests would fail all the same, because leases are renewed over it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import select
import selectors
import socket
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from vllm_pd_connector.errors import ProtocolError, TransferError
from vllm_pd_connector.transport.greeting import IncomingLink
from vllm_pd_connector.transport.liveness_link import RECEIVE_BYTES, LivenessLink, LivenessState
from vllm_pd_connector.wake import Wake

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

SAYS = "pd-line-"
SILENCE_S = 15
GREETING_S = 10.0
MAX_UNAUTHENTICATED = 256
MAX_DIALLERS = 4096  # at a time; 64 instances of 8 ranks that watch this process are 512
PAUSE_S = 1.0

# Those of this machine, before anything was sent: no port, route or memory is left, or its own filter forbids it.
_OURS = frozenset(
    (errno.EADDRNOTAVAIL, errno.ENETUNREACH, errno.ENETDOWN, errno.ENOBUFS, errno.ENOMEM, errno.EACCES, errno.EPERM)
)

# A refusal of a machine nearby comes within this time; `dial` does not wait longer for one.
_NEAR_MILLISECONDS = 3


class LivenessHub:
    """Listens at `address` under `name` and dials others; see the module.

    Args:
        lost: called in the hub's thread when a link was lost.

    Raises:
        TransferError: nothing can listen at the address.
    """

    def __init__(
        self, address: str, name: str, *, lost: Callable[[], None] = lambda: None, silence_s: int = SILENCE_S
    ) -> None:
        self._name = name
        self._silence_s = silence_s
        self._lost = lost
        self._listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._listener.bind((address, 0))
            self._listener.listen(1024)
        except OSError as error:
            self._listener.close()
            raise TransferError(f"cannot listen at {address}: {error.strerror}; choose another address") from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._new: deque[LivenessLink] = deque()
        self._lines: set[LivenessLink] = set()
        self._arriving: dict[socket.socket, IncomingLink] = {}
        self._unauthenticated: dict[socket.socket, IncomingLink] = {}  # those of them that did not greet, oldest first
        self._paused_until = 0.0
        self._paused_for = ""  # why nobody was taken, since somebody was
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._wake = Wake()
        self._selector.register(self._wake, selectors.EVENT_READ, lambda ready: self._wake.clear())
        self._lock = threading.Lock()  # of `_new` and `_ended`
        self._closing = self._ended = False
        self._thread = threading.Thread(target=self._run, name="pd-lines", daemon=True)
        self._thread.start()

    def dial(
        self, address: str, port: int, peer: str, timeout: float, wait_ms: int = _NEAR_MILLISECONDS
    ) -> LivenessLink:
        """A link to the hub named `peer`.

        It is LOST when it is not open within `timeout` seconds, and on return when the peer's machine refuses within
        `wait_ms`.

        Raises:
            TransferError: this process has no descriptor left, this machine lets nobody dial there, the address is none
                here, or this hub is closed.
        """
        try:
            made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            raise TransferError(f"no connection to {peer} can be made: {error.strerror}", retryable=True) from error
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_silence(made, self._silence_s)
        link = LivenessLink(peer, time.monotonic() + timeout, self._wake.set, made, asks=peer.startswith(SAYS))
        try:
            failure = made.connect_ex((address, port))
        except (OSError, OverflowError) as error:  # no address here, or no port
            made.close()
            raise TransferError(f"{peer} cannot be dialled at {address} port {port}: {error}") from error
        if failure in _OURS:
            made.close()
            reason = f"{peer} cannot be dialled at {address} port {port} from here: {os.strerror(failure)}"
            raise TransferError(reason, retryable=True)
        if failure == errno.EINPROGRESS and not wait_ms:
            failure = 0
        elif failure == errno.EINPROGRESS:
            near = select.poll()  # select takes no descriptor above 1023
            near.register(made, select.POLLOUT)
            near.poll(wait_ms)
            failure = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            link.lose(f"{peer} cannot be reached at {address} port {port}: {os.strerror(failure)}")
        with self._lock:
            if self._ended:  # nobody would close it
                made.close()
                raise TransferError(f"no connection to {peer} can be made: this worker's links have ended")
            self._new.append(link)
        self._wake.set()
        return link

    def close(self) -> None:
        """End all links. Returns when the thread has ended."""
        self._closing = True
        self._wake.set()
        self._thread.join()
        for one in (*self._arriving, self._listener):
            one.close()
        self._selector.close()

    def _run(self) -> None:
        try:
            self._serve_until_closed()
        except Exception:
            # A link that nobody looks after would be open for ever. Who dialled stays connected, see the module.
            logger.exception("this worker's liveness links have failed: it takes its peers for lost until it restarts")
        self._end_links()

    def _serve_until_closed(self) -> None:
        while not self._closing:
            for key, ready in self._selector.select(self._wait_timeout()):
                key.data(ready)
            while self._new:
                self._lines.add(self._new.popleft())
            now = time.monotonic()
            for link in tuple(self._lines):
                try:
                    self._look_after(link, now)
                except Exception as error:
                    _spoil(link, error)
                    self._drop(link)
            self._look_after_unauthenticated(now)

    def _wait_timeout(self) -> float | None:
        """Seconds until the first dialled link or greeting is overdue, or a pause is over."""
        deadlines = [link.deadline for link in self._lines if link.state is LivenessState.DIALLING]
        deadlines += [incoming.deadline for incoming in itertools.islice(self._unauthenticated.values(), 1)]
        deadlines += [self._paused_until] * bool(self._paused_until)
        return max(min(deadlines) - time.monotonic(), 0.0) if deadlines else None

    @staticmethod
    def _serve(link: LivenessLink, ready: int) -> None:
        try:
            if ready & selectors.EVENT_READ:
                link.readable()
            if ready & selectors.EVENT_WRITE:
                link.writable()
        except Exception as error:
            _spoil(link, error)

    def _look_after(self, link: LivenessLink, now: float) -> None:
        """Keep the selector's interest in a link up to date, and end what is over."""
        link.writable()
        if link.state is LivenessState.DIALLING and now >= link.deadline:
            link.lose(f"{link.peer} did not answer in time; it is stopped, or its address leads elsewhere")
        if link.state is LivenessState.LOST or link.leaving:
            self._drop(link)
        elif link.socket not in self._selector.get_map():
            self._selector.register(link.socket, link.interest(), partial(self._serve, link))
        elif (key := self._selector.get_key(link.socket)).events != link.interest():
            self._selector.modify(link.socket, link.interest(), key.data)

    def _drop(self, link: LivenessLink) -> None:
        if link.socket in self._selector.get_map():
            self._selector.unregister(link.socket)
        link.lose("the line was ended here")
        link.socket.close()
        self._lines.discard(link)
        self._lost()

    def _accept(self, ready: int) -> None:
        if len(self._arriving) >= MAX_DIALLERS:
            return self._pause(f"{len(self._arriving)} are connected, at most {MAX_DIALLERS} may be")
        try:
            arrived, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # the dialler left again
            return None
        except OSError as error:
            return self._pause(str(error.strerror))
        arrived.setblocking(False)
        _notice_silence(arrived, self._silence_s)
        incoming = IncomingLink(self._name.encode(), time.monotonic() + GREETING_S)
        try:
            self._selector.register(arrived, selectors.EVENT_READ, partial(self._receive, arrived))
        except OSError as error:  # the kernel watches no more of them
            logger.warning("hung up on who dials this worker: %s", error.strerror)
            return arrived.close()
        self._arriving[arrived] = self._unauthenticated[arrived] = incoming
        self._paused_for = ""

    def _pause(self, why: str) -> None:
        """Take nobody for a while: the listener stays readable as long as somebody waits. It may go on so for hours,
        and is said once."""
        if why != self._paused_for:
            logger.warning("nobody is taken who dials this worker, tried again every %s s: %s", PAUSE_S, why)
            self._paused_for = why
        self._selector.unregister(self._listener)
        self._paused_until = time.monotonic() + PAUSE_S

    def _look_after_unauthenticated(self, now: float) -> None:
        """Hang up on who did not greet in time, or on the oldest if there are too many; go on after a pause."""
        while self._unauthenticated:
            arrived, incoming = next(iter(self._unauthenticated.items()))
            if now < incoming.deadline and len(self._unauthenticated) <= MAX_UNAUTHENTICATED:
                break
            self._hang_up_on(arrived)
        if self._paused_until and now >= self._paused_until:
            self._paused_until = now + PAUSE_S  # the kernel may have no room for it yet
            with contextlib.suppress(OSError):
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
                self._paused_until = 0.0

    def _hang_up_on(self, arrived: socket.socket) -> None:
        self._selector.unregister(arrived)
        del self._arriving[arrived]
        self._unauthenticated.pop(arrived, None)
        arrived.close()

    def _receive(self, arrived: socket.socket, ready: int) -> None:
        try:
            received = arrived.recv(RECEIVE_BYTES)
            if not received:
                return self._hang_up_on(arrived)
            incoming = self._arriving[arrived]
            incoming.take(received)
            if incoming.greeted:
                del self._unauthenticated[arrived]
                arrived.send(incoming.answer(arrived.getpeername()))
        except BlockingIOError:
            return
        except OSError:
            self._hang_up_on(arrived)
        except Exception as error:  # also a defect that one met, which must not end the others' links
            logger.warning("hung up on a dialler: %s", error, exc_info=not isinstance(error, ProtocolError))
            self._hang_up_on(arrived)

    def _end_links(self) -> None:
        with self._lock:  # no link comes any more
            self._ended = True
        self._wake.close()
        for link in (*self._lines, *self._new):
            link.lose("this worker's links have ended")
            link.socket.close()
        self._lost()


def _spoil(link: LivenessLink, error: Exception) -> None:
    """Lose a link that met a defect of ours, which must not end the others."""
    logger.error("a liveness link", exc_info=error)
    link.lose(f"{link.peer} is not watched any more: {type(error).__name__}: {error}")


def _notice_silence(connection: socket.socket, seconds: int) -> None:
    """Let the kernel end a connection whose other machine does not acknowledge for that long."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)
