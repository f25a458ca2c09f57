"""Stand-ins for vLLM instances, for tests of routers: they note what they are asked and answer what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from vllm_pd_connector.instance_info import INFO_SERIES, EngineInfo
from vllm_pd_connector.proxy.legs import REFUSED

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

PARAMS = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": [[7]], "own": {"nonce": "x"}}
LIMIT = 10.0
"""Seconds after which a test that waits for something fails."""


class Instance:
    """A stand-in for a vLLM instance: notes what it is asked, answers what it is told to."""

    def __init__(
        self,
        handler: Handler,
        says: EngineInfo | Sequence[EngineInfo] | None = None,
        engines: int = 1,
        port: int | None = None,
        first_engine: int = 0,
    ):
        self.asked: list[dict[str, Any]] = []
        self.given_back: list[dict[str, Any]] = []
        self.gives_back = asyncio.Event()
        self.to_what_is_given_back: Handler = answers({"error": {"message": "temperature"}}, status=400)
        self.gives_back.set()
        self.request_ids: list[str | None] = []
        self.ranks: list[str | None] = []
        self.traces: list[tuple[str | None, ...]] = []
        self.priorities: list[tuple[str | None, int | None]] = []
        self.sessions: list[str | None] = []
        self.says = says
        self.engines, self.first_engine = engines, first_engine
        self.health = 200
        self.checks = 0
        self.held: asyncio.Event | None = None
        self.names_models = asyncio.Event()
        self.names_models.set()
        self.page: bytes | None = None
        self.arrived = asyncio.Event()
        self.cancelled = asyncio.Event()
        self._handler = handler
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/completions", self._serve)
        app.router.add_post("/v1/chat/completions", self._serve)
        app.router.add_get("/v1/models", self._show_models)
        app.router.add_get("/health", self._show_health)
        app.router.add_get("/metrics", self._show_metrics)
        self.server = TestServer(app, port=port)

    async def _show_health(self, _request: web.Request) -> web.Response:
        self.checks += 1
        if self.held is not None:
            await self.held.wait()
        return web.Response(status=self.health)

    async def _show_models(self, request: web.Request) -> web.Response:
        await self.names_models.wait()
        return web.json_response({"asked by": request.headers.get("Authorization"), "data": [{"id": "m"}]})

    async def _show_metrics(self, _request: web.Request) -> web.Response:
        if self.page is not None:
            return web.Response(body=self.page, content_type="text/plain")
        said = [self.says] * self.engines if isinstance(self.says, EngineInfo) else self.says or []
        rows = [exposition(says, index) for index, says in enumerate(said, self.first_engine)]
        return web.Response(text="".join(rows))

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.items() >= REFUSED.items():  # as vLLM refuses it, which then tells its connector
            await self.gives_back.wait()
            self.given_back.append(body["kv_transfer_params"])
            return await self.to_what_is_given_back(request)
        self.asked.append(body)
        self.request_ids.append(request.headers.get("X-Request-Id"))
        self.ranks.append(request.headers.get("X-data-parallel-rank"))
        self.traces.append(tuple(request.headers.get(name) for name in ("traceparent", "tracestate")))
        self.priorities.append((request.headers.get("X-Vllm-Priority"), self.asked[-1].get("priority")))
        self.sessions.append(request.headers.get("X-Session-ID"))
        self.arrived.set()
        try:
            return await self._handler(request)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")


def info(**changes: Any) -> EngineInfo:
    """What a prefill instance that pushes says of itself, with changes."""
    usual = {"role": "kv_producer", "mode": "push", "transport": "nixl", "engine_id": "p-0", "side_channel_host": "h"}
    numbers = {"side_channel_port": 5600, "tp_size": 2, "pp_size": 1, "dcp_size": 1, "dp_size": 1}
    usual["handoff"] = "concurrent" if changes.get("mode", "push") == "push" else "serial"
    return EngineInfo(**{**usual, **numbers, **changes})


def exposition(says: EngineInfo, engine: int = 0) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in {"engine": engine, **says.labels()}.items())
    return f"{INFO_SERIES}{{{labels}}} 1.0\n"


def answers(body: object, status: int = 200) -> Handler:
    async def handler(_request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return handler


def streams(*chunks: bytes, then: Callable[[web.Request], Awaitable[None]] | None = None, last: bytes = b"") -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        if then is not None:
            await then(request)
        if last:
            await response.write(last)
        return response

    return handler


async def stall(_request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("never reached")


async def break_off(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


HANDS_OVER = answers({"choices": [{"text": "a"}], "kv_transfer_params": PARAMS})
DONE = answers({"choices": [{"text": "abc"}]})
FINISHED = b'data: {"choices": [{"text": "c", "finish_reason": "stop"}]}\n\n'
"""Without such an event vLLM's streams have not ended well."""
NOBODY = "http://127.0.0.1:{}"
