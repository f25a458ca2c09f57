"""The router's concurrent hand-off, as its clients see it: both legs at once."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import DONE, FINISHED, HANDS_OVER, Handler, answers, info, stall, streams
from vllm_pd_connector.proxy.choice import PromptPrefix
from vllm_pd_connector.proxy.exchange import end
from vllm_pd_connector.proxy.instance import InstanceRole, LegError


@over_bench
async def test_a_pushing_prefill_gets_its_leg_beside_the_decode(bench: Bench) -> None:
    together = asyncio.Barrier(2)

    def meets(handler: Handler) -> Handler:
        async def meet(request: web.Request) -> web.StreamResponse:
            await together.wait()
            return await handler(request)

        return meet

    prefill = await bench.instance(meets(HANDS_OVER), info())
    decode = await bench.instance(meets(DONE), info(role="kv_consumer", engine_id="d-0"))
    await bench.route(instances=[prefill.url, decode.url])
    status, answer, _ = await bench.ask({"prompt": "x", "max_tokens": 9}, **{"X-Request-Id": "id-7"})
    assert (status, answer) == (200, {"choices": [{"text": "abc"}]})
    assert prefill.request_ids == decode.request_ids == ["id-7"]
    assert prefill.asked[0]["max_tokens"] == 1
    told = prefill.asked[0]["kv_transfer_params"]
    name = told["transfer_id"]
    assert told["do_remote_decode"] is True and name.startswith("id-7.")
    assert decode.asked[0]["kv_transfer_params"] == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": "p-0",
        "remote_host": "h",
        "remote_port": 5600,
        "remote_request_id": name,
        "tp_size": 2,
        "pp_size": 1,
        "dcp_size": 1,
        "transfer_id": name,
    }


@over_bench
async def test_a_decode_that_reads_gets_what_prefill_has_answered(bench: Bench) -> None:
    """A prefill instance in mode push serves it, too, as while a fleet changes its mode."""
    prefill = await bench.instance(HANDS_OVER, info())
    decode = await bench.instance(DONE, info(role="kv_consumer", engine_id="d-0", mode="pull"))
    await bench.route(instances=[prefill.url, decode.url])
    status, _, _ = await bench.ask({"prompt": "x", "max_tokens": 9})
    assert status == 200
    assert "transfer_id" not in decode.asked[0]["kv_transfer_params"]


@over_bench
async def test_a_pushing_prefill_whose_answer_is_needed_is_asked_first(bench: Bench) -> None:
    prefill = await bench.instance(HANDS_OVER, info(handoff="serial"))
    decode = await bench.instance(DONE, info(role="kv_consumer", engine_id="d-0"))
    await bench.route(instances=[prefill.url, decode.url])
    status, _, _ = await bench.ask({"prompt": "x", "max_tokens": 9})
    assert status == 200
    assert "transfer_id" not in decode.asked[0]["kv_transfer_params"]
    assert decode.asked[0]["kv_transfer_params"]["do_remote_prefill"] is True


@over_bench
async def test_nothing_is_taken_from_the_answer_of_a_prefill_beside_the_decode(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.pair(DONE, says=(info(), None))
    assert [(await bench.ask())[0] for _ in range(4)] == [200] * 4
    while bench.router._trailing:
        await asyncio.sleep(0.01)
    assert "in a row" not in caplog.text


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
@over_bench
async def test_a_failing_leg_ends_the_other_and_reaches_the_client(bench: Bench, leg: str, stream: bool) -> None:
    other_waits = asyncio.Event()

    async def fail_when_the_other_waits(request: web.Request) -> web.StreamResponse:
        await other_waits.wait()
        return await answers({"error": {"message": "no"}}, status=500)(request)

    async def wait(request: web.Request) -> web.StreamResponse:
        other_waits.set()
        # As vLLM does: headers of a stream are sent before there is an event.
        return await (streams(then=stall) if stream else stall)(request)

    prefill, decode = await bench.pair(
        fail_when_the_other_waits if leg == "prefill" else wait,
        fail_when_the_other_waits if leg == "decode" else wait,
        says=(info(), None),
    )
    status, answer, _ = await bench.ask({"prompt": "x", "stream": stream})
    assert (status, answer) == (500, {"error": {"message": "no"}})
    await (decode if leg == "prefill" else prefill).cancelled.wait()


@over_bench
async def test_a_prefill_that_fails_after_the_first_byte_does_not_end_the_answer(bench: Bench) -> None:
    seen = asyncio.Event()

    async def fail_late(request: web.Request) -> web.StreamResponse:
        await seen.wait()
        return web.Response(status=500)

    async def wait_until_prefill_failed(_request: web.Request) -> None:
        seen.set()
        while bench.router.fleet.choose(InstanceRole.PREFILL, PromptPrefix(), set()).in_flight:
            await asyncio.sleep(0)

    events = [FINISHED, b"data: [DONE]\n\n"]
    decode = streams(events[0], then=wait_until_prefill_failed, last=events[1])
    await bench.pair(fail_late, decode, says=(info(), None))
    assert (await bench.ask({"prompt": "x", "stream": True}))[:2] == (200, b"".join(events).decode())


@over_bench
async def test_a_prefill_that_fails_while_the_head_is_written_gives_the_client_no_second_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, begins = web.StreamResponse.prepare, asyncio.Event()

    async def fail(_request: web.Request) -> web.StreamResponse:
        await begins.wait()
        return web.Response(status=500)

    async def write_late(answer: web.StreamResponse, request: web.BaseRequest) -> AbstractStreamWriter | None:
        if not isinstance(answer, web.Response) and "X-Request-Id" in answer.headers:  # the router's
            begins.set()
            while bench.router.fleet.choose(InstanceRole.PREFILL, PromptPrefix(), set()).in_flight:
                await asyncio.sleep(0)
            for _ in range(100):  # whoever waits for the prefill learns it
                await asyncio.sleep(0)
        return await writes(answer, request)

    events = [FINISHED, b"data: [DONE]\n\n"]
    await bench.pair(fail, streams(*events), says=(info(), None))
    monkeypatch.setattr(web.StreamResponse, "prepare", write_late)
    assert (await bench.ask({"prompt": "x", "stream": True}))[:2] == (200, b"".join(events).decode())


@over_bench
async def test_a_client_that_leaves_cancels_both_legs(bench: Bench) -> None:
    prefill, decode = await bench.pair(stall, stall, says=(info(), None))
    client = asyncio.create_task(bench.ask())
    await asyncio.gather(prefill.arrived.wait(), decode.arrived.wait())
    client.cancel()
    await asyncio.gather(prefill.cancelled.wait(), decode.cancelled.wait())


@over_bench
async def test_nothing_is_sent_to_decode_before_a_prefill_took_the_connection(bench: Bench) -> None:
    gone, prefill = await bench.instance(HANDS_OVER, info(engine_id="gone")), await bench.instance(HANDS_OVER, info())
    decode = await bench.instance(DONE)
    await bench.route([gone.url, prefill.url], [decode.url])
    await gone.server.close()
    assert [(await bench.ask())[0] for _ in range(2)] == [200, 200]
    assert [asked["kv_transfer_params"]["remote_engine_id"] for asked in decode.asked] == ["p-0", "p-0"]


@pytest.mark.parametrize("first", [0, 2])
@over_bench
async def test_a_prefill_with_several_engines_is_asked_for_one_of_them(bench: Bench, first: int) -> None:
    """By the number that its API server gives it: with hybrid load balancing those of other hosts come before them."""
    says = [info(dp_size=4, engine_id=f"p-{first + i}") for i in range(2)]
    prefill, decode = await bench.instance(HANDS_OVER, says, first_engine=first), await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url])
    for _ in range(4):
        assert (await bench.ask())[0] == 200
    assert sorted(prefill.ranks) == ["0", "0", "1", "1"]
    named = [asked["kv_transfer_params"]["remote_engine_id"] for asked in decode.asked]
    assert named == [f"p-{first + int(rank)}" for rank in prefill.ranks]


@over_bench
async def test_a_request_that_comes_again_under_its_id_pairs_with_nothing_of_the_former_attempt(bench: Bench) -> None:
    """As a gateway sends it, 25 ms after the failure; the former prefill may still be given back, or go on."""

    async def fails_beside_the_prefill(request: web.Request) -> web.StreamResponse:
        while len(prefill.asked) < len(decode.asked):
            await asyncio.sleep(0)
        return await answers({"error": {"message": "no"}}, status=503)(request)

    prefill, decode = await bench.pair(decode=fails_beside_the_prefill, says=(info(), None))
    decode.gives_back.clear()
    for _ in range(2):
        assert (await bench.ask(**{"X-Request-Id": "same"}))[0] == 503
    names = [[asked["kv_transfer_params"]["transfer_id"] for asked in one.asked] for one in (prefill, decode)]
    assert names[0] == names[1] and len(set(names[0])) == 2
    assert prefill.request_ids == decode.request_ids == ["same"] * 2
    decode.gives_back.set()
    while len(decode.given_back) < 2:
        await asyncio.sleep(0.01)
    assert {params["transfer_id"] for params in decode.given_back} == set(names[1])


@over_bench
async def test_an_id_may_come_again_while_its_prefill_goes_on_behind_the_answer(bench: Bench) -> None:
    may_end = asyncio.Event()

    async def hand_over_late(request: web.Request) -> web.StreamResponse:
        await may_end.wait()
        return await HANDS_OVER(request)

    await bench.pair(hand_over_late, says=(info(), None))
    for _ in range(2):
        assert (await bench.ask(**{"X-Request-Id": "same"}))[0] == 200
    may_end.set()


@over_bench
async def test_a_concurrent_handoff_needs_a_prefill_that_says_its_engine(bench: Bench) -> None:
    _, decode = await bench.pair(handoff="concurrent")
    status, answer, _ = await bench.ask()
    assert status == 503 and "engine id" in answer["error"]["message"]
    assert decode.asked == []


def test_a_leg_that_fails_when_its_client_leaves_is_no_forgotten_error() -> None:
    forgotten: list[dict[str, Any]] = []

    async def fail() -> None:
        raise LegError(502, "it broke off")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: forgotten.append(context))
        leg = asyncio.create_task(fail())
        ending = asyncio.create_task(end(leg))
        while not leg.done():
            await asyncio.sleep(0)
        ending.cancel()
        await asyncio.wait({ending})
        assert ending.cancelled()

    asyncio.run(main())
    gc.collect()
    assert forgotten == []
