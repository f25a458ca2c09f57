"""Instances that take no more requests for now, or are paused: others get them, and nobody is taken for broken."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from aiohttp import web

from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import DONE, HANDS_OVER, Handler, answers, info, stall, streams
from vllm_pd_connector.proxy.instance import FAILS, FULL_S, Answers, InstanceRole

WORDS = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
)
SAYS = {"error": {"message": WORDS, "type": "ServiceUnavailableError", "code": 503}}
FULL = answers(SAYS, status=503)
PAUSE = {"error": {**SAYS["error"], "message": "Generation is paused. Please retry after it resumes."}}
PAUSED = answers(PAUSE, status=503)


def as_first_event(says: object) -> Handler:
    return streams(f"data: {json.dumps(says)}\n\n".encode(), b"data: [DONE]\n\n")


FULL_DECODES = {"a status": FULL, "a stream": as_first_event(SAYS)}
"""How a decode instance says so: to a stream also by its first event, behind status 200."""
PAUSED_DECODES = {"paused": PAUSED, "paused, a stream": as_first_event(PAUSE)}
"""From vLLM 0.33 on, the same of one that is paused."""
ABORTS = answers({"choices": [{"text": "", "finish_reason": "abort"}]})
UPSTREAM = answers({"error": {"message": "upstream connect error", "code": 503}}, status=503)


@pytest.mark.parametrize("answer", [FULL, PAUSED], ids=["full", "paused"])
@over_bench
async def test_another_prefill_instance_gets_what_a_full_one_does_not_take(bench: Bench, answer: Handler) -> None:
    full, other, decode = [await bench.instance(handler) for handler in (answer, HANDS_OVER, DONE)]
    await bench.route([full.url, other.url], [decode.url])
    assert [(await bench.ask())[0] for _ in range(2 * FAILS)] == [200] * 2 * FAILS
    assert len(full.asked) == 1, "it is asked last for a while"
    assert len(other.asked) == len(decode.asked) == 2 * FAILS


@pytest.mark.parametrize("says", [*FULL_DECODES, *PAUSED_DECODES])
@over_bench
async def test_what_a_full_decode_instance_does_not_take_is_prefilled_again(bench: Bench, says: str) -> None:
    """It has given back what the first prefill held."""
    decode = (FULL_DECODES | PAUSED_DECODES)[says]
    prefill, full, other = [await bench.instance(handler) for handler in (HANDS_OVER, decode, DONE)]
    await bench.route([prefill.url], [full.url, other.url])
    assert (await bench.ask())[0] == 200
    assert (len(prefill.asked), len(full.asked), len(other.asked)) == (2, 1, 1)


@pytest.mark.parametrize(("answer", "told"), [(FULL, True), (UPSTREAM, False)], ids=["full", "another's"])
@over_bench
async def test_a_full_decode_instance_has_told_its_connector_of_what_is_given_back(
    bench: Bench, caplog: pytest.LogCaptureFixture, answer: Handler, told: bool
) -> None:
    _, decode = await bench.pair(decode=answers({"error": {"message": "no"}}, status=400))
    decode.to_what_is_given_back = answer
    assert (await bench.ask())[0] == 400
    while bench.router._trailing:
        await asyncio.sleep(0.01)
    assert len(decode.given_back) == 1
    assert ("is held until its lease ends" not in caplog.text) is told


@pytest.mark.parametrize(("leg", "says"), [("prefill", "a status"), ("decode", "a status"), ("decode", "a stream")])
@over_bench
async def test_where_all_are_full_the_client_is_told_so_and_none_counts_as_failing(
    bench: Bench, caplog: pytest.LogCaptureFixture, leg: str, says: str
) -> None:
    legs = (FULL, DONE) if leg == "prefill" else (HANDS_OVER, FULL_DECODES[says])
    prefill, decode = await bench.pair(*legs)
    for _ in range(2 * FAILS):
        status, answer, _ = await bench.ask()
        assert status == 503 and answer["error"]["message"] == WORDS
    assert len((prefill if leg == "prefill" else decode).asked) == 2 * FAILS
    assert "times in a row" not in caplog.text


@pytest.mark.parametrize("says", PAUSED_DECODES)
@over_bench
async def test_where_all_are_paused_the_client_is_told_so_and_none_counts_as_failing(
    bench: Bench, caplog: pytest.LogCaptureFixture, says: str
) -> None:
    _, decode = await bench.pair(decode=PAUSED_DECODES[says])
    for _ in range(2 * FAILS):
        status, answer, _ = await bench.ask()
        assert (status, answer) == (503, PAUSE)
    assert len(decode.asked) == 2 * FAILS and "times in a row" not in caplog.text


@over_bench
async def test_one_that_is_paused_is_asked_last_for_longer_than_one_that_is_full(bench: Bench) -> None:
    """A request that it gets is prefilled in vain."""
    prefill, paused, other = [await bench.instance(handler) for handler in (HANDS_OVER, PAUSED, DONE)]
    await bench.route([prefill.url], [paused.url, other.url])
    assert (await bench.ask())[0] == 200
    answers_of = bench.router.fleet._instances[paused.url].answers
    assert answers_of.asked_last(InstanceRole.DECODE, time.monotonic() + 2 * FULL_S)


def name_of(asked: dict[str, Any]) -> str:
    """By which the two legs of a concurrent hand-off find each other."""
    return str(asked["kv_transfer_params"]["transfer_id"])


@pytest.mark.parametrize("answer", [FULL, PAUSED, ABORTS], ids=["full", "paused", "ends"])
@over_bench
async def test_both_legs_at_once_go_to_another_prefill_instance_under_another_name(
    bench: Bench, answer: Handler
) -> None:
    async def when_it_is_written(request: web.Request) -> web.StreamResponse:
        while name_of(await request.json()) not in map(name_of, other.asked):
            await asyncio.sleep(0.01)
        return await DONE(request)

    full, other = [
        await bench.instance(does, info(engine_id=name)) for does, name in ((answer, "full"), (HANDS_OVER, "other"))
    ]
    decode = await bench.instance(when_it_is_written, info(role="kv_consumer", engine_id="d-0"))
    await bench.route([full.url, other.url], [decode.url])
    assert (await bench.ask())[0] == 200
    assert len(full.asked) == len(other.asked) == 1
    assert name_of(full.asked[0]) != name_of(other.asked[0]) == name_of(decode.asked[-1])
    assert decode.asked[-1]["kv_transfer_params"]["remote_engine_id"] == "other"


@pytest.mark.parametrize("says", [*FULL_DECODES, *PAUSED_DECODES, "ends"])
@over_bench
async def test_both_legs_at_once_go_to_another_decode_instance_and_the_former_prefill_is_given_back(
    bench: Bench, says: str
) -> None:
    async def beside_the_prefill(request: web.Request) -> web.StreamResponse:
        while not prefill.asked:
            await asyncio.sleep(0.01)
        return await (FULL_DECODES | PAUSED_DECODES | {"ends": ABORTS})[says](request)

    prefill = await bench.instance(HANDS_OVER, info())
    full, other = [await bench.instance(does) for does in (beside_the_prefill, DONE)]
    await bench.route([prefill.url], [full.url, other.url])
    assert (await bench.ask())[0] == 200
    assert (len(full.asked), len(other.asked)) == (1, 1)
    assert name_of(full.asked[0]) != name_of(other.asked[0])
    while not other.given_back:
        await asyncio.sleep(0.01)
    assert [params["transfer_id"] for params in other.given_back] == [name_of(full.asked[0])]


@over_bench
async def test_both_legs_at_once_are_told_to_the_client_where_all_are_full(bench: Bench) -> None:
    decode = await bench.instance(stall, info(role="kv_consumer", engine_id="d-0"))
    prefills = [await bench.instance(FULL, info(engine_id=name)) for name in ("p-0", "p-1")]
    await bench.route([one.url for one in prefills], [decode.url])
    assert (await bench.ask())[0] == 503
    assert [len(one.asked) for one in prefills] == [1, 1]


@over_bench
async def test_another_s_503_is_a_failure(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """A proxy before an instance may say so of a request that the instance has begun."""
    await bench.pair(decode=UPSTREAM)
    assert [(await bench.ask())[0] for _ in range(FAILS)] == [503] * FAILS
    assert f"has failed {FAILS} times in a row" in caplog.text


def test_one_that_is_full_is_asked_last_for_a_moment() -> None:
    told = Answers()
    told.took_none(0.0)
    assert all(told.asked_last(role, FULL_S / 2) and not told.asked_last(role, FULL_S) for role in InstanceRole)
