"""A defect of ours that one request meets costs that request: vLLM's engine core ends by what is raised to it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from tests.support.ports import free_port
from tests.support.scheduler.halves import (
    EMPTY_STEP,
    PROMPT,
    abort,
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
from tests.support.scheduler.push_halves import ASK, Prefill, step
from vllm_pd_connector.metadata import BadParameters, WorkerReport
from vllm_pd_connector.observability.stats import NotHeld
from vllm_pd_connector.protocol.lease import End
from vllm_pd_connector.protocol.wire import push_messages as pm
from vllm_pd_connector.scheduler import operations
from vllm_pd_connector.scheduler.half import SchedulerHalf


def owner(half: SchedulerHalf, path: str) -> Any:
    """The part of a half that has the last name of a path."""
    found: Any = half
    for name in path.split(".")[:-1]:
        found = getattr(found, name)
    return found


def damage(patch: pytest.MonkeyPatch, half: SchedulerHalf, path: str) -> None:
    patch.setattr(owner(half, path), path.rpartition(".")[2], broken)


@pytest.mark.parametrize("path", ["consumer.add", "producer.drain", "operations.arrived"])
def test_a_request_that_meets_one_when_it_arrives_fails_alone(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    params = hand_over(serving_half("kv_producer")[0])
    half, pool = make_half("kv_consumer")
    with monkeypatch.context() as patch:
        damage(patch, half, path)
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
    assert prefill.half.hand_over.not_held == {NotHeld.REFUSED: 1}


@pytest.mark.parametrize(
    "path",
    ["_blocks._pool.touch", "_blocks.hold", "_spans.held", "progress.last_step", "_server.pushes.finished"],
)
def test_of_a_prefill_that_meets_one_when_it_is_held_no_block_stays(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    half, pool = serving_half("kv_producer", kv_lease_duration=600.0)
    free = pool.get_num_free_blocks()
    request = make_request("p-1", ASK)
    half.on_new_request(request)
    with monkeypatch.context() as patch:
        damage(patch, half, f"producer.{path}")
        assert half.request_finished(request, ([5, 6, 7],)) == (False, None)
    until(lambda: freed(half) == ["p-1"], "its lease to end")
    assert pool.get_num_free_blocks() == free and half.producer.num_leases == 0
    assert hand_over(half, "p-1")["remote_request_id"] == "p-1", "the name can be used again"


@pytest.mark.parametrize("path", ["_spans.ended", "progress.went_on", "lending.ended", "_spans.given"])
def test_where_the_end_of_a_lease_meets_one_no_block_stays(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    half, pool = serving_half("kv_producer", kv_lease_duration=600.0)
    free = pool.get_num_free_blocks()
    for name in ("p-1", "p-2"):
        hand_over(half, name)
    with monkeypatch.context() as patch:
        damage(patch, half, f"producer.{path}")
        half.producer._server.drop_all(End.DROPPED)
        with contextlib.suppress(ZeroDivisionError):
            half.producer.drain()
    half.producer.drain()
    assert pool.get_num_free_blocks() == free and half.producer.num_leases == 0


def test_what_was_offered_in_a_step_that_another_prefill_breaks_can_be_taken_back(prefill: Prefill) -> None:
    half = prefill.half
    for name in ("p-1", "p-2"):
        half.on_new_request(make_request(name, ASK | {"transfer_id": name}))
    prefill.tables["p-1"] = [[5, 6, 7]]  # and of the other there is none
    step(half, p_1=(0, 40), p_2=(0, 40))
    assert half.producer.num_leases == 1
    half.producer.progress.fail("the caches are reset")
    assert half.producer.num_leases == 0


@pytest.mark.parametrize("path", ["consumer.finished", "producer.ended", "share.end"])
def test_a_prefill_that_meets_one_beside_its_end_is_handed_over(
    producer: SchedulerHalf, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    damage(monkeypatch, producer, path)
    assert hand_over(producer)["remote_request_id"] == "p-1"


def test_a_prefill_whose_end_nobody_can_be_told_of_ends(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    request = prefill.arrive(status=RequestStatus.FINISHED_ABORTED)
    damage(monkeypatch, prefill.half, "producer.abandon")
    assert prefill.half.request_finished(request, ([5, 6, 7],)) == (False, None)
    assert prefill.half.hand_over.not_held == {NotHeld.ABORTED: 1} and not prefill.half.producer._unfinished


def test_what_ends_while_it_looks_for_its_prefill_is_not_kept_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    half, _ = serving_half("kv_consumer", mode="push")
    dropped: list[str] = []
    monkeypatch.setattr(half.consumer._renewer, "drop_prefill", dropped.append)
    damage(monkeypatch, half, "consumer._searches.decline")
    sent = {"do_remote_prefill": True, "transfer_id": "t-1", "remote_engine_id": "kv_producer-0"}
    request = make_request("d-1", sent | {"remote_bootstrap_addr": f"http://127.0.0.1:{free_port()}"})
    half.on_new_request(request)
    abort(half, request)
    assert dropped == ["d-1"] and not half.consumer._receives


@pytest.mark.parametrize("path", ["hold.step", "producer.drain", "share.step"])
def test_the_orders_of_a_step_that_meets_one_are_given(
    producer: SchedulerHalf, consumer: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    half, pool = consumer
    request = make_request("d-1", hand_over(producer))
    half.on_new_request(request)
    allocate(half, pool, request)
    damage(monkeypatch, half, path)
    [receive] = half.build_metadata(EMPTY_STEP).receives
    assert receive.read is not None and half.consumer.loads("d-1", receive.attempt)


@pytest.mark.parametrize("path", ["epochs.advance", "producer.progress.advance"])
def test_of_a_step_that_meets_one_nothing_is_handed_over(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Nobody has noted with which weights its prefills begin; those of others are handed over."""
    request, answer = prefill.arrive_asked_for()
    other = make_request("p-2", ASK | {"transfer_id": "t-2"})
    prefill.half.on_new_request(other)
    prefill.tables |= {"p-1": [[5, 6, 7]], "p-2": [[8, 9, 10]]}
    with monkeypatch.context() as patch:
        damage(patch, prefill.half, path)
        met = step(prefill.half, p_1=(0, 40))
    assert met.ends_prefill and met.step < step(prefill.half, p_2=(0, 40)).step
    assert prefill.half.request_finished(request, ([5, 6, 7],)) == (False, None)
    assert answer().state is pm.PushState.FAILED and prefill.half.hand_over.not_held == {NotHeld.REFUSED: 1}
    assert prefill.half.request_finished(other, ([8, 9, 10],))[1] is not None


@pytest.mark.parametrize("path", ["producer.came_in_part", "consumer.received", "consumer._used.add", "consumer.lost"])
def test_what_has_come_for_a_request_that_meets_one_is_not_used(
    producer: SchedulerHalf, consumer: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    half, pool = consumer
    request = make_request("d-1", hand_over(producer))
    receive_of(half, pool, request)
    here: list[str] = []
    monkeypatch.setattr(operations, "compute_here", lambda _, name, *, at_once: not here.append(name))
    counts: dict[str, int] = {}
    half._manager = SimpleNamespace(  # type: ignore[assignment]
        coordinator=SimpleNamespace(single_type_managers=[SimpleNamespace(num_cached_block=counts)])
    )
    damage(monkeypatch, half, path)
    spared = {"d-1"} if path == "consumer.lost" else set[str]()
    report = WorkerReport(unshareable={"d-1": {0: 1}}, spared=spared)
    half.update_output(KVConnectorOutput(finished_recving={"d-1"}, kv_connector_worker_meta=report))
    assert here == ["d-1"]
    assert path in ("consumer.received", "consumer.lost") or not half.consumer._receives
