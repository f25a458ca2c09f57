"""The decode side's end of the side channel, used inside the loop of the one thread that owns it.

`send` never blocks and returns a token; `receive` never blocks and returns what became of tokens. Between calls the
owner waits on `sockets()` with a zmq.Poller, at most until `next_deadline()`, and calls `receive` after each wait.
Every token comes back exactly once. All requests are idempotent, so when one of them times out the socket is made
anew (whatever the old one still queues is forgotten) and the others under way are sent again on the new one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from vllm_pd_connector.errors import DeadlineExceeded, ProtocolError
from vllm_pd_connector.protocol.fields import Message
from vllm_pd_connector.protocol.messages import (
    REPLY_OF,
    Failure,
    FailureCode,
    Reply,
    Request,
    decode_reply,
    encode,
    sequence_of,
)
from vllm_pd_connector.sidechannel.keys import Keys
from vllm_pd_connector.sidechannel.sockets import KEY_MARK, MAX_PENDING, connected_dealer

Outcome = Reply | ProtocolError | DeadlineExceeded

MAX_SERVERS = 512  # sockets at a time; whoever is asked least recently and owes no answer makes room for another

_DRAIN = 256  # frames taken from one socket per `receive`, so that no server can hold the owner


@dataclass(frozen=True, slots=True)
class _Pending:
    frame: bytes
    expected: type[Message]
    deadline: float
    timeout_s: float


@dataclass(slots=True)
class _Link:
    """One server: its socket and the requests under way, by sequence number (which is the token)."""

    endpoint: str
    socket: zmq.Socket[bytes]
    used_at: float
    pending: dict[int, _Pending] = field(default_factory=dict)


class SideChannelClient:
    """Requests to any number of servers. Not thread-safe; `idle_s` is how long an unused socket is kept.

    `clock` gives seconds, monotonic; `keys` are needed for servers whose address has a key.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, idle_s: float = 60.0, keys: Keys | None = None
    ) -> None:
        self._clock = clock
        self._keys = keys
        self._idle_s = idle_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: dict[str, _Link] = {}
        self._tokens = itertools.count(1)
        self._departed: list[str] = []

    def send(self, endpoint: str, request: Request, timeout_s: float) -> int:
        """Send a request to the server at `endpoint` (see `sockets.endpoint`); returns its token.

        Raises:
            ProtocolError: the request is too large, the endpoint is no address, MAX_PENDING are under way there, or
                MAX_SERVERS others owe answers.
        """
        token = next(self._tokens)
        now = self._clock()
        frame = encode(token, request)
        link = self._links.get(endpoint)
        if link is None:
            self._make_room(endpoint)
            link = self._links[endpoint] = _Link(endpoint, connected_dealer(self._context, endpoint, self._keys), now)
        if len(link.pending) >= MAX_PENDING:
            raise ProtocolError(f"{endpoint}: {len(link.pending)} requests are under way, the limit is {MAX_PENDING}")
        link.pending[token] = _Pending(frame, REPLY_OF[type(request)], now + timeout_s, timeout_s)
        link.used_at = now
        _transmit(link, frame)
        return token

    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """What to wait on for input; changes with each call of `send` and `receive`."""
        return tuple(link.socket for link in self._links.values())

    def next_deadline(self) -> float | None:
        """When `receive` is due at the latest, None if there is nothing to wait for."""
        return min(map(self._link_deadline, self._links.values()), default=None)

    def under_way(self) -> int:
        """How many tokens have not come back yet."""
        return sum(len(link.pending) for link in self._links.values())

    def receive(self) -> list[tuple[int, Outcome]]:
        """What has come back: a reply (or Failure), ProtocolError for what is no reply, or DeadlineExceeded."""
        outcomes: list[tuple[int, Outcome]] = []
        for link in list(self._links.values()):
            outcomes += self._drain(link)
            outcomes += self._expire(link)
            if not link.pending and self._link_deadline(link) <= self._clock():
                self._close_link(link)
        return outcomes

    def take_departed(self) -> list[str]:
        """Endpoints whose server has said, since the last call, that it ends."""
        departed, self._departed = self._departed, []
        return departed

    def close(self, linger_s: float = 0.0) -> None:
        """Forget all requests under way and close the sockets. May be called twice.

        What was sent just before gets up to `linger_s` to leave this process.
        """
        for link in list(self._links.values()):
            link.socket.setsockopt(zmq.LINGER, round(1000 * linger_s))
            self._close_link(link)
        self._context.term()

    def _make_room(self, endpoint: str) -> None:
        if len(self._links) < MAX_SERVERS:
            return
        idle = [link for link in self._links.values() if not link.pending]
        if not idle:
            raise ProtocolError(f"{endpoint}: {MAX_SERVERS} other servers owe answers, which is the limit; ask later")
        self._close_link(min(idle, key=lambda link: link.used_at))

    def _link_deadline(self, link: _Link) -> float:
        return min((pending.deadline for pending in link.pending.values()), default=link.used_at + self._idle_s)

    def _drain(self, link: _Link) -> list[tuple[int, Outcome]]:
        outcomes: list[tuple[int, Outcome]] = []
        for _ in range(_DRAIN):
            try:
                parts = link.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            outcomes += self._accept(link, parts)
        if outcomes:
            link.used_at = self._clock()
        return outcomes

    def _accept(self, link: _Link, parts: list[bytes]) -> list[tuple[int, Outcome]]:
        try:
            if len(parts) != 1:
                raise ProtocolError(f"{link.endpoint}: message parts: {len(parts)} there, 1 here")
            seq, reply = decode_reply(parts[0])
        except ProtocolError as error:
            error = ProtocolError(f"{link.endpoint}: {error}")
            seq = sequence_of(parts[0])
            # What names no request of ours says that none of them will be understood there.
            blamed = [seq] if seq in link.pending else list(link.pending) if seq == 0 else []
            for token in blamed:
                del link.pending[token]
            return [(token, error) for token in blamed]
        if seq == 0 and isinstance(reply, Failure):
            if reply.code is FailureCode.LEAVING:
                self._departed.append(link.endpoint)
            tokens = list(link.pending)
            link.pending.clear()
            return [(token, reply) for token in tokens]
        pending = link.pending.pop(seq, None)
        if pending is None:  # a reply that came after its deadline, or a second one
            return []
        if isinstance(reply, Failure | pending.expected):
            return [(seq, reply)]
        wrong = f"{type(reply).__name__} there, {pending.expected.__name__} or Failure here"
        return [(seq, ProtocolError(f"{link.endpoint}: kind of reply: {wrong}"))]

    def _expire(self, link: _Link) -> list[tuple[int, Outcome]]:
        now = self._clock()
        late = {token: pending for token, pending in link.pending.items() if pending.deadline <= now}
        if not late:
            return []
        for token in late:
            del link.pending[token]
        outcomes: list[tuple[int, Outcome]] = [(token, _timed_out(link.endpoint, late[token])) for token in late]
        link.socket.close()
        try:
            link.socket = connected_dealer(self._context, link.endpoint, self._keys)
        except ProtocolError as error:
            outcomes += [(token, error) for token in link.pending]
            link.pending = {}
            link.used_at = now - self._idle_s  # a later request makes it anew
            return outcomes
        link.used_at = now
        for pending in link.pending.values():
            _transmit(link, pending.frame)
        return outcomes

    def _close_link(self, link: _Link) -> None:
        link.socket.close()
        del self._links[link.endpoint]


def _transmit(link: _Link, frame: bytes) -> None:
    try:
        link.socket.send(frame, zmq.NOBLOCK)
    except zmq.Again:  # the queue is full although few requests are pending: old ones fill it; the deadline decides
        return


def _timed_out(endpoint: str, pending: _Pending) -> DeadlineExceeded:
    also = ", and does it know this side's key" if KEY_MARK in endpoint else ""
    return DeadlineExceeded(
        f"{endpoint}: no reply within {pending.timeout_s:g} s; is the prefill instance alive{also}?"
    )
