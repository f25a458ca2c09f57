"""A defect of ours that one request meets costs that request: vLLM's engine core ends by what is raised to it."""

from __future__ import annotations

import pytest

from tests.support.scheduler.halves import broken, hand_over, make_half, make_request, receive_of, serving_half
from tests.support.scheduler.push_halves import Prefill
from vllm_pd_connector.metadata import BadParameters
from vllm_pd_connector.observability.stats import NotHeld
from vllm_pd_connector.protocol.wire import push_messages as pm


def test_a_request_that_meets_one_when_it_arrives_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    params = hand_over(serving_half("kv_producer")[0])
    half, pool = make_half("kv_consumer")
    with monkeypatch.context() as patch:
        patch.setattr(half.consumer, "add", broken)
        receive = receive_of(half, pool, make_request("d-1", params))
    assert isinstance(receive.source, BadParameters) and "ZeroDivisionError: a defect" in receive.source.reason
    assert not isinstance(receive_of(half, pool, make_request("d-2", params)).source, BadParameters)


def test_a_prefill_that_meets_one_when_it_ends_hands_nothing_over(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, answer = prefill.arrive_asked_for()
    monkeypatch.setattr(prefill.half.producer, "hold", broken)
    assert prefill.half.request_finished(request, ([5, 6, 7],)) == (False, None)
    reply = answer()
    assert (reply.state, reply.terminal) == (pm.PushState.FAILED, True) and "a defect" in reply.reason
    assert prefill.half._not_held == {NotHeld.REFUSED: 1}
