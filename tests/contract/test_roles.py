"""Decode requests that reach an instance which only prefills, through vLLM's own scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.support.scheduler.engines import given_back, prefilled, transfer
from vllm_pd_connector.metadata import BadParameters

PROMPT = list(range(40))


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
