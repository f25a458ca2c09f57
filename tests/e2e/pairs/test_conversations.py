"""Conversations of five turns: every answer is a plain run's, and prefill computes what is new and nothing else.

Both instances compare checksums of all that they read (`verify`), so that a turn whose bytes came wrong is computed,
and shows in the count of tokens that prefill computed itself. Where ranks share a request's tokens there are no
checksums, and the answers alone show it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.launch import Server, Spec, post, router_spec, vllm_spec
from examples.make_models import MODELS, make
from tests.support.ports import free_ports
from tests.support.servers.agreement import disagreement
from tests.support.servers.cluster import PATIENCE, until
from tests.support.servers.engine import rounds_to_bfloat16
from tests.support.servers.load import vllm_router_spec
from tests.support.servers.matrix import CONTEXT_ROWS, Row
from tests.support.servers.pairs import Pairs
from tests.support.servers.workload import LOGPROBS, Answer, Prompt, Stream, ask, completion, forgets, prompts, series
from vllm_pd_connector.sidechannel.net.keys import create_keys

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

TURNS = 5
LENGTHS = (150, 40, 17, 90, 33)
"""Tokens that the client says in each turn: other lengths than blocks have."""
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
LEFT = 2
"""Tokens that prefill computes beside the new ones, at most: the last of an answer, which decode has sampled and not
computed. Of models with states it leaves the prompt's last to decode, too."""
COMMON, OTHER = 112, 20
"""Of a prompt that leaves its conversation early: what it has in common with it, and what is new."""
WHOLE = ("gqa", "mla", "mqa")
"""Families of which every prefix is held. Windows and states reach back no further than where they stand."""

MOONCAKE = {"transport": "mooncake"}
PUSH = {"mode": "push", "chunked": True}
ROWS = [
    Row("gqa"),
    Row("gqa", mode="auto", chunked=True),
    Row("gqa", **PUSH),
    Row("gqa", p_pp=2),
    Row("gqa", d_pp=2),
    Row("gqa", 2, 1, **MOONCAKE),
    Row("gqa", 1, 2, **MOONCAKE),
    Row("gqa", p_block=32, d_block=96, **MOONCAKE),
    Row("gqa", p_layout="NHD", p_block=32, d_layout="HND", d_block=64, **MOONCAKE),
    Row("gqa", 2, 1, **PUSH, **MOONCAKE),
    Row("gqa", 1, 2, p_layout="HND", p_block=48, d_layout="NHD", d_block=32, **PUSH),
    *CONTEXT_ROWS[:2],
    Row("swa"),
    Row("swa", **PUSH),
    Row("mla"),
    Row("mla", **MOONCAKE),
    Row("mla", mode="push", **MOONCAKE),
    Row("kimi"),
    Row("kimi", prefix_caching=False, **MOONCAKE),
    Row("kimi", prefix_caching=False, mode="push"),
    Row("kimi", 1, 2),
    Row("qwen3next", prefix_caching=False),
]
IN_PART = [Row("swa", p_block=128, d_block=32), Row("swa", p_block=32, d_block=128, **MOONCAKE)]
"""Of which the side with the larger blocks receives a part of the first block of a window, at most lengths."""
if transport := os.environ.get("PD_TEST_TRANSPORT"):
    ROWS = list(dict.fromkeys(replace(row, transport=transport) for row in ROWS))


