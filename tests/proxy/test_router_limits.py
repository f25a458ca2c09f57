"""What a router has of files and memory, and what it says where that is not enough."""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import os
import signal
import socket
import subprocess
import sys
import tracemalloc
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.support.ports import free_port
from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import DONE, HANDS_OVER, LIMIT, Handler, streams
from vllm_pd_connector.proxy import exchange, instance, legs, router
from vllm_pd_connector.proxy.instance import InstanceState
from vllm_pd_connector.routing.prompt_ids import MOST_IDS

MIB = 1 << 20


@over_bench
async def test_a_router_without_a_file_refuses_that_request_and_blames_no_instance(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would be taken for one that refuses connections, until there is none to route to."""
    made, left = legs._probed, 0

    def probed(place: aiohttp.AddrInfoType) -> socket.socket:
        nonlocal left
        left -= 1
        if left == -1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return made(place)

    monkeypatch.setattr(legs, "_probed", probed)
    monkeypatch.setattr(legs, "IDLE_CONNECTION", 0.0)
    left = 1000
    await bench.pair()
    for before in range(2):  # prefill's connection, and decode's
        left = before
        status, answer, _ = await bench.ask()
        assert status == 503 and "no connection left to give" in answer["error"]["message"]
        assert "ulimit" in answer["error"]["message"]
        left = 1000
        assert all(one.state is InstanceState.UP for one in bench.router.fleet._instances.values())
        assert (await bench.ask())[0] == 200
    left = 0
    status, said = await bench.get("/v1/models")
    assert status == 503 and "no connection left to give" in str(said)
    left = 1000
    assert all(one.state is InstanceState.UP for one in bench.router.fleet._instances.values())


def test_the_command_allows_itself_as_many_files_as_it_may() -> None:
    port = free_port()
    command = (
        f"ulimit -Sn 256; exec {sys.executable} -m vllm_pd_connector.proxy --port {port} --instance http://h.invalid"
    )
    with subprocess.Popen(["bash", "-c", command], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert any("listening" in line for line in process.stderr)
            limits = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
            [soft, hard] = next(line.split()[3:5] for line in limits if line.startswith("Max open files"))
            assert int(soft) == min(65535, int(hard)) > 256
            process.send_signal(signal.SIGTERM)
            assert process.wait(60.0) == 0
        finally:
            process.kill()


@over_bench
async def test_while_an_answer_streams_its_request_is_kept_once(bench: Bench) -> None:
    """A chat with images has megabytes, and its answer takes minutes."""
    goes_on = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[{"text":"x","finish_reason":null}]}\n\n')
        async with asyncio.timeout(LIMIT):
            await goes_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    await bench.pair(decode=slow)
    body = b'{"prompt": "' + bytes(8 * MIB).replace(b"\0", b"x") + b'", "stream": true}'
    tracemalloc.start(30)
    try:
        async with bench.client.post(bench.url, data=io.BytesIO(body)) as response:
            del body
            assert response.status == 200
            await response.content.readuntil(b"\n\n")
            large = [trace for trace in tracemalloc.take_snapshot().traces if trace.size > 4 * MIB]
            large = [trace for trace in large if any("/vllm_pd_connector/" in one.filename for one in trace.traceback)]
            goes_on.set()
            await response.read()
    finally:
        tracemalloc.stop()
    assert len(large) == 1, [str(trace) for trace in large]


def endless(status: int = 200, *, told: int | None = None) -> tuple[Handler, list[int]]:
    """An instance that answers for as long as it is listened to, at most 64 MiB, and how many bytes it got rid of."""
    sent = [0]

    async def handler(_request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={"Content-Type": "application/json"})
        response.content_length = told
        await response.prepare(_request)
        for _ in range(1 << 10):
            await response.write(b" " * (64 << 10))
            sent[0] += 64 << 10
        return response

    return handler, sent


@pytest.mark.parametrize(
    ("role", "status", "told"),
    [("prefill", 200, None), ("prefill", 200, 64 * MIB), ("prefill", 500, None), ("decode", 200, None)],
)
def test_an_answer_without_end_is_an_error_that_says_whose(
    role: str, status: int, told: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MAX_PREFILL_BYTES", "MAX_ANSWER_BYTES"):
        monkeypatch.setattr(router, name, MIB)
    handler, sent = endless(status, told=told)

    @over_bench
    async def ask(bench: Bench) -> None:
        first, second = await bench.pair(**{"prefill": HANDS_OVER, "decode": DONE, role: handler})
        status_, answer, _ = await bench.ask()
        url = (first if role == "prefill" else second).url
        assert status_ == 502
        said = answer["error"]["message"]
        assert said.startswith(f"{role} instance {url} answered {status} with ") and f"at most {MIB} are read" in said
        assert told is None or f"with {told} bytes" in said
        if role == "decode":
            async with asyncio.timeout(LIMIT):
                while not second.given_back:
                    await asyncio.sleep(0.01)

    ask()
    assert sent[0] < 32 * MIB, "it was read to its end"


def test_the_longest_chat_has_room_in_a_prefills_answer() -> None:
    """At the limit before there were ids, contexts of 10M tokens were 502, and a failure of a healthy prefill."""
    blocks, longest_id = 64 * MIB, len(f"{10**7 - 1},")
    assert blocks + longest_id * MOST_IDS <= instance.MAX_PREFILL_BYTES


@over_bench
async def test_an_answer_is_in_memory_once_when_it_is_read(bench: Bench) -> None:
    async def whole(_request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(_request)
        for _ in range(32 * MIB // len(piece)):
            await response.write(piece)
        return response

    piece = b"x" * (64 << 10)
    first, _ = await bench.pair(prefill=whole)
    async with bench.client.post(f"{first.url}/v1/completions", json={}) as response:
        tracemalloc.start()
        try:
            content = await instance.read_whole(response, "it", 64 * MIB)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert type(content) is bytes and content == piece * (32 * MIB // len(piece))
    assert peak < 48 * MIB


@over_bench
async def test_an_event_without_end_is_an_error_that_says_whose(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_ANSWER_BYTES", MIB)
    _, second = await bench.pair(decode=streams(b"data: ", *[b"x" * (64 << 10)] * 64))
    status, answer, _ = await bench.ask({"prompt": [1], "stream": True})
    said = answer["error"]["message"]
    assert status == 502 and said.startswith(f"decode instance {second.url} answered 200") and f"most {MIB} are" in said


@over_bench
async def test_models_and_what_is_given_back_are_read_within_limits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance, "MAX_REFUSAL_BYTES", MIB)
    monkeypatch.setattr(legs, "MAX_REFUSAL_BYTES", MIB)
    monkeypatch.setattr(router, "MAX_PREFILL_BYTES", 4)
    handler, sent = endless(400)
    _, second = await bench.pair(decode=DONE)
    status, said = await bench.get("/v1/models")
    assert status == 503 and f"{second.url}/v1/models answered 200 with" in said
    second.to_what_is_given_back = handler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger(legs.__name__), "warning", lambda *words: given.set_result(words))
        given: asyncio.Future[tuple[object, ...]] = asyncio.get_running_loop().create_future()
        await bench.router._legs.give_back("r", {}, {"kv_transfer_params": {}})
        assert "at most" in str(given.result())
    assert sent[0] < 32 * MIB
