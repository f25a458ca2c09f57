"""A man in the middle of the side channel: forwards every message, and does to chosen ones what a bad network would.

A decode instance is sent to the relay's port instead of the prefill instance's (the campaign hands the parameters
over itself, so it can). Each of its connections gets a connection of its own behind the relay. A `Rule` looks at every
message and says what becomes of it: a list of (delay in seconds, message); an empty list drops it. The relay runs in
a thread; rules are called there and must not block.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import zmq

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.protocol.wire import messages
from vllm_pd_connector.wake import Wake


@dataclass(frozen=True, slots=True)
class Passing:
    """One message on its way. `name` is the type of what it says ("ReadDone", "Failure", …), "?" if it says nothing."""

    to_server: bool
    name: str
    frame: bytes


Rule = Callable[[Passing], list[tuple[float, bytes]]]


def forward(passing: Passing) -> list[tuple[float, bytes]]:
    return [(0.0, passing.frame)]


class Relay:
    """Listens on a free port of this host, `port`, for the side channel at `server`."""

    def __init__(self, server: str, host: str = "127.0.0.1"):
        self.server = server
        self._rule: Rule = forward
        self._seen: Counter[str] = Counter()
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.linger = 0
        self.port = self._front.bind_to_random_port(f"tcp://{host}")
        self._wake = Wake()
        self._stop = False
        self._own: deque[Passing] = deque()
        self._behind: dict[bytes, zmq.Socket[bytes]] = {}
        self._later: list[tuple[float, int, zmq.Socket[bytes], list[bytes]]] = []
        self._order = itertools.count()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def obey(self, rule: Rule) -> None:
        """Treat every message by this rule from now on; `forward` is the honest one."""
        self._rule = rule

    def say(self, messages: Iterable[Passing]) -> None:
        """Send these messages on every line that there is, whatever the rule says; from any thread."""
        self._own.extend(messages)
        self._wake.set()

    @property
    def seen(self) -> Counter[str]:
        """How many messages came by, in either direction, by name."""
        return Counter(self._seen)

    def close(self) -> None:
        self._stop = True
        self._wake.set()
        self._thread.join()
        for socket in self._behind.values():
            socket.close()
        self._front.close()
        self._context.term()
        self._wake.close()

    def _run(self) -> None:
        while not self._stop:
            poller = zmq.Poller()
            poller.register(self._wake.fileno(), zmq.POLLIN)
            poller.register(self._front, zmq.POLLIN)
            for socket in self._behind.values():
                poller.register(socket, zmq.POLLIN)
            timeout = max(0.0, self._later[0][0] - time.monotonic()) * 1000 if self._later else None
            ready = dict(poller.poll(timeout))
            self._wake.clear()
            while self._own:
                self._say(self._own.popleft())
            if self._front in ready:
                client, *parts = self._front.recv_multipart()
                self._pass(parts, True, self._to_server(client), [])
            for client, socket in list(self._behind.items()):
                if socket in ready:
                    self._pass(socket.recv_multipart(), False, self._front, [client])
            while self._later and self._later[0][0] <= time.monotonic():
                _, _, socket, parts = heapq.heappop(self._later)
                _send(socket, parts)

    def _say(self, message: Passing) -> None:
        for client, socket in self._behind.items():
            if message.to_server:
                _send(socket, [message.frame])
            else:
                _send(self._front, [client, message.frame])

    def _to_server(self, client: bytes) -> zmq.Socket[bytes]:
        socket = self._behind.get(client)
        if socket is None:
            socket = self._behind[client] = self._context.socket(zmq.DEALER)
            socket.linger = 0
            socket.connect(self.server)
        return socket

    def _pass(self, parts: list[bytes], to_server: bool, socket: zmq.Socket[bytes], prefix: list[bytes]) -> None:
        if len(parts) != 1:
            _send(socket, [*prefix, *parts])
            return
        passing = Passing(to_server, name_of(parts[0], to_server), parts[0])
        self._seen[passing.name] += 1
        for delay, frame in self._rule(passing):
            if delay <= 0:
                _send(socket, [*prefix, frame])
            else:
                heapq.heappush(self._later, (time.monotonic() + delay, next(self._order), socket, [*prefix, frame]))


def _send(socket: zmq.Socket[bytes], parts: list[bytes]) -> None:
    try:
        socket.send_multipart(parts, zmq.NOBLOCK)
    except zmq.ZMQError:  # nobody takes it: lost, as on a network
        return


def name_of(frame: bytes, to_server: bool) -> str:
    try:
        decode = messages.decode_request if to_server else messages.decode_reply
        return type(decode(frame)[1]).__name__
    except ProtocolError:
        return "?"
