"""Caches in fp8 on real servers: unequal blocks, read and written, give a plain fp8 instance's tokens.

vLLM's CPU attention has fp8 caches on processors with AVX-512 alone; on others there is nothing to run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from examples.launch import Server, Servers, Spec, vllm_spec
from examples.make_models import MODELS, make
from tests.support.servers.pairs import ROOT
from tests.support.servers.workload import Prompt, ask, completion, prompts

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.matrix,
    pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM has no fp8 caches on this processor"),
]

PROMPTS = prompts("fp8", (2, 33, 100, 700))


def spec(name: str, block: int, role: str = "", mode: str = "", dtype: str = "fp8") -> Spec:
    flags = ["--kv-cache-dtype", dtype, "--block-size", str(block), "--no-enable-prefix-caching"]
    options = {"mode": mode, "verify": "all"}
    transfer = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": options} if role else None
    return vllm_spec(name, make(MODELS["gqa"]), flags=flags, transfer=transfer, environment={"PD_TEST_POLITE": "1"})


class Fleet(NamedTuple):
    prefill: Server
    decode: dict[str, Server]
    expected: dict[Prompt, tuple[int, ...]]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Servers(ROOT / "out" / "e2e" / "fp8") as servers:
        [plain] = servers.start(spec("plain", 32))
        expected = {prompt: ask(plain.url, completion("gqa", prompt)).tokens for prompt in PROMPTS}
        servers.stop(plain)
        prefill, reads, written = servers.start(
            spec("prefill", 64, "kv_producer", "push"),
            spec("decode-reads", 32, "kv_consumer", "pull"),
            spec("decode-is-written", 64, "kv_consumer", "push"),
        )
        yield Fleet(prefill, {"pull": reads, "push": written}, expected)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_tokens_are_those_of_a_plain_fp8_instance(fleet: Fleet, mode: str) -> None:
    for prompt, expected in fleet.expected.items():
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        first = ask(fleet.prefill.url, completion("gqa", prompt, max_tokens=1, kv_transfer_params=asked))
        answer = ask(fleet.decode[mode].url, completion("gqa", prompt, kv_transfer_params=first.kv_transfer_params))
        assert answer.tokens == expected, f"{len(prompt)} tokens"
