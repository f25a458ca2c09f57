"""The router between instances that answer, fail, stall and vanish, as its clients see it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from vllm_pd_connector.proxy.router import Options, Router

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

PARAMS = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": [[7]], "own": {"nonce": "x"}}
LIMIT = 10.0
"""Seconds after which a test that waits for something fails."""


class Instance:
    """A stand-in for a vLLM instance: notes what it is asked, answers what it is told to."""

    def __init__(self, handler: Handler):
        self.asked: list[dict[str, Any]] = []
        self.request_ids: list[str | None] = []
        self.arrived = asyncio.Event()
        self.cancelled = asyncio.Event()
        self._handler = handler
        app = web.Application()
        app.router.add_post("/v1/completions", self._serve)
        app.router.add_post("/v1/chat/completions", self._serve)
        app.router.add_get("/health", answers({}))
        self.server = TestServer(app)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.request_ids.append(request.headers.get("X-Request-Id"))
        self.arrived.set()
        try:
            return await self._handler(request)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")


def answers(body: object, status: int = 200) -> Handler:
    async def handler(_request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return handler


def streams(*chunks: bytes, then: Callable[[web.Request], Awaitable[None]] | None = None) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        if then is not None:
            await then(request)
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
NOBODY = "http://127.0.0.1:{}"


class Bench:
    """A router in front of stand-ins, and a client of it."""

    def __init__(self, stack: AsyncExitStack):
        self._stack = stack
        self.client: aiohttp.ClientSession
        self.url = ""

    async def instance(self, handler: Handler) -> Instance:
        instance = Instance(handler)
        await instance.server.start_server()
        self._stack.push_async_callback(instance.server.close)
        return instance

    async def route(self, prefill: list[str], decode: list[str], read_timeout: float = LIMIT) -> None:
        server = TestServer(Router(Options(prefill, decode, LIMIT, read_timeout)).application())
        await server.start_server()
        self._stack.push_async_callback(server.close)
        self.client = await self._stack.enter_async_context(aiohttp.ClientSession())
        self.url = str(server.make_url("/v1/completions"))

    async def ask(self, body: object = None, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
        body = {"prompt": [1, 2]} if body is None else body
        async with self.client.post(self.url, json=body, headers=headers) as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if is_json else text, response.headers


def over_bench(test: Callable[[Bench], Awaitable[None]]) -> Callable[[], None]:
    """Run a test as a coroutine, within the limit of time."""

    async def main() -> None:
        async with asyncio.timeout(3 * LIMIT), AsyncExitStack() as stack:
            await test(Bench(stack))

    def run() -> None:
        asyncio.run(main())

    run.__name__ = test.__name__
    return run


@over_bench
async def test_the_decode_instance_gets_the_parameters_of_the_prefill_instance(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url])
    status, answer, headers = await bench.ask({"prompt": [1, 2], "max_tokens": 9}, **{"X-Request-Id": "id-1"})
    assert (status, answer) == (200, {"choices": [{"text": "abc"}]})
    assert prefill.asked[0]["max_tokens"] == 1
    assert decode.asked == [{"prompt": [1, 2], "max_tokens": 9, "kv_transfer_params": PARAMS}]
    assert prefill.request_ids == decode.request_ids == ["id-1"]
    assert headers["X-Request-Id"] == "id-1"


@over_bench
async def test_both_legs_carry_one_new_request_id_when_the_client_gives_none(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url])
    await bench.ask()
    await bench.ask()
    assert prefill.request_ids == decode.request_ids
    assert None not in prefill.request_ids
    assert len(set(prefill.request_ids)) == 2


@over_bench
async def test_chat_goes_to_the_chat_route(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url])
    bench.url = bench.url.replace("/v1/completions", "/v1/chat/completions")
    status, _, _ = await bench.ask({"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 7})
    assert status == 200
    assert prefill.asked[0]["max_completion_tokens"] == 1
    assert decode.asked[0]["max_completion_tokens"] == 7


@over_bench
async def test_a_stream_is_passed_on_byte_by_byte(bench: Bench) -> None:
    prefill = await bench.instance(HANDS_OVER)
    decode = await bench.instance(streams(b"data: 1\n\n", b"data: [DONE]\n\n"))
    await bench.route([prefill.url], [decode.url])
    status, text, headers = await bench.ask({"prompt": "x", "stream": True})
    assert (status, text) == (200, "data: 1\n\ndata: [DONE]\n\n")
    assert headers["Content-Type"].startswith("text/event-stream")


@over_bench
async def test_an_event_reaches_the_client_before_the_stream_ends(bench: Bench) -> None:
    seen = asyncio.Event()

    async def wait_until_seen(_request: web.Request) -> None:
        await seen.wait()

    prefill = await bench.instance(HANDS_OVER)
    decode = await bench.instance(streams(b"data: 1\n\n", then=wait_until_seen))
    await bench.route([prefill.url], [decode.url])
    async with bench.client.post(bench.url, json={"prompt": "x", "stream": True}) as response:
        assert await response.content.readany() == b"data: 1\n\n"
        seen.set()
        assert await response.content.read() == b""


@over_bench
async def test_instances_take_turns(bench: Bench) -> None:
    prefills = [await bench.instance(HANDS_OVER) for _ in range(2)]
    decodes = [await bench.instance(DONE) for _ in range(3)]
    await bench.route([one.url for one in prefills], [one.url for one in decodes])
    for _ in range(6):
        await bench.ask()
    assert [len(one.asked) for one in prefills] == [3, 3]
    assert [len(one.asked) for one in decodes] == [2, 2, 2]


@over_bench
async def test_an_instance_that_refuses_the_connection_is_passed_over(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
    nobody = NOBODY.format(unused_port())
    await bench.route([nobody, prefill.url], [nobody, decode.url])
    assert [(await bench.ask())[0] for _ in range(4)] == [200] * 4


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_no_reachable_instance_is_503(kind: str) -> None:
    async def test(bench: Bench) -> None:
        prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
        urls = {"prefill": prefill.url, "decode": decode.url, kind: NOBODY.format(unused_port())}
        await bench.route([urls["prefill"]], [urls["decode"]])
        status, answer, _ = await bench.ask()
        assert status == 503
        assert kind in answer["error"]["message"]

    over_bench(test)()


@over_bench
async def test_an_error_of_the_prefill_instance_reaches_the_client(bench: Bench) -> None:
    prefill = await bench.instance(answers({"error": {"message": "too long"}}, status=422))
    decode = await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url])
    status, answer, _ = await bench.ask()
    assert (status, answer) == (422, {"error": {"message": "too long"}})
    assert decode.asked == []


@over_bench
async def test_an_error_of_the_decode_instance_reaches_the_client(bench: Bench) -> None:
    prefill = await bench.instance(HANDS_OVER)
    decode = await bench.instance(answers({"error": {"message": "no cache"}}, status=500))
    await bench.route([prefill.url], [decode.url])
    status, answer, _ = await bench.ask({"prompt": "x", "stream": True})
    assert (status, answer) == (500, {"error": {"message": "no cache"}})


@over_bench
async def test_a_prefill_that_hands_nothing_over_is_502_and_decodes_nothing(bench: Bench) -> None:
    prefill, decode = await bench.instance(DONE), await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url])
    status, answer, _ = await bench.ask()
    assert status == 502
    assert "kv_transfer_params" in answer["error"]["message"]
    assert decode.asked == []


@over_bench
async def test_a_silent_instance_is_504(bench: Bench) -> None:
    prefill, decode = await bench.instance(stall), await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url], read_timeout=0.2)
    assert (await bench.ask())[0] == 504


@over_bench
async def test_an_instance_that_breaks_off_before_an_answer_is_502(bench: Bench) -> None:
    async def vanish(request: web.Request) -> web.StreamResponse:
        await break_off(request)
        return web.Response()

    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(vanish)
    await bench.route([prefill.url], [decode.url])
    assert (await bench.ask())[0] == 502


@over_bench
async def test_a_stream_that_breaks_off_ends_with_an_error_event(bench: Bench) -> None:
    prefill = await bench.instance(HANDS_OVER)
    decode = await bench.instance(streams(b"data: 1\n\n", then=break_off))
    await bench.route([prefill.url], [decode.url])
    status, text, _ = await bench.ask({"prompt": "x", "stream": True})
    events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    assert status == 200
    assert (events[0], events[-1]) == ("1", "[DONE]")
    assert json.loads(events[1])["error"]["code"] == 502


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_client_that_leaves_cancels_the_leg_in_progress(leg: str) -> None:
    async def test(bench: Bench) -> None:
        prefill = await bench.instance(stall if leg == "prefill" else HANDS_OVER)
        decode = await bench.instance(stall if leg == "decode" else DONE)
        await bench.route([prefill.url], [decode.url])
        waiting = prefill if leg == "prefill" else decode
        client = asyncio.create_task(bench.ask())
        await waiting.arrived.wait()
        client.cancel()
        await waiting.cancelled.wait()

    over_bench(test)()


@over_bench
async def test_a_client_that_leaves_its_stream_cancels_the_decode(bench: Bench) -> None:
    async def wait(_request: web.Request) -> None:
        await asyncio.Event().wait()

    prefill = await bench.instance(HANDS_OVER)
    decode = await bench.instance(streams(b"data: 1\n\n", then=wait))
    await bench.route([prefill.url], [decode.url])
    async with bench.client.post(bench.url, json={"prompt": "x", "stream": True}) as response:
        await response.content.readany()
        response.close()
    await decode.cancelled.wait()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"n": 2}', b"\xff\xfe"])
def test_a_bad_body_is_400_and_reaches_no_instance(content: bytes) -> None:
    async def test(bench: Bench) -> None:
        prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
        await bench.route([prefill.url], [decode.url])
        async with bench.client.post(bench.url, data=content) as response:
            assert response.status == 400
            assert (await response.json())["error"]["message"]
        assert prefill.asked == decode.asked == []

    over_bench(test)()


@over_bench
async def test_health_needs_one_instance_of_each_kind(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
    nobody = NOBODY.format(unused_port())
    for prefills, decodes, expected in (
        ([prefill.url, nobody], [nobody, decode.url], 200),
        ([nobody], [decode.url], 503),
        ([prefill.url], [nobody], 503),
    ):
        await bench.route(prefills, decodes)
        async with bench.client.get(bench.url.replace("/v1/completions", "/health")) as response:
            assert response.status == expected
