"""The router between instances that answer, fail, stall and vanish, as its clients see it: one leg after the other."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from tests.support.ports import free_port
from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import DONE, FINISHED, HANDS_OVER, NOBODY, PARAMS, answers, break_off, stall, streams
from tests.support.servers.excuses import legs_of
from vllm_pd_connector.proxy.exchange import whole_events

DONE_EVENT = b"data: [DONE]\n\n"


def ended(reason: str | None) -> bytes:
    """An event as vLLM writes it."""
    return f'data: {{"choices":[{{"text":"","finish_reason":{json.dumps(reason)}}}]}}\n\n'.encode()


@over_bench
async def test_the_decode_instance_gets_the_parameters_of_the_prefill_instance(bench: Bench) -> None:
    prefill, decode = await bench.pair()
    status, answer, headers = await bench.ask({"prompt": [1, 2], "max_tokens": 9}, **{"X-Request-Id": "id-1"})
    assert (status, answer) == (200, {"choices": [{"text": "abc"}]})
    assert prefill.asked[0]["max_tokens"] == 1
    assert decode.asked == [{"prompt": [1, 2], "max_tokens": 9, "kv_transfer_params": PARAMS}]
    assert prefill.request_ids == decode.request_ids == ["id-1"]
    assert headers["X-Request-Id"] == "id-1"


@over_bench
async def test_both_legs_carry_one_new_request_id_when_the_client_gives_none(bench: Bench) -> None:
    prefill, decode = await bench.pair()
    await bench.ask()
    await bench.ask()
    assert prefill.request_ids == decode.request_ids
    assert None not in prefill.request_ids
    assert len(set(prefill.request_ids)) == 2


@over_bench
async def test_chat_goes_to_the_chat_route(bench: Bench) -> None:
    prefill, decode = await bench.pair()
    bench.url = bench.url.replace("/v1/completions", "/v1/chat/completions")
    status, _, _ = await bench.ask({"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 7})
    assert status == 200
    assert prefill.asked[0]["max_completion_tokens"] == 1
    assert decode.asked[0]["max_completion_tokens"] == 7


@over_bench
async def test_a_stream_is_passed_on_byte_by_byte(bench: Bench) -> None:
    await bench.pair(decode=streams(FINISHED, b"data: [DONE]\n\n"))
    status, text, headers = await bench.ask({"prompt": "x", "stream": True})
    assert (status, text) == (200, FINISHED.decode() + "data: [DONE]\n\n")
    assert headers["Content-Type"].startswith("text/event-stream")


@over_bench
async def test_an_event_reaches_the_client_before_the_stream_ends(bench: Bench) -> None:
    seen = asyncio.Event()

    async def wait_until_seen(_request: web.Request) -> None:
        await seen.wait()

    await bench.pair(decode=streams(FINISHED, then=wait_until_seen, last=DONE_EVENT))
    async with bench.client.post(bench.url, json={"prompt": "x", "stream": True}) as response:
        assert await response.content.readany() == FINISHED
        seen.set()
        assert await response.content.read() == DONE_EVENT


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
    nobody = [NOBODY.format(free_port()) for _ in range(2)]
    await bench.route([nobody[0], prefill.url], [nobody[1], decode.url])
    assert [(await bench.ask())[0] for _ in range(4)] == [200] * 4


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@over_bench
async def test_no_reachable_instance_is_503(bench: Bench, kind: str) -> None:
    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
    urls = {"prefill": prefill.url, "decode": decode.url, kind: NOBODY.format(free_port())}
    await bench.route([urls["prefill"]], [urls["decode"]])
    status, answer, _ = await bench.ask()
    assert status == 503
    assert f"no {kind} instance can be reached" in answer["error"]["message"]
    assert prefill.asked == decode.asked == [], "what nobody decodes is not prefilled"


@over_bench
async def test_an_error_of_the_prefill_instance_reaches_the_client(bench: Bench) -> None:
    _, decode = await bench.pair(answers({"error": {"message": "too long"}}, status=422))
    status, answer, _ = await bench.ask()
    assert (status, answer) == (422, {"error": {"message": "too long"}})
    assert decode.asked == []


@over_bench
async def test_an_error_of_the_decode_instance_reaches_the_client(bench: Bench) -> None:
    await bench.pair(decode=answers({"error": {"message": "no cache"}}, status=500))
    status, answer, _ = await bench.ask({"prompt": "x", "stream": True})
    assert (status, answer) == (500, {"error": {"message": "no cache"}})


@over_bench
async def test_a_prefill_that_hands_nothing_over_is_502_and_decodes_nothing(bench: Bench) -> None:
    _, decode = await bench.pair(DONE)
    status, answer, _ = await bench.ask()
    assert status == 502
    assert "kv_transfer_params" in answer["error"]["message"]
    assert decode.asked == []


@over_bench
async def test_a_prefill_that_its_engine_cut_off_is_502_and_said(bench: Bench) -> None:
    prefill, decode = await bench.pair(answers({"choices": [{"text": "", "finish_reason": "abort"}]}))
    status, answer, _ = await bench.ask()
    assert status == 502 and decode.asked == []
    assert f"prefill instance {prefill.url} could not finish" in answer["error"]["message"]


@over_bench
async def test_a_silent_instance_is_504(bench: Bench) -> None:
    await bench.pair(stall, read_timeout=0.2)
    assert (await bench.ask())[0] == 504


@over_bench
async def test_an_instance_that_breaks_off_before_an_answer_is_502(bench: Bench) -> None:
    async def vanish(request: web.Request) -> web.StreamResponse:
        await break_off(request)
        return web.Response()

    await bench.pair(decode=vanish)
    assert (await bench.ask())[0] == 502


@over_bench
async def test_a_stream_that_breaks_off_ends_with_an_error_event(bench: Bench) -> None:
    await bench.pair(decode=streams(FINISHED, then=break_off))
    status, text, _ = await bench.ask({"prompt": "x", "stream": True})
    events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    assert status == 200
    assert (f"data: {events[0]}\n\n".encode(), events[-1]) == (FINISHED, "[DONE]")
    assert json.loads(events[1])["error"]["code"] == 502


@over_bench
async def test_half_an_event_of_a_stream_that_breaks_off_is_kept_from_the_client(bench: Bench) -> None:
    seen = asyncio.Event()

    async def wait_and_break_off(request: web.Request) -> None:
        await seen.wait()
        await break_off(request)

    await bench.pair(decode=streams(ended(None), b'data: {"choi', then=wait_and_break_off))
    async with bench.client.post(bench.url, json={"prompt": "x", "stream": True}) as response:
        assert await response.content.readany() == ended(None)
        seen.set()
        error, last, nothing = (await response.text()).split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 502
    assert (last, nothing) == ("data: [DONE]", "")


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@over_bench
async def test_a_client_that_leaves_cancels_the_leg_in_progress(bench: Bench, leg: str) -> None:
    prefill, decode = await bench.pair(stall if leg == "prefill" else HANDS_OVER, stall if leg == "decode" else DONE)
    waiting = prefill if leg == "prefill" else decode
    client = asyncio.create_task(bench.ask())
    await waiting.arrived.wait()
    client.cancel()
    await waiting.cancelled.wait()


@over_bench
async def test_a_client_that_leaves_its_stream_cancels_the_decode(bench: Bench) -> None:
    async def wait(_request: web.Request) -> None:
        await asyncio.Event().wait()

    _, decode = await bench.pair(decode=streams(FINISHED, then=wait))
    async with bench.client.post(bench.url, json={"prompt": "x", "stream": True}) as response:
        await response.content.readany()
        response.close()
    await decode.cancelled.wait()


@over_bench
async def test_health_needs_one_instance_of_each_kind(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
    nobody, no_one = (NOBODY.format(free_port()) for _ in range(2))
    for prefills, decodes, expected in (
        ([prefill.url, nobody], [no_one, decode.url], 200),
        ([nobody], [decode.url], 503),
        ([prefill.url], [nobody], 503),
    ):
        await bench.route(prefills, decodes)
        async with bench.client.get(bench.url.replace("/v1/completions", "/health")) as response:
            assert response.status == expected


# -- what reaches the client ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "status"), [(500, 500), (404, 404), ("x", 502), (None, 502)])
@over_bench
async def test_a_stream_that_begins_with_an_error_is_a_status(bench: Bench, code: object, status: int) -> None:
    error = {"error": {"message": "no cache", "code": code}}
    await bench.pair(decode=streams(f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n".encode()))
    assert (await bench.ask({"prompt": "x", "stream": True}))[:2] == (status, error)


@over_bench
async def test_an_error_that_comes_in_pieces_is_a_status(bench: Bench) -> None:
    error = {"error": {"message": "no cache", "code": 404}}
    pieces = [bytes([byte]) for byte in f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n".encode()]
    await bench.pair(decode=streams(*pieces))
    assert (await bench.ask({"prompt": "x", "stream": True}))[:2] == (404, error)


@pytest.mark.parametrize("reason", ["error", "abort"])
@over_bench
async def test_a_stream_whose_first_event_says_it_failed_is_502(bench: Bench, reason: str) -> None:
    await bench.pair(decode=streams(ended(reason), DONE_EVENT))
    status, answer, _ = await bench.ask({"prompt": "x", "stream": True})
    assert status == 502
    assert reason in answer["error"]["message"]


@pytest.mark.parametrize("reason", ["error", "abort"])
@over_bench
async def test_a_stream_that_says_later_that_it_failed_ends_with_an_error_event(bench: Bench, reason: str) -> None:
    usage = b'data: {"choices":[],"usage":{}}\n\n'
    await bench.pair(decode=streams(ended(None), ended(reason), usage, DONE_EVENT))
    status, text, _ = await bench.ask({"prompt": "x", "stream": True})
    first, error, last, nothing = text.split("\n\n")
    assert status == 200
    assert (f"{first}\n\n".encode(), f"{last}\n\n".encode(), nothing) == (ended(None), DONE_EVENT, "")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 502


@over_bench
async def test_an_instances_own_error_event_is_passed_on_and_counted(bench: Bench) -> None:
    events = [ended(None), b'data: {"error":{"message":"no cache","code":500}}\n\n', DONE_EVENT]
    await bench.pair(decode=streams(*events))
    assert (await bench.ask({"prompt": "x", "stream": True}))[:2] == (200, b"".join(events).decode())
    assert "vllm_pd_proxy_broken_streams_total 1.0" in (await bench.get("/metrics"))[1]


@over_bench
async def test_a_stream_about_errors_is_none(bench: Bench) -> None:
    events = [b'data: {"choices":[{"text":"\\"finish_reason\\": \\"abort\\", error"}]}\n\n', ended("stop"), DONE_EVENT]
    await bench.pair(decode=streams(*events))
    assert (await bench.ask({"prompt": "x", "stream": True}))[:2] == (200, b"".join(events).decode())


@pytest.mark.parametrize("blank", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_events_are_whole_however_a_stream_is_cut(blank: bytes) -> None:
    async def events(*chunks: bytes) -> list[bytes]:
        async def reads() -> AsyncIterator[bytes]:
            for chunk in chunks:
                yield chunk

        return [event async for event in whole_events(reads())]

    expected = [FINISHED.rstrip() + blank, b"data: 2" + blank, b"data: [DONE]"]
    stream = b"".join(expected)
    assert asyncio.run(events(stream[:-1])) == expected[:-1], "half an event"
    for cut in range(len(stream) + 1):
        assert asyncio.run(events(stream[:cut], stream[cut:])) == expected


def test_a_long_event_is_looked_at_once() -> None:
    """An echoed prompt with its log-probabilities, of some 30 MB; each look at all of it would take a tenth second."""

    async def reads() -> AsyncIterator[bytes]:
        for _ in range(500):
            yield bytes(1 << 16)
        yield b"\n\n"

    async def sizes() -> list[int]:
        return [len(event) async for event in whole_events(reads())]

    began = time.process_time()
    assert asyncio.run(sizes()) == [(500 << 16) + 2]
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize("said", [b"", b"data: {}\n\n"])
@over_bench
async def test_a_stream_that_ends_without_its_last_event_is_broken(bench: Bench, said: bytes) -> None:
    """As of an instance that ends behind a proxy which speaks HTTP/1.0 to it: there the end of a connection is the end
    of an answer."""
    await bench.pair(decode=streams(said + b'data: {"choices": [{"text": "a"}]}\n\n'))
    status, text, _ = await bench.ask({"prompt": "x", "stream": True})
    assert status == 200
    *_, error, done, rest = text.split("\n\n")
    assert "without data: [DONE]" in json.loads(error.removeprefix("data: "))["error"]["message"]
    assert (done, rest) == ("data: [DONE]", "")
    _, page = await bench.get("/metrics")
    assert "vllm_pd_proxy_broken_streams_total 1.0" in page


@over_bench
async def test_a_connection_that_breaks_behind_the_last_event_breaks_no_stream(bench: Bench) -> None:
    await bench.pair(decode=streams(FINISHED, DONE_EVENT, then=break_off))
    assert (await bench.ask({"prompt": "x", "stream": True}))[:2] == (200, FINISHED.decode() + "data: [DONE]\n\n")
    assert "vllm_pd_proxy_broken_streams_total 0.0" in (await bench.get("/metrics"))[1]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("said", [b"", b"<html>Sign in</html>", b"[]", b'{"choices": [{"text": "a'])
@over_bench
async def test_an_answer_that_is_none_is_502(bench: Bench, leg: str, said: bytes) -> None:
    async def says(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=said, content_type="application/json")

    await bench.pair(**{leg: says})
    status, answer, _ = await bench.ask()
    assert (status, list(answer)) == (502, ["error"])


@over_bench
async def test_a_stream_without_an_event_is_502(bench: Bench) -> None:
    await bench.pair(decode=streams())
    assert (await bench.ask({"prompt": "x", "stream": True}))[0] == 502


@over_bench
async def test_an_answer_that_says_it_failed_is_502(bench: Bench) -> None:
    prefill = await bench.instance(HANDS_OVER)
    for reason in ("error", "abort"):
        decode = await bench.instance(answers({"choices": [{"text": "", "finish_reason": reason}]}))
        await bench.route([prefill.url], [decode.url])
        assert (await bench.ask())[0] == 502


@over_bench
async def test_the_log_says_where_the_legs_of_a_request_were(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "vllm_pd_connector")
    prefill, decode = await bench.pair()
    for number in range(2):
        await bench.ask(**{"X-Request-Id": f"id-{number}"})
    log = "\n".join(f"{record.name}: {record.getMessage()}" for record in caplog.records)
    expected = {"prefill": prefill.url, "decode": decode.url}
    assert legs_of(log) == {"id-0": expected, "id-1": expected}


@over_bench
async def test_a_first_failure_is_a_row_that_grows(bench: Bench) -> None:
    """Of a series that is not there before it, Prometheus sees no increase."""
    await bench.pair()
    _, text = await bench.get("/metrics")
    for status in (500, 502, 503, 504):
        assert f'vllm_pd_proxy_requests_total{{status="{status}"}} 0.0' in text
    assert "vllm_pd_proxy_broken_streams_total 0.0" in text


@over_bench
async def test_what_the_router_did_is_in_its_metrics(bench: Bench) -> None:
    prefill, decode = await bench.pair()
    await bench.ask()
    await bench.ask({"n": 2})
    _, text = await bench.get("/metrics")
    for row in (
        'vllm_pd_proxy_requests_total{status="200"} 1.0',
        'vllm_pd_proxy_requests_total{status="400"} 1.0',
        f'vllm_pd_proxy_legs_total{{instance="{prefill.url}",role="prefill"}} 1.0',
        f'vllm_pd_proxy_in_flight{{instance="{decode.url}"}} 0.0',
        f'vllm_pd_proxy_instance_usable{{instance="{decode.url}"}} 1.0',
        'vllm_pd_proxy_seconds_count{phase="first_byte"} 1.0',
    ):
        assert row in text
