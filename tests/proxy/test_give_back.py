"""What a prefill instance holds for a request that decode does not take is given back, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from aiohttp import web

from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import (
    DONE,
    HANDS_OVER,
    PARAMS,
    Handler,
    Instance,
    answers,
    break_off,
    info,
    stall,
    streams,
)

EVENT = b'data: {"choices":[{"text":"","finish_reason":null}]}\n\n'


async def until(condition: Callable[[], object]) -> None:
    """For a moment: the bench has a limit of time."""
    while not condition():
        await asyncio.sleep(0.01)


async def one_that_falls(bench: Bench) -> Instance:
    """Its first request ends it."""

    async def falls(request: web.Request) -> web.StreamResponse:
        for site in fallen.server.runner.sites:
            await site.stop()
        await break_off(request)
        return web.Response()

    fallen = await bench.instance(falls)
    return fallen


@over_bench
async def test_what_decode_turns_out_not_to_take_is_given_back_by_another(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)

    first = await one_that_falls(bench)
    await bench.route([prefill.url], [first.url, decode.url])
    while not first.arrived.is_set():
        await bench.ask()
    await until(lambda: decode.given_back)
    assert decode.given_back == [PARAMS]


REFUSALS = [
    answers({"error": {"message": "no"}}, status=400),
    answers({"choices": [{"text": "", "finish_reason": "abort"}]}),
    streams(b'data: {"error": {"message": "no", "code": 400}}\n\n', b"data: [DONE]\n\n"),
]


@pytest.mark.parametrize("refuses", REFUSALS, ids=["a status", "an engine that ends", "a stream"])
@over_bench
async def test_the_prefill_of_what_decode_refuses_is_given_back(bench: Bench, refuses: Handler) -> None:
    _, decode = await bench.pair(decode=refuses)
    assert (await bench.ask())[0] in (400, 502)
    await until(lambda: decode.given_back)
    assert decode.given_back == [PARAMS] and len(decode.asked) == 1


@over_bench
async def test_the_prefill_of_a_client_that_leaves_before_decode_has_taken_it_is_given_back(bench: Bench) -> None:
    _, decode = await bench.pair(decode=stall)
    asking = asyncio.ensure_future(bench.ask())
    await decode.arrived.wait()
    asking.cancel()
    await until(lambda: decode.given_back)
    assert decode.given_back == [PARAMS]


@over_bench
async def test_what_is_answered_is_not_given_back(bench: Bench) -> None:
    begun, whole = streams(EVENT, then=break_off), streams(EVENT, b"data: [DONE]\n\n")
    for answer, stream in ((begun, True), (whole, True), (DONE, False)):
        _, decode = await bench.pair(decode=answer)
        await bench.ask({"prompt": "x", "stream": stream})
        await until(lambda: not bench.router._trailing)
        assert decode.given_back == [] and len(decode.asked) == 1


@over_bench
async def test_a_prefill_that_failed_has_nothing_to_give_back(bench: Bench) -> None:
    """The decode's leg is ended beside it, as by a client that leaves."""
    says = info(), info(role="kv_consumer", engine_id="d-0")
    decodes = await bench.instance(stall, says[1])

    async def fails(_request: web.Request) -> web.StreamResponse:
        await decodes.arrived.wait()
        return web.json_response({"error": {"message": "no"}}, status=400)

    prefill = await bench.instance(fails, says[0])
    await bench.route([prefill.url], [decodes.url])
    assert (await bench.ask())[0] == 400
    assert not bench.router._trailing
    assert decodes.given_back == []


@over_bench
async def test_a_prefill_that_was_asked_at_the_same_time_is_given_back_too(bench: Bench) -> None:
    says = info(), info(role="kv_consumer", engine_id="d-0")
    _, decode = await bench.pair(decode=REFUSALS[0], says=says)
    assert (await bench.ask())[0] == 400
    await until(lambda: decode.given_back)
    (params,) = decode.given_back
    assert params["remote_engine_id"] == "p-0" and params == decode.asked[0]["kv_transfer_params"]


@over_bench
async def test_where_nobody_can_be_told_the_log_says_so(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    first = await one_that_falls(bench)
    await bench.route([(await bench.instance(HANDS_OVER)).url], [first.url])
    assert (await bench.ask())[0] == 502
    await until(lambda: "is held until its lease ends" in caplog.text)
