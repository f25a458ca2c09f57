"""Two instances that each prefill for the other: full pools must not make them wait for each other for ever. And one
that prefills for itself."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from examples.launch import Server, vllm_spec
from examples.make_models import MODELS, make
from tests.support.servers.cluster import until
from tests.support.servers.pairs import Pairs
from tests.support.servers.workload import SCENARIOS, Answer, Prompt, Refused, ask, completion, series

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

FAMILY = "gqa"
BLOCKS = 20
BLOCK_TOKENS = 32
SMALL = ("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "384",
         "--no-enable-prefix-caching")  # fmt: skip
TOKENS = 10 * BLOCK_TOKENS
"""More than half of a pool, in which the first block is never used."""
LIMITS_S = (20.0, 120.0)
"""`kv_lease_limit` of the first and of the second instance: the first gives up first, and the second is served."""
PATIENCE_S = 60.0


def test_two_instances_that_wait_for_each_other_s_blocks_go_on_by_themselves(pairs: Pairs) -> None:
    pairs.end()
    here, there = pairs.servers.start(*(_spec(f"both-{i}", limit) for i, limit in enumerate(LIMITS_S)))
    try:
        mine, theirs = prompts = [prompt[:TOKENS] for prompt in SCENARIOS["concurrent"] if len(prompt) >= TOKENS][:2]
        plain = [ask(there.url, completion(FAMILY, prompt)).tokens for prompt in prompts]
        for_there, for_here = _prefill(here, mine), _prefill(there, theirs)
        with ThreadPoolExecutor(2) as pool:
            loser = pool.submit(_decode, there, mine, for_there)
            winner = pool.submit(_decode, here, theirs, for_here)
            for server in (here, there):
                until(lambda server=server: series(server, "num_requests_waiting") == 1, "each waits for the other")
            assert _ended(winner) == plain[1]
            refused = _ended(loser)
        assert isinstance(refused, Refused), f"answered {refused}"
        until(lambda: "kv_lease_limit" in there.log.read_text(errors="replace"), "decode names the reason")
        assert "kv_lease_limit" in here.log.read_text(errors="replace")
        for prompt, tokens in zip(prompts, plain, strict=True):
            assert _decode(there, prompt, _prefill(here, prompt)) == tokens
            assert _decode(here, prompt, _prefill(there, prompt)) == tokens
        assert series(here, "pd_leases_over_limit_total") == 1 and series(there, "pd_leases_over_limit_total") == 0
    finally:
        pairs.servers.stop(here, there)


def test_an_instance_answers_a_request_of_which_it_gets_both_legs(pairs: Pairs) -> None:
    pairs.end()
    [alone] = pairs.servers.start(_spec("both-alone", LIMITS_S[1]))
    try:
        prompt = next(prompt[:TOKENS] for prompt in SCENARIOS["concurrent"] if len(prompt) >= TOKENS)
        plain = ask(alone.url, completion(FAMILY, prompt)).tokens
        for _ in range(2):
            assert _decode(alone, prompt, _prefill(alone, prompt)) == plain
        until(lambda: series(alone, "pd_leases") == 0, "the leases are given back")
        assert series(alone, "pd_leases_expired_total") == 0
    finally:
        pairs.servers.stop(alone)


def _spec(name: str, limit: float) -> Any:
    extra = {"kv_lease_duration": 15.0, "kv_lease_limit": limit}
    transfer = {"kv_connector": "PDConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return vllm_spec(name, make(MODELS[FAMILY]), flags=SMALL, transfer=transfer)


def _prefill(server: Server, prompt: Prompt) -> dict[str, Any]:
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    handed = ask(server.url, completion(FAMILY, prompt, max_tokens=1, kv_transfer_params=params)).kv_transfer_params
    assert handed
    return handed


def _decode(server: Server, prompt: Prompt, params: dict[str, Any]) -> tuple[int, ...] | Refused:
    try:
        answer: Answer = ask(server.url, completion(FAMILY, prompt, kv_transfer_params=params), timeout=PATIENCE_S)
    except Refused as refused:
        return refused
    return answer.tokens


def _ended(outcome: Future[tuple[int, ...] | Refused]) -> tuple[int, ...] | Refused:
    until(outcome.done, "neither waits for the other any more", PATIENCE_S)
    return outcome.result()
