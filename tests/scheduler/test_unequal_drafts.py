"""Sides that draft unequally: how many tokens prefill leaves is its own affair, if the model goes on from the rest."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks

from tests.support.scheduler.halves import BLOCK, EMPTY_STEP, FULL, PROMPT, TOKEN, WINDOW, make_half, new_prompt
from tests.support.scheduler.push_halves import ASK, Prefill
from vllm_pd_connector.compat.blocks import prompt_digest
from vllm_pd_connector.metadata import BadParameters
from vllm_pd_connector.protocol.wire import push_messages as pm
from vllm_pd_connector.scheduler.half import SchedulerHalf

WINDOWS = (FULL, WINDOW)
Side = tuple[SchedulerHalf, BlockPool, int]


def side(role: str, drafts: int, spec: tuple[Any, ...], **changes: Any) -> Side:
    """A half with so many draft modules, each of which looks ahead of the one before; one is any other drafter."""
    speculative = SimpleNamespace(method="mtp") if drafts else None
    half, pool = make_half(role, lookahead=drafts, spec=spec, speculative=speculative, **changes)
    half.serve([b"manifest"], [TOKEN])
    return half, pool, len(spec)


def handed_over(there: Side, here: Side, prompt: list[int] = PROMPT) -> int:
    """How many tokens of a prompt the one side computes and the other loads."""
    (prefill, _, groups), (decode, pool, own) = there, here
    request = new_prompt("p-1", {"do_remote_decode": True}, prompt)
    prefill.on_new_request(request)
    request.num_computed_tokens = request.num_prompt_tokens
    count = -(-request.num_prompt_tokens // BLOCK)
    _, params = prefill.request_finished(request, tuple([10 * i + 1 + b for b in range(count)] for i in range(groups)))
    wanted = new_prompt("d-1", json.loads(json.dumps(params)), prompt)
    decode.on_new_request(wanted)
    tokens, _ = decode.num_matched_tokens(wanted, 0)
    assert tokens is not None
    blocks = tuple(pool.get_new_blocks(-(-len(prompt) // BLOCK)) for _ in range(own))
    decode.update_after_alloc(wanted, KVCacheBlocks(blocks), tokens)
    if tokens == 0:
        return 0
    [receive] = decode.build_metadata(EMPTY_STEP).receives
    assert not isinstance(receive.source, BadParameters), receive.source.reason
    assert receive.stop == tokens == request.num_prompt_tokens
    return int(receive.stop)


@pytest.mark.parametrize(
    ("spec", "there", "here", "left"),
    [
        (WINDOWS, 0, 3, 1),
        (WINDOWS, 1, 3, 1),
        (WINDOWS, 2, 3, 1),
        (WINDOWS, 3, 3, 2),
        (WINDOWS, 3, 2, 2),
        (WINDOWS, 3, 0, 2),
        ((FULL,), 0, 3, 0),
        ((FULL,), 2, 3, 1),
        ((FULL,), 3, 3, 2),
        ((FULL,), 3, 0, 2),
    ],
)
def test_prefill_leaves_what_its_own_draft_modules_look_ahead_to_and_decode_takes_it(
    spec: tuple[Any, ...], there: int, here: int, left: int
) -> None:
    """Step-3.5 drafts by three modules, on one side or both. What a drafter's caches lack decides which drafts are
    right; with equal numbers they lack nothing."""
    prefill, decode = side("kv_producer", there, spec), side("kv_consumer", here, spec)
    assert handed_over(prefill, decode) == len(PROMPT) - left


@pytest.mark.parametrize(("here", "loaded"), [(0, 1), (2, 1), (3, 0)])
def test_of_a_prompt_that_is_not_longer_its_first_token_is_prefilled(here: int, loaded: int) -> None:
    """It stayed whole, and a side without these modules has to compute its last token."""
    prefill, decode = side("kv_producer", 3, WINDOWS), side("kv_consumer", here, WINDOWS)
    assert handed_over(prefill, decode, [7, 8]) == loaded


@pytest.mark.parametrize(("there", "left"), [(0, 0), (1, 1)])
def test_windows_of_a_drafter_alone_take_no_token_from_decode(there: int, left: int) -> None:
    """One that drafts with it prefills for it; one that does not has the whole prompt."""
    prefill = side("kv_producer", there, WINDOWS if there else (FULL,), layers=1)
    assert handed_over(prefill, side("kv_consumer", 1, WINDOWS, layers=1)) == len(PROMPT) - left


@pytest.mark.parametrize("prefill", [{"spec": WINDOWS}], indirect=True)
def test_who_asks_before_the_answer_is_told_to_draft_as_many(prefill: Prefill) -> None:
    """Where a router sends both legs at once decode says how long the prefill is, by its own drafter."""
    request = new_prompt("p-1", ASK, PROMPT)
    prefill.half.on_new_request(request)
    stop = len(PROMPT) - 2
    reply = prefill.register(prompt_digest(request, stop), stop)()
    assert reply.state is pm.PushState.FAILED and "draft equally many tokens by it" in reply.reason
    assert f"({len(PROMPT) - 1} tokens" in reply.reason and f"({stop} tokens" in reply.reason
