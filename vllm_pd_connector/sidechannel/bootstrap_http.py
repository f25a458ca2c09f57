"""Bootstrap over HTTP, for the proxies of vLLM's in-tree Mooncake connector: one answer served, and asked for.

The server says the same few hundred bytes to everyone; it has one thread per open question, a bound on how many there
are and one on how long each may take, however its bytes come. When the process has no descriptor left for who asks
next, nobody is answered for `PAUSE_S`. It reads registrations of the other engines of its `vllm serve` alone,
which come from its own host unless unauthenticated peers are allowed. `EngineRegistration` sends one until it is taken.
`EngineDirectory` asks,
in threads of its own, and remembers an answer for a few seconds: a restarted instance may be another engine, or listen
elsewhere.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import math
import socket
import threading
import time
from concurrent.futures import Future, InvalidStateError
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.errors import InvalidConfig, ProtocolError
from vllm_pd_connector.protocol.params.bootstrap import (
    MAX_ANSWER_BYTES,
    MAX_REGISTRATION_BYTES,
    QUERY_PATH,
    REGISTER_PATH,
    EngineRegistry,
    HostPort,
    parse_answer,
)
from vllm_pd_connector.sidechannel.net.deadline import DeadlineSocket

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

QUESTION_S = 5.0
MAX_QUESTIONS = 64
PAUSE_S = 1.0
RETRY_S = 0.1
KNOWN_S = 10.0
RETRY_REGISTRATION_S = 0.2
"""A proxy asks once, when `/health` is good: an engine that was ready before the first one must be there by then."""
REMIND_S = 60.0


class BootstrapServer:
    """Answers GET /query with the registry's answer (JSON) and takes POST /register into it until it is closed. While
    MAX_QUESTIONS are open, others are cut off.

    Args:
        unauthenticated peers: whether engines on other hosts may register.

    Raises:
        InvalidConfig: nothing can listen there.
    """

    def __init__(self, host: str, port: int, registry: EngineRegistry, *, unauthenticated: bool = False) -> None:
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path != QUERY_PATH:
                    self.send_error(404)
                    return
                self._say(200, "application/json", registry.answer)

            def do_POST(self) -> None:
                length = self.headers.get("Content-Length", "")
                if self.path != REGISTER_PATH:
                    self.send_error(404)
                elif not unauthenticated and self.client_address[0] != self.connection.getsockname()[0]:
                    self.send_error(403, "engines on other hosts register with allow_unauthenticated_peers alone")
                elif not (length.isdecimal() and int(length) <= MAX_REGISTRATION_BYTES):
                    self.send_error(413, f"Content-Length must be at most {MAX_REGISTRATION_BYTES}")
                else:
                    self._register(self.rfile.read(int(length)))

            def _register(self, data: bytes) -> None:
                try:
                    with lock:
                        registry.join(data)
                except ProtocolError as error:
                    self._say(409, "text/plain; charset=utf-8", str(error).encode())
                    return
                self._say(200, "application/json", b"{}")

            def _say(self, status: int, kind: str, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                logger.debug(format, *args)

        try:
            self._server = _Server(host, port, Handler)
        except OSError as error:
            raise InvalidConfig(
                f"bootstrap_port: cannot listen on {host} port {port}: {error.strerror}; choose another bootstrap_port"
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="pd-bootstrap", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.BoundedSemaphore(MAX_QUESTIONS)
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        """Without the lookup of the host's name that HTTP servers make here: it may take long, in an engine's start."""
        TCPServer.server_bind(self)
        host, self.server_port, *_ = self.server_address
        self.server_name = str(host)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            connection, address = super().get_request()
        except OSError as error:  # mostly no descriptor is left, and the listener stays readable
            logger.debug("bootstrap: nobody is answered for %s s: %s", PAUSE_S, error)
            time.sleep(PAUSE_S)
            raise
        return DeadlineSocket(connection, QUESTION_S), address

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread was started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("bootstrap: a question of %s was not answered", client_address, exc_info=True)


class EngineRegistration:
    """Registers an engine with the first of its server, in a thread of its own: until it is taken, or closed.

    Args:
        leaders: where that one may listen, asked in turn.
        own: the answer of this engine alone.
    """

    def __init__(self, leaders: Sequence[HostPort], own: bytes) -> None:
        self._closed = threading.Event()
        arguments = (tuple(leaders), own)
        self._thread = threading.Thread(target=self._run, args=arguments, name="pd-bootstrap-register", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self, leaders: Sequence[HostPort], own: bytes) -> None:
        told = -math.inf
        while True:
            reasons = []
            for leader in leaders:
                try:
                    register_engine(leader, own)
                    return
                except ProtocolError as error:
                    reasons.append(str(error))
            if time.monotonic() - told >= REMIND_S:  # the first engine may still load its model
                told = time.monotonic()
                logger.warning("proxies do not know this data-parallel engine yet: %s", "; ".join(reasons))
            if self._closed.wait(RETRY_REGISTRATION_S):
                return


class EngineDirectory:
    """Where engines are, by the bootstrap addresses of their instances. Used from one thread; it never waits.

    At most MAX_QUESTIONS are open, a thread each: addresses and engines come out of requests' parameters.
    """

    def __init__(self, wait_timeout: float) -> None:
        self._wait_timeout = wait_timeout
        self._closed = threading.Event()
        self._asked: dict[tuple[HostPort, str], tuple[float, Future[HostPort]]] = {}
        self._asking: list[threading.Thread] = []

    def find(self, bootstrap: HostPort, engine_id: str) -> Future[HostPort]:
        """The side channel of an engine; asks one question at a time, for up to `wait_timeout` seconds.

        The future's exception is a ProtocolError: nobody answers, or no such engine does.
        """
        now = time.monotonic()
        self._asked = {
            key: (asked, answer)
            for key, (asked, answer) in self._asked.items()
            if not answer.done() or (answer.exception() is None and now < asked + KNOWN_S)
        }
        key = (bootstrap, engine_id)
        if key not in self._asked:
            answer: Future[HostPort] = Future()
            self._asking = [thread for thread in self._asking if thread.is_alive()]  # also where nobody waits any more
            if len(self._asking) >= MAX_QUESTIONS:
                where = f"bootstrap {bootstrap.host}:{bootstrap.port}"
                answer.set_exception(ProtocolError(f"{where}: {MAX_QUESTIONS} others do not answer either; ask later"))
                return answer
            asks = threading.Thread(target=self._ask, args=(*key, answer), name="pd-bootstrap-query", daemon=True)
            try:
                asks.start()
            except RuntimeError as error:  # no thread is left: a scheduler asks, whose engine is not to end with it
                answer.set_exception(ProtocolError(f"bootstrap {bootstrap.host}:{bootstrap.port}: {error}"))
                return answer
            self._asking.append(asks)
            self._asked[key] = (now, answer)
        return self._asked[key][1]

    def close(self) -> None:
        """Ask nobody any more. Questions that are open end with an error, each at its next attempt."""
        self._closed.set()

    def _ask(self, bootstrap: HostPort, engine_id: str, answer: Future[HostPort]) -> None:
        try:
            self._answer(bootstrap, engine_id, answer)
        except Exception as error:  # a request waits for this future: whatever happens, it must end
            with contextlib.suppress(InvalidStateError):  # it waits no longer, see `scheduler.bootstrap.Searches`
                answer.set_exception(ProtocolError(f"bootstrap {bootstrap.host}:{bootstrap.port}: {error!r}"))

    def _answer(self, bootstrap: HostPort, engine_id: str, answer: Future[HostPort]) -> None:
        until = time.monotonic() + self._wait_timeout
        while True:
            try:
                engines = query(bootstrap, min(QUESTION_S, max(RETRY_S, until - time.monotonic())))
                break
            except ProtocolError as error:
                if time.monotonic() + RETRY_S >= until or self._closed.wait(RETRY_S):
                    answer.set_exception(error)
                    return
        if engine_id in engines:
            answer.set_result(engines[engine_id])
            return
        answer.set_exception(
            ProtocolError(
                f"remote_engine_id: {engine_id[:80]!r} is not at bootstrap {bootstrap.host}:{bootstrap.port}, which "
                f"has {', '.join(engines)[:200] or 'none'}; the prefill instance was restarted and the router does "
                "not know it yet"
            )
        )


def is_own_address(host: str) -> bool:
    """Whether a name or an address is this host's: what can be bound is."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as own:
            own.bind(address)
            return True
    return False


