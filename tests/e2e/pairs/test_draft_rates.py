"""Drafters with caches of their own on both sides: tokens are the plain run's, and as many drafts are accepted.

A stale page of the drafter's changes no token, since the target checks every draft; it shows in what is accepted, and
nowhere else. The drafter is an EAGLE head whose drafts are often right (`make_eagle`). Three prefill instances, which
draft no token, one and three, and two decode instances, which read and are written into, meet in every combination.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import pytest

from examples.launch import Server, Servers, Spec, vllm_spec
from examples.make_models import EAGLE_TARGET, make, make_eagle
from tests.support.servers.pairs import ROOT
from tests.support.servers.workload import Prompt, ask, completion, prompts

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

COUNTERS = re.compile(r"^vllm:spec_decode_num_(draft|accepted)_tokens_total\{[^}]*\} (\S+)$", re.MULTILINE)
PROMPTS = prompts("drafts", (33, 100, 257, 700, 1900))
CHUNK_TOKENS = 512
LEAST_RATE = 0.3
DRAFTED = 3
"""Tokens that every instance but one drafts. Where only the last token of a prompt is left to compute, vLLM pads that
step with as many drafts that are none (`Scheduler.schedule`, "Pad new decode requests"), and counts them: a decode
instance has them once per prompt, a plain one never."""


class Drafts(NamedTuple):
    """Tokens that were drafted, and those of them that the target took."""

    drafted: int
    accepted: int


def drafts(server: Server) -> Drafts:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        found = {name: int(float(value)) for name, value in COUNTERS.findall(answer.read().decode())}
    return Drafts(found["draft"], found["accepted"])


def spec(name: str, tokens: int, role: str = "", mode: str = "") -> Spec:
    eagle = {"method": "eagle", "model": str(make_eagle()), "num_speculative_tokens": tokens}
    flags = ["--max-num-batched-tokens", str(CHUNK_TOKENS), "--no-enable-prefix-caching"]
    flags += ["--speculative-config", json.dumps(eagle)] if tokens else []
    options = {"mode": mode, "verify": "all"}
    transfer = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": options} if role else None
    return vllm_spec(name, make(EAGLE_TARGET), flags=flags, transfer=transfer, environment={"PD_TEST_POLITE": "1"})


class Fleet(NamedTuple):
    """`expected` is what the plain instance, which drafts three tokens, has answered, and its drafts."""

    prefill: dict[int, Server]
    decode: dict[str, Server]
    expected: dict[Prompt, tuple[int, ...]]
    drafts: Drafts


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Servers(ROOT / "out" / "e2e" / "drafts") as servers:
        [plain] = servers.start(spec("plain", DRAFTED))
        expected = {prompt: ask(plain.url, completion("llama", prompt)).tokens for prompt in PROMPTS}
        found = drafts(plain)
        servers.stop(plain)
        none, one, three, reads, written = servers.start(
            spec("prefill-0", 0, "kv_producer", "push"),
            spec("prefill-1", 1, "kv_producer", "push"),
            spec("prefill-3", 3, "kv_producer", "push"),
            spec("decode-reads", DRAFTED, "kv_consumer", "pull"),
            spec("decode-is-written", DRAFTED, "kv_consumer", "push"),
        )
        yield Fleet({0: none, 1: one, 3: three}, {"pull": reads, "push": written}, expected, found)


def hand_over(fleet: Fleet, tokens: int, mode: str) -> Drafts:
    """All prompts from the prefill instance that drafts so many tokens to a decode instance, and what that drafted."""
    prefill, decode = fleet.prefill[tokens], fleet.decode[mode]
    before = drafts(decode)
    for prompt, expected in fleet.expected.items():
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        first = ask(prefill.url, completion("llama", prompt, max_tokens=1, kv_transfer_params=asked))
        answer = ask(decode.url, completion("llama", prompt, kv_transfer_params=first.kv_transfer_params))
        assert answer.tokens == expected
    after = drafts(decode)
    found = Drafts(after.drafted - before.drafted, after.accepted - before.accepted)
    print(f"P {tokens}, D {DRAFTED}, {mode}: {found}; plain: {fleet.drafts}")
    return found


@pytest.mark.parametrize(("tokens", "mode"), list(product((1, 3), ("pull", "push"))))
def test_as_many_drafts_are_accepted_as_by_a_plain_instance(fleet: Fleet, tokens: int, mode: str) -> None:
    found = hand_over(fleet, tokens, mode)
    assert found.accepted == fleet.drafts.accepted
    assert found.drafted == fleet.drafts.drafted + DRAFTED * len(fleet.expected)
    assert fleet.drafts.accepted > LEAST_RATE * fleet.drafts.drafted


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_decode_may_draft_alone_and_its_drafter_has_not_seen_the_prompt(fleet: Fleet, mode: str) -> None:
    found = hand_over(fleet, 0, mode)
    assert 0 <= found.accepted < fleet.drafts.accepted < found.drafted
