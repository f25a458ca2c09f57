"""Caches in fp8 on real servers: unequal blocks and layouts, read and written, give a plain fp8 instance's tokens.

vLLM's CPU attention has fp8 caches on processors with AVX-512 alone; the reference attention has them on all, in the
pages of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from examples.launch import Server, Servers, Spec, vllm_spec
from examples.make_models import MODELS, make
from tests.support.servers.cluster import until
from tests.support.servers.pairs import ROOT
from tests.support.servers.workload import VERIFIED, Prompt, ask, completion, prompts, series

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

PROMPTS = prompts("fp8", (2, 33, 100, 700))


class Pages(NamedTuple):
    """Tokens per block, and the layout of the reference attention's pages; "" is vLLM's own attention."""

    block: int
    layout: str = ""


class Setup(NamedTuple):
    prefill: Pages
    reads: Pages
    is_written: Pages


SETUPS = {
    "vllm": Setup(Pages(64), Pages(32), Pages(64)),
    "reference": Setup(Pages(48, "NHD"), Pages(32, "HND"), Pages(64, "NHD")),
}


def spec(name: str, pages: Pages, role: str = "", mode: str = "") -> Spec:
    flags = ["--kv-cache-dtype", "fp8", "--block-size", str(pages.block), "--no-enable-prefix-caching"]
    options = {"mode": mode, "verify": "all"}
    transfer = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": options} if role else None
    environment = {"PD_TEST_POLITE": "1"}
    if pages.layout:
        environment |= {"PD_TEST_REFERENCE_ATTENTION": "1", "VLLM_KV_CACHE_LAYOUT": pages.layout}
    return vllm_spec(name, make(MODELS["gqa"]), flags=flags, transfer=transfer, environment=environment)


class Fleet(NamedTuple):
    prefill: Server
    decode: dict[str, Server]
    expected: dict[Prompt, tuple[int, ...]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            "vllm",
            marks=pytest.mark.skipif(
                not torch.cpu._is_avx512_supported(), reason="vLLM's attention has no fp8 caches on this processor"
            ),
        ),
        "reference",
    ],
)
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    setup = SETUPS[request.param]
    with Servers(ROOT / "out" / "e2e" / "fp8" / request.param) as servers:
        [plain] = servers.start(spec("plain", setup.prefill))
        expected = {prompt: ask(plain.url, completion("gqa", prompt)).tokens for prompt in PROMPTS}
        servers.stop(plain)
        prefill, reads, written = servers.start(
            spec("prefill", setup.prefill, "kv_producer", "push"),
            spec("decode-reads", setup.reads, "kv_consumer", "pull"),
            spec("decode-is-written", setup.is_written, "kv_consumer", "push"),
        )
        yield Fleet(prefill, {"pull": reads, "push": written}, expected)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_tokens_are_those_of_a_plain_fp8_instance(fleet: Fleet, mode: str) -> None:
    received = series(fleet.decode[mode], VERIFIED)
    for prompt, expected in fleet.expected.items():
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        first = ask(fleet.prefill.url, completion("gqa", prompt, max_tokens=1, kv_transfer_params=asked))
        answer = ask(fleet.decode[mode].url, completion("gqa", prompt, kv_transfer_params=first.kv_transfer_params))
        assert answer.tokens == expected, f"{len(prompt)} tokens"
    wanted = received + len(fleet.expected)
    until(lambda: series(fleet.decode[mode], VERIFIED) == wanted, "each was received, and its sums compared")
