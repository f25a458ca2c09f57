"""The decode side's end of the side channel, used inside the loop of the one thread that owns it.

`send` never blocks and returns a token; `receive` never blocks and returns what became of tokens. Between calls the
owner waits on `net.sockets()` with a zmq.Poller, at most until `next_deadline()`, and calls `receive` after each wait.
Every token comes back exactly once. All requests are idempotent, so when one of them times out the socket is made
anew (whatever the old one still queues is forgotten) and the others under way are sent again on the new one.

A server is dialled (`net.dial`) before zmq is told where it is, and again when its connection is lost: when nobody
takes connections there, those who ask hear it at once. Attempts are REDIAL_S apart. Messages of errors do not name the
address, which who asks knows.
"""

from __future__ import annotations

import itertools
import logging
import select
import time
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import zmq

from vllm_pd_connector.bounded import Bounded
from vllm_pd_connector.errors import Busy, DeadlineExceeded, ProtocolError, Unreachable
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.protocol.wire.push_messages import PushInto
from vllm_pd_connector.sidechannel.net.dial import Dial
from vllm_pd_connector.sidechannel.net.sockets import MAX_PENDING, connect, dealer, place_of, take
from vllm_pd_connector.sidechannel.net.watch import Watch
from vllm_pd_connector.wake import Wake

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm_pd_connector.protocol.wire.fields import Message
    from vllm_pd_connector.sidechannel.net.keys import Keys

logger = logging.getLogger(__name__)

Outcome = m.Reply | ProtocolError | DeadlineExceeded

MAX_SERVERS = 512  # at a time; see `_make_room`
OF_EACH_RECEIVE = (m.ReadDone, m.GetChecksums, PushInto)  # other requests are few, or end something
NEW_S = 1.0  # how long who was never asked before has to answer
REDIAL_S = 0.25

_DRAIN = 256  # frames taken from one socket per `receive`, so that no server can hold the owner
_SOCKETS = 8 * MAX_SERVERS  # of zmq's: each server has its own, and two of its monitor


@dataclass(frozen=True, slots=True)
class _Pending:
    frame: bytes
    expected: type[Message]
    deadline: float
    timeout_s: float


@dataclass(slots=True)
class _Link:
    """One server: its socket and the requests under way, by sequence number (which is the token).

    Not `connected`, it is being dialled, or will be at `dial_at`. `name` is its socket's in the watch.
    """

    endpoint: str
    host: str
    port: int
    server_key: str
    socket: zmq.Socket[bytes]
    name: str
    made_at: float
    used_at: float
    pending: dict[int, _Pending] = field(default_factory=dict)
    dial: Dial | None = None
    dial_at: float = -inf
    connected: bool = False
    reached: bool = False  # once
    answered: bool = False


def busy_of(outcome: Outcome) -> str:
    """Why what was asked only has to be asked again later, here or on the other side; empty if that is not so."""
    match outcome:
        case m.Failure(code=m.FailureCode.BUSY | m.FailureCode.NOT_READY, message=message):
            return message or outcome.code
        case Busy():
            return str(outcome)
    return ""