def said(family: str) -> list[Prompt]:
    """What the client says in each turn."""
    return prompts(f"conversation with {family}", LENGTHS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_each_turn_reads_what_the_last_one_left(pairs: Pairs, row: Row) -> None:
    pairs.end()
    prefill, decode = pairs.servers.start(_spec(row, "p"), _spec(row, "d"))
    turns, prompt, kept, new = list[tuple[Prompt, Answer]](), Prompt(), dict[str, Any](KEEP), 0
    try:
        for words in said(row.family):
            prompt, new = (*prompt, *words), new + len(words) + LEFT
            answer, kept = _turn(prefill, decode, row.family, prompt, kept)
            assert _computed(prefill) <= new, f"turn {len(turns)}"
            turns.append((prompt, answer))
            prompt = (*prompt, *answer.tokens)
        assert series(prefill, "pd_turns_read_total") == TURNS - 1
        assert series(decode, "pd_conversations_read_total") == TURNS - 1
        assert series(prefill, "pd_turns_computed_total") == 0
        until(lambda: series(decode, "pd_conversations_held") == 1, "the last turn alone is kept")
        turns.append(_leaves_early(prefill, decode, row.family, prompt, kept))
        if not rounds_to_bfloat16(row.family):
            _streamed_by_the_router(pairs, row, prefill, decode, turns[:TURNS])
        _check(prefill, row.family, turns)
    finally:
        pairs.servers.stop(prefill, decode)


@pytest.mark.parametrize("row", IN_PART, ids=lambda row: row.id)
def test_a_window_s_block_that_came_in_part_is_handed_on_by_nobody(pairs: Pairs, row: Row) -> None:
    """Turns that would need it are computed, and the log says so; the others are read; all are right."""
    pairs.end()
    prefill, decode = pairs.servers.start(_spec(row, "p"), _spec(row, "d"))
    turns, prompt, kept = list[tuple[Prompt, Answer]](), Prompt(), dict[str, Any](KEEP)
    try:
        for words in said(row.family):
            prompt = (*prompt, *words)
            handed = ask(prefill.url, completion(row.family, prompt, max_tokens=1, kv_transfer_params=kept))
            params = handed.kv_transfer_params
            answer = ask(decode.url, completion(row.family, prompt, kv_transfer_params=params, **LOGPROBS))
            kept = answer.kv_transfer_params or KEEP
            turns.append((prompt, answer))
            prompt = (*prompt, *answer.tokens)
        read, computed = (series(prefill, f"pd_turns_{what}_total") for what in ("read", "computed"))
        assert 0 < read - computed < TURNS - 1
        assert "in part" in prefill.log.read_text() + decode.log.read_text()
        _check(prefill, row.family, turns)
    finally:
        pairs.servers.stop(prefill, decode)


def _leaves_early(
    prefill: Server, decode: Server, family: str, prompt: Prompt, kept: dict[str, Any]
) -> tuple[Prompt, Answer]:
    """A prompt that goes on from a beginning of the last turn: that is read if it is held, and all computed if not."""
    before = _computed(prefill)
    read, computed = (series(prefill, f"pd_turns_{what}_total") for what in ("read", "computed"))
    [other] = prompts("leaves early", [OTHER])
    short = (*prompt[:COMMON], *other)
    answer, _ = _turn(prefill, decode, family, short, kept)
    held = family in WHOLE
    assert series(prefill, "pd_turns_read_total") == read + held
    assert series(prefill, "pd_turns_computed_total") == computed + (not held)
    assert _computed(prefill) - before <= (OTHER if held else len(short)) + LEFT
    return short, answer


def _turn(
    prefill: Server, decode: Server, family: str, prompt: Prompt, kept: dict[str, Any]
) -> tuple[Answer, dict[str, Any]]:
    """One turn by both instances; its answer, and what decode has kept of it."""
    handed = ask(prefill.url, completion(family, prompt, max_tokens=1, kv_transfer_params=kept))
    assert handed.kv_transfer_params is not None
    request = completion(family, prompt, kv_transfer_params=handed.kv_transfer_params, **LOGPROBS)
    answer = ask(decode.url, request)
    assert answer.kv_transfer_params is not None, "decode keeps the turn"
    return answer, answer.kv_transfer_params


def _streamed_by_the_router(
    pairs: Pairs, row: Row, prefill: Server, decode: Server, turns: Sequence[tuple[Prompt, Answer]]
) -> None:
    """The same by the router, which sees streams alone, and in mode push sends both legs at once."""
    _forget(decode)
    before, read = _computed(prefill), series(prefill, "pd_turns_read_total")
    [router] = pairs.servers.start(_talking(router_spec(f"talk-{row.id}-router", [prefill.url], [decode.url])))
    try:
        new = 0
        for number, (prompt, answer) in enumerate(turns):
            with Stream(router.url, completion(row.family, prompt)) as stream:
                assert stream.tokens() == answer.tokens, f"turn {number}"
            new += LENGTHS[number] + LEFT
            assert _computed(prefill) - before <= new, f"turn {number}"
        until(lambda: series(prefill, "pd_turns_read_total") - read == TURNS - 1, "every turn was read")
    finally:
        pairs.servers.stop(router)


def _check(prefill: Server, family: str, turns: Sequence[tuple[Prompt, Answer]]) -> None:
    """Every answer is a plain run's: that of an instance without a prefix cache that is told nothing of a hand-over."""
    exact = not rounds_to_bfloat16(family)
    rights = [ask(prefill.url, completion(family, prompt, **LOGPROBS)) for prompt, _ in turns]
    found = [disagreement(right, answer, exact=exact) for right, (_, answer) in zip(rights, turns, strict=True)]
    assert found == [""] * len(turns)


def _spec(row: Row, side: str, name: str = "", more: Sequence[str] = (), **extra: Any) -> Spec:
    """Side "p" or "d" of a pair. Prefill has no prefix cache: it stands for another of several
    than the one that had the last turn."""
    model = MODELS[row.family]
    verify = "off" if max(row.p_dcp, row.d_dcp) > 1 else "all"
    ours = {"conversations": True, "verify": verify, "transport": row.transport, "mode": row.mode, **PATIENCE, **extra}
    role = "kv_producer" if side == "p" else "kv_consumer"
    alone = ["--no-enable-prefix-caching"] if side == "p" and "--enable-prefix-caching" not in more else []
    return vllm_spec(
        f"talk-{row.id}-{name or side}",
        make(model),
        flags=[*model.flags, *row.flags(side), *alone, *more],
        tp_size=row.p_tp if side == "p" else row.d_tp,
        transfer={"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": ours},
        environment={"PD_TEST_POLITE": "1", "VLLM_SERVER_DEV_MODE": "1", **model.environment, **row.environment(side)},
    )


def _talking(router: Spec) -> Spec:
    return replace(router, command=(*router.command, "--conversations", "on"))


@pytest.mark.parametrize("family", ["gqa", "kimi"])
def test_prefill_reads_behind_its_own_hits_also_of_chats(pairs: Pairs, family: str) -> None:
    """One prefill instance with a prefix cache, as in most set-ups: it has each prompt, and reads the answer. Chats
    come by the router; their prompts are made by a template, of text, and of prefill alone: decode's makes another."""
    pairs.end()
    row, other = Row(family), ["--chat-template", "{{ 'another prompt' }}"]
    prefill, decode = pairs.servers.start(
        _spec(row, "p", "caches", ["--enable-prefix-caching"]), _spec(row, "d", "untold", other)
    )
    [router] = pairs.servers.start(_talking(router_spec(f"talk-{row.id}-chats", [prefill.url], [decode.url])))
    try:
        turns, prompt, kept, new = list[tuple[Prompt, Answer]](), Prompt(), dict[str, Any](KEEP), 0
        for words in said(family):
            prompt, new = (*prompt, *words), new + len(words) + LEFT
            answer, kept = _turn(prefill, decode, family, prompt, kept)
            assert _computed(prefill) <= new, f"turn {len(turns)}"
            turns.append((prompt, answer))
            prompt = (*prompt, *answer.tokens)
        read = series(prefill, "prompt_tokens_by_source_total", 'source="external_kv_transfer"')
        assert 0 < series(prefill, "pd_turns_read_total") <= TURNS - 1
        assert 0 < read < sum(len(prompt) for prompt, _ in turns[:-1]), "the rest it had itself"
        before = series(prefill, "pd_turns_read_total")
        messages, chats = list[dict[str, str]](), list[tuple[list[dict[str, str]], str]]()
        for number in range(3):
            messages.append({"role": "user", "content": f"{number} " * 60})
            chats.append((list(messages), _chat(router, family, messages)))
            messages.append({"role": "assistant", "content": chats[-1][1]})
        if family in WHOLE:  # a state stands behind the answer, which the template brings back as other tokens
            assert series(prefill, "pd_turns_read_total") > before, "turns of chats are found again"
        _forget(prefill)
        _check(prefill, family, turns)
        for asked, answered in chats:
            _forget(prefill)
            assert _chat(prefill, family, asked) == answered
    finally:
        pairs.servers.stop(router, prefill, decode)


def _chat(server: Server, model: str, messages: Sequence[dict[str, str]]) -> str:
    body = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = post(f"{server.url}/v1/chat/completions", body, timeout=120.0)
    return str(answer["choices"][0]["message"]["content"])


def _forget(server: Server) -> None:
    """Empty a server's prefix cache; a decode instance forgets its conversations with it."""
    until(lambda: forgets(server), "every block to be free")


def _computed(server: Server) -> float:
    """Prompt tokens that an instance has computed itself."""
    return series(server, "prompt_tokens_by_source_total", 'source="local_compute"')


def test_a_turn_whose_conversation_is_gone_is_computed(pairs: Pairs) -> None:
    """Leases that ran out, blocks that others have used since, a decode instance that was killed: nothing fails, though
    that is vLLM's policy here, and nothing wrong is answered. A prefill instance that was restarted reads as ever."""
    pairs.end()
    row, servers, alone = Row("gqa"), pairs.servers, ("--no-enable-prefix-caching",)
    prefill, decode = servers.start(
        _spec(row, "p", kv_lease_duration=300.0), _spec(row, "d", "forgets", alone, conversation_lease=2.0)
    )
    try:
        turns, prompt = list[tuple[Prompt, Answer]](), Prompt()
        for words in said("gqa"):  # of the instance itself, without any transfer
            prompt = (*prompt, *words)
            turns.append((prompt, ask(prefill.url, completion("gqa", prompt))))
            prompt = (*prompt, *turns[-1][1].tokens)
        answer, kept = _turn(prefill, decode, "gqa", turns[0][0], KEEP)
        assert answer.tokens == turns[0][1].tokens
        until(lambda: series(decode, "pd_conversations_held") == 0, "the lease is over")
        for prompt, right in turns[2:]:
            assert ask(decode.url, completion("gqa", prompt)).tokens == right.tokens, "and its blocks are used"
        answer, kept = _turn(prefill, decode, "gqa", turns[1][0], kept)
        assert answer.tokens == turns[1][1].tokens
        assert series(prefill, "pd_turns_computed_total") == 1
        os.killpg(decode.process.pid, signal.SIGKILL)
        decode.process.wait()
        handed = ask(prefill.url, completion("gqa", turns[2][0], max_tokens=1, kv_transfer_params=kept))
        assert series(prefill, "pd_turns_computed_total") == 2
        servers.stop(decode)
        [decode] = servers.start(_spec(row, "d"))
        answer = ask(decode.url, completion("gqa", turns[2][0], kv_transfer_params=handed.kv_transfer_params))
        assert answer.tokens == turns[2][1].tokens and answer.kv_transfer_params is not None
        servers.stop(prefill)
        [prefill] = servers.start(_spec(row, "p", "prefill-again"))
        last, _ = _turn(prefill, decode, "gqa", turns[3][0], answer.kv_transfer_params)
        assert last.tokens == turns[3][1].tokens
        assert series(prefill, "pd_turns_read_total") == 1
        assert _computed(prefill) <= LENGTHS[3] + LEFT
    finally:
        servers.stop(prefill, decode)


CHATS = 2


def test_several_instances_and_engines_with_keys_behind_the_router(pairs: Pairs, tmp_path: Path) -> None:
    """Two prefill and two decode instances, one of which has two data-parallel engines, all with keys. Streams: each
    turn is read, whichever prefill instance has it. vLLM's own router, which tells nothing of them, is served as ever.
    Then the decode instance that holds a conversation is killed."""
    pairs.end()
    row, servers = Row("gqa"), pairs.servers
    create_keys(tmp_path / "keys", "all")
    keys = {"side_channel_keys": str(tmp_path / "keys")}
    engines = ("--data-parallel-size", "2")
    prefills = servers.start(*(_spec(row, "p", f"p{i}", **keys) for i in range(2)))
    decodes = servers.start(
        _spec(row, "d", "d0", engines, side_channel_port=free_ports(range(2)), **keys), _spec(row, "d", "d1", **keys)
    )
    [router] = servers.start(
        _talking(router_spec("talk-several-router", [p.url for p in prefills], [d.url for d in decodes]))
    )
    words = [prompts(f"chat {chat}", LENGTHS) for chat in range(CHATS)]
    known: list[Prompt] = [()] * CHATS
    turns: list[tuple[Prompt, Answer]] = []

    def turn(number: int) -> None:
        for chat in range(CHATS):
            prompt = (*known[chat], *words[chat][number])
            with Stream(router.url, completion("gqa", prompt)) as stream:
                tokens = stream.tokens()
            turns.append((prompt, Answer(tokens, None)))
            known[chat] = (*prompt, *tokens)

    try:
        for number in range(TURNS - 1):
            turn(number)
            new = CHATS * sum(LENGTHS[: number + 1]) + len(turns) * LEFT
            assert sum(map(_computed, prefills)) <= new, f"turn {number}"
        read = sum(series(prefill, "pd_turns_read_total") for prefill in prefills)
        assert read == CHATS * (TURNS - 2)
        assert sum(series(decode, "pd_conversations_kept_total") for decode in decodes) == len(turns)
        _by_vllm_router(pairs, prefills, decodes, turns[: 2 * CHATS])
        victim = max(decodes, key=lambda decode: series(decode, "pd_conversations_kept_total"))
        os.killpg(victim.process.pid, signal.SIGKILL)
        victim.process.wait()
        turn(TURNS - 1)
        _check(prefills[0], "gqa", turns)
    finally:
        servers.stop(router, *prefills, *decodes)


def _by_vllm_router(
    pairs: Pairs, prefills: Sequence[Server], decodes: Sequence[Server], turns: Sequence[tuple[Prompt, Answer]]
) -> None:
    """The same turns again: decode keeps each, and nobody comes for it."""
    read = sum(series(prefill, "pd_turns_read_total") for prefill in prefills)
    kept = sum(series(decode, "pd_conversations_kept_total") for decode in decodes)
    [router] = pairs.servers.start(vllm_router_spec("talk-several-vllm-router", prefills, decodes))
    try:
        for number, (prompt, answer) in enumerate(turns):
            assert ask(router.url, completion("gqa", prompt)).tokens == answer.tokens, f"turn {number}"
    finally:
        pairs.servers.stop(router)
    kept += len(turns)
    until(lambda: sum(series(decode, "pd_conversations_kept_total") for decode in decodes) == kept, "each is kept")
    assert sum(series(prefill, "pd_turns_read_total") for prefill in prefills) == read
