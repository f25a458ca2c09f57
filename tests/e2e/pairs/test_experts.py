"""A mixture of experts whose data-parallel engines share the experts: every engine hands over to every engine.

Engines step in time with each other: while one computes, the other, which has nothing to do, runs dummy batches, and
so does a decode engine whose only request waits for its caches. Requests are sent one by one, so there is always an
idle engine on either side.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest

from examples.launch import Server, Servers, Spec, post, vllm_spec
from examples.make_models import EXPERTS, make
from tests.support.ports import free_ports
from tests.support.servers.agreement import disagreement
from tests.support.servers.cluster import until
from tests.support.servers.pairs import ROOT
from tests.support.servers.workload import LOGPROBS, VERIFIED, Answer, Prompt, ask, completion, prompts, series

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

ENGINES = (0, 1)
PROMPTS = prompts("experts", (33, 300, 700, 1500))
WORKER = "pd_test_plugins.experts.SharedExpertsWorker"
TRANSPORT = os.environ.get("PD_TEST_TRANSPORT", "nixl")


def spec(name: str, role: str = "", mode: str = "") -> Spec:
    extra = {"mode": mode, "transport": TRANSPORT, "verify": "all", "side_channel_port": free_ports(ENGINES)}
    transfer = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": extra} if role else None
    flags = ["--no-enable-prefix-caching"]
    if role:
        flags += ["--data-parallel-size", str(len(ENGINES)), "--enable-expert-parallel", "--worker-cls", WORKER]
    environment = {"PD_TEST_POLITE": "1"}
    return vllm_spec(name, make(EXPERTS), flags=flags, transfer=transfer, environment=environment)


class Sides(NamedTuple):
    prefill: Server
    decode: Server
    expected: dict[Prompt, Answer]


@pytest.fixture(scope="module", params=["pull", "push"])
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    with Servers(ROOT / "out" / "e2e" / "experts") as servers:
        [plain] = servers.start(spec("plain"))
        expected = {one: ask(plain.url, completion(EXPERTS.name, one, **LOGPROBS)) for one in PROMPTS}
        servers.stop(plain)
        prefill, decode = servers.start(
            spec("prefill", "kv_producer", request.param), spec("decode", "kv_consumer", request.param)
        )
        yield Sides(prefill, decode, expected)


def ask_engine(server: Server, engine: int, prompt: Prompt, **fields: Any) -> Any:
    body = completion(EXPERTS.name, prompt, **fields)
    return post(f"{server.url}/v1/completions", body, headers={"X-data-parallel-rank": str(engine)})


def test_every_engine_hands_over_to_every_engine(sides: Sides) -> None:
    for (p, d), prompt in zip(product(ENGINES, ENGINES), PROMPTS, strict=True):
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        params = ask_engine(sides.prefill, p, prompt, max_tokens=1, kv_transfer_params=asked)["kv_transfer_params"]
        assert params["remote_engine_id"].endswith(f"_dp{p}")
        [choice] = ask_engine(sides.decode, d, prompt, kv_transfer_params=params)["choices"]
        answer = Answer(tuple(choice["token_ids"]))
        # Experts of two engines are added in another order than those of one.
        wrong = disagreement(sides.expected[prompt], answer, exact=False)
        assert not wrong, f"engine {p} to engine {d}: {wrong}"
    until(lambda: series(sides.decode, VERIFIED) == len(PROMPTS), "each was received, and its sums compared")
