"""Conversations of five turns: every answer is a plain run's, and prefill computes what is new and nothing else.

Both instances compare checksums of all that they read (`verify`), so that a turn whose bytes came wrong is computed,
and shows in the count of tokens that prefill computed itself.
"""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from dataclasses import replace
from typing import Any

import pytest

from examples.launch import Server, Spec, router_spec, vllm_spec
from examples.make_models import MODELS, make
from tests.support.servers.agreement import disagreement
from tests.support.servers.cluster import PATIENCE, until
from tests.support.servers.engine import rounds_to_bfloat16
from tests.support.servers.matrix import HYBRID_BLOCKS, HYBRIDS
from tests.support.servers.pairs import Pairs
from tests.support.servers.workload import LOGPROBS, OUTPUT_TOKENS, Answer, Prompt, Stream, ask, completion, prompts

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

FAMILIES = ("gqa", "mla", "kimi", "qwen3next")
TURNS = 5
SAID = {family: prompts(f"conversation with {family}", (150, 40, 17, 90, 33)) for family in FAMILIES}
"""What the client says in each turn: other lengths than blocks have."""
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
LEFT = 2
"""Tokens that prefill computes beside the new ones, at most: the last of an answer, which decode has sampled and not
computed. Of models with states it leaves the prompt's last to decode, too."""


@pytest.mark.parametrize("family", FAMILIES)
def test_each_turn_reads_what_the_last_one_left(pairs: Pairs, family: str) -> None:
    pairs.end()
    exact = not rounds_to_bfloat16(family)
    prefill, decode = pairs.servers.start(
        _spec(family, "prefill", "kv_producer", flags=("--no-enable-prefix-caching",)),
        _spec(family, "decode", "kv_consumer"),
    )
    turns, prompt, kept = list[tuple[Prompt, Answer]](), Prompt(), dict[str, Any](KEEP)
    try:
        for number, said in enumerate(SAID[family]):
            prompt, before = (*prompt, *said), _computed(prefill)
            handed = ask(prefill.url, completion(family, prompt, max_tokens=1, kv_transfer_params=kept))
            assert handed.kv_transfer_params is not None
            request = completion(family, prompt, kv_transfer_params=handed.kv_transfer_params, **LOGPROBS)
            answer = ask(decode.url, request)
            assert answer.kv_transfer_params is not None, "decode keeps the turn"
            assert _computed(prefill) - before <= len(said) + LEFT, f"turn {number}"
            turns.append((prompt, answer))
            prompt, kept = (*prompt, *answer.tokens), answer.kv_transfer_params
        assert _series(prefill, "pd_turns_read_total") == TURNS - 1
        assert _series(decode, "pd_conversations_read_total") == TURNS - 1
        assert _series(prefill, "pd_turns_computed_total") == 0
        until(lambda: _series(decode, "pd_conversations_held") == 1, "the last turn alone is kept")
        if exact:
            streamed = [(prompt, answer.tokens) for prompt, answer in turns]
            _streamed_by_the_router(pairs, family, prefill, decode, streamed)
    finally:
        pairs.servers.stop(prefill, decode)
    [plain] = pairs.servers.start(_spec(family, "plain", None))
    try:
        rights = [ask(plain.url, completion(family, prompt, **LOGPROBS)) for prompt, _ in turns]
    finally:
        pairs.servers.stop(plain)
    found = [disagreement(right, answer, exact=exact) for right, (_, answer) in zip(rights, turns, strict=True)]
    assert found == [""] * TURNS


def _streamed_by_the_router(
    pairs: Pairs, family: str, prefill: Server, decode: Server, turns: list[tuple[Prompt, tuple[int, ...]]]
) -> None:
    """The same by the router, which sees streams alone."""
    spec = router_spec(f"talk-{family}-router", [prefill.url], [decode.url])
    [router] = pairs.servers.start(replace(spec, command=(*spec.command, "--conversations", "on")))
    try:
        for number, (prompt, tokens) in enumerate(turns):
            before = _computed(prefill)
            with Stream(router.url, completion(family, prompt)) as stream:
                assert stream.tokens() == tokens, f"turn {number}"
            new = len(SAID[family][number])
            assert _computed(prefill) - before <= new + LEFT, f"turn {number}"
        assert _series(prefill, "pd_turns_read_total") == 2 * (TURNS - 1)
    finally:
        pairs.servers.stop(router)


