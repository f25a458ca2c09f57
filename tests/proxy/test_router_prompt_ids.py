"""The token ids of a chat's prompt: decode gets those that prefill made; else it renders the chat itself."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import pytest
from aiohttp import web

from tests.support.ports import free_port
from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import DONE, FINISHED, PARAMS, answers, info, streams
from vllm_pd_connector.instance_info import EngineInfo
from vllm_pd_connector.routing import prompt_ids
from vllm_pd_connector.routing.prompt_ids import take_prompt_ids

Says = tuple[EngineInfo | None, EngineInfo | None]
SAYS = (info(mode="pull"), info(mode="pull", role="kv_consumer", engine_id="d-0"))
CHAT = {"messages": [{"role": "user", "content": "x"}]}
IDS = [70_001, 70_002, 70_003]
WITH_IDS = answers({"choices": [{"text": "a"}], "kv_transfer_params": PARAMS, "prompt_token_ids": IDS})


async def asked(bench: Bench, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
    bench.url = bench.url.replace("/v1/completions", path)
    status, answer, _ = await bench.ask(body)
    assert status == 200
    return answer


@pytest.mark.parametrize("mode", ["pull", "push"])
@over_bench
async def test_decode_gets_the_ids_that_prefill_made(bench: Bench, mode: str) -> None:
    says = (info(mode=mode, handoff="serial"), info(mode=mode, role="kv_consumer", handoff="serial"))
    prefill, decode = await bench.pair(WITH_IDS, says=says)
    answer = await asked(bench, CHAT)
    assert prefill.asked[0]["return_token_ids"] is True
    assert decode.asked == [CHAT | {"kv_transfer_params": PARAMS | {"prompt_token_ids": IDS}}]
    assert answer == {"choices": [{"text": "abc"}]}, "the client asked for none"


@pytest.mark.parametrize("wants", [True, False])
@over_bench
async def test_whether_a_client_gets_ids_is_what_it_asked_decode_for(bench: Bench, wants: bool) -> None:
    _, decode = await bench.pair(WITH_IDS, says=SAYS)
    await asked(bench, CHAT | {"return_token_ids": wants})
    assert decode.asked[0]["return_token_ids"] is wants


IMAGE = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}
NOT_THESE: dict[str, tuple[str, dict[str, Any]]] = {
    "a completion": ("/v1/completions", {"prompt": "x"}),
    "media": ("/v1/chat/completions", IMAGE),
    "its rendered prompt": ("/v1/chat/completions", CHAT | {"return_prompt_text": True}),
}


@pytest.mark.parametrize("kind", NOT_THESE)
@over_bench
async def test_what_decode_would_not_take_ids_for_goes_without(bench: Bench, kind: str) -> None:
    prefill, decode = await bench.pair(WITH_IDS, says=SAYS)
    path, body = NOT_THESE[kind]
    await asked(bench, body, path)
    assert "return_token_ids" not in prefill.asked[0]
    assert decode.asked == [body | {"kv_transfer_params": PARAMS}]


@pytest.mark.parametrize("says", [(None, SAYS[1]), (SAYS[0], None)], ids=["prefill", "decode"])
@over_bench
async def test_instances_of_another_connector_get_none(bench: Bench, says: Says) -> None:
    prefill, decode = await bench.pair(WITH_IDS, says=says)
    await asked(bench, CHAT)
    assert ("return_token_ids" in prefill.asked[0]) is (says[0] is not None)
    assert decode.asked == [CHAT | {"kv_transfer_params": PARAMS}]


@over_bench
async def test_a_concurrent_hand_off_has_none_to_give(bench: Bench) -> None:
    prefill, decode = await bench.pair(WITH_IDS, says=(info(), info(role="kv_consumer", engine_id="d-0")))
    await asked(bench, CHAT)
    assert "return_token_ids" not in prefill.asked[0]
    assert "prompt_token_ids" not in decode.asked[0]["kv_transfer_params"]


@pytest.mark.parametrize("ids", [None, "1", [], [1, -1], [1, "2"]], ids=str)
@over_bench
async def test_bad_ids_are_not_handed_on_and_that_is_said_once(
    bench: Bench, ids: object, caplog: pytest.LogCaptureFixture
) -> None:
    bad = answers({"choices": [{"text": "a"}], "kv_transfer_params": PARAMS, "prompt_token_ids": ids})
    prefill, decode = await bench.pair(bad, says=SAYS)
    for _ in range(3):
        await asked(bench, CHAT)
    assert decode.asked == [CHAT | {"kv_transfer_params": PARAMS}] * 3
    said = [one.getMessage() for one in caplog.records if "prompt_token_ids" in one.getMessage()]
    assert len(said) == 1 and prefill.url in said[0]


@over_bench
async def test_the_next_decode_instance_gets_them_when_one_refuses_the_connection(bench: Bench) -> None:
    prefill, decode = await bench.instance(WITH_IDS, SAYS[0]), await bench.instance(DONE, SAYS[1])
    gone = await bench.instance(DONE, SAYS[1], port=free_port())
    await bench.route([prefill.url], [gone.url, decode.url])
    await gone.server.close()
    for _ in range(2):
        await asked(bench, CHAT)
    assert [one["kv_transfer_params"] for one in decode.asked] == [PARAMS | {"prompt_token_ids": IDS}] * 2


@over_bench
async def test_what_is_given_back_has_no_ids(bench: Bench) -> None:
    _, decode = await bench.pair(WITH_IDS, answers({"error": {"message": "no"}}, status=400), SAYS)
    bench.url = bench.url.replace("/v1/completions", "/v1/chat/completions")
    assert (await bench.ask(CHAT))[0] == 400
    while not decode.given_back:
        await asyncio.sleep(0.01)
    assert decode.given_back == [PARAMS]


class Counted(list[int]):
    """A list to which there are weak references."""


@over_bench
async def test_a_request_that_waits_for_its_answer_keeps_no_ids(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stream, and of an answer in one piece: neither holds them while decode decodes."""
    taken, go_on = list[weakref.ref[Counted]](), asyncio.Event()

    def take(answer: dict[str, Any]) -> list[int]:
        ids = Counted(take_prompt_ids(answer))
        taken.append(weakref.ref(ids))
        return ids

    async def waits(request: web.Request) -> web.StreamResponse:
        await go_on.wait()
        return await answering(request)

    monkeypatch.setattr(prompt_ids, "take_prompt_ids", take)
    for stream in (True, False):
        answering = streams(FINISHED, b"data: [DONE]\n\n") if stream else DONE
        go_on.clear()
        _, decode = await bench.pair(WITH_IDS, waits, SAYS)
        asking = asyncio.create_task(asked(bench, CHAT | {"stream": stream}))
        await decode.arrived.wait()
        while any(ids() is not None for ids in taken):
            await asyncio.sleep(0.01)
        go_on.set()
        await asking
    assert len(taken) == 2
