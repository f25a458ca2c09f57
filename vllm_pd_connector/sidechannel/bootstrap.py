"""Bootstrap over HTTP, for the proxies of vLLM's in-tree Mooncake connector: one answer served, and asked for.

The server says the same few hundred bytes to everyone and reads nothing; it has one thread per open question and a
bound on how long a question may take. `Directory` asks, in threads of its own, and remembers an answer for a few
seconds: a restarted instance may be another engine, or listen elsewhere.
"""

from __future__ import annotations

import http.client
import logging
import socket
import threading
import time
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from vllm_pd_connector.errors import InvalidConfig, ProtocolError
from vllm_pd_connector.protocol.bootstrap import MAX_ANSWER_BYTES, QUERY_PATH, Place, parse_answer

logger = logging.getLogger(__name__)

QUESTION_SECONDS = 5.0
RETRY_SECONDS = 0.1
KNOWN_SECONDS = 10.0


class BootstrapServer:
    """Answers GET /query with `answer` (JSON) until it is closed.

    Raises:
        InvalidConfig: nothing can listen there.
    """

    def __init__(self, host: str, port: int, answer: bytes) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = QUESTION_SECONDS

            def do_GET(self) -> None:
                if self.path != QUERY_PATH:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                logger.debug(format, *args)

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

        try:
            self._server = Server((host, port), Handler)
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


class Directory:
    """Where engines are, by the bootstrap addresses of their instances. Used from one thread; it never waits."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._closed = threading.Event()
        self._asked: dict[tuple[Place, str], tuple[float, Future[Place]]] = {}

    def find(self, bootstrap: Place, engine_id: str) -> Future[Place]:
        """The side channel of an engine; asks one question at a time, for up to `patience` seconds.

        The future's exception is a ProtocolError: nobody answers, or no such engine does.
        """
        now = time.monotonic()
        self._asked = {
            key: (asked, answer)
            for key, (asked, answer) in self._asked.items()
            if not answer.done() or (answer.exception() is None and now < asked + KNOWN_SECONDS)
        }
        key = (bootstrap, engine_id)
        if key not in self._asked:
            answer: Future[Place] = Future()
            self._asked[key] = (now, answer)
            threading.Thread(target=self._ask, args=(*key, answer), name="pd-bootstrap-query", daemon=True).start()
        return self._asked[key][1]

    def close(self) -> None:
        """Ask nobody any more. Questions that are open end with an error, each at its next attempt."""
        self._closed.set()

    def _ask(self, bootstrap: Place, engine_id: str, answer: Future[Place]) -> None:
        try:
            self._answer(bootstrap, engine_id, answer)
        except Exception as error:  # a request waits for this future: whatever happens, it must end
            answer.set_exception(ProtocolError(f"bootstrap {bootstrap.host}:{bootstrap.port}: {error!r}"))

    def _answer(self, bootstrap: Place, engine_id: str, answer: Future[Place]) -> None:
        until = time.monotonic() + self._patience
        while True:
            try:
                engines = query(bootstrap)
                break
            except ProtocolError as error:
                if time.monotonic() + RETRY_SECONDS >= until or self._closed.wait(RETRY_SECONDS):
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


def query(bootstrap: Place) -> dict[str, Place]:
    """Ask an instance who it is.

    Raises:
        ProtocolError: no answer, an HTTP error, or an answer that is none.
    """
    where = f"bootstrap {bootstrap.host}:{bootstrap.port}"
    connection = http.client.HTTPConnection(bootstrap.host, bootstrap.port, timeout=QUESTION_SECONDS)
    try:
        connection.request("GET", QUERY_PATH)
        response = connection.getresponse()
        data = response.read(MAX_ANSWER_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        raise ProtocolError(f"{where} does not answer: {error}; check that the prefill instance runs") from error
    finally:
        connection.close()
    if response.status != 200:
        raise ProtocolError(f"{where} answers {response.status} {response.reason[:80]}; it is no prefill instance")
    return parse_answer(data)
