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
from yarl import URL

from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import DONE, FINISHED, HANDS_OVER, Handler, stall, streams
from vllm_pd_connector.proxy.exchange import told_if_it_failed
from vllm_pd_connector.proxy.fleet import Fleet
from vllm_pd_connector.proxy.instance import InstanceRole, InstanceState
from vllm_pd_connector.proxy.legs import Limits, make_session
from vllm_pd_connector.proxy.metrics import ProxyMetrics

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


@pytest.mark.parametrize("turns", range(4))
def test_checks_end_when_they_are_told_also_where_an_instance_was_just_lost(turns: int) -> None:
    """Before Python 3.12 `asyncio.wait_for` may swallow a cancellation that comes while what it waits for is done."""

    async def main() -> None:
        fleet = Fleet(ProxyMetrics(), check_interval=60.0, facts_interval=60.0, slack=0)
        async with aiohttp.ClientSession() as session:
            checks = asyncio.create_task(fleet.run(session))
            await asyncio.sleep(0.01)
            fleet._wake.set()
            for _ in range(turns):
                await asyncio.sleep(0)
            checks.cancel()
            done, _ = await asyncio.wait({checks}, timeout=30.0)
            assert checks in done and checks.cancelled()

    asyncio.run(main())


@over_bench
async def test_an_instance_that_is_added_again_is_checked_though_the_former_s_check_hangs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_pd_connector.proxy.fleet.LOOK_S", 3600.0)
    _prefill, decode = await bench.pair(check_interval=0.05)
    fleet = bench.router.fleet
    decode.held, before = asyncio.Event(), decode.checks
    while decode.checks == before:
        await asyncio.sleep(0.01)
    decode.held = None
    fleet.remove(decode.url)
    fleet.add(decode.url, InstanceRole.DECODE)
    while not fleet.usable(InstanceRole.DECODE):
        await asyncio.sleep(0.01)


@over_bench
async def test_a_client_that_takes_nothing_for_long_leaves(bench: Bench) -> None:
    """It says that it is there (the kernel answers for it), and its instance would be in use for ever."""
    event = b'data: {"choices":[{"text":"' + b"x" * 65536 + b'","finish_reason":null}]}\n\n'

    async def pours(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(event)

    await bench.pair(decode=pours, read_timeout=3.0)
    url = URL(bench.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    body = b'{"prompt": "x", "stream": true}'
    head = f"POST {url.path} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    (instance,) = bench.router.fleet.usable(InstanceRole.DECODE)
    while not instance.in_flight:
        await asyncio.sleep(0.01)
    while instance.in_flight:
        await asyncio.sleep(0.01)
    writer.close()


def test_to_look_up_a_name_counts_as_connecting() -> None:
    class Slow(aiohttp.abc.AbstractResolver):
        async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[aiohttp.abc.ResolveResult]:
            await asyncio.Event().wait()
            return []

        async def close(self) -> None:
            pass

    async def main() -> None:
        async with make_session(Limits(connect_timeout=0.1, read_timeout=600.0)) as session, asyncio.timeout(30.0):
            connector = session.connector
            assert isinstance(connector, aiohttp.TCPConnector)
            connector._resolver = Slow()
            with pytest.raises(aiohttp.ConnectionTimeoutError):
                await session.get("http://decode.example:1/health")

    asyncio.run(main())


def test_a_task_that_nobody_waits_for_is_heard_of_when_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    async def falls() -> None:
        raise RuntimeError("out of threads")

    async def main() -> None:
        task = asyncio.create_task(falls())
        task.add_done_callback(told_if_it_failed)
        await asyncio.wait({task})
        await asyncio.sleep(0)

    asyncio.run(main())
    assert "falls" in caplog.text and "out of threads" in caplog.text


@over_bench
async def test_a_name_with_an_address_that_leads_nowhere_is_known_to_be_left_by_the_other(bench: Bench) -> None:
    """What differs of the two comes as a text."""
    _prefill, decode = await bench.pair(decode=stall)
    asking = asyncio.ensure_future(bench.ask())
    await decode.arrived.wait()
    for site in decode.server.runner.sites:
        await site.stop()
    (instance,) = bench.router.fleet.usable(InstanceRole.DECODE)
    port = decode.server.port
    assert port is not None
    instance.url = f"http://decode.example:{port}"

    class Both(aiohttp.abc.AbstractResolver):
        async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[aiohttp.abc.ResolveResult]:
            return [
                {"hostname": host, "host": address, "port": port, "family": kind, "proto": 0, "flags": 0}
                for address, kind in (("2001:db8::1", socket.AF_INET6), ("127.0.0.1", socket.AF_INET))
            ]

        async def close(self) -> None: ...

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(resolver=Both())) as session:
        for _ in range(2):
            await bench.router.fleet.check_all(session)
    assert (await asking)[0] == 502


@over_bench
async def test_a_client_that_reads_slowly_does_not_lose_what_decode_has_sent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_pd_connector.proxy.instance.SILENT_S", 2.0)
    event = b'data: {"choices":[{"text":"%s","finish_reason":null}]}\n\n' % (b"x" * (1 << 20))
    count = 24
    _, decode = await bench.pair(
        decode=streams(*[event] * count, FINISHED, last=b"data: [DONE]\n\n"), check_interval=0.05
    )
    async with bench.client.post(bench.url, json={"prompt": "x", "stream": True}) as response:
        for site in decode.server.runner.sites:
            await site.stop()
        (instance,) = bench.router.fleet._instances.keys() - {bench.router._options.prefill[0]}
        while bench.router.fleet._instances[instance].deaf < 60:  # for longer than a stream may be silent
            await asyncio.sleep(0.01)
        text = await response.read()
    assert text.count(b"finish_reason") == count + 1 and text.endswith(b"[DONE]\n\n") and b"error" not in text


@over_bench
async def test_comments_alone_are_no_life(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's server sends them also when its engine has ended (`--sse-keep-alive-interval`)."""
    monkeypatch.setattr("vllm_pd_connector.proxy.instance.SILENT_S", 0.2)

    async def keeps_alive(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        while True:
            await response.write(b": keep-alive\n\n")
            await asyncio.sleep(0.02)

    _, decode = await bench.pair(decode=keeps_alive, check_interval=0.05)
    async with bench.client.post(bench.url, json={"prompt": "x", "stream": True}) as response:
        for site in decode.server.runner.sites:
            await site.stop()
        assert b"nobody listens there" in await response.read()


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
    assert instance.state is (InstanceState.DOWN if fault == "no such name" else InstanceState.UP)
    assert not asking.done()
    answered.set()
    assert (await asking)[0] == 200


@over_bench
async def test_a_stream_that_goes_on_lives_where_no_connection_is_taken_and_one_that_stands_ends(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Service without endpoints that are ready refuses connections, and keeps those that there are."""
    monkeypatch.setattr("vllm_pd_connector.proxy.instance.SILENT_S", 2.0)
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
        while time.monotonic() - began < 3.0:
            assert await response.content.readuntil(b"\n\n") == event
        goes_on.set()
        rest = (await response.read()).decode()
    assert "nobody listens there, and its answer stands still" in rest
