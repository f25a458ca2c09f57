"""What a router has of files and memory, and what it says where that is not enough."""

from __future__ import annotations

import asyncio
import errno
import io
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
from tests.support.proxy.stand_ins import LIMIT
from vllm_pd_connector.proxy import legs
from vllm_pd_connector.proxy.instance import InstanceState

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
