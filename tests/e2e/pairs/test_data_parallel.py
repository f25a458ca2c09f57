"""Several engines behind one API server on both sides: each hands over to each, and proxies are told of all of them.

A router chooses engines by the header X-data-parallel-rank. Every engine has a side channel of its own; the first of a
server answers the proxies of vLLM's in-tree Mooncake connector for all.
"""

from __future__ import annotations

import json
import os
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from examples.launch import Server, post, router_spec, vllm_spec
from examples.make_models import MODELS, make
from tests.support.ports import free_port, free_ports
from tests.support.servers import digests
from tests.support.servers.cluster import until
from tests.support.servers.pairs import Pairs
from tests.support.servers.workload import SCENARIOS, Prompt, ask_many, completion, forgets

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

FAMILY = "gqa"
ENGINES = (0, 1)
WAYS = tuple(product(ENGINES, ENGINES))
TRANSPORT = os.environ.get("PD_TEST_TRANSPORT", "nixl")


@dataclass(frozen=True, slots=True)
class Sides:
    """Both servers; `bootstrap` is where proxies ask the prefill one."""

    prefill: Server
    decode: Server
    bootstrap: str
    digest_dir: Path
    pairs: Pairs

    def ask(self, server: Server, rank: int, prompt: Prompt, params: object, **fields: Any) -> Any:
        headers = {"X-data-parallel-rank": str(rank)}
        body = completion(FAMILY, prompt, kv_transfer_params=params, **fields)
        return post(f"{server.url}/v1/completions", body, headers=headers)

    def check(self, prompt: Prompt, answer: Mapping[str, Any]) -> None:
        [choice] = answer["choices"]
        assert tuple(choice["token_ids"]) == self.pairs.baselines.tokens(FAMILY, prompt)

    def forget_prefixes(self) -> None:
        """Empty the prefix caches of the decode side's engines, so that every prompt is handed over."""
        until(lambda: forgets(self.decode), "every block to be free")

    def check_bytes(self, count: int) -> None:
        """So many requests were handed over since the last call, and arrived as they left."""
        until(lambda: len(digests.received(digests.load(self.digest_dir))) == count, f"{count} traces of hand-overs")
        records = digests.load(self.digest_dir)
        assert not digests.differences(records)
        for record in records:
            record.path.unlink()


@pytest.fixture(scope="module")
def sides(request: pytest.FixtureRequest, pairs: Pairs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    pairs.end()
    pairs.baselines.of(FAMILY)
    mode, digest_dir = request.param, tmp_path_factory.mktemp("digests")
    bootstrap = free_port()
    specs = []
    for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        extra = {
            "mode": mode, "transport": TRANSPORT, "digest_dir": str(digest_dir),
            "side_channel_port": free_ports(ENGINES),
        }  # fmt: skip
        if mode == "push" and name == "prefill":
            extra["bootstrap_port"] = bootstrap
        transfer = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": extra}
        flags = (*MODELS[FAMILY].flags, "--data-parallel-size", str(len(ENGINES)))
        environment = {"PD_TEST_POLITE": "1", "VLLM_SERVER_DEV_MODE": "1"}
        name = f"dp-{mode}-{name}"
        specs.append(vllm_spec(name, make(MODELS[FAMILY]), flags=flags, transfer=transfer, environment=environment))
    prefill, decode = pairs.servers.start(*specs)
    yield Sides(prefill, decode, f"http://127.0.0.1:{bootstrap}", digest_dir, pairs)
    pairs.servers.stop(prefill, decode)


@pytest.mark.parametrize("sides", ["push", "pull"], indirect=True)
def test_every_engine_hands_over_to_every_engine(sides: Sides) -> None:
    prompts = SCENARIOS["concurrent"][4:8]
    sides.forget_prefixes()
    for (p, d), prompt in zip(WAYS, prompts, strict=True):
        keep = {"do_remote_decode": True, "do_remote_prefill": False}
        params = sides.ask(sides.prefill, p, prompt, keep, max_tokens=1)["kv_transfer_params"]
        assert params["remote_engine_id"].endswith(f"_dp{p}")
        sides.check(prompt, sides.ask(sides.decode, d, prompt, params))
    sides.check_bytes(len(WAYS))


@pytest.mark.parametrize("sides", ["push", "pull"], indirect=True)
def test_the_router_sends_both_legs_to_the_right_engines(sides: Sides) -> None:
    """With a pushing pair both at once: the decode leg names one engine of the prefill server, the header pins it."""
    servers, prompts = sides.pairs.servers, SCENARIOS["concurrent"][4:12]
    sides.forget_prefixes()
    [router] = servers.start(router_spec("dp-router", [sides.prefill.url], [sides.decode.url]))
    try:
        bodies = [completion(FAMILY, prompt) for prompt in prompts]
        for prompt, answer in zip(prompts, ask_many(router.url, bodies, at_once=4), strict=True):
            assert answer.tokens == sides.pairs.baselines.tokens(FAMILY, prompt)
    finally:
        servers.stop(router)
    sides.check_bytes(len(prompts))


@pytest.mark.parametrize("sides", ["push"], indirect=True)
def test_a_proxy_of_the_in_tree_mooncake_connector_reaches_every_engine(sides: Sides) -> None:
    def told() -> dict[str, Any]:
        with urllib.request.urlopen(f"{sides.bootstrap}/query", timeout=10) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    until(lambda: sorted(told()) == [str(rank) for rank in ENGINES], "all engines to register")
    engines, prompts = told(), SCENARIOS["concurrent"][4:8]
    sides.forget_prefixes()
    for (p, d), prompt in zip(WAYS, prompts, strict=True):
        name = uuid.uuid4().hex
        keep = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
        take = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": name}
        take |= {"remote_bootstrap_addr": sides.bootstrap, "remote_engine_id": engines[str(p)]["engine_id"]}
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(sides.ask, sides.prefill, p, prompt, keep, max_tokens=1)
            sides.check(prompt, pool.submit(sides.ask, sides.decode, d, prompt, take).result())
            first.result()
    sides.check_bytes(len(WAYS))
