"""Introductions: every prefill engine hands a prompt to every decode engine before a client asks for it."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections import Counter
from typing import Any

import pytest
from aiohttp import web

from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import DONE, HANDS_OVER, Handler, Instance, answers, info
from vllm_pd_connector.cli.app import main as vllm_pd
from vllm_pd_connector.instance_info import EngineInfo
from vllm_pd_connector.proxy.commands.introduce import Engine, introduce, rounds


def engine(role: str, number: int, **more: Any) -> EngineInfo:
    return info(role=role, engine_id=f"{role[3:7]}-{number}", mode="pull", **more)


async def producer(bench: Bench, number: int = 0, handler: Handler = HANDS_OVER, **more: Any) -> Instance:
    return await bench.instance(handler, engine("kv_producer", number), **more)


async def consumer(bench: Bench, number: int = 0, handler: Handler = DONE, **more: Any) -> Instance:
    return await bench.instance(handler, engine("kv_consumer", number), **more)


@pytest.mark.parametrize(("prefills", "decodes"), [(0, 0), (0, 3), (2, 0), (1, 1), (1, 4), (3, 2), (5, 5)])
def test_every_two_meet_once_and_nobody_twice_in_a_round(prefills: int, decodes: int) -> None:
    left = [Engine(f"p{i}", None, f"p{i}") for i in range(prefills)]
    right = [Engine(f"d{i}", None, f"d{i}") for i in range(decodes)]
    met = list(rounds(left, right))
    assert Counter(itertools.chain(*met)) == Counter(itertools.product(left, right))
    for pairs in met:
        assert all(count == 1 for count in Counter(itertools.chain(*pairs)).values())
    assert len(met) == (max(prefills, decodes) if prefills and decodes else 0)


@over_bench
async def test_who_is_there_when_the_router_starts_has_met_when_it_takes_requests(bench: Bench) -> None:
    prefills = [await producer(bench, number) for number in range(2)]
    decodes = [await consumer(bench, number) for number in range(2)]
    await bench.route([one.url for one in prefills], [one.url for one in decodes], introduce=True)
    assert [len(one.asked) for one in (*prefills, *decodes)] == [2, 2, 2, 2]
    for decode in decodes:
        assert all(body["kv_transfer_params"]["remote_engine_id"] == "p" for body in decode.asked)
        assert all(body["max_tokens"] == 1 for body in decode.asked)
    salts = [body["cache_salt"] for one in (*prefills, *decodes) for body in one.asked]
    assert set(Counter(salts).values()) == {2}, "a cache may have the prompt of another introduction"
    assert {name for one in prefills for name in one.request_ids} == set(salts)


@over_bench
async def test_who_becomes_usable_later_or_is_another_is_introduced_and_nobody_again(bench: Bench) -> None:
    prefill, decode = await producer(bench), await consumer(bench)
    await bench.route([prefill.url], [decode.url], introduce=True, facts_interval=0.01)
    bench.router.fleet.add((late := await consumer(bench, 1)).url, None)
    await bench.check()
    await late.arrived.wait()
    await bench.check()
    assert [len(one.asked) for one in (prefill, decode, late)] == [2, 1, 1]
    decode.arrived.clear()
    decode.says = engine("kv_consumer", 7)  # restarted between two checks
    await asyncio.sleep(0.02)
    await bench.check()
    await decode.arrived.wait()
    await bench.check()
    assert [len(one.asked) for one in (prefill, decode, late)] == [3, 2, 1]


@over_bench
async def test_nobody_is_introduced_unless_it_is_asked_for(bench: Bench) -> None:
    prefill, decode = await producer(bench), await consumer(bench)
    await bench.route([prefill.url], [decode.url])
    await bench.check()
    assert not prefill.asked and not decode.asked


@over_bench
async def test_a_pair_that_does_not_work_is_named_and_costs_no_other(bench: Bench) -> None:
    refuses = answers({"error": {"message": "layouts differ"}}, status=400)
    prefill, bad, good = await producer(bench), await consumer(bench, 0, refuses), await consumer(bench, 1)
    done, unusable = await introduce([prefill.url, bad.url, good.url])
    assert not unusable
    assert {one.decode.url: one.failure for one in done} == {
        good.url: "",
        bad.url: f'{bad.url}: /v1/completions: HTTP 400: {{"error": {{"message": "layouts differ"}}}}',
    }


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        (answers({"choices": [{"text": "", "finish_reason": "error"}]}), "could not finish the request"),
        (answers({"choices": []}, status=401), "wants its API key; set VLLM_API_KEY"),
    ],
)
def test_what_an_instance_says_of_its_failure_is_told(handler: Handler, why: str) -> None:
    async def test(bench: Bench) -> None:
        prefill, decode = await producer(bench), await consumer(bench, 0, handler)
        [one], _ = await introduce([prefill.url, decode.url])
        assert why in one.failure and decode.url in one.failure

    over_bench(test)()


@over_bench
async def test_a_prefill_that_hands_nothing_over_fails_and_decode_is_not_asked(bench: Bench) -> None:
    prefill, decode = await producer(bench, 0, DONE), await consumer(bench)
    [one], _ = await introduce([prefill.url, decode.url])
    assert "kv_transfer_params" in one.failure and not decode.asked


@over_bench
async def test_an_answer_that_cannot_be_passed_on_costs_one_introduction(bench: Bench) -> None:
    depths = itertools.count(sys.getrecursionlimit() - 70)

    async def nests(_request: web.Request) -> web.StreamResponse:
        """Ever more deeply: of some depth is what can be read, and cannot be written with a deeper stack."""
        nested = "[" * (depth := next(depths)) + "]" * depth
        text = f'{{"kv_transfer_params": {{"do_remote_prefill": true, "nested": {nested}}}}}'
        return web.Response(text=text, content_type="application/json")

    prefill, decode = await producer(bench, 0, nests), await consumer(bench)
    failures = [one.failure for _ in range(70) for one in (await introduce([prefill.url, decode.url]))[0]]
    assert len(failures) == 70 and not failures[0] and "kv_transfer_params" in failures[-1], "it could not be read"


@pytest.mark.parametrize("first", [0, 4])
@over_bench
async def test_each_data_parallel_engine_meets_each(bench: Bench, first: int) -> None:
    prefill = await bench.instance(HANDS_OVER, [engine("kv_producer", n) for n in range(2)], first_engine=first)
    decode = await bench.instance(DONE, [engine("kv_consumer", n) for n in range(3)], first_engine=first)
    done, _ = await introduce([prefill.url, decode.url])
    assert len({(one.prefill, one.decode) for one in done}) == 6
    assert Counter(prefill.ranks) == {"0": 3, "1": 3} and Counter(decode.ranks) == {"0": 2, "1": 2, "2": 2}


@over_bench
async def test_an_instance_of_both_roles_does_not_meet_itself(bench: Bench) -> None:
    both = [await bench.instance(HANDS_OVER, engine("kv_both", number)) for number in range(2)]
    done, _ = await introduce([one.url for one in both])
    urls = tuple(one.url for one in both)
    assert sorted((one.prefill.url, one.decode.url) for one in done) == sorted([urls, urls[::-1]])


@over_bench
async def test_instances_get_the_key_of_the_environment(bench: Bench) -> None:
    asked: list[str | None] = []

    async def wants_a_key(request: web.Request) -> web.StreamResponse:
        asked.append(request.headers.get("Authorization"))
        return await HANDS_OVER(request)

    prefill, decode = await producer(bench, 0, wants_a_key), await consumer(bench, 0, wants_a_key)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_API_KEY", "secret")
        await introduce([prefill.url, decode.url])
    assert asked == ["Bearer secret"] * 2


@over_bench
async def test_the_command_prints_each_pair_and_fails_with_any(bench: Bench) -> None:
    prefill, decode, bad = await producer(bench), await consumer(bench), await consumer(bench, 1, answers({}, 500))

    async def run(*urls: str) -> int:
        return await asyncio.to_thread(vllm_pd, ["introduce", *urls])

    assert await run(prefill.url, decode.url) == 0
    assert await run(prefill.url, decode.url, bad.url) == 1
    assert await run(prefill.url, decode.url, "http://127.0.0.1:9") == 1
    assert await run(decode.url) == 1


def test_the_command_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(bench: Bench) -> None:
        prefill, decode = await producer(bench), await consumer(bench)
        words = ["introduce", prefill.url, decode.url, "http://127.0.0.1:9", "--json"]
        assert await asyncio.to_thread(vllm_pd, words) == 1
        said = json.loads(capsys.readouterr().out)
        [pair] = said["pairs"]
        assert (pair["prefill"], pair["decode"], pair["failure"]) == (prefill.url, decode.url, "")
        assert pair["seconds"] > 0 and "127.0.0.1:9" in said["unusable"][0]

    over_bench(test)()
