"""vLLM's own router (`vllm-router`, the released program) speaks what the connector understands.

The instances behind it are stand-ins, so what is looked at is the router's side of the contract: the parameters that it
sends to a prefill instance, that a prefill instance's answer reaches a decode instance unchanged, and that its registry
takes the announcements of `vllm-pd announce`. That real instances serve behind it is shown end to end (tests/e2e).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from router_stand_ins import Instance, answers, info, streams

from handed_over import handed_over
from ports import free_port
from vllm_pd_connector.protocol.params import parse_remote_decode, parse_remote_prefill

STARTS_WITHIN = 60.0
ANSWER = handed_over()
"""What a prefill instance with PDConnector answers."""
COMPLETION = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


def finished(**fields: Any) -> dict[str, Any]:
    return {**COMPLETION, "choices": [{"index": 0, "text": "a", "finish_reason": "length"}], "usage": USAGE, **fields}


class Bench:
    """vllm-router in front of a prefill and a decode stand-in."""

    def __init__(self, stack: AsyncExitStack):
        self._stack = stack
        self.prefill = Instance(answers(finished(kv_transfer_params=ANSWER)), info(mode="pull"))
        self.decode = Instance(answers(finished(choices=[{"index": 0, "text": "right"}])), info(role="kv_consumer"))
        self.url = f"http://127.0.0.1:{free_port()}"

    async def start(self, *words: str, static: bool = True) -> None:
        for instance in (self.prefill, self.decode):
            await instance.server.start_server()
            self._stack.push_async_callback(instance.server.close)
        words += ("--prefill", self.prefill.url, "--decode", self.decode.url) if static else ()
        port = self.url.rpartition(":")[2]
        program = str(Path(sys.executable).with_name("vllm-router"))
        options = ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"]
        options += ["--worker-startup-check-interval", "1", "--prometheus-port", str(free_port())]
        self.run(program, *options, "--host", "127.0.0.1", "--port", port, *words)

    def run(self, *command: str) -> None:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

    async def ask(self, path: str, body: dict[str, Any]) -> str:
        """The answer, from the time on at which the router has instances."""
        async with aiohttp.ClientSession() as client:
            while True:
                try:
                    async with client.post(self.url + path, json=body) as response:
                        if response.status == 200:
                            return await response.text()
                except aiohttp.ClientConnectionError:
                    pass
                await asyncio.sleep(0.1)

    def check_parameters(self) -> None:
        """Both legs carry what the connector takes, and the answer of prefill came through unchanged."""
        for body in self.prefill.asked:
            parse_remote_decode(body["kv_transfer_params"])
            assert body["max_tokens"] == 1 and not body["stream"]
        for body in self.decode.asked:
            assert body["kv_transfer_params"] == ANSWER
            parse_remote_prefill(body["kv_transfer_params"])
        assert self.prefill.request_ids == self.decode.request_ids
        assert len(set(self.decode.request_ids)) == len(self.decode.request_ids) > 0


def over_bench(test: Callable[[Bench], Awaitable[None]]) -> Callable[[], None]:
    async def main() -> None:
        async with asyncio.timeout(2 * STARTS_WITHIN), AsyncExitStack() as stack:
            await test(Bench(stack))

    def run() -> None:
        asyncio.run(main())

    run.__name__ = test.__name__
    return run


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "m", "prompt": [1, 2, 3], "max_tokens": 9, "stop": ["."], "min_tokens": 4}),
        ("/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 9, "logprobs": 1, "temperature": 0.5}),
        (
            "/v1/chat/completions",
            {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 9},
        ),
    ],
)
def test_static_instances(path: str, body: dict[str, Any]) -> None:
    async def test(bench: Bench) -> None:
        await bench.start()
        answer = json.loads(await bench.ask(path, body))
        assert answer["choices"][0]["text"] == "right"
        bench.check_parameters()

    over_bench(test)()


@over_bench
async def test_streams(bench: Bench) -> None:
    bench.decode = Instance(streams(b'data: {"choices":[{"index":0,"text":"r"}]}\n\n', b"data: [DONE]\n\n"))
    await bench.start()
    text = await bench.ask("/v1/completions", {"model": "m", "prompt": [1], "max_tokens": 2, "stream": True})
    assert text.count("data: ") == 2
    assert bench.decode.asked[0]["stream"] is True
    bench.check_parameters()


@over_bench
async def test_discovery_takes_the_announced_instances(bench: Bench) -> None:
    registry = f"127.0.0.1:{free_port()}"
    await bench.start("--vllm-discovery-address", registry, static=False)
    bench.run(sys.executable, "-m", "vllm_pd_connector.cli", "announce", registry, bench.prefill.url, bench.decode.url)
    answer = json.loads(await bench.ask("/v1/completions", {"model": "m", "prompt": [1], "max_tokens": 2}))
    assert answer["choices"][0]["text"] == "right"
    bench.check_parameters()