def _spec(family: str, name: str, role: str | None, flags: tuple[str, ...] = (), **extra: Any) -> Spec:
    model = MODELS[family]
    ours = {"conversations": True, "verify": "all", **PATIENCE, **extra}
    blocks = ["--num-gpu-blocks-override", str(HYBRID_BLOCKS)] if family in HYBRIDS else []
    return vllm_spec(
        f"talk-{family}-{name}",
        make(model),
        flags=[*model.flags, "--block-size", str(model.block_size), *blocks, *flags],
        transfer=None
        if role is None
        else {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": ours},
        environment={"PD_TEST_POLITE": "1", **model.environment},
    )


def _conversation(server: Server, family: str) -> list[tuple[Prompt, tuple[int, ...]]]:
    """Each turn's prompt and its right answer."""
    turns: list[tuple[Prompt, tuple[int, ...]]] = []
    prompt: Prompt = ()
    for said in SAID[family]:
        prompt = (*prompt, *said)
        tokens = ask(server.url, completion(family, prompt)).tokens
        assert len(tokens) == OUTPUT_TOKENS
        turns.append((prompt, tokens))
        prompt = (*prompt, *tokens)
    return turns


def _series(server: Server, name: str, labels: str = "") -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        page = answer.read().decode()
    return sum(map(float, re.findall(rf"^vllm:{name}\{{[^}}]*{labels}[^}}]*\}} (\S+)$", page, re.MULTILINE)))


def _computed(server: Server) -> float:
    """Prompt tokens that an instance has computed itself."""
    return _series(server, "prompt_tokens_by_source_total", 'source="local_compute"')


def test_a_turn_whose_conversation_is_gone_is_computed(pairs: Pairs) -> None:
    """Leases that ran out, blocks that others have used since, a decode instance that was killed: nothing fails, though
    that is vLLM's policy here, and nothing wrong is answered. A prefill instance that was restarted reads as ever."""
    pairs.end()
    family, servers = "gqa", pairs.servers
    alone = ("--no-enable-prefix-caching",)
    prefill, decode = servers.start(
        _spec(family, "prefill", "kv_producer", alone, kv_lease_duration=300.0),
        _spec(family, "forgets", "kv_consumer", alone, conversation_lease=2.0),
    )
    try:
        turns = _conversation(prefill, family)  # of the instance itself, without any transfer
        kept = _turn(prefill, decode, family, *turns[0], KEEP)
        until(lambda: _series(decode, "pd_conversations_held") == 0, "the lease is over")
        for prompt, tokens in turns[2:]:
            assert ask(decode.url, completion(family, prompt)).tokens == tokens, "and its blocks are used"
        kept = _turn(prefill, decode, family, *turns[1], kept)
        assert _series(prefill, "pd_turns_computed_total") == 1
        os.killpg(decode.process.pid, signal.SIGKILL)
        decode.process.wait()
        handed = ask(prefill.url, completion(family, turns[2][0], max_tokens=1, kv_transfer_params=kept))
        assert _series(prefill, "pd_turns_computed_total") == 2
        servers.stop(decode)
        [decode] = servers.start(_spec(family, "decode", "kv_consumer"))
        assert handed.kv_transfer_params is not None
        answer = ask(decode.url, completion(family, turns[2][0], kv_transfer_params=handed.kv_transfer_params))
        assert answer.tokens == turns[2][1] and answer.kv_transfer_params is not None
        servers.stop(prefill)
        [prefill] = servers.start(_spec(family, "prefill-again", "kv_producer", alone))
        _turn(prefill, decode, family, *turns[3], answer.kv_transfer_params)
        assert _series(prefill, "pd_turns_read_total") == 1
        assert _computed(prefill) <= len(SAID[family][3]) + LEFT
    finally:
        servers.stop(prefill, decode)


def _turn(
    prefill: Server, decode: Server, family: str, prompt: Prompt, tokens: tuple[int, ...], kept: dict[str, Any]
) -> dict[str, Any]:
    """One turn by both instances, answered rightly; what decode has kept of it."""
    handed = ask(prefill.url, completion(family, prompt, max_tokens=1, kv_transfer_params=kept))
    answer = ask(decode.url, completion(family, prompt, kv_transfer_params=handed.kv_transfer_params))
    assert answer.tokens == tokens
    assert answer.kv_transfer_params is not None
    return answer.kv_transfer_params
