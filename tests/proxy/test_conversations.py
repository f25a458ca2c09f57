"""A turn finds what the last one left at a decode instance; what is not there any more is forgotten."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import FINISHED, HANDS_OVER, PARAMS, Instance, answers, info, streams
from vllm_pd_connector.proxy.conversations import Conversations, turn_keys
from vllm_pd_connector.proxy.instance import InstanceRole
from vllm_pd_connector.routing.handoff import ASK_PREFILL

KEPT = {"do_remote_prefill": False, "do_remote_decode": True, "remote_engine_id": "d-0", "remote_block_ids": [[7]]}
STREAM = streams(FINISHED, b"data: [DONE]\n\n")
KEEPS = answers({"choices": [{"message": {"content": "b"}}], "kv_transfer_params": KEPT})
P = info(mode="pull", conversations="on")
D = info(mode="pull", conversations="on", role="kv_consumer", engine_id="d-0", side_channel_port=5700)


def chat(*said: str, stream: bool = False) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {
        "model": "m",
        "messages": [{"role": roles[i % 2], "content": one} for i, one in enumerate(said)],
        "stream": stream,
    }


def turns(prefill: Instance) -> list[dict[str, Any]]:
    """What prefills were told beside the usual."""
    told = [asked["kv_transfer_params"] for asked in prefill.asked]
    return [{k: v for k, v in each.items() if v is not None and each[k] != ASK_PREFILL.get(k)} for each in told]


async def ask(bench: Bench, *said: str, stream: bool = False) -> None:
    url = bench.url.replace("/v1/completions", "/v1/chat/completions")
    async with bench.client.post(url, json=chat(*said, stream=stream)) as answer:
        assert answer.status == 200
        await answer.read()


@over_bench
async def test_what_a_decode_instance_answers_goes_to_the_next_turn_s_prefill_once(bench: Bench) -> None:
    prefill, decode = await bench.pair(decode=KEEPS, says=(P, D), conversations=True)
    await ask(bench, "a")
    await ask(bench, "other", "b", "c")
    await ask(bench, "a", "b", "c")
    await ask(bench, "a", "b", "d")
    kept = {"remote_engine_id": "d-0", "remote_block_ids": [[7]]}
    assert turns(prefill) == [{}, {}, kept, {}]
    assert decode.asked[0]["kv_transfer_params"].items() >= PARAMS.items()


@over_bench
async def test_of_a_stream_the_next_turn_has_the_name_that_decode_was_given(bench: Bench) -> None:
    prefill, decode = await bench.pair(decode=STREAM, says=(P, D), conversations=True)
    await ask(bench, "a", stream=True)
    await ask(bench, "a", "b", "c")
    name = decode.asked[0]["kv_transfer_params"]["transfer_id"]
    where = {"remote_engine_id": "d-0", "remote_host": "h", "remote_port": 5700, "remote_request_id": name}
    assert turns(prefill) == [{}, where]


@over_bench
async def test_of_a_prompt_that_decode_computed_itself_nothing_is_kept(bench: Bench) -> None:
    prefill, _ = await bench.pair(decode=STREAM, says=(P, D), conversations=True)
    url = bench.url.replace("/v1/completions", "/v1/chat/completions")
    async with bench.client.post(url, json=chat("a", stream=True) | {"echo": True}) as answer:
        await answer.read()
    await ask(bench, "a", "b", "c")
    assert turns(prefill) == [{}]


@over_bench
async def test_a_client_is_not_told_by_a_stream_where_the_caches_are(bench: Bench) -> None:
    """vLLM 0.33 says it with the last event of a choice."""
    quoted = json.dumps({"choices": [{"delta": {"content": '"kv_transfer_params": {}'}}]}).encode()
    last = {"choices": [{"delta": {}, "finish_reason": "stop"}], "kv_transfer_params": KEPT}
    bare = {"choices": last["choices"]}
    decode = streams(b"data: " + quoted + b"\n\n", f"data: {json.dumps(last)}\n\n".encode(), b"data: [DONE]\n\n")
    prefill, _ = await bench.pair(decode=decode, says=(P, D), conversations=True)
    url = bench.url.replace("/v1/completions", "/v1/chat/completions")
    async with bench.client.post(url, json=chat("a", stream=True)) as answer:
        said = await answer.read()
    assert said.split(b"\n\n") == [b"data: " + quoted, f"data: {json.dumps(bare)}".encode(), b"data: [DONE]", b""]
    await ask(bench, "a", "b", "c")
    assert turns(prefill)[1]["remote_engine_id"] == "d-0"


@over_bench
async def test_a_stream_s_turn_is_known_as_soon_as_its_client_has_the_end(bench: Bench) -> None:
    ended = asyncio.Event()

    async def wait(_request: web.Request) -> None:
        await ended.wait()

    prefill, _ = await bench.pair(
        decode=streams(FINISHED, b"data: [DONE]\n\n", then=wait), says=(P, D), conversations=True
    )
    url = bench.url.replace("/v1/completions", "/v1/chat/completions")
    async with bench.client.post(url, json=chat("a", stream=True)) as first:
        heard = b""
        while b"[DONE]" not in heard:
            heard += await first.content.readany()
        following = asyncio.create_task(ask(bench, "a", "b", "c", stream=True))
        while len(prefill.asked) < 2:
            await asyncio.sleep(0.01)
        ended.set()
        await following
    assert [bool(turn) for turn in turns(prefill)] == [False, True]


@pytest.mark.parametrize("lacks", ["option", "prefill", "decode"])
@over_bench
async def test_nothing_is_passed_on_unless_all_take_part(bench: Bench, lacks: str) -> None:
    prefill = await bench.instance(HANDS_OVER, P if lacks != "prefill" else info(mode="pull"))
    other = info(mode="pull", role="kv_consumer", engine_id="d-0")
    decode = await bench.instance(KEEPS, D if lacks != "decode" else other)
    await bench.route([prefill.url], [decode.url], conversations=lacks != "option")
    await ask(bench, "a")
    await ask(bench, "a", "b", "c")
    assert turns(prefill) == [{}, {}]


def taken(found: Conversations, keys: list[bytes], usable: set[str]) -> dict[str, Any]:
    turn = found.take(keys, usable)
    return {} if turn is None else turn.params


def test_the_longest_beginning_is_taken_of_an_engine_that_is_there() -> None:
    found = Conversations()
    found.remember(turn_keys(chat("a")), "one", {"turn": 1})
    found.remember(turn_keys(chat("a", "b", "c")), "two", {"turn": 2})
    keys = turn_keys(chat("a", "b", "c", "d", "e"))
    assert taken(found, keys, {"one", "two"}) == {"turn": 2}
    found.remember(turn_keys(chat("a", "b", "c")), "two", {"turn": 2})
    assert taken(found, keys, {"one"}) == {"turn": 1}, "of an engine that is gone nothing is told, and it is forgotten"
    assert len(found) == 0


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    found = Conversations(max_bytes=1000)
    for number in range(100):
        found.remember(turn_keys(chat(str(number))), "d", {"turn": number, "ids": "x" * 80})
    assert len(found) == 1000 // len('{"turn": 99, "ids": ""}' + "x" * 80)
    assert taken(found, turn_keys(chat("0", "b")), {"d"}) == {}
    assert taken(found, turn_keys(chat("99", "b")), {"d"})["turn"] == 99


@pytest.mark.parametrize(
    "prompts", [[[*range(8000), i] * 2 for i in range(2)], [f"{'words ' * 8000}{i}" * 2 for i in range(2)]]
)
def test_conversations_with_one_long_beginning_are_two(prompts: list[Any]) -> None:
    found = Conversations()
    for i, prompt in enumerate(prompts):
        found.remember(turn_keys({"model": "m", "prompt": prompt}), "d", {"turn": i})
    for i, prompt in enumerate(prompts):
        assert taken(found, turn_keys({"model": "m", "prompt": prompt + prompt}), {"d"}) == {"turn": i}


def test_a_prompt_of_tokens_is_known_by_its_pieces() -> None:
    found, prompt = Conversations(), list(range(200))
    found.remember(turn_keys({"model": "m", "prompt": prompt[:150]}), "d", {"turn": 1})
    assert taken(found, turn_keys({"model": "m", "prompt": [5, *prompt]}), {"d"}) == {}
    assert taken(found, turn_keys({"model": "other", "prompt": prompt}), {"d"}) == {}
    assert taken(found, turn_keys({"model": "m", "prompt": prompt}), {"d"}) == {"turn": 1}


def test_what_was_taken_in_vain_is_there_for_the_next_attempt_unless_a_newer_turn_is() -> None:
    found, keys = Conversations(), turn_keys(chat("a", "b", "c"))
    found.remember(turn_keys(chat("a")), "d", {"turn": 1})
    turn = found.take(keys, {"d"})
    assert turn is not None and len(found) == 0
    found.put_back(turn)
    assert taken(found, keys, {"d"}) == {"turn": 1}
    found.remember(turn_keys(chat("a")), "d", {"turn": 2})
    found.put_back(turn)
    assert taken(found, keys, {"d"}) == {"turn": 2} and len(found) == 0


async def post(bench: Bench, *said: str, **headers: str) -> tuple[int, Any]:
    url = bench.url.replace("/v1/completions", "/v1/chat/completions")
    async with bench.client.post(url, json=chat(*said), headers=headers) as answer:
        return answer.status, await answer.json()


@over_bench
async def test_a_client_is_not_told_where_the_caches_are(bench: Bench) -> None:
    await bench.pair(decode=KEEPS, says=(P, D), conversations=True)
    assert await post(bench, "a") == (200, {"choices": [{"message": {"content": "b"}}]})


@over_bench
async def test_a_request_that_no_prefill_instance_took_leaves_the_turn_for_the_next(bench: Bench) -> None:
    prefill, _ = await bench.pair(decode=KEEPS, says=(P, D), conversations=True)
    await ask(bench, "a")
    port = prefill.server.port
    await prefill.server.close()
    for _ in range(2):  # the connection is refused; then there is no usable instance
        assert (await post(bench, "a", "b", "c"))[0] == 503
    prefill = await bench.instance(HANDS_OVER, P, port=port)
    await bench.check()
    await ask(bench, "a", "b", "c")
    assert [bool(turn) for turn in turns(prefill)] == [True]


@pytest.mark.parametrize(
    "events",
    [
        (b'data: {"choices": [{"text": "[DONE]"}]}\n\n',),
        (FINISHED, b'data: {"error": {"message": "m", "code": 500}}\n\n', b"data: [DONE]\n\n"),
    ],
    ids=["breaks off after a text like the end", "says that it failed"],
)
@over_bench
async def test_a_stream_that_failed_is_no_finished_turn(bench: Bench, events: tuple[bytes, ...]) -> None:
    prefill, _ = await bench.pair(decode=streams(*events), says=(P, D), conversations=True)
    await ask(bench, "a", stream=True)
    await ask(bench, "a", "b", "c")
    assert turns(prefill) == [{}, {}]


@over_bench
async def test_of_an_instance_with_keys_the_next_turn_has_the_key_that_it_says(bench: Bench) -> None:
    prefill = await bench.instance(HANDS_OVER, P)
    keyed = info(mode="pull", conversations="on", role="kv_consumer", engine_id="d-0", server_key="k" * 40)
    decode = await bench.instance(STREAM, keyed)
    await bench.route([prefill.url], [decode.url], conversations=True)
    await ask(bench, "a", stream=True)
    await ask(bench, "a", "b", "c")
    assert turns(prefill)[1]["pd_connector"] == {"server_key": "k" * 40}


def several(bench: Bench, handler: Any, first: int = 0, **says: Any) -> Any:
    """A decode instance with three data-parallel engines that keep turns; `first` others are on other hosts."""
    engines = [
        info(
            mode="pull", conversations="on", role="kv_consumer", engine_id=f"d-{i}", side_channel_port=5700 + i, **says
        )
        for i in range(3)
    ]
    return bench.instance(handler, says=engines, first_engine=first)


@pytest.mark.parametrize("first", [0, 3])
@over_bench
async def test_the_router_chooses_among_data_parallel_engines_and_asks_the_one_that_it_chose(
    bench: Bench, first: int
) -> None:
    prefill, decode = await bench.instance(HANDS_OVER, P), await several(bench, STREAM, first)
    await bench.route([prefill.url], [decode.url], conversations=True)
    for said in "xyz":
        await ask(bench, said, stream=True)
    assert sorted(decode.ranks) == ["0", "1", "2"], "idle engines take turns"
    for said in "zxy":
        await ask(bench, said, "b", "c", stream=True)
    assert decode.ranks[3:] == [decode.ranks[2], *decode.ranks[:2]], "the one that had the last turn"
    names = [asked["kv_transfer_params"]["transfer_id"] for asked in decode.asked]
    found = [(t["remote_engine_id"], t["remote_port"], t["remote_request_id"]) for t in turns(prefill)[3:]]
    assert found == [
        (f"d-{decode.ranks[i]}", 5700 + int(decode.ranks[i]), names[i]) for i in (2, 0, 1)
    ]  # fmt: skip


@over_bench
async def test_a_conversation_is_read_by_any_prefill_instance_and_lost_with_its_decode_instance(bench: Bench) -> None:
    prefills = [
        await bench.instance(HANDS_OVER, info(mode="pull", conversations="on", engine_id=f"p-{i}")) for i in "01"
    ]
    says = [info(mode="pull", conversations="on", role="kv_consumer", engine_id=f"d-{i}") for i in "01"]
    decodes = [await bench.instance(STREAM, each) for each in says]
    await bench.route([p.url for p in prefills], [d.url for d in decodes], conversations=True)
    said = ["a"]
    for _ in range(3):
        await ask(bench, *said, stream=True)
        said += ["b", "c"]
    known = [turn for prefill in prefills for turn in turns(prefill) if turn]
    assert len(known) == 2 and {turn["remote_engine_id"] for turn in known} <= {"d-0", "d-1"}
    last = max(decodes, key=lambda decode: len(decode.asked[-1]["messages"]) if decode.asked else 0)
    await last.server.close()
    await bench.check()
    await bench.check()
    before = sum(len(prefill.asked) for prefill in prefills)
    await ask(bench, *said, stream=True)
    assert sum(len(prefill.asked) for prefill in prefills) == before + 1
    assert len([turn for prefill in prefills for turn in turns(prefill) if turn]) == 2, "nothing is told of who is gone"


@over_bench
async def test_a_data_parallel_engine_s_answer_in_one_piece_goes_to_the_next_turn(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER, P), await several(bench, KEEPS)
    await bench.route([prefill.url], [decode.url], conversations=True)
    await ask(bench, "a")
    await ask(bench, "a", "b", "c")
    assert turns(prefill) == [{}, {"remote_engine_id": "d-0", "remote_block_ids": [[7]]}]
    assert decode.ranks[0] == decode.ranks[1] is not None


@over_bench
async def test_an_engine_that_is_busier_than_others_by_more_than_the_slack_does_not_get_its_next_turn(
    bench: Bench,
) -> None:
    prefill = await bench.instance(HANDS_OVER, P)
    decode = await several(bench, STREAM)
    await bench.route([prefill.url], [decode.url], conversations=True, slack=0)
    await ask(bench, "a", stream=True)
    [instance] = bench.router.fleet.usable(InstanceRole.DECODE)
    instance.at_engine[int(decode.ranks[0])] += 1
    await ask(bench, "a", "b", "c", stream=True)
    assert decode.ranks[1] != decode.ranks[0]
    assert +instance.at_engine == {int(decode.ranks[0]): 1}, "what has ended is not counted"


@over_bench
async def test_without_conversations_vllm_chooses_among_its_engines(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER, P), await several(bench, KEEPS)
    await bench.route([prefill.url], [decode.url])
    await ask(bench, "a")
    assert decode.ranks == [None]
