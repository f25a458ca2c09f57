"""A router in front of stand-ins, for tests that are its clients."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.support.proxy.stand_ins import DONE, HANDS_OVER, LIMIT, Handler, Instance
from vllm_pd_connector.instance_info import EngineInfo
from vllm_pd_connector.proxy.legs import Limits
from vllm_pd_connector.proxy.options import Options
from vllm_pd_connector.proxy.router import Router


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

    async def pair(
        self,
        prefill: Handler = HANDS_OVER,
        decode: Handler = DONE,
        says: tuple[EngineInfo | None, EngineInfo | None] = (None, None),
        **options: Any,
    ) -> tuple[Instance, Instance]:
        """A prefill and a decode instance, and a router in front of them. `says`: what they say of themselves."""
        first, second = await self.instance(prefill, says[0]), await self.instance(decode, says[1])
        await self.route([first.url], [second.url], **options)
        return first, second

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


def over_bench(test: Callable[..., Awaitable[None]], seconds: float = 3 * LIMIT) -> Callable[..., None]:
    """Run a test as a coroutine, within the limit of time; what it takes beside the bench it takes from pytest."""

    async def main(**fixtures: Any) -> None:
        async with asyncio.timeout(seconds), AsyncExitStack() as stack:
            await test(Bench(stack), **fixtures)

    def run(**fixtures: Any) -> None:
        asyncio.run(main(**fixtures))

    signature = inspect.signature(test)
    run.__name__, run.__doc__ = test.__name__, test.__doc__
    run.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return run