def query(bootstrap: HostPort, seconds: float = QUESTION_S) -> dict[str, HostPort]:
    """Ask an instance who it is; the whole answer must come within so many seconds of the connection.

    Raises:
        ProtocolError: no answer, an HTTP error, or an answer that is none.
    """
    status, data = _asked(bootstrap, "GET", QUERY_PATH, b"", seconds)
    if status != 200:
        where = f"bootstrap {bootstrap.host}:{bootstrap.port}"
        raise ProtocolError(f"{where} answers {status}; it is no prefill instance")
    return parse_answer(data)


def register_engine(leader: HostPort, own: bytes, seconds: float = QUESTION_S) -> None:
    """Have the first engine of a server tell of this one.

    Raises:
        ProtocolError: no answer, or it refuses.
    """
    status, data = _asked(leader, "POST", REGISTER_PATH, own, seconds)
    if status != 200:
        reason = data[:300].decode(errors="replace")
        raise ProtocolError(f"bootstrap {leader.host}:{leader.port} does not register this engine ({status}): {reason}")


def _asked(bootstrap: HostPort, method: str, path: str, body: bytes, seconds: float) -> tuple[int, bytes]:
    where = f"bootstrap {bootstrap.host}:{bootstrap.port}"
    connection = http.client.HTTPConnection(bootstrap.host, bootstrap.port, timeout=seconds)
    try:
        connection.connect()
        connection.sock = DeadlineSocket(connection.sock, seconds)
        connection.request(method, path, body or None)
        response = connection.getresponse()
        return response.status, response.read(MAX_ANSWER_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        raise ProtocolError(f"{where} does not answer: {error}; check that the prefill instance runs") from error
    finally:
        connection.close()
