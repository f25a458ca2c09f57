"""The router's HTTP side: two legs per request, errors with the right status, nothing left running.

Until the first byte of the answer is sent, every failure is an HTTP status: an instance's own error is passed on as it
is, 502 for an instance that breaks off or hands nothing over, 503 when no instance can be reached, 504 for one that
does not answer in time. After the first byte only an event in the stream can tell the client. A client that goes away
cancels its handler, which closes the leg in progress; vLLM aborts a request whose connection is closed.

Instances take turns. One that refuses the connection has seen nothing of the request, so the next is asked; any other
failure is final, because the request may have been run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.proxy.handoff import Body, check_client_body, decode_body, prefill_body

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024 * 1024
COMPLETION_PATHS = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True, slots=True)
class Options:
    """Where the instances are (base URLs) and how long to wait, in seconds."""

    prefill: Sequence[str]
    decode: Sequence[str]
    connect_timeout: float
    read_timeout: float
    """Longest silence of an instance: for a prefill the whole computation, for a decode the gap between bytes."""


class LegError(Exception):
    """A leg that gave no usable answer; what the client is told."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Pool:
    """Instances of one kind, taken in turns."""

    kind: str
    urls: Sequence[str]
    _next: int = field(default=0)

    def turn(self) -> list[str]:
        """All instances, beginning with the one whose turn it is."""
        first = self._next % len(self.urls)
        self._next += 1
        return [*self.urls[first:], *self.urls[:first]]


def error_object(status: int, message: str) -> Body:
    """An error in the form of the OpenAI API."""
    return {"error": {"message": message, "type": "router_error", "param": None, "code": status}}


class Router:
    """One router; `application()` is what an aiohttp server runs."""

    def __init__(self, options: Options):
        self._options = options
        self._prefill = Pool("prefill", options.prefill)
        self._decode = Pool("decode", options.decode)
        self._session: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._run_session)
        for path in COMPLETION_PATHS:
            app.router.add_post(path, self._complete)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        return app

    async def _run_session(self, _app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._options.connect_timeout, sock_read=self._options.read_timeout
        )
        # No limit on connections: waiting in the router would hide a queue from the instances' own metrics.
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            self._session = session
            yield

    @asynccontextmanager
    async def _leg(
        self, pool: Pool, path: str, *, body: Body | None = None, headers: dict[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer of the first instance in turn that takes the connection.

        Raises:
            LegError: 503 when none does, 504 for silence, 502 for a connection that breaks.
        """
        assert self._session is not None
        method = "GET" if body is None else "POST"
        refused = []
        for url in pool.turn():
            try:
                async with self._session.request(method, url + path, json=body, headers=headers) as response:
                    yield response
                    return
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                refused.append(f"{url}: {error}")
            except TimeoutError as error:
                silence = f"{self._options.read_timeout:g} s"
                raise LegError(504, f"{pool.kind} instance {url} sent nothing for {silence}") from error
            except aiohttp.ClientError as error:
                raise LegError(502, f"{pool.kind} instance {url} broke off: {error!r}") from error
        raise LegError(503, f"no {pool.kind} instance can be reached: {'; '.join(refused)}")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        headers = {"X-Request-Id": request.headers.get("X-Request-Id") or uuid.uuid4().hex}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        try:
            body = check_client_body(await request.json())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            return _refuse(headers, 400, f"the request body is not JSON: {error}")
        except ProtocolError as error:
            return _refuse(headers, 400, str(error))
        answer: web.StreamResponse | None = None
        try:
            async with self._leg(self._prefill, request.path, body=prefill_body(body), headers=headers) as prefill:
                content = await prefill.read()
                if prefill.status != 200:
                    logger.warning("request %s: prefill answered %d", headers["X-Request-Id"], prefill.status)
                    return _pass_on(headers, prefill, content)
            second = decode_body(body, _json(content))
            async with self._leg(self._decode, request.path, body=second, headers=headers) as decode:
                if decode.status != 200 or decode.content_type != "text/event-stream":
                    return _pass_on(headers, decode, await decode.read())
                answer = web.StreamResponse(headers={"X-Request-Id": headers["X-Request-Id"]})
                answer.content_type = "text/event-stream"
                await answer.prepare(request)
                await _stream(decode, answer)
        except ProtocolError as error:
            return _refuse(headers, 502, str(error))
        except LegError as error:
            if answer is None:
                return _refuse(headers, error.status, str(error))
            logger.warning("request %s: %s", headers["X-Request-Id"], error)
            event = json.dumps(error_object(error.status, str(error)))
            await answer.write(f"data: {event}\n\ndata: [DONE]\n\n".encode())
        await answer.write_eof()
        return answer

    async def _models(self, _request: web.Request) -> web.StreamResponse:
        try:
            async with self._leg(self._decode, "/v1/models") as response:
                return _pass_on({}, response, await response.read())
        except LegError as error:
            return _refuse({}, error.status, str(error))

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        """200 while at least one instance of each kind is healthy."""
        for pool in (self._prefill, self._decode):
            if not any(await asyncio.gather(*map(self._is_healthy, pool.urls))):
                return _refuse({}, 503, f"no healthy {pool.kind} instance among {', '.join(pool.urls)}")
        return web.Response()

    async def _is_healthy(self, url: str) -> bool:
        assert self._session is not None
        try:
            async with self._session.get(f"{url}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


async def _stream(source: aiohttp.ClientResponse, answer: web.StreamResponse) -> None:
    """Pass bytes on as they come. A client that has gone is a cancellation, not an error of the instance."""
    async for chunk in source.content.iter_any():
        try:
            await answer.write(chunk)
        except ConnectionResetError as error:
            raise asyncio.CancelledError from error


def _json(content: bytes) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _pass_on(headers: dict[str, str], response: aiohttp.ClientResponse, content: bytes) -> web.Response:
    """An instance's answer as it is."""
    identity = {name: value for name, value in headers.items() if name == "X-Request-Id"}
    return web.Response(status=response.status, body=content, content_type=response.content_type, headers=identity)


def _refuse(headers: dict[str, str], status: int, message: str) -> web.Response:
    logger.warning("request %s: %d: %s", headers.get("X-Request-Id", "-"), status, message)
    identity = {name: value for name, value in headers.items() if name == "X-Request-Id"}
    return web.json_response(error_object(status, message), status=status, headers=identity)
