"""What the router takes from clients, and what it refuses before an instance hears of it; clients that leave."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import DONE, HANDS_OVER, info, streams


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
async def test_a_body_of_an_unknown_charset_is_400(bench: Bench) -> None:
    await bench.route()
    headers = {"Content-Type": "application/json; charset=none-such"}
    async with bench.client.post(bench.url, data=b"{}", headers=headers) as response:
        assert response.status == 400
        assert "none-such" in (await response.json())["error"]["message"]


def test_a_body_that_is_too_large_is_413(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_pd_connector.proxy.router.MAX_BODY_BYTES", 1000)

    async def test(bench: Bench) -> None:
        await bench.route()
        async with bench.client.post(bench.url, data=bytes(1001)) as response:
            assert response.status == 413
            assert "1000" in (await response.json())["error"]["message"]
        _, text = await bench.get("/metrics")
        assert 'vllm_pd_proxy_requests_total{status="413"} 1.0' in text

    over_bench(test)()


@over_bench
async def test_a_defect_of_the_router_is_counted_as_one(bench: Bench) -> None:
    await bench.route()
    del bench.router.fleet  # whatever it may be
    async with bench.client.post(bench.url, json={"prompt": "x"}) as response:
        assert response.status == 500
    _, text = await bench.get("/metrics")
    assert 'vllm_pd_proxy_requests_total{status="500"} 1.0' in text


@pytest.mark.parametrize("request_id", ["a b", "ü", "x" * 201, "'"])
def test_a_request_id_that_could_confuse_a_log_is_refused(request_id: str) -> None:
    async def test(bench: Bench) -> None:
        prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
        await bench.route([prefill.url], [decode.url])
        assert (await bench.ask(**{"X-Request-Id": request_id}))[0] == 400
        assert prefill.asked == []

    over_bench(test)()


@over_bench
async def test_models_are_asked_for_in_the_clients_name(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url])
    url = bench.url.replace("/completions", "/models")
    for headers in ({"Authorization": "Bearer x"}, {}):
        async with bench.client.get(url, headers=headers) as response:
            assert (response.status, (await response.json())["asked by"]) == (200, headers.get("Authorization"))


@over_bench
async def test_both_legs_have_the_client_s_priority(bench: Bench) -> None:
    for handoff, says in (("serial", None), ("concurrent", info())):
        p, d = await bench.instance(HANDS_OVER, says), await bench.instance(DONE)
        await bench.route([p.url], [d.url], handoff=handoff)
        assert (await bench.ask({"prompt": [1, 2], "priority": -3}, **{"X-Vllm-Priority": "7"}))[0] == 200
        assert p.priorities == d.priorities == [("7", -3)]


@over_bench
async def test_both_legs_belong_to_the_clients_trace(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url])
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert (await bench.ask(traceparent=parent, tracestate="a=1"))[0] == 200
    assert (await bench.ask())[0] == 200
    assert prefill.traces == decode.traces == [(parent, "a=1"), (None, None)]


@pytest.mark.parametrize("at", ["prepare", "write", "write_eof"])
def test_a_client_that_is_leaving_when_it_is_answered_is_no_error_of_an_instance(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    does = getattr(web.StreamResponse, at)

    async def fail(answer: web.StreamResponse, *rest: Any) -> Any:
        if answer.headers.get("Cache-Control") == "no-cache":  # the router's, not the stand-in's
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")
        return await does(answer, *rest)

    monkeypatch.setattr(web.StreamResponse, at, fail)

    @over_bench
    async def ask(bench: Bench) -> None:
        prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(streams(b"data: 1\n\n"))
        await bench.route([prefill.url], [decode.url])
        with pytest.raises(aiohttp.ClientError):
            await bench.ask({"prompt": "x", "stream": True})
        _, text = await bench.get("/metrics")
        assert 'vllm_pd_proxy_requests_total{status="499"} 1.0' in text
        assert "vllm_pd_proxy_broken_streams_total 0.0" in text

    ask()
