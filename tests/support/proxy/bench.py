"""A router in front of stand-ins, for tests that are its clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.support.proxy.stand_ins import LIMIT, Handler, Instance
from vllm_pd_connector.instance_info import EngineInfo
from vllm_pd_connector.proxy.legs import Limits
from vllm_pd_connector.proxy.router import Options, Router


class Bench:
    """A router in front of stand-ins, and a client of it."""

    def __init__(self, stack: AsyncExitStack):
        self._stack = stack
        self.client: aiohttp.ClientSession
        self.router: Router
        self.url = ""

    async def instance(
        self, handler: Handler, says: EngineInfo | Sequence[EngineInfo] | None = None, **more: Any
    ) -> Instance:
        instance = Instance(handler, says, **more)
        await instance.server.start_server()
        self._stack.push_async_callback(instance.server.close)
        return instance

    async def route(
        self, prefill: Sequence[str] = (), decode: Sequence[str] = (), *, read_timeout: float = LIMIT, **options: Any
    ) -> None:
        # Checks after the first one happen only where a test asks for them.
        usual: dict[str, Any] = {"check_interval": 1000.0, "limits": Limits(LIMIT, read_timeout)}
        self.router = Router(Options(prefill, decode, **(usual | options)))
        self.client = await self._stack.enter_async_context(aiohttp.ClientSession())
        self.url = await self.serve(self.router.application()) + "/v1/completions"

    async def serve(self, app: web.Application) -> str:
        server = TestServer(app)
        await server.start_server()
        self._stack.push_async_callback(server.close)
        return str(server.make_url("")).rstrip("/")

    async def check(self) -> None:
        await self.router.fleet.check_all()

    async def get(self, path: str) -> tuple[int, str]:
        async with self.client.get(self.url.replace("/v1/completions", path)) as response:
            return response.status, await response.text()

    async def ask(self, body: object = None, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
        body = {"prompt": [1, 2]} if body is None else body
        async with self.client.post(self.url, json=body, headers=headers) as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if is_json else text, response.headers


def over_bench(test: Callable[[Bench], Awaitable[None]], seconds: float = 3 * LIMIT) -> Callable[[], None]:
    """Run a test as a coroutine, within the limit of time."""

    async def main() -> None:
        async with asyncio.timeout(seconds), AsyncExitStack() as stack:
            await test(Bench(stack))

    def run() -> None:
        asyncio.run(main())

    run.__name__ = test.__name__
    return run
