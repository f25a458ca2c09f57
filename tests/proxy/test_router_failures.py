"""An instance that is healthy and fails what it is asked: it is asked last, until it answers one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import DONE, HANDS_OVER, PARAMS, Handler, Instance, answers, info, stall, streams
from vllm_pd_connector.proxy.choice import PIECE_TOKENS
from vllm_pd_connector.proxy.instance import ASKED_LAST_S, FAILS, Answers, InstanceRole

DECODE, PREFILL = InstanceRole.DECODE, InstanceRole.PREFILL
FAILED = answers({"error": {"message": "weights: 'version v2' there, '' here", "code": 500}}, status=500)
FAILURES = {
    "a status": FAILED,
    "a stream": streams(b'data: {"error": {"message": "no", "code": 500}}\n\n', b"data: [DONE]\n\n"),
    "a reason": answers({"choices": [{"text": "", "finish_reason": "error"}]}),
}
UNREADABLE = answers({"choices": [{"text": "a"}], "kv_transfer_params": PARAMS | {"remote_engine_id": "unreadable"}})
ABORTS = answers({"choices": [{"text": "", "finish_reason": "abort"}]})


async def two_decodes(bench: Bench, first: Handler, second: Handler = DONE) -> tuple[Instance, Instance]:
    prefill, one, other = [await bench.instance(handler) for handler in (HANDS_OVER, first, second)]
    await bench.route([prefill.url], [one.url, other.url])
    return one, other


def known(bench: Bench, instance: Instance) -> Answers:
    """What the router knows of how an instance answers."""
    return bench.router.fleet._instances[instance.url].answers


@pytest.mark.parametrize("failure", FAILURES)
@over_bench
async def test_a_decode_instance_that_fails_is_asked_last(
    bench: Bench, caplog: pytest.LogCaptureFixture, failure: str
) -> None:
    broken, other = await two_decodes(bench, FAILURES[failure])
    told = [(await bench.ask())[0] for _ in range(10)]
    assert (len(broken.asked), len(other.asked)) == (FAILS, 10 - FAILS)
    assert told.count(200) == 10 - FAILS and all(status >= 500 for status in told if status != 200)
    assert caplog.text.count(f"decode instance {broken.url} has failed {FAILS} times in a row") == 1


@over_bench
async def test_a_decode_instance_that_is_silent_is_asked_last(bench: Bench) -> None:
    """A client waits for it as long as the router does, each time."""
    prefill, silent, other = [await bench.instance(handler) for handler in (HANDS_OVER, stall, DONE)]
    await bench.route([prefill.url], [silent.url, other.url], read_timeout=0.2)
    told = [(await bench.ask())[0] for _ in range(10)]
    assert (told.count(504), told.count(200)) == (FAILS, 10 - FAILS) and len(silent.asked) == FAILS


@over_bench
async def test_a_prefill_instance_that_fails_is_asked_last(bench: Bench) -> None:
    broken, other, decode = [await bench.instance(handler) for handler in (FAILED, HANDS_OVER, DONE)]
    await bench.route([broken.url, other.url], [decode.url])
    assert [(await bench.ask())[0] for _ in range(10)].count(500) == FAILS == len(broken.asked)
    assert len(other.asked) == len(decode.asked) == 10 - FAILS


@over_bench
async def test_what_a_prefill_instance_does_not_hand_over_another_does_and_it_is_asked_last(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers are good, as those of one without a connector."""
    monkeypatch.setattr("vllm_pd_connector.proxy.instance.FULL_S", 1000.0)
    bad, good, decode = [await bench.instance(handler) for handler in (DONE, HANDS_OVER, DONE)]
    await bench.route([bad.url, good.url], [decode.url])
    for trial in range(1, FAILS + 1):
        assert [(await bench.ask())[0] for _ in range(3)] == [200] * 3
        assert (len(bad.asked), len(good.asked)) == (trial, 3 * trial), "it is asked last for a moment"
        known(bench, bad)._full_until = 0.0  # as after a while
    assert f"prefill instance {bad.url} has failed {FAILS} times in a row" in caplog.text
    assert [(await bench.ask())[0] for _ in range(4)] == [200] * 4 and len(bad.asked) == FAILS


