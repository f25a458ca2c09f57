"""vLLM's own router (`vllm-router`, the released program) speaks what the connector understands.

The instances behind it are stand-ins, so what is looked at is the router's side of the contract: the parameters that it
sends to a prefill instance, that a prefill instance's answer reaches a decode instance unchanged, that with
`--kv-connector mooncake` it asks the bootstrap port who a prefill instance is and tells the decode instance that, and
that its registry takes the announcements of `vllm-pd announce`. That real instances serve behind it is shown end to end
(tests/e2e).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.support.handed_over import handed_over, kept
from tests.support.ports import free_port
from tests.support.proxy.stand_ins import Instance, answers, info, streams
from vllm_pd_connector.protocol.params.bootstrap import EngineRegistry, HostPort, encode_answer, parse_bootstrap_address
from vllm_pd_connector.protocol.params.parse import (
    pairing_name,
    parse_remote_bootstrap,
    parse_remote_decode,
    parse_remote_prefill,
)
from vllm_pd_connector.sidechannel.bootstrap_http import BootstrapServer, query

STARTS_WITHIN = 60.0
ANSWER = handed_over()
"""What a prefill instance with PDConnector answers."""
SIDE_CHANNEL = HostPort(ANSWER["remote_host"], ANSWER["remote_port"])
CONNECTORS = ("nixl", "mooncake")
COMPLETION = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


def finished(**fields: Any) -> dict[str, Any]:
    return {**COMPLETION, "choices": [{"index": 0, "text": "a", "finish_reason": "length"}], "usage": USAGE, **fields}


class Bench:
    """vllm-router in front of a prefill and a decode stand-in, the first with the bootstrap port of a real one."""

    def __init__(self, stack: AsyncExitStack, connector: str):
        self._stack = stack
        self._connector = connector
        who = encode_answer(0, ANSWER["remote_engine_id"], SIDE_CHANNEL, ANSWER["tp_size"], ANSWER["pp_size"])
        self.bootstrap = BootstrapServer("127.0.0.1", 0, EngineRegistry(who))
        stack.callback(self.bootstrap.close)
        self.prefill = Instance(answers(finished(kv_transfer_params=ANSWER)), info(mode="pull"))
        self.decode = Instance(answers(finished(choices=[{"index": 0, "text": "right"}])), info(role="kv_consumer"))
        self.url = f"http://127.0.0.1:{free_port()}"

    async def start(self, *words: str, static: bool = True) -> None:
        for instance in (self.prefill, self.decode):
            await instance.server.start_server()
            self._stack.push_async_callback(instance.server.close)
        bootstrap = (str(self.bootstrap.port),) if self._connector == "mooncake" else ()
        words += ("--prefill", self.prefill.url, *bootstrap, "--decode", self.decode.url) if static else ()
        port = self.url.rpartition(":")[2]
        program = str(Path(sys.executable).with_name("vllm-router"))
        options = ["--vllm-pd-disaggregation", "--kv-connector", self._connector, "--policy", "round_robin"]
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
        """Both legs carry what the connector takes, and what the second says leads to the first."""
        for body in self.prefill.asked:
            parse_remote_decode(body["kv_transfer_params"])
            assert body["max_tokens"] == 1 and not body["stream"]
        for first, second in zip(self.prefill.asked, self.decode.asked, strict=True):
            self._check_second(first["kv_transfer_params"], second["kv_transfer_params"])
        assert self.prefill.request_ids == self.decode.request_ids
        assert len(set(self.decode.request_ids)) == len(self.decode.request_ids) > 0

    def _check_second(self, first: dict[str, Any], second: dict[str, Any]) -> None:
        """The answer of prefill unchanged; or the name of the first leg, and where its engine is found."""
        if self._connector == "nixl":
            assert second == ANSWER
            parse_remote_prefill(second)
            return
        told = parse_remote_bootstrap(second)
        assert pairing_name(first, "") == pairing_name(second, "") == told.transfer_id
        where = parse_bootstrap_address(told.remote_bootstrap_addr)
        assert where == HostPort("127.0.0.1", self.bootstrap.port)
        assert query(where) == {told.remote_engine_id: SIDE_CHANNEL}


def over_bench(test: Callable[[Bench], Awaitable[None]], connector: str = "nixl") -> Callable[[], None]:
    async def main() -> None:
        async with asyncio.timeout(2 * STARTS_WITHIN), AsyncExitStack() as stack:
            await test(Bench(stack, connector))

    def run() -> None:
        asyncio.run(main())

    run.__name__ = test.__name__
    return run


@pytest.mark.parametrize("connector", CONNECTORS)
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
def test_static_instances(path: str, body: dict[str, Any], connector: str) -> None:
    async def test(bench: Bench) -> None:
        await bench.start()
        answer = json.loads(await bench.ask(path, body))
        assert answer["choices"][0]["text"] == "right"
        bench.check_parameters()

    over_bench(test, connector)()


@pytest.mark.parametrize("connector", CONNECTORS)
def test_what_decode_keeps_of_a_turn_disturbs_no_next_one(connector: str) -> None:
    async def test(bench: Bench) -> None:
        bench.decode = Instance(answers(finished(kv_transfer_params=kept())), info(role="kv_consumer"))
        await bench.start()
        for said in ([1, 2], [1, 2, 3, 4]):
            await bench.ask("/v1/completions", {"model": "m", "prompt": said, "max_tokens": 2})
        bench.check_parameters()

    over_bench(test, connector)()


@pytest.mark.parametrize("connector", CONNECTORS)
def test_streams(connector: str) -> None:
    async def test(bench: Bench) -> None:
        bench.decode = Instance(streams(b'data: {"choices":[{"index":0,"text":"r"}]}\n\n', b"data: [DONE]\n\n"))
        await bench.start()
        text = await bench.ask("/v1/completions", {"model": "m", "prompt": [1], "max_tokens": 2, "stream": True})
        assert text.count("data: ") == 2
        assert bench.decode.asked[0]["stream"] is True
        bench.check_parameters()

    over_bench(test, connector)()


def test_with_mooncake_too_the_decode_leg_waits_for_the_prefill() -> None:
    """Other proxies of that connector send both legs at once."""

    async def test(bench: Bench) -> None:
        beside: list[bool] = []

        async def prefill(_request: web.Request) -> web.StreamResponse:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(bench.decode.arrived.wait(), 1.0)
            beside.append(bench.decode.arrived.is_set())
            return web.json_response(finished())

        bench.prefill = Instance(prefill, info())
        await bench.start()
        await bench.ask("/v1/completions", {"model": "m", "prompt": [1], "max_tokens": 2})
        assert beside == [False]
        bench.check_parameters()

    over_bench(test, "mooncake")()


@over_bench
async def test_discovery_takes_the_announced_instances(bench: Bench) -> None:
    registry = f"127.0.0.1:{free_port()}"
    await bench.start("--vllm-discovery-address", registry, static=False)
    bench.run(sys.executable, "-m", "vllm_pd_connector.cli", "announce", registry, bench.prefill.url, bench.decode.url)
    answer = json.loads(await bench.ask("/v1/completions", {"model": "m", "prompt": [1], "max_tokens": 2}))
    assert answer["choices"][0]["text"] == "right"
    bench.check_parameters()
