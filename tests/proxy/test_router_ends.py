"""Requests at an instance that ends are answered soon, and no others are taken for them."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time

import aiohttp
import aiohttp.abc
import pytest
from aiohttp import web

from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import DONE, HANDS_OVER, Handler, stall, streams
from vllm_pd_connector.proxy.instance import InstanceRole, InstanceState

HEADERS_ALONE = streams(then=stall)


@pytest.mark.parametrize("removed", [False, True], ids=["", "and was removed"])
@pytest.mark.parametrize(
    ("leg", "hangs"),
    [("prefill", stall), ("decode", stall), ("decode", HEADERS_ALONE)],
    ids=["prefill", "decode", "stream"],
)
@over_bench
async def test_an_instance_that_listens_no_more_and_has_not_answered_is_502(
    bench: Bench, leg: str, hangs: Handler, removed: bool
) -> None:
    prefill, decode = await bench.pair(
        hangs if leg == "prefill" else HANDS_OVER, hangs if leg == "decode" else DONE, check_interval=0.05
    )
    asking = asyncio.ensure_future(bench.ask())
    ends = prefill if leg == "prefill" else decode
    await ends.arrived.wait()
    if removed:
        bench.router.fleet.remove(ends.url)
    for site in ends.server.runner.sites:  # its open connections stay
        await site.stop()
    status, answer, _ = await asking
    assert status == 502 and f"{leg} instance {ends.url} ends" in str(answer)


@pytest.mark.parametrize("fault", ["no such name", "no file is left"])
@over_bench
async def test_a_fault_of_the_router_s_own_ends_no_request(bench: Bench, fault: str) -> None:
    """Two checks that fail for it would be those by which an instance that has ended is known."""
    answered = asyncio.Event()

    async def late(_request: web.Request) -> web.StreamResponse:
        await answered.wait()
        return web.json_response({"choices": [{"text": "abc"}]})

    _, decode = await bench.pair(decode=late)
    asking = asyncio.ensure_future(bench.ask())
    await decode.arrived.wait()

    class Unknown(aiohttp.abc.AbstractResolver):
        async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[aiohttp.abc.ResolveResult]:
            raise OSError(-2, "Name or service not known")

        async def close(self) -> None: ...

    def no_file(_place: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    (instance,) = bench.router.fleet.usable(InstanceRole.DECODE)
    if fault == "no such name":
        connector = aiohttp.TCPConnector(resolver=Unknown())
        instance.url = instance.url.replace("127.0.0.1", "decode.example")
    else:
        connector = aiohttp.TCPConnector(socket_factory=no_file)
    async with aiohttp.ClientSession(connector=connector) as session:
        for _ in range(3):
            await bench.router.fleet.check_all(session)
    assert instance.state is InstanceState.DOWN and not asking.done()
    answered.set()
    assert (await asking)[0] == 200


@over_bench
async def test_a_stream_that_goes_on_lives_where_no_connection_is_taken_and_one_that_stands_ends(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Service without endpoints that are ready refuses connections, and keeps those that there are."""
    monkeypatch.setattr("vllm_pd_connector.proxy.instance.SILENT_S", 0.5)
    event, goes_on = b'data: {"choices":[{"text":"x","finish_reason":null}]}\n\n', asyncio.Event()

    async def speaks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        while not goes_on.is_set():
            await response.write(event)
            await asyncio.sleep(0.02)
        return await stall(request)

    _, decode = await bench.pair(decode=speaks, check_interval=0.05)
    async with bench.client.post(bench.url, json={"prompt": "x", "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        for site in decode.server.runner.sites:
            await site.stop()
        began = time.monotonic()
        while time.monotonic() - began < 1.0:
            assert await response.content.readuntil(b"\n\n") == event
        goes_on.set()
        rest = (await response.read()).decode()
    assert "nobody listens there, and its answer stands still" in rest
