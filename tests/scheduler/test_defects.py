"""A defect of ours that one request meets costs that request: vLLM's engine core ends by what is raised to it."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput

from tests.support.scheduler.halves import (
    EMPTY_STEP,
    PROMPT,
    allocate,
    broken,
    freed,
    hand_over,
    make_half,
    make_request,
    receive_of,
    serving_half,
    until,
)
from tests.support.scheduler.push_halves import Prefill
from vllm_pd_connector.metadata import BadParameters
from vllm_pd_connector.observability.stats import NotHeld
from vllm_pd_connector.protocol.wire import push_messages as pm
from vllm_pd_connector.scheduler.half import SchedulerHalf


def owner(half: SchedulerHalf, path: str) -> Any:
    """The part of a half that has the last name of a path."""
    found: Any = half
    for name in path.split(".")[:-1]:
        found = getattr(found, name)
    return found


def damage(patch: pytest.MonkeyPatch, half: SchedulerHalf, path: str) -> None:
    patch.setattr(owner(half, path), path.rpartition(".")[2], broken)


def test_a_request_that_meets_one_when_it_arrives_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    params = hand_over(serving_half("kv_producer")[0])
    half, pool = make_half("kv_consumer")
    with monkeypatch.context() as patch:
        patch.setattr(half.consumer, "add", broken)
        receive = receive_of(half, pool, make_request("d-1", params))
    assert isinstance(receive.source, BadParameters) and "ZeroDivisionError: a defect" in receive.source.reason
    assert not isinstance(receive_of(half, pool, make_request("d-2", params)).source, BadParameters)


def test_one_that_is_met_while_room_is_made_keeps_no_request_from_its_caches(
    producer: SchedulerHalf, consumer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, pool = consumer
    damage(monkeypatch, half, "producer.make_room")
    damage(monkeypatch, half, "share.admits")
    assert not isinstance(receive_of(half, pool, make_request("d-1", hand_over(producer))).source, BadParameters)


@pytest.mark.parametrize(
    "path", ["consumer.sources.prefilled_tokens", "beside.end_before", "consumer.sources.from_here"]
)
def test_a_request_that_meets_one_before_it_loads_fails_alone_and_gives_its_lease_back(
    producer: SchedulerHalf, consumer: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Also where it has its blocks: vLLM waits for a report of them."""
    half, pool = consumer
    request = make_request("d-1", hand_over(producer))
    half.on_new_request(request)
    with monkeypatch.context() as patch:
        damage(patch, half, path)
        assert allocate(half, pool, request)[0] == len(PROMPT)
    [receive] = half.build_metadata(EMPTY_STEP).receives
    assert isinstance(receive.source, BadParameters) and "ZeroDivisionError: a defect" in receive.source.reason
    assert (receive.blocks, receive.stop, receive.spare) == ((), len(PROMPT), False)
    assert half.consumer.loads("d-1", receive.attempt)
    until(lambda: freed(producer) == ["p-1"], "the lease to be given back")
    half.update_output(KVConnectorOutput(finished_recving={"d-1"}, failed_recving={"d-1"}))
    assert not half.consumer._receives


def test_a_request_that_meets_one_where_nothing_is_loaded_is_computed_and_gives_its_lease_back(
    producer: SchedulerHalf, consumer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, pool = consumer
    request = make_request("d-1", hand_over(producer))
    half.on_new_request(request)
    damage(monkeypatch, half, "consumer._used.add")
    assert allocate(half, pool, request, computed=len(PROMPT) - 1)[0] == 0
    assert half.build_metadata(EMPTY_STEP).receives == [] and not half.consumer._receives
    until(lambda: freed(producer) == ["p-1"], "the lease to be given back")


def test_a_prefill_that_meets_one_when_it_ends_hands_nothing_over(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, answer = prefill.arrive_asked_for()
    monkeypatch.setattr(prefill.half.producer, "hold", broken)
    assert prefill.half.request_finished(request, ([5, 6, 7],)) == (False, None)
    reply = answer()
    assert (reply.state, reply.terminal) == (pm.PushState.FAILED, True) and "a defect" in reply.reason
    assert prefill.half._not_held == {NotHeld.REFUSED: 1}