@over_bench
async def test_a_prompt_is_at_home_where_it_was_handed_over(bench: Bench) -> None:
    bad, good, decode = [await bench.instance(handler) for handler in (DONE, HANDS_OVER, DONE)]
    await bench.route([bad.url, good.url], [decode.url])
    for _ in range(3):
        assert (await bench.ask({"prompt": list(range(PIECE_TOKENS))}))[0] == 200
        known(bench, bad)._full_until = 0.0  # as after a while
    assert (len(bad.asked), len(good.asked)) == (1, 3)


@over_bench
async def test_where_nobody_hands_anything_over_each_is_asked_once(bench: Bench) -> None:
    prefills, decode = [await bench.instance(DONE) for _ in range(2)], await bench.instance(DONE)
    await bench.route([one.url for one in prefills], [decode.url])
    status, answer, _ = await bench.ask()
    assert status == 502 and "kv_transfer_params" in answer["error"]["message"]
    assert [len(one.asked) for one in prefills] == [1, 1] and not decode.asked


@pytest.mark.parametrize("status", [400, 404, 429, 501])
@over_bench
async def test_what_a_client_is_refused_for_does_not_count(bench: Bench, status: int) -> None:
    refusing, other = await two_decodes(bench, answers({"error": {"message": "no"}}, status=status))
    assert [(await bench.ask())[0] for _ in range(10)].count(status) == 5
    assert (len(refusing.asked), len(other.asked)) == (5, 5)


PICTURE = {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "https://pictures.example/1.png"}}]}]}
INLINE = {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]}
HOST_FAILS = {"message": "500, message='Internal Server Error', url='https://pictures.example/1.png'", "code": 500}
ENGINE_FAILS = {"message": "Internal server error", "code": 500}


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("body", "error", "counts"),
    [(PICTURE, HOST_FAILS, False), (PICTURE, ENGINE_FAILS, True), (INLINE, HOST_FAILS, True)],
    ids=["the host of a picture", "the engine", "nobody else"],
)
@over_bench
async def test_a_host_of_pictures_that_fails_does_not_count_against_an_instance(
    bench: Bench, caplog: pytest.LogCaptureFixture, leg: str, body: dict[str, Any], error: dict[str, Any], counts: bool
) -> None:
    """vLLM says 500 then, as of its own failures."""
    fails = answers({"error": error}, status=500)
    await bench.pair(*((fails, DONE) if leg == "prefill" else (HANDS_OVER, fails)))
    assert [(await bench.ask(body))[0] for _ in range(FAILS)] == [500] * FAILS
    assert (f"{leg} instance" in caplog.text and "times in a row" in caplog.text) is counts


