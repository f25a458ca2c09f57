"""The router's ends of the sockets over which instances announce what they hold.

One task follows one instance: it subscribes to everything that is published there and, where the instance keeps past
batches (`replay_endpoint`), asks for them at the start and whenever some are missing. What came is judged by
`known_prefixes`; here are only sockets, and the limits in time and size of what is read.

An endpoint is one that an engine binds. What an instance says of itself names a port alone (`tcp://*:5557`), and the
host is that of its URL.

Source: vLLM 0.32, `ZmqEventPublisher` (also the form of a replay: a request is the first number, an answer comes as one
message per batch, and a last one numbered -1).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from vllm_pd_connector.errors import InvalidConfig, ProtocolError
from vllm_pd_connector.proxy.kv_events.wire import MAX_BATCH_BYTES, sequence_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_pd_connector.proxy.kv_events.known_prefixes import KnownPrefixes

logger = logging.getLogger(__name__)

REPLAY_S = 30.0
"""For a whole replay; vLLM answers between two steps, so it may take some."""
QUEUED = 16
"""Messages that wait here while others are taken over, so that their size is bounded, too; more wait at the publisher,
which drops what is above its own limit (`hwm`): a gap."""
REPLAYED = 10_000
"""Messages of a replay that wait here: what vLLM keeps (`buffer_steps`). It answers all at once, over a socket that
drops what nobody reads, so these cannot wait there; that they are many is bounded by `REPLAY_S` alone."""
PROBES = (
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 30),
    (zmq.TCP_KEEPALIVE_INTVL, 10),
    (zmq.TCP_KEEPALIVE_CNT, 3),
)
"""After a minute without an acknowledgement the kernel ends a connection, and it is made anew."""
ANY_HOST = ("*", "0.0.0.0", "[::]")


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where an instance publishes its events and, empty for nowhere, where it replays them."""

    events: str
    replay: str = ""


def source_of(url: str, events: str, replay: str) -> EventSource:
    """Where to subscribe to an instance that is reached at `url`, by what it or the operator says.

    Raises:
        InvalidConfig: no endpoint that can be connected to.
    """
    if not events:
        raise InvalidConfig(
            "it announces no KV-cache events; start it with --kv-events-config "
            '\'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}\', or use --policy prefix'
        )
    host = urlsplit(url).hostname or ""
    return EventSource(_connectable(events, host), _connectable(replay, host) if replay else "")


def _connectable(endpoint: str, host: str) -> str:
    scheme, _, place = endpoint.partition("://")
    if scheme == "ipc" and 0 < len(place) <= zmq.IPC_PATH_MAX_LEN:
        return endpoint
    name, _, port = place.rpartition(":")
    if scheme != "tcp" or not name or not (port.isascii() and port.isdigit() and len(port) <= 5):
        raise InvalidConfig(f"KV-cache events: {endpoint[:80]!r} is no endpoint; give tcp://*:PORT or ipc://PATH")
    if not 1 <= int(port) <= 65535:
        raise InvalidConfig(f"KV-cache events: port {port} in {endpoint[:80]!r}; give one from 1 to 65535")
    if name in ANY_HOST:
        name = f"[{host}]" if ":" in host else host
    return f"tcp://{name}:{port}"


class Subscriptions:
    """Follows instances, each in a task; make it in the event loop in which it runs, and close it."""

    def __init__(self, known: KnownPrefixes, on_change: Callable[[str], None] = lambda _url: None):
        """`on_change` is called with an instance's URL when more or less may be known of it."""
        self.known = known
        self._on_change = on_change
        self._context = zmq.asyncio.Context()
        self._tasks: dict[str, tuple[EventSource, asyncio.Task[None]]] = {}

    def follow(self, url: str, source: EventSource) -> None:
        """Know of an instance what it announces from now on; nothing changes if it is followed already. What ended with
        an error of its socket begins anew."""
        followed = self._tasks.get(url)
        if followed is not None and followed[0] == source and not followed[1].done():
            return
        self.leave(url)
        self.known.begin(url)
        self._tasks[url] = source, asyncio.create_task(self._follow(url, source))

    def leave(self, url: str) -> None:
        """Know nothing of an instance any more."""
        self.known.forget(url)
        source_and_task = self._tasks.pop(url, None)
        if source_and_task is not None:
            source_and_task[1].cancel()

    async def close(self) -> None:
        tasks = [task for _, task in self._tasks.values()]
        for url in list(self._tasks):
            self.leave(url)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _follow(self, url: str, source: EventSource) -> None:
        feed = self.known.begin(url)
        socket = self._socket(zmq.SUB, QUEUED)
        try:
            socket.subscribe(b"")
            socket.connect(source.events)
            if source.replay:
                await self._replay(url, source.replay, feed.due)
            while True:
                number, payload = self._read(url, await socket.recv_multipart())
                losses = feed.losses.copy()
                if number is not None:
                    missing = feed.missing_from(number)
                    if missing is not None and source.replay:
                        await self._replay(url, source.replay, missing)
                    self._take(url, number, payload)
                if lost := feed.losses - losses:
                    logger.warning(
                        "%s: KV-cache events: %s at batch %s; what was known of it is forgotten",
                        url, ", ".join(lost), number,
                    )  # fmt: skip
                # A message that is there already does not end this task's turn, and others want theirs.
                await asyncio.sleep(0)
        except zmq.ZMQError as error:
            logger.error("%s: KV-cache events: %s: %s; it is taken for one that holds nothing", url, source, error)
        finally:
            socket.close(linger=0)

    async def _replay(self, url: str, endpoint: str, start: int) -> None:
        """Take over what an instance kept from batch `start` on."""
        socket = self._socket(zmq.DEALER, REPLAYED)  # a new one each time: answers to an earlier question stay away
        try:
            async with asyncio.timeout(REPLAY_S):
                socket.connect(endpoint)
                await socket.send_multipart((b"", start.to_bytes(8, "big")))
                while True:
                    number, payload = self._read(url, (await socket.recv_multipart())[1:])
                    if number == -1:
                        return
                    if number is not None:
                        self._take(url, number, payload)
                    await asyncio.sleep(0)
        except TimeoutError:
            logger.warning("%s: KV-cache events: no whole replay from %s within %g s", url, endpoint, REPLAY_S)
        finally:
            socket.close(linger=0)

    def _take(self, url: str, number: int, payload: bytes) -> None:
        try:
            self.known.take(url, number, payload)
        except ProtocolError as error:
            logger.warning("%s: batch %d: %s", url, number, error)
        self._on_change(url)

    def _read(self, url: str, frames: list[bytes]) -> tuple[int | None, bytes]:
        """Number and payload of a message; no number if it is none."""
        try:
            if len(frames) != 3:
                raise ProtocolError(f"KV-cache events: {len(frames)} frames there, 3 here")
            return sequence_number(frames[1]), frames[2]
        except ProtocolError as error:
            logger.warning("%s: %s", url, error)
            return None, b""

    def _socket(self, kind: int, queued: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
        socket.setsockopt(zmq.RCVHWM, queued)
        socket.setsockopt(zmq.IPV6, 1)
        # Who only listens hears nothing of a machine that is gone, or of a connection that a firewall has forgotten.
        for option, value in PROBES:
            socket.setsockopt(option, value)
        return socket
