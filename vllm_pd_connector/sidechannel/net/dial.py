"""Where a server takes connections, found out before zmq is told to connect.

zmq tries an address for ever and says nothing: a wrong port, a name that nobody knows and a host that is silent are the
same to who waits. It looks names up in the one thread that serves all its sockets, and tries the first address that a
name has. A `Dial` looks a name up in a thread of its own and tries all its addresses at once; the first that takes a
connection is the one that zmq gets, as numbers. Nothing is sent on that connection, and it ends at once.

Used in a loop that waits on an epoll object, in which a dial registers what it waits for.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  # else the first look-up loads it, which takes the loop 2 ms
import os
import select
import socket
import threading
from errno import EINPROGRESS, EMFILE, ENFILE, ENOBUFS, ENOMEM

from vllm_pd_connector.errors import Busy, Unreachable
from vllm_pd_connector.wake import Wake

MAX_LOOKUPS = 64  # names that are looked up at a time in this process, a thread each; requests name them
MAX_ADDRESSES = 8  # of one name
NONE_LEFT = (EMFILE, ENFILE, ENOBUFS, ENOMEM)  # of what a connection takes here: this says nothing of the other side

_lookups = threading.BoundedSemaphore(MAX_LOOKUPS)

_Found = list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int]]]


class Dial:
    """One attempt at a host and port; `ready` gets what to wait for. `close` it, whatever comes of it."""

    def __init__(self, host: str, port: int, ready: select.epoll) -> None:
        self._host, self._port, self._ready = host, port, ready
        self._trying: dict[socket.socket, str] = {}
        self._reached: str | None = None
        self._failures: list[str] = []
        self._refused = False  # by a failure that does not come of this side alone
        self._found: _Found | OSError | None = None
        self._lookup: Wake | None = None
        try:
            self._try(_addresses(host, port, socket.AI_NUMERICHOST))
        except (OSError, UnicodeError):  # it is a name, or can be none, which the look-up says
            self._look_up()

    def result(self) -> str | None:
        """The address, in numbers, that takes connections; None: not known yet.

        Raises:
            Busy: there was no room on this side to find out.
            Unreachable: there is none.
        """
        if self._lookup is not None and self._lookup.clear():
            self._end_lookup()
        if self._trying:
            poll = select.poll()
            for attempt in self._trying:
                poll.register(attempt, select.POLLOUT)
            done = {number for number, _ in poll.poll(0)}
            for attempt in [attempt for attempt in self._trying if attempt.fileno() in done]:
                self._ended(self._trying.pop(attempt), attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
                attempt.close()
        if self._reached is None and self._lookup is None and not self._trying:
            raise (Busy if self._failures and not self._refused else Unreachable)("; ".join(self._failures))
        return self._reached

    def close(self) -> None:
        for attempt in self._trying:
            attempt.close()
        self._trying = {}
        if self._lookup is not None:
            self._lookup.close()
            self._lookup = None

    def _look_up(self) -> None:
        if not _lookups.acquire(blocking=False):
            self._failures.append(f"{MAX_LOOKUPS} other names are being looked up")
            return
        try:
            self._lookup = Wake()
            self._ready.register(self._lookup, select.EPOLLIN)
            threading.Thread(target=self._wait_for_names, args=(self._lookup,), name="pd-lookup", daemon=True).start()
        except (OSError, RuntimeError) as error:  # no descriptor or no thread is left: who gives the place back is none
            _lookups.release()
            self.close()
            self._failures.append(f"the name {self._host} cannot be looked up: {error}")

    def _wait_for_names(self, done: Wake) -> None:
        try:
            self._found = _addresses(self._host, self._port, 0)
        except (OSError, UnicodeError) as error:
            self._found = error if isinstance(error, OSError) else OSError(0, str(error))
        finally:
            _lookups.release()
            done.set()

    def _end_lookup(self) -> None:
        assert self._lookup is not None
        self._lookup.close()
        self._lookup = None
        match self._found:
            case OSError() as error:
                self._refused = True
                self._failures.append(f"the name {self._host} is not known here: {error.strerror}")
            case found:
                self._try(found or [])

    def _try(self, found: _Found) -> None:
        for family, kind, protocol, _, address in found[:MAX_ADDRESSES]:
            shown = socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]
            try:
                attempt = socket.socket(family, kind, protocol)
            except OSError as error:
                self._refused |= error.errno not in NONE_LEFT
                self._failures.append(f"no connection can be made: {error.strerror}")
                continue
            attempt.setblocking(False)
            code = attempt.connect_ex(address)
            if code == EINPROGRESS:
                self._trying[attempt] = shown
                self._ready.register(attempt, select.EPOLLOUT)
            else:
                self._ended(shown, code)
                attempt.close()

    def _ended(self, address: str, code: int) -> None:
        if code:
            self._refused |= code not in NONE_LEFT
            at = f"{address}: " if address != self._host else ""
            self._failures.append(f"{at}{os.strerror(code).lower()}")
        elif self._reached is None:
            self._reached = address


def _addresses(host: str, port: int, flags: int) -> _Found:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)  # type: ignore[return-value]