@over_bench
async def test_failures_with_an_answer_between_are_not_in_a_row(bench: Bench) -> None:
    count = 0

    async def now_and_then(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        return await (FAILED if count % FAILS else DONE)(request)

    unsteady, other = await two_decodes(bench, now_and_then)
    for _ in range(6 * FAILS):
        await bench.ask()
    assert len(unsteady.asked) == len(other.asked) == 3 * FAILS


@over_bench
async def test_where_there_is_no_other_it_is_asked_still(bench: Bench) -> None:
    _, decode = await bench.pair(decode=FAILED)
    assert [(await bench.ask())[0] for _ in range(2 * FAILS)] == [500] * (2 * FAILS)
    assert len(decode.asked) == 2 * FAILS


@over_bench
async def test_one_that_fails_goes_before_one_that_ends(bench: Bench) -> None:
    """The one may have recovered."""
    ending, broken = await two_decodes(bench, ABORTS, FAILED)
    assert [(await bench.ask())[0] for _ in range(2 * FAILS)] == [500] * (2 * FAILS)
    assert (len(ending.asked), len(broken.asked)) == (1, 2 * FAILS)


@over_bench
async def test_it_is_asked_as_before_when_it_has_answered_one(bench: Bench) -> None:
    healed = asyncio.Event()

    async def heals(request: web.Request) -> web.StreamResponse:
        return await (DONE if healed.is_set() else FAILED)(request)

    broken, other = await two_decodes(bench, heals)
    for _ in range(10):
        await bench.ask()
    for trial in (1, 2):
        known(bench, broken)._next_at[DECODE] = 0.0  # as after a while
        if trial == 2:
            healed.set()
        status = (await bench.ask())[0]
        assert status == (200 if trial == 2 else 500) and len(broken.asked) == FAILS + trial
        if trial == 1:
            assert [(await bench.ask())[0] for _ in range(3)] == [200] * 3 and len(broken.asked) == FAILS + trial
    before = len(broken.asked), len(other.asked)
    assert [(await bench.ask())[0] for _ in range(4)] == [200] * 4
    assert (len(broken.asked), len(other.asked)) == (before[0] + 2, before[1] + 2)


async def unless_unreadable(request: web.Request) -> web.StreamResponse:
    """A decode instance that is well, and cannot read what one prefill instance hands over."""
    params = (await request.json())["kv_transfer_params"]
    return await (FAILED if params["remote_engine_id"] == "unreadable" else DONE)(request)


async def with_an_unreadable_one(bench: Bench, decodes: int, bad: Handler = UNREADABLE) -> list[Instance]:
    """Two prefill instances, first the one whose caches nobody can read, and decode instances."""
    prefills = [await bench.instance(handler) for handler in (bad, HANDS_OVER)]
    others = [await bench.instance(unless_unreadable) for _ in range(decodes)]
    await bench.route([one.url for one in prefills], [one.url for one in others])
    return prefills + others


@pytest.mark.parametrize("decodes", [1, 2, 3])
@over_bench
async def test_a_prefill_instance_whose_caches_nobody_can_read_is_asked_last(
    bench: Bench, caplog: pytest.LogCaptureFixture, decodes: int
) -> None:
    bad, good, *others = await with_an_unreadable_one(bench, decodes)
    told = [(await bench.ask())[0] for _ in range(20)]
    assert (told.count(500), told.count(200)) == (FAILS, 20 - FAILS) and told[-10:] == [200] * 10
    assert (len(bad.asked), len(good.asked)) == (FAILS, 20 - FAILS)
    assert all(len(one.asked) >= 20 // decodes - 2 for one in others), "they are well"
    [said] = [record.getMessage() for record in caplog.records if "in a row" in record.getMessage()]
    assert said.startswith(f"prefill instance {bad.url}: decode instances have failed with what it handed over")


@over_bench
async def test_a_prefill_instance_is_not_blamed_for_a_decode_instance(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Not where it met that one each time, nor where many of its requests fail there at once."""
    prefills = [await bench.instance(HANDS_OVER) for _ in range(2)]
    broken, other = await bench.instance(FAILED), await bench.instance(DONE)
    await bench.route([one.url for one in prefills], [broken.url, other.url])
    for _ in range(3):
        await asyncio.gather(*(bench.ask() for _ in range(6 * FAILS)))
    told = [(await bench.ask())[0] for _ in range(10)]
    assert told == [200] * 10 and len(broken.asked) >= FAILS
    assert f"decode instance {broken.url} has failed" in caplog.text and "handed over" not in caplog.text
    assert abs(len(prefills[0].asked) - len(prefills[1].asked)) <= 1


@over_bench
async def test_what_a_prefill_instance_hands_over_is_tried_again_after_a_while(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    healed = asyncio.Event()

    async def heals(request: web.Request) -> web.StreamResponse:
        return await (HANDS_OVER if healed.is_set() else UNREADABLE)(request)

    bad, good, *_ = await with_an_unreadable_one(bench, 2, heals)
    for _ in range(10):
        await bench.ask()
    for trial in (1, 2):
        known(bench, bad)._next_at[PREFILL] = 0.0  # as after a while
        if trial == 2:
            healed.set()
        assert (await bench.ask())[0] == (200 if trial == 2 else 500) and len(bad.asked) == FAILS + trial
        if trial == 1:
            assert [(await bench.ask())[0] for _ in range(3)] == [200] * 3 and len(bad.asked) == FAILS + trial
    assert f"answered again with what prefill instance {bad.url} handed over" in caplog.text
    before = len(good.asked)
    assert [(await bench.ask())[0] for _ in range(4)] == [200] * 4
    assert (len(bad.asked), len(good.asked)) == (FAILS + 4, before + 2)


@over_bench
async def test_who_has_prefilled_itself_what_it_fails_to_decode_is_not_blamed_for_handing_it_over(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    async def prefills(request: web.Request) -> web.StreamResponse:
        params = (await request.json())["kv_transfer_params"]
        return await (HANDS_OVER if params.get("do_remote_decode") else FAILED)(request)

    alone = await bench.instance(prefills, info(role="kv_both", mode="pull"))
    await bench.route(instances=[alone.url])
    assert [(await bench.ask())[0] for _ in range(FAILS)] == [500] * FAILS
    assert f"decode instance {alone.url} has failed" in caplog.text and "handed over" not in caplog.text


@over_bench
async def test_another_process_at_its_address_is_asked_as_any(bench: Bench) -> None:
    says = info(role="kv_consumer", mode="pull", engine_id="d-0")
    prefill, other = await bench.instance(HANDS_OVER), await bench.instance(DONE)
    broken = await bench.instance(FAILED, says)
    await bench.route([prefill.url], [broken.url, other.url], facts_interval=0.0)
    for _ in range(10):
        await bench.ask()
    await bench.check()
    assert len(broken.asked) == FAILS and known(bench, broken)._failed[DECODE] == FAILS
    broken.says = info(role="kv_consumer", mode="pull", engine_id="d-1")
    await bench.check()
    await bench.ask()
    assert len(broken.asked) == FAILS + 1


def test_one_that_fails_gets_one_request_in_a_while() -> None:
    told = Answers()
    assert [told.failed(DECODE, 0.0) for _ in range(FAILS + 1)] == [False] * (FAILS - 1) + [True, False]
    assert told.fails(DECODE, ASKED_LAST_S - 1.0) and not told.fails(DECODE, ASKED_LAST_S)
    told.chosen(DECODE, ASKED_LAST_S)
    assert told.fails(DECODE, 2 * ASKED_LAST_S - 1.0)
    assert told.answered(DECODE) and not told.fails(DECODE, ASKED_LAST_S)
    assert not told.answered(DECODE), "it is said once"


def test_what_one_hands_over_fails_when_two_have_said_so_or_none_else_can() -> None:
    told = Answers()
    assert [told.unread("a", 0.0, others=True) for _ in range(2 * FAILS)] == [False] * (2 * FAILS)
    told.answered(PREFILL)
    assert [told.unread("b", 0.0, others=True) for _ in range(2)] == [True, False], "its own answers do not count"
    assert told.asked_last(PREFILL, 1.0) and not told.asked_last(DECODE, 1.0)
    told.answered(PREFILL)
    assert told.asked_last(PREFILL, 1.0) and not told.asked_last(PREFILL, ASKED_LAST_S)
    assert told.read() and not told.asked_last(PREFILL, 1.0) and not told.read() and not told.unread_by
    assert [told.unread("a", 0.0, others=False) for _ in range(FAILS)] == [False] * (FAILS - 1) + [True]


def test_one_may_fail_in_one_role_alone() -> None:
    told = Answers()
    for _ in range(FAILS):
        told.failed(DECODE, 0.0)
        told.answered(PREFILL)
    assert told.asked_last(DECODE, 1.0) and not told.asked_last(PREFILL, 1.0)
    told.aborted(1.0)
    assert told.asked_last(PREFILL, 2.0) and not told.asked_last(PREFILL, 1.0 + ASKED_LAST_S)
