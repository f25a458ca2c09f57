"""What of a decode instance's stream reaches the client while nothing has been said, as vLLM 0.32 writes it."""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp
import pytest
from aiohttp import web

from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import FINISHED, HANDS_OVER, answers, break_off, streams
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.proxy.exchange import Passage, says_nothing
from vllm_pd_connector.proxy.instance import InstanceRole
from vllm_pd_connector.routing.handoff import check_client_body

OPENING = (
    b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":""},'
    b'"logprobs":null,"finish_reason":null}],"prompt_token_ids":null}\n\n'
)
USAGE = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":9,"total_tokens":9,"completion_tokens":0}}\n\n'
TEXT = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
END = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "before", [(), (USAGE,), (OPENING,), (OPENING, USAGE)], ids=["", "usage", "chat", "chat, usage"]
)
@over_bench
async def test_a_stream_that_its_engine_aborts_before_the_first_token_is_sent_again(
    bench: Bench, before: tuple[bytes, ...]
) -> None:
    """vLLM drops the output that says so: what is left looks like a complete answer without a word."""
    ending = await bench.instance(streams(*before, END))
    other = await bench.instance(streams(OPENING, TEXT, FINISHED, END))
    prefill = await bench.instance(HANDS_OVER)
    await bench.route([prefill.url], [ending.url, other.url], handoff="serial")
    for _ in range(4):
        status, text, _ = await bench.ask({"prompt": "x", "stream": True})
        assert (status, text.encode()) == (200, OPENING + TEXT + FINISHED + END)
    assert len(ending.asked) <= 1 < len(other.asked), "it is asked last from then on"


@pytest.mark.parametrize("word", [".", "abort", "error"])
@pytest.mark.parametrize("stream", [False, True])
@over_bench
async def test_an_answer_that_a_stop_string_ended_is_whole_whatever_it_is(
    bench: Bench, stream: bool, word: str
) -> None:
    """vLLM's API server finds it, and aborts the request at its engine; its answer says "stop"."""
    said = {"choices": [{"text": "", "finish_reason": "stop", "stop_reason": word}]}
    events = f"data: {json.dumps(said)}\n\n".encode(), END
    prefill, decode = await bench.pair(decode=streams(*events) if stream else answers(said))
    status, answer, _ = await bench.ask({"prompt": "x", "stop": [word], "stream": stream})
    assert (status, answer) == (200, b"".join(events).decode() if stream else said)
    assert len(prefill.asked) == len(decode.asked) == 1 and not decode.given_back
    assert b"vllm_pd_proxy_broken_streams_total 0.0" in bench.router.metrics.exposition()
    (instance,) = bench.router.fleet.usable(InstanceRole.DECODE)
    assert not instance.answers.asked_last(InstanceRole.DECODE, time.monotonic())


@over_bench
async def test_where_no_other_can_be_asked_that_is_an_error_and_no_empty_answer(bench: Bench) -> None:
    await bench.pair(decode=streams(OPENING, USAGE, END))
    status, answer, _ = await bench.ask({"prompt": "x", "stream": True})
    assert status == 502 and "aborts the request" in answer["error"]["message"]


@over_bench
async def test_behind_some_of_the_answer_it_is_an_error_event(bench: Bench) -> None:
    await bench.pair(decode=streams(OPENING, TEXT, END))
    status, text, _ = await bench.ask({"prompt": "x", "stream": True})
    first, second, error, last, _ = text.split("\n\n")
    assert status == 200 and f"{first}\n\n{second}\n\n".encode() == OPENING + TEXT and last == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 502


@over_bench
async def test_a_stream_keeps_its_type_with_the_charset(bench: Bench) -> None:
    """Without it `requests` takes text for Latin-1, and so garbles all that is not ASCII."""
    await bench.pair(decode=streams(TEXT.replace(b'"a"', '"ü"'.encode()), FINISHED, END))
    _, text, headers = await bench.ask({"prompt": "x", "stream": True})
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8" and '"ü"' in text


@over_bench
async def test_a_chat_that_fails_at_once_is_a_status_though_its_opening_came_first(bench: Bench) -> None:
    error = {"error": {"message": "its caches did not come", "code": 500}}
    _, decode = await bench.pair(decode=streams(OPENING, f"data: {json.dumps(error)}\n\n".encode(), END))
    for _ in range(3):
        assert (await bench.ask({"prompt": "x", "stream": True}))[:2] == (500, error)
    (instance,) = (one for url, one in bench.router.fleet._instances.items() if url == decode.url)
    assert instance.answers.asked_last(InstanceRole.DECODE, time.monotonic()), "as one that fails everything at once"


@over_bench
async def test_an_instance_that_breaks_off_each_time_is_asked_last(bench: Bench) -> None:
    """Its health may be good all the same, and answering at once it would draw most requests."""
    _, decode = await bench.pair(decode=streams(TEXT, then=break_off))
    for _ in range(3):
        assert "broke off" in (await bench.ask({"prompt": "x", "stream": True}))[1]
    (instance,) = (one for url, one in bench.router.fleet._instances.items() if url == decode.url)
    assert instance.answers.asked_last(InstanceRole.DECODE, time.monotonic())


@over_bench
async def test_a_client_that_takes_nothing_is_not_waited_for_at_the_end_either(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said of a stream that broke off is the last that it gets, and may find its connection full."""
    ends = web.StreamResponse.write_eof

    async def never(answer: web.StreamResponse, data: bytes = b"") -> None:
        if isinstance(answer, web.Response) or "X-Request-Id" not in answer.headers:
            await ends(answer, data)
        else:  # the router's
            await asyncio.Event().wait()

    await bench.pair(decode=streams(TEXT, then=break_off), read_timeout=0.2)
    monkeypatch.setattr(web.StreamResponse, "write_eof", never)
    with pytest.raises(aiohttp.ClientPayloadError):
        await bench.ask({"prompt": "x", "stream": True})


def test_what_says_nothing_is_held_and_comes_with_what_says_something() -> None:
    passage = Passage("decode")
    assert passage.take(OPENING) == b"" and passage.take(TEXT) == OPENING + TEXT
    assert passage.take(OPENING) == OPENING, "only at the beginning"
    passage = Passage("decode")
    assert passage.take(OPENING) == b"" and passage.take(b": waits\n\n") == OPENING + b": waits\n\n"
    passage, held = Passage("decode"), 0
    while not passage.take(OPENING):
        held += len(OPENING)
    assert 60_000 < held < 70_000, "no more than that"


@pytest.mark.parametrize(
    "event",
    [
        TEXT, FINISHED, END, b"data: {\n\n", b"data: 1\n\n", b": waits\n\n",
        b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n',
        b'data: {"choices":[{"delta":{"role":"assistant","reasoning":"I"},"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"delta":{"role":"assistant"},"finish_reason":"stop"}]}\n\n',
    ],
)  # fmt: skip
def test_what_says_something(event: bytes) -> None:
    assert not says_nothing(event)


def test_a_client_cannot_say_that_its_answer_is_finished() -> None:
    said = json.dumps({"choices": [{"text": 'x "finish_reason": "stop"', "finish_reason": None}]}).encode()
    passage = Passage("decode")
    passage.take(b"data: " + said + b"\n\n")
    with pytest.raises(Exception, match="aborts the request"):
        passage.take(END)


def test_what_a_client_gives_is_cut_in_what_is_said_of_it() -> None:
    with pytest.raises(ProtocolError) as caught:
        check_client_body({"n": "x" * (1 << 20)})
    assert len(str(caught.value)) < 300
