"""Decode requests that reach an instance which only prefills, or which prefilled for them itself, through vLLM's own
scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.support.scheduler.engines import KEEP, Engine, given_back, prefilled, transfer
from tests.support.scheduler.push_halves import concurrent
from vllm_pd_connector.metadata import BadParameters

PROMPT = list(range(40))
LONG_S = 600.0
"""A lease that only a message ends within a test."""


def served_here(both: Engine, *names: str) -> None:
    """These requests end as they should, nothing is loaded for them, and nothing stays held."""
    both.run(*names)
    assert {both.ended(name).finish_reason for name in names} == {FinishReason.LENGTH}
    assert not any(told.receives for told in both.told)
    given_back(both)


@pytest.mark.parametrize("extra", [{}, {"mode": "push"}, {"mode": "auto"}], ids=["pull", "push", "auto"])
def test_a_decode_request_for_another_role_is_refused_and_given_back(engine: Any, extra: dict[str, str]) -> None:
    """vLLM keeps blocks of aborted requests back for consumers alone, while a step in flight may still write them."""
    source, wrong = engine(transfer("kv_producer", **extra)), engine(transfer("kv_producer", **extra), blocks=10)
    params = prefilled(source, "p-1", PROMPT)
    wrong.add("other", range(500, 640), max_tokens=4)
    wrong.step()
    asks = wrong.add("d-1", PROMPT, params)
    wrong.step()
    assert asks.status is RequestStatus.WAITING, "there is no room beside the other"
    given_back(source)
    wrong.scheduler.finish_requests("other", RequestStatus.FINISHED_ABORTED)
    for _ in range(3):
        wrong.step()
    receive = wrong.receive_of("d-1")
    assert isinstance(receive.source, BadParameters), "it would be read into blocks that a step in flight writes"
    assert "kv_role: kv_producer here" in receive.source.reason
    wrong.step(failed={"d-1"})
    wrong.rest()
    assert wrong.ended("d-1").finish_reason is FinishReason.ERROR
    wrong.check_empty()


@pytest.mark.parametrize("extra", [{}, {"mode": "push"}, {"mode": "auto"}], ids=["pull", "push", "auto"])
@pytest.mark.parametrize("more", [[], [5]], ids=["its prompt", "a longer one"])
def test_an_instance_that_prefilled_for_itself_loads_nothing_and_gives_its_lease_back(
    engine: Any, extra: dict[str, str], more: list[int]
) -> None:
    """Its workers cannot link themselves; what was prefilled is in vLLM's prefix cache, or is computed again."""
    both = engine(transfer("kv_both", kv_lease_duration=LONG_S, **extra))
    params = prefilled(both, "p-1", PROMPT)
    both.add("d-1", [*PROMPT, *more], params)
    served_here(both, "d-1")
    assert sum(step.get("d-1", 0) for step in both.scheduled) < len(PROMPT), "the prefix cache has it"


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_both_legs_that_are_sent_at_once_to_one_instance_are_computed(engine: Any, first: str) -> None:
    both = engine(transfer("kv_both", kv_lease_duration=LONG_S, mode="push"))
    home = both.connector.scheduler.producer.home
    names_itself = concurrent(home.port, remote_engine_id=home.engine_id, transfer_id="t-1")
    legs = [("p-1", {**KEEP, "transfer_id": "t-1"}, 1), ("d-1", names_itself, 4)]
    for name, params, tokens in legs if first == "prefill" else reversed(legs):
        both.add(name, PROMPT, params, max_tokens=tokens)
        both.step()
    served_here(both, "p-1", "d-1")