class SideChannelClient:
    """Requests to any number of servers. Not thread-safe; `idle_s` is how long an unused socket is kept.

    `clock` gives seconds, monotonic; `net.keys` are needed for servers whose address has a key.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, idle_s: float = 60.0, keys: Keys | None = None
    ) -> None:
        self._clock = clock
        self._keys = keys
        self._idle_s = idle_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _SOCKETS)
        self._events = select.epoll()  # of dials, and of connections that are lost
        self._lost = Wake()
        self._events.register(self._lost.fileno(), select.EPOLLIN)
        self._watch = Watch(self._context, self._lost)
        self._links: dict[str, _Link] = {}
        self._tokens = itertools.count(1)
        self._departed: Bounded[str, None] = Bounded(MAX_SERVERS)  # by endpoint; some owners never take them
        self._due: list[tuple[int, Outcome]] = []  # for the next `receive`

    def send(self, endpoint: str, request: m.Request, timeout_s: float) -> int:
        """Send a request to the server at `endpoint` (see `net.sockets.endpoint`); returns its token.

        Raises:
            Busy: it is one OF_EACH_RECEIVE and MAX_PENDING are under way there, MAX_SERVERS others that have answered
                before owe answers, or no socket is left.
            ProtocolError: the request is too large, or the endpoint is no address.
        """
        link = self._links.get(endpoint)
        if link is not None and isinstance(request, OF_EACH_RECEIVE) and len(link.pending) >= MAX_PENDING:
            raise Busy(f"{len(link.pending)} requests are under way there, the limit is {MAX_PENDING}")
        token = next(self._tokens)
        now = self._clock()
        frame = m.encode(token, request)
        if link is None:
            place = place_of(endpoint)
            self._make_room()
            made = dealer(self._context, place[2], self._watch, self._keys)
            link = self._links[endpoint] = _Link(endpoint, *place, *made, now, now)
        link.pending[token] = _Pending(frame, m.REPLY_OF[type(request)], now + timeout_s, timeout_s)
        link.used_at = now
        if link.connected:
            _transmit(link, frame)
        else:
            self._due.extend(self._look(link))
        return token

    def sockets(self) -> tuple[zmq.Socket[bytes] | int, ...]:
        """What to wait on for input; changes with each call of `send` and `receive`."""
        return (self._events.fileno(), *(link.socket for link in self._links.values())) if self._links else ()

    def next_deadline(self) -> float | None:
        """When `receive` is due at the latest, None if there is nothing to wait for."""
        return self._clock() if self._due else min(map(self._link_deadline, self._links.values()), default=None)

    def under_way(self) -> int:
        """How many tokens have not come back yet."""
        return sum(len(link.pending) for link in self._links.values()) + len(self._due)

    def receive(self) -> list[tuple[int, Outcome]]:
        """What has come back: a reply (or Failure), ProtocolError for what is no reply, or for nobody being there, or
        DeadlineExceeded."""
        outcomes, self._due = self._due, []
        self._lost.clear()
        for link in list(self._links.values()):
            outcomes.extend(self._look(link))
        return outcomes

    def take_departed(self) -> list[str]:
        """Endpoints whose server has said, since the last call, that it ends: each once, the latest MAX_SERVERS."""
        departed = list(self._departed)
        self._departed.clear()
        return departed

    def close(self, linger_s: float = 0.0) -> None:
        """Forget all requests under way and close the sockets. May be called twice.

        What was sent just before gets up to `linger_s` to leave this process.
        """
        if self._context.closed:
            return
        for link in list(self._links.values()):
            link.socket.setsockopt(zmq.LINGER, round(1000 * linger_s))
            self._close_link(link)
        self._watch.close()
        self._context.term()
        self._lost.close()
        self._events.close()

    def _look(self, link: _Link) -> Iterator[tuple[int, Outcome]]:
        """What has come back from one server. Who asks others is not to hear of whatever goes wrong here."""
        try:
            yield from self._turn(link)
        except Exception as error:
            logger.exception("side channel: what was asked of %s port %d", link.host, link.port)
            yield from _fail_pending(link, ProtocolError(f"unexpected {type(error).__name__}: {error}"))
            self._close_link(link)  # a later request makes it anew

    def _turn(self, link: _Link) -> Iterator[tuple[int, Outcome]]:
        lost = link.connected and self._watch.has_lost(link.name)
        yield from self._drain(link)  # what came before it was lost
        if lost:
            if self._watch.was_cut(link.name):
                reason = "a message without end came from there, so its connection was cut off"
                yield from _fail_pending(link, ProtocolError(reason))
            yield from self._renew(link)
        yield from self._dial(link, self._clock())
        yield from self._expire(link)
        if not link.pending and self._link_deadline(link) <= self._clock():
            self._close_link(link)

    def _make_room(self) -> None:
        """Requests name servers, and unauthenticated peers may have made the requests: who has not answered for NEW_S
        gives way to others, then who owes nothing and is only dialled anew, then who has just come; of each kind who
        was asked least recently. Else several that come at once would push out each other."""
        if len(self._links) < MAX_SERVERS:
            return
        yielding = [link for link in self._links.values() if not (link.answered and link.pending)]
        if not yielding:
            raise Busy(f"{MAX_SERVERS} other servers owe answers, which is the limit; ask later")
        new = self._clock() - NEW_S

        def last(link: _Link) -> tuple[int, float]:
            comes = not link.answered and link.pending and link.made_at > new
            return 2 if comes else int(link.answered), link.used_at

        link = min(yielding, key=last)
        reason = f"no answer yet, and of more than {MAX_SERVERS} servers the one that was asked first gives way"
        self._due += _fail_pending(link, Unreachable(reason))
        self._close_link(link)

    def _link_deadline(self, link: _Link) -> float:
        if not link.pending:
            return link.used_at + self._idle_s
        due = min(pending.deadline for pending in link.pending.values())
        return due if link.connected or link.dial is not None else min(due, link.dial_at)

    def _dial(self, link: _Link, now: float) -> list[tuple[int, Outcome]]:
        """Find out where a server takes connections, and connect; if nobody does, whoever asks is told."""
        if link.connected or (link.dial is None and (not link.pending or now < link.dial_at)):
            return []
        if link.dial is None:
            link.dial, link.dial_at = Dial(link.host, link.port, self._events), now + REDIAL_S
        try:
            address = link.dial.result()
            if address is None:
                return []
            connect(link.socket, address, link.port)
        except ProtocolError as error:
            _end_dial(link)
            link.dial_at = now + REDIAL_S
            return _fail_pending(link, error)
        _end_dial(link)
        link.connected = link.reached = True
        for pending in link.pending.values():
            _transmit(link, pending.frame)
        return []

    def _drain(self, link: _Link) -> Iterator[tuple[int, Outcome]]:
        for _ in range(_DRAIN):
            try:
                parts = take(link.socket)
            except zmq.Again:
                break
            except ProtocolError as error:
                yield from _fail_pending(link, error)
                yield from self._renew(link)
                break
            self._watch.took(parts[0])
            if outcomes := self._accept(link, [part.bytes for part in parts]):
                link.used_at = self._clock()
                yield from outcomes

    def _accept(self, link: _Link, parts: list[bytes]) -> list[tuple[int, Outcome]]:
        try:
            if len(parts) != 1:
                raise ProtocolError(f"message parts: {len(parts)} there, 1 here")
            seq, reply = m.decode_reply(parts[0])
        except ProtocolError as error:
            seq = m.sequence_of(parts[0])
            # What names no request of ours says that none of them will be understood there.
            blamed = [seq] if seq in link.pending else list(link.pending) if seq == 0 else []
            for token in blamed:
                del link.pending[token]
            return [(token, error) for token in blamed]
        link.answered = True
        if seq == 0 and isinstance(reply, m.Failure):
            if reply.code is m.FailureCode.LEAVING:
                self._departed[link.endpoint] = None
            tokens = list(link.pending)
            link.pending.clear()
            return [(token, reply) for token in tokens]
        pending = link.pending.pop(seq, None)
        if pending is None:  # a reply that came after its deadline, or a second one
            return []
        if isinstance(reply, m.Failure | pending.expected):
            return [(seq, reply)]
        wrong = f"{type(reply).__name__} there, {pending.expected.__name__} or Failure here"
        return [(seq, ProtocolError(f"kind of reply: {wrong}"))]

    def _expire(self, link: _Link) -> list[tuple[int, Outcome]]:
        now = self._clock()
        late = {token: pending for token, pending in link.pending.items() if pending.deadline <= now}
        if not late:
            return []
        outcomes: list[tuple[int, Outcome]] = [(token, self._timed_out(link, late[token])) for token in late]
        for token in late:
            del link.pending[token]
        if link.connected:
            outcomes += self._renew(link)
            outcomes += self._dial(link, now)
        link.used_at = now
        return outcomes

    def _renew(self, link: _Link) -> list[tuple[int, Outcome]]:
        """Another socket for a server, to be dialled; what is under way is sent again when it is connected."""
        link.socket.close()
        link.connected = False
        try:
            link.socket, link.name = dealer(self._context, link.server_key, self._watch, self._keys)
        except ProtocolError as error:
            self._links.pop(link.endpoint)  # a later request makes it anew
            return _fail_pending(link, error)
        return []

    def _timed_out(self, link: _Link, pending: _Pending) -> DeadlineExceeded:
        late = f"within {pending.timeout_s:g} s"
        if not link.reached:
            return DeadlineExceeded(f"no connection {late}: nobody takes or refuses it, or {link.host} is not resolved")
        also = ", and does it know this side's key" if link.server_key else ""
        return DeadlineExceeded(f"no reply {late}; is the instance there alive{also}?")

    def _close_link(self, link: _Link) -> None:
        _end_dial(link)
        link.socket.close()
        self._links.pop(link.endpoint, None)


def _fail_pending(link: _Link, error: ProtocolError) -> list[tuple[int, Outcome]]:
    failed: list[tuple[int, Outcome]] = [(token, error) for token in link.pending]
    link.pending.clear()
    return failed


def _end_dial(link: _Link) -> None:
    if link.dial is not None:
        link.dial.close()
        link.dial = None


def _transmit(link: _Link, frame: bytes) -> None:
    try:
        link.socket.send(frame, zmq.NOBLOCK)
    except zmq.Again:  # the queue is full although few requests are pending: old ones fill it; the deadline decides
        return
