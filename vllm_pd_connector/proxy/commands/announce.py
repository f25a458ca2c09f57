"""Tell a router with a registry of its own which instances there are: `vllm-pd announce`.

vLLM's router (`vllm-router --vllm-discovery-address HOST:PORT`) learns of instances from messages that instances send
it, and forgets one whose last message is five seconds old. Instances with PDConnector do not know of routers, so this
command sends the messages for them: for each URL it asks `/health` and `/metrics`, and registers what is healthy under
the role that it says. One that is not healthy any more is not registered again, and so leaves the router; one that has
no time to answer, as a busy API server, stays for `PATIENCE` seconds. Each is asked in a thread of its own, so that
those that do not answer cannot hold the messages of the others up.

A message is msgpack of {"type": "P" or "D", "http_address": "host:port", "zmq_address": "host:port"}, sent from a
DEALER socket. The router only puts the last field into request ids.

Source: vllm-project/router, `src/routers/http/vllm_service_discovery.rs`.
"""

from __future__ import annotations

import http.client
import logging
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
import zmq

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.instance_info import MAX_PAGE_BYTES, EngineInfo, opened, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

INTERVAL = 2.0
"""Seconds between two messages; the router forgets after five."""
LETTERS = {"kv_producer": "P", "kv_consumer": "D"}
ASK_TIMEOUT = 2.0
"""Seconds for each of two questions: with both the router has its message in time."""
PATIENCE = 10.0


class NoAnswer(ProtocolError):
    """It has said nothing in time, and nobody has said that it is gone."""


@dataclass(slots=True)
class Registration:
    """The latest message of an instance, what came of it, and when it was last known to be healthy (monotonic)."""

    message: bytes = b""
    of: str = ""
    good_at: float = -math.inf


def registration(url: str, engine: EngineInfo) -> bytes:
    """The message that registers an instance.

    Raises:
        ProtocolError: its role is not one of a router's two.
    """
    letter = LETTERS.get(engine.role)
    if letter is None:
        raise ProtocolError(f"{url}: kv_role is {engine.role}; a router needs kv_producer or kv_consumer")
    return msgspec.msgpack.encode(
        {
            "type": letter,
            "http_address": urlsplit(url).netloc,
            "zmq_address": f"{engine.side_channel_host}:{engine.side_channel_port}",
        }
    )


def ask_instance(url: str) -> EngineInfo:
    """What a healthy instance says of itself; of several data-parallel engines the first.

    Raises:
        NoAnswer: there was none in time.
        ProtocolError: it is not healthy, or says nothing of itself.
    """
    try:
        for path in ("/health", "/metrics"):
            with opened(url + path, timeout=ASK_TIMEOUT) as answer:
                content = answer.read(MAX_PAGE_BYTES)
                if answer.length:  # there is more, or it broke off
                    raise http.client.IncompleteRead(content, answer.length)
    # Errors that HTTP tells and time-outs are OSErrors too; an answer that broke off is not.
    except (OSError, http.client.HTTPException) as error:
        late = isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError)
        raise (NoAnswer if late else ProtocolError)(f"{url}: {error}") from error
    engines = parse(content.decode(errors="replace"))
    if not engines:
        raise ProtocolError(f"{url}: it does not say its role; run PDConnector there, with metrics on")
    return engines[min(engines)]


def announce(router: str, urls: Sequence[str], rounds: int | None = None) -> None:
    """Register the instances at `urls` with the router at `router` ("host:port") again and again.

    Returns only after `rounds` rounds, None for never.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.setsockopt(zmq.IPV6, 1)  # beside IPv4
    # Messages that nobody takes are worthless after the next round.
    socket.sndhwm = 2 * len(urls)
    socket.connect(f"tcp://{router}")
    lock = threading.Lock()
    ended = threading.Event()

    def send(message: bytes) -> None:
        with lock:  # a socket is not for several threads at once
            socket.send(message, zmq.NOBLOCK)

    pool = ThreadPoolExecutor(len(urls))
    try:
        for one in as_completed([pool.submit(_keep_registered, url, send, ended, rounds) for url in urls]):
            one.result()
    finally:
        ended.set()
        pool.shutdown()
        socket.close()
        context.term()


def _keep_registered(url: str, send: Callable[[bytes], None], ended: threading.Event, rounds: int | None) -> None:
    """Register one instance every INTERVAL seconds, `rounds` times or until `ended`; log when something changes."""
    said, known = "", Registration()
    while not ended.is_set() and (rounds is None or rounds > 0):
        started = time.monotonic()
        news = _register(url, send, known)
        if news != said:
            logger.info("%s %s", url, news)
            said = news
        rounds = rounds and rounds - 1
        ended.wait(max(0.0, INTERVAL - (time.monotonic() - started)))


def _register(url: str, send: Callable[[bytes], None], known: Registration) -> str:
    """Send one instance's message if there is one to send, and keep it in `known`; what came of it."""
    try:
        try:
            engine = ask_instance(url)
            known.message, known.of = registration(url, engine), f"registered as {engine.role}"
            known.good_at = time.monotonic()
        except NoAnswer:
            if time.monotonic() - known.good_at > PATIENCE:
                raise
        send(known.message)
        return known.of
    except ProtocolError as error:
        return f"not registered: {error}"
    except zmq.Again:
        return "not registered: the router takes no messages"
