"""What the router takes from clients, and what it refuses before an instance hears of it; clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import DONE, FINISHED, HANDS_OVER, PARAMS, answers, break_off, info, streams
from vllm_pd_connector.instance_info import EngineInfo
from vllm_pd_connector.proxy.instance import InstanceRole

TOKEN = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
HANDED_OVER = {"choices": [{"text": "a"}], "kv_transfer_params": PARAMS}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"n": 2}', b"\xff\xfe", b'{"prompt": "\xfc"}'])
@over_bench
async def test_a_bad_body_is_400_and_reaches_no_instance(bench: Bench, content: bytes) -> None:
    prefill, decode = await bench.pair()
    async with bench.client.post(bench.url, data=content) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"]
    assert prefill.asked == decode.asked == []


@pytest.mark.parametrize("charset", ["", "; charset=none-such", "; charset=undefined", "; charset=iso-8859-1"])
@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-be"])
@over_bench
async def test_a_body_is_read_by_its_bytes_as_at_an_instance_whatever_charset_it_names(
    bench: Bench, coding: str, charset: str
) -> None:
    prefill, decode = await bench.pair()
    content, headers = '{"prompt": "ü"}'.encode(coding), {"Content-Type": f"application/json{charset}"}
    async with bench.client.post(bench.url, data=content, headers=headers) as response:
        assert response.status == 200
    assert prefill.asked[0]["prompt"] == decode.asked[0]["prompt"] == "ü"


@pytest.mark.parametrize(
    "said",
    [
        b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
        b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n",
    ],
)
@over_bench
async def test_a_body_that_is_not_coded_as_its_headers_say_is_400(bench: Bench, said: bytes) -> None:
    await bench.route()
    where = urlsplit(bench.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nConnection: close\r\n" + said)
    assert (await reader.readline()).split()[1] == b"400"
    writer.close()


@over_bench
async def test_a_body_that_is_too_large_is_413(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_pd_connector.proxy.router.MAX_BODY_BYTES", 1000)
    await bench.route()
    async with bench.client.post(bench.url, data=bytes(1001)) as response:
        assert response.status == 413
        assert "1000" in (await response.json())["error"]["message"]
    _, text = await bench.get("/metrics")
    assert 'vllm_pd_proxy_requests_total{status="413"} 1.0' in text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/responses", 404),
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/health", 405),
    ],
)
@over_bench
async def test_what_is_not_handed_over_is_told_in_the_form_of_an_error(
    bench: Bench, method: str, path: str, status: int
) -> None:
    await bench.route()
    where = bench.url.replace("/v1/completions", path)
    async with bench.client.request(method, where, json={"input": "x"}) as response:
        assert response.status == status
        says = (await response.json())["error"]["message"]
        assert "are handed over" in says and "computes the whole prompt: nothing is handed over there" in says


@over_bench
async def test_a_defect_of_the_router_is_counted_as_one(bench: Bench) -> None:
    await bench.route()
    del bench.router.fleet  # whatever it may be
    async with bench.client.post(bench.url, json={"prompt": "x"}) as response:
        assert response.status == 500
    _, text = await bench.get("/metrics")
    assert 'vllm_pd_proxy_requests_total{status="500"} 1.0' in text


@pytest.mark.parametrize("request_id", ["a b", "ü", "x" * 201, "'"])
@over_bench
async def test_a_request_id_that_could_confuse_a_log_is_refused(bench: Bench, request_id: str) -> None:
    prefill, _ = await bench.pair()
    assert (await bench.ask(**{"X-Request-Id": request_id}))[0] == 400
    assert prefill.asked == []


@over_bench
async def test_models_are_asked_for_in_the_clients_name(bench: Bench) -> None:
    await bench.pair()
    url = bench.url.replace("/completions", "/models")
    for headers in ({"Authorization": "Bearer x"}, {}):
        async with bench.client.get(url, headers=headers) as response:
            assert (response.status, (await response.json())["asked by"]) == (200, headers.get("Authorization"))


@over_bench
async def test_who_asks_for_models_does_not_wait_for_an_instance_that_is_stopped(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_pd_connector.proxy.router.LOOK_S", 2.0)
    stopped, other = await bench.instance(DONE), await bench.instance(DONE)
    stopped.names_models.clear()
    await bench.route(decode=[stopped.url, other.url], read_timeout=1000.0)
    assert (await bench.get("/v1/models"))[0] == 200


@over_bench
async def test_an_instance_that_is_slow_to_name_its_models_still_gets_requests(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_pd_connector.proxy.router.LOOK_S", 0.1)
    slow = await bench.instance(DONE)
    slow.names_models.clear()
    await bench.route(decode=[slow.url], check_interval=1000.0)
    status, said = await bench.get("/v1/models")
    assert status == 503 and f"{slow.url}/v1/models: TimeoutError" in str(said)
    assert [instance.url for instance in bench.router.fleet.usable(InstanceRole.DECODE)] == [slow.url]


WHOLE_PROMPT = {"prompt": [1, 2], "echo": True, "logprobs": 0}
"""For the log-probabilities of a prompt vLLM computes all of it, and loads nothing."""


@pytest.mark.parametrize("says", [None, info()], ids=["serial", "concurrent"])
@over_bench
async def test_a_prompt_that_decode_computes_anyway_is_not_prefilled(bench: Bench, says: EngineInfo | None) -> None:
    prefill, decode = await bench.pair(says=(says, None))
    assert (await bench.ask(WHOLE_PROMPT))[0] == 200
    assert (prefill.asked, decode.asked) == ([], [WHOLE_PROMPT])


@over_bench
async def test_what_decode_refuses_without_a_prefill_leaves_nothing_to_give_back(bench: Bench) -> None:
    _, decode = await bench.pair(decode=answers({"error": {"message": "no"}}, status=400))
    assert (await bench.ask(WHOLE_PROMPT))[0] == 400
    assert not bench.router._trailing and len(decode.asked) == 1


@over_bench
async def test_both_legs_have_the_client_s_priority(bench: Bench) -> None:
    for handoff, says in (("serial", None), ("concurrent", info())):
        p, d = await bench.pair(says=(says, None), handoff=handoff)
        assert (await bench.ask({"prompt": [1, 2], "priority": -3}, **{"X-Vllm-Priority": "7"}))[0] == 200
        assert p.priorities == d.priorities == [("7", -3)]


@over_bench
async def test_both_legs_have_the_client_s_session(bench: Bench) -> None:
    prefill, decode = await bench.pair()
    assert (await bench.ask(**{"X-Session-ID": "s"}))[0] == 200
    assert prefill.sessions == decode.sessions == ["s"]


@over_bench
async def test_both_legs_belong_to_the_clients_trace(bench: Bench) -> None:
    prefill, decode = await bench.pair()
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert (await bench.ask(traceparent=parent, tracestate="a=1"))[0] == 200
    assert (await bench.ask())[0] == 200
    assert prefill.traces == decode.traces == [(parent, "a=1"), (None, None)]


@pytest.mark.parametrize("at", ["prepare", "write", "write_eof"])
@over_bench
async def test_a_client_that_is_leaving_when_it_is_answered_is_no_error_of_an_instance(
    bench: Bench, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    does = getattr(web.StreamResponse, at)

    async def fail(answer: web.StreamResponse, *rest: Any) -> Any:
        if answer.headers.get("Cache-Control") == "no-cache":  # the router's, not the stand-in's
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")
        return await does(answer, *rest)

    monkeypatch.setattr(web.StreamResponse, at, fail)
    await bench.pair(decode=streams(FINISHED, b"data: [DONE]\n\n"))
    with pytest.raises(aiohttp.ClientError):
        await bench.ask({"prompt": "x", "stream": True})
    _, text = await bench.get("/metrics")
    assert 'vllm_pd_proxy_requests_total{status="499"} 1.0' in text
    assert "vllm_pd_proxy_broken_streams_total 0.0" in text


@over_bench
async def test_what_an_instance_has_its_client_keep_is_not_shown_in_the_name_of_another(bench: Bench) -> None:
    """As of a gateway before instances, that knows who has shown its key by a cookie from then on."""
    cookies: list[str | None] = []

    async def lets_in(request: web.Request) -> web.StreamResponse:
        cookies.append(request.headers.get("Cookie"))
        return web.json_response(HANDED_OVER, headers={"Set-Cookie": "session=of-the-first; Path=/"})

    prefill, decode = await bench.instance(lets_in), await bench.instance(lets_in)
    by_name = [instance.url.replace("127.0.0.1", "localhost") for instance in (prefill, decode)]
    await bench.route(by_name[:1], by_name[1:])
    for key in ("Bearer first", "Bearer second"):
        assert (await bench.ask(Authorization=key))[0] == 200
    assert cookies == [None] * 4


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@over_bench
async def test_no_request_follows_an_instance_elsewhere(bench: Bench, status: int) -> None:
    other = await bench.instance(DONE)

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, headers={"Location": f"{other.url}{request.path}"})

    await bench.pair(prefill=elsewhere)
    said = await bench.ask()
    assert said[0] == 502 and "elsewhere" in said[1]["error"]["message"]
    assert other.asked == []


@pytest.mark.parametrize("status", [200, 503])
@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("application/json; charset=utf-8", "application/json; charset=utf-8"),
        ("text/plain;charset=utf-8;x=1", "text/plain;charset=utf-8;x=1"),
        (None, "application/octet-stream"),
        ("text/plain; x=\udcff", "application/octet-stream"),
    ],
)
@over_bench
async def test_an_answer_keeps_its_type_whole(bench: Bench, said: str | None, told: str, status: int) -> None:
    async def says(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        kind = b"" if said is None else b"Content-Type: " + said.encode(errors="surrogateescape") + b"\r\n"
        request.transport.write(b"HTTP/1.1 %d X\r\n" % status + kind + b"Content-Length: 2\r\n\r\n{}")
        request.transport.close()
        return web.Response()

    async def well(_request: web.Request) -> web.StreamResponse:
        return web.Response()

    app = web.Application()
    app.router.add_get("/v1/models", says)
    app.router.add_post("/v1/completions", says)
    app.router.add_get("/{path:.*}", well)
    prefill, decode = await bench.instance(HANDS_OVER), await bench.serve(app)
    await bench.route([prefill.url], [decode])
    async with bench.client.post(bench.url, json={"prompt": "x"}) as response:
        assert (response.status, response.headers["Content-Type"]) == (status, told)
    async with bench.client.get(bench.url.replace("/completions", "/models")) as response:
        assert (response.status, response.headers["Content-Type"]) == (status, told)


@over_bench
async def test_an_answer_of_a_type_that_is_none_is_passed_on(bench: Bench) -> None:
    async def says(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        head = b"HTTP/1.1 400 Bad\r\nContent-Type: text/plain charset=utf-8\r\nContent-Length: 2\r\n\r\n"
        request.transport.write(head + b"no")
        request.transport.close()
        return web.Response()

    await bench.pair(decode=says)
    assert (await bench.ask())[:2] == (400, "no")


@over_bench
async def test_no_check_follows_an_instance_elsewhere(bench: Bench) -> None:
    other = await bench.instance(DONE, info(role="kv_consumer"))

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": f"{other.url}{request.path}"})

    app = web.Application()
    app.router.add_get("/{path:.*}", elsewhere)
    await bench.route(decode=[await bench.serve(app)])
    [shown] = bench.router.fleet.describe()
    assert (shown["state"], shown["why"], other.checks) == ("down", "/health answered 307", 0)


@over_bench
async def test_who_asks_for_models_is_not_sent_elsewhere(bench: Bench) -> None:
    other = await bench.instance(DONE)

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": f"{other.url}{request.path}"})

    async def well(_request: web.Request) -> web.StreamResponse:
        return web.Response()

    app = web.Application()
    app.router.add_get("/v1/models", elsewhere)
    app.router.add_get("/{path:.*}", well)
    await bench.route(decode=[await bench.serve(app)])
    status, said = await bench.get("/v1/models")
    assert status == 503 and "elsewhere" in said and other.url in said


@pytest.mark.parametrize("then", [None, break_off])
@over_bench
async def test_a_stream_that_ends_behind_an_instances_own_error_event_is_told_and_counted_once(
    bench: Bench, then: Callable[[web.Request], Awaitable[None]] | None
) -> None:
    event = b'data: {"error":{"message":"no cache","code":500}}\n\n'
    await bench.pair(decode=streams(TOKEN, event, then=then))
    whole = TOKEN + event + b"data: [DONE]\n\n"
    assert (await bench.ask({"prompt": "x", "stream": True}))[:2] == (200, whole.decode())
    assert "vllm_pd_proxy_broken_streams_total 1.0" in (await bench.get("/metrics"))[1]
