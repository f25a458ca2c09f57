"""Drafters with caches of their own on both sides: tokens are the plain run's, and as many drafts are accepted.

A stale page of the drafter's changes no token, since the target checks every draft; it shows in what is accepted, and
nowhere else. The drafters' drafts are often right (`examples/make_drafters.py`). Per drafter prefill instances
that draft no token, one or three and two decode instances, which read and are written into, meet in every combination.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import pytest

from examples.launch import Server, Servers, Spec, vllm_spec
from examples.make_drafters import DEEPSEEK, EAGLE_TARGET, MIMO, make_eagle, make_eagle3
from examples.make_models import Model, make
from tests.support.servers.pairs import ROOT
from tests.support.servers.workload import Prompt, ask, completion, prompts

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

COUNTERS = re.compile(r"^vllm:spec_decode_num_(draft|accepted)_tokens_total\{[^}]*\} (\S+)$", re.MULTILINE)
PROMPTS = prompts("drafts", (33, 100, 257, 700, 1900))
CHUNK_TOKENS = 512
LEAST_RATE = 0.2
DRAFTED = 3
"""Tokens that every instance but one drafts. Where only the last token of a prompt is left to compute, vLLM pads that
step with as many drafts that are none (`Scheduler.schedule`, "Pad new decode requests"), and counts them: a decode
instance has them once per prompt, a plain one never."""


class Drafter(NamedTuple):
    """The served model, what speculates for it (`--speculative-config` without the number of tokens), and how many
    tokens the prefill instances draft."""

    model: Model
    settings: Callable[[], Mapping[str, Any]]
    prefills: tuple[int, ...]


DRAFTERS = {
    "eagle": Drafter(EAGLE_TARGET, lambda: {"method": "eagle", "model": str(make_eagle())}, (0, 1, 3)),
    "eagle3": Drafter(EAGLE_TARGET, lambda: {"method": "eagle3", "model": str(make_eagle3())}, (1,)),
    "mtp": Drafter(MIMO, lambda: {"method": "mtp"}, (0, 1)),
    "mtp-of-latents": Drafter(DEEPSEEK, lambda: {"method": "mtp"}, (1,)),
}


class Drafts(NamedTuple):
    """Tokens that were drafted, and those of them that the target took."""

    drafted: int
    accepted: int


def drafts(server: Server) -> Drafts:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        found = {name: int(float(value)) for name, value in COUNTERS.findall(answer.read().decode())}
    return Drafts(found["draft"], found["accepted"])


def spec(drafter: Drafter, name: str, tokens: int, role: str = "", mode: str = "") -> Spec:
    model = drafter.model
    speculates = {**drafter.settings(), "num_speculative_tokens": tokens}
    flags = [*model.flags, "--max-num-batched-tokens", str(CHUNK_TOKENS), "--no-enable-prefix-caching"]
    flags += ["--speculative-config", json.dumps(speculates)] if tokens else []
    options = {"mode": mode, "verify": "all"}
    transfer = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": options} if role else None
    environment = {"PD_TEST_POLITE": "1", **model.environment}
    return vllm_spec(name, make(model), flags=flags, transfer=transfer, environment=environment)


class Fleet(NamedTuple):
    """`expected` is what the plain instance, which drafts three tokens, has answered, and its drafts."""

    model: Model
    prefill: dict[int, Server]
    decode: dict[str, Server]
    expected: dict[Prompt, tuple[int, ...]]
    drafts: Drafts


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    drafter = DRAFTERS[request.param]
    with Servers(ROOT / "out" / "e2e" / "drafts" / request.param) as servers:
        [plain] = servers.start(spec(drafter, "plain", DRAFTED))
        expected = {prompt: ask(plain.url, completion(drafter.model.name, prompt)).tokens for prompt in PROMPTS}
        found = drafts(plain)
        servers.stop(plain)
        *prefill, reads, written = servers.start(
            *(spec(drafter, f"prefill-{tokens}", tokens, "kv_producer", "push") for tokens in drafter.prefills),
            spec(drafter, "decode-reads", DRAFTED, "kv_consumer", "pull"),
            spec(drafter, "decode-is-written", DRAFTED, "kv_consumer", "push"),
        )
        decode = {"pull": reads, "push": written}
        yield Fleet(drafter.model, dict(zip(drafter.prefills, prefill, strict=True)), decode, expected, found)


def hand_over(fleet: Fleet, tokens: int, mode: str) -> Drafts:
    """All prompts from the prefill instance that drafts so many tokens to a decode instance, and what that drafted."""
    prefill, decode = fleet.prefill[tokens], fleet.decode[mode]
    before = drafts(decode)
    for prompt, expected in fleet.expected.items():
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        first = ask(prefill.url, completion(fleet.model.name, prompt, max_tokens=1, kv_transfer_params=asked))
        answer = ask(decode.url, completion(fleet.model.name, prompt, kv_transfer_params=first.kv_transfer_params))
        assert answer.tokens == expected
    after = drafts(decode)
    found = Drafts(after.drafted - before.drafted, after.accepted - before.accepted)
    print(f"P {tokens}, D {DRAFTED}, {mode}: {found}; plain: {fleet.drafts}")
    return found


def cases(alone: bool) -> list[tuple[str, int, str]]:
    """Drafter, tokens that the prefill drafts and mode; in those of the decode side `alone` that is none."""
    found = [(name, tokens) for name, one in DRAFTERS.items() for tokens in one.prefills if (not tokens) == alone]
    return [(*one, mode) for one, mode in product(found, ("pull", "push"))]


@pytest.mark.parametrize(("fleet", "tokens", "mode"), cases(alone=False), indirect=["fleet"], scope="module")
def test_as_many_drafts_are_accepted_as_by_a_plain_instance(fleet: Fleet, tokens: int, mode: str) -> None:
    found = hand_over(fleet, tokens, mode)
    assert found.accepted == fleet.drafts.accepted
    assert found.drafted == fleet.drafts.drafted + DRAFTED * len(fleet.expected)
    assert fleet.drafts.accepted > LEAST_RATE * fleet.drafts.drafted


@pytest.mark.parametrize(("fleet", "tokens", "mode"), cases(alone=True), indirect=["fleet"], scope="module")
def test_decode_may_draft_alone_and_its_drafter_has_not_seen_the_prompt(fleet: Fleet, tokens: int, mode: str) -> None:
    found = hand_over(fleet, tokens, mode)
    assert 0 <= found.accepted < fleet.drafts.accepted < found.drafted
