"""Instances whose caches vLLM groups otherwise: decode drafts beside a model with windows, which makes other groups.

Layers are matched by name. The bytes are compared by the instances themselves, the token that follows the prompt with a
plain instance's: later ones vLLM computes wrong on CPUs, where layers with windows check drafts, without us, too.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from examples.launch import Server, Servers, Spec, vllm_spec
from examples.make_drafters import ONE_LAYER
from examples.make_models import MODELS, make
from tests.support.ports import free_port
from tests.support.servers.cluster import until
from tests.support.servers.matrix import DRAFTS
from tests.support.servers.pairs import ROOT
from tests.support.servers.workload import VERIFIED, Prompt, ask, completion, prompts, series

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

PROMPTS = prompts("groups", (2, 33, 100, 700))


def spec(name: str, role: str = "", mode: str = "", *, drafts: bool = False, port: int = 0) -> Spec:
    flags = ["--no-enable-prefix-caching"]
    if drafts:
        flags += ["--speculative-config", json.dumps(DRAFTS | {"model": str(make(ONE_LAYER))})]
    options = {"mode": mode, "verify": "all"} | ({"side_channel_port": port} if port else {})
    transfer = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": options} if role else None
    return vllm_spec(name, make(MODELS["swa"]), flags=flags, transfer=transfer, environment={"PD_TEST_POLITE": "1"})


class Fleet(NamedTuple):
    prefill: Server
    decode: dict[str, Server]
    groups: int
    expected: dict[Prompt, tuple[int, ...]]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Servers(ROOT / "out" / "e2e" / "groups") as servers:
        [plain] = servers.start(spec("plain"))
        expected = {prompt: ask(plain.url, completion("swa", prompt, max_tokens=1)).tokens for prompt in PROMPTS}
        servers.stop(plain)
        port = free_port()
        prefill, reads, written = servers.start(
            spec("prefill", "kv_producer", "push"),
            spec("decode-reads", "kv_consumer", "pull", drafts=True),
            spec("decode-is-written", "kv_consumer", "push", drafts=True, port=port),
        )
        yield Fleet(prefill, {"pull": reads, "push": written}, groups(port), expected)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_what_is_brought_is_what_the_prefill_instance_has(fleet: Fleet, mode: str) -> None:
    received = series(fleet.decode[mode], VERIFIED)
    for prompt, expected in fleet.expected.items():
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        first = ask(fleet.prefill.url, completion("swa", prompt, max_tokens=1, kv_transfer_params=asked))
        params = first.kv_transfer_params
        answer = ask(fleet.decode[mode].url, completion("swa", prompt, max_tokens=1, kv_transfer_params=params))
        assert answer.tokens == expected, f"{len(prompt)} tokens"
        assert len(params["remote_block_ids"]) != fleet.groups, "the case is none"
    wanted = received + len(fleet.expected)
    until(lambda: series(fleet.decode[mode], VERIFIED) == wanted, "each was received, and its sums compared")


def groups(port: int) -> int:
    """How many KV-cache groups the instance with a side channel there has."""
    saved = ROOT / "out" / "e2e" / "groups" / "manifests.json"
    command = [ROOT / ".venv" / "bin" / "vllm-pd", "manifest", f"tcp://127.0.0.1:{port}", "-o", saved]
    subprocess.run(command, check=True, capture_output=True)
    return len(json.loads(saved.read_text())[0]["groups"])
