"""Convolution states where one side drafts alone: decode may, and answers as a plain instance; prefill may not.

GDN, of which alone vLLM's CPU kernels know taps for draft tokens. N-grams of eight tokens hardly repeat in the eight
that are asked for, so decode drafts nothing itself: it would compute wrong on CPUs (`_spec_forward` of vLLM 0.32 loses
inputs where fewer tokens are drafted than fit), without us, too. But vLLM pads each first step with drafts that are
none, and so that step reads what was received as one with drafts does.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from examples.launch import Server, Servers, Spec, vllm_spec
from examples.make_models import MODELS, make
from tests.support.servers.agreement import disagreement
from tests.support.servers.pairs import ROOT
from tests.support.servers.workload import LOGPROBS, Answer, Prompt, Refused, ask, completion, prompts

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

MODEL = MODELS["qwen3next"]
PROMPTS = prompts("drafting states", (2, 33, 300, 700))
TOKENS = 8
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": TOKENS, "prompt_lookup_max": TOKENS}
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}


def spec(name: str, role: str = "", mode: str = "", *, drafts: bool = False) -> Spec:
    flags = [*MODEL.flags, "--no-enable-prefix-caching"]
    flags += ["--speculative-config", json.dumps(DRAFTS)] if drafts else []
    options = {"mode": mode, "verify": "all"}
    transfer = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": options} if role else None
    return vllm_spec(
        name, make(MODEL), flags=flags, transfer=transfer, environment={"PD_TEST_POLITE": "1", **MODEL.environment}
    )


class Fleet(NamedTuple):
    servers: Servers
    prefill: Server
    expected: dict[Prompt, Answer]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Servers(ROOT / "out" / "e2e" / "drafting-states") as servers:
        [plain] = servers.start(spec("plain"))
        with urllib.request.urlopen(f"{plain.url}/version", timeout=30) as answer:
            if not json.load(answer)["version"].startswith("0.32."):
                pytest.skip("of this vLLM the kernels were not read: such pairs are refused")
        expected = {
            prompt: ask(plain.url, completion(MODEL.name, prompt, max_tokens=TOKENS, **LOGPROBS)) for prompt in PROMPTS
        }
        servers.stop(plain)
        [prefill] = servers.start(spec("prefill", "kv_producer", "push"))
        yield Fleet(servers, prefill, expected)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_decode_may_draft_alone(fleet: Fleet, mode: str) -> None:
    [decode] = fleet.servers.start(spec(f"decode-{mode}", "kv_consumer", mode, drafts=True))
    try:
        for prompt, expected in fleet.expected.items():
            first = ask(fleet.prefill.url, completion(MODEL.name, prompt, max_tokens=1, kv_transfer_params=KEEP))
            asked = completion(
                MODEL.name, prompt, max_tokens=TOKENS, kv_transfer_params=first.kv_transfer_params, **LOGPROBS
            )
            answer = ask(decode.url, asked)
            assert disagreement(expected, answer, exact=False) == "", f"{len(prompt)} tokens"
    finally:
        fleet.servers.stop(decode)


def test_prefill_may_not_draft_alone(fleet: Fleet) -> None:
    prefill, decode = fleet.servers.start(
        spec("prefill-drafts", "kv_producer", "push", drafts=True), spec("decode-plain", "kv_consumer", "pull")
    )
    try:
        first = ask(prefill.url, completion(MODEL.name, PROMPTS[1], max_tokens=1, kv_transfer_params=KEEP))
        with pytest.raises(Refused) as refused:
            ask(decode.url, completion(MODEL.name, PROMPTS[1], kv_transfer_params=first.kv_transfer_params))
        said = refused.value.body + decode.log.read_text(errors="replace")
        assert "tap 3 here" in said and "tap 5 there" in said and "fewer on prefill than on decode" in said
        assert ask(decode.url, completion(MODEL.name, PROMPTS[1], max_tokens=1)).tokens
    finally:
        fleet.servers.stop(prefill, decode)
