"""What is not handed over and what is refused counts by its reason, so that each leads to what is to be done."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import RequestStatus

from tests.support.scheduler.halves import (
    EMPTY_STEP,
    TOKEN,
    allocate,
    hand_over,
    make_half,
    make_request,
    receive_of,
    serving_half,
)
from vllm_pd_connector.metadata import BadParameters, Refusal
from vllm_pd_connector.observability.stats import FailureKind, PDStats
from vllm_pd_connector.scheduler import operations
from vllm_pd_connector.scheduler.half import SchedulerHalf
from vllm_pd_connector.sidechannel.net.keys import create_secret

PREFILL = {"do_remote_decode": True}
Consumer = tuple[SchedulerHalf, BlockPool]


def end(half: SchedulerHalf, params: Any, request_id: str = "p-1", **changes: Any) -> Any:
    """A prefill ends; what the router gets of it."""
    request = make_request(request_id, params, **changes)
    half.on_new_request(request)
    return half.request_finished(request, ([5],))[1]


def counted(half: SchedulerHalf) -> dict[str, int]:
    """By reason, the prefills that were not held since the last call."""
    stats = half.stats()
    assert stats is None or isinstance(stats, PDStats)
    return dict(stats.data["not_held"]) if stats is not None else {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": RequestStatus.FINISHED_ABORTED}, "aborted"),
        ({"status": RequestStatus.FINISHED_ERROR}, "ended"),
        ({"params": {**PREFILL, "surprise": 1}}, "refused"),
        ({"request_id": "x" * 1000}, "refused"),
    ],
    ids=["aborted", "with an error", "an unknown field", "a name too long"],
)
def test_a_prefill_that_is_not_held_counts_once(producer: SchedulerHalf, changes: dict[str, Any], reason: str) -> None:
    assert end(producer, **{"params": PREFILL, **changes}) is None
    assert counted(producer) == {reason: 1} and counted(producer) == {}


def test_what_is_held_or_is_no_prefill_for_another_does_not_count(producer: SchedulerHalf) -> None:
    hand_over(producer)
    end(producer, None, "x")
    assert counted(producer) == {}


def test_a_prompt_that_is_computed_though_it_came_for_caches_counts(producer: SchedulerHalf) -> None:
    half, pool = make_half("kv_consumer")
    half.stats()
    params = hand_over(producer, "cmpl-a-0-0123abcd")
    for name in ("cmpl-a-1-89abcdef", "cmpl-a-2-89abcdef", "resp_x_1-0123abcd"):
        half.on_new_request(make_request(name, params))
    stats = half.stats()
    assert stats is not None and stats.data["computed_here"] == {"batch": 2, "used": 1}
    receive_of(half, pool, make_request("cmpl-a-0-89abcdef", params))
    stats = half.stats()
    assert stats is None or not stats.data["computed_here"], "each once, and what is loaded not at all"


def test_so_does_one_of_which_the_caches_had_come_when_the_weights_changed(
    producer: SchedulerHalf, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, _ = consumer
    monkeypatch.setattr(operations, "compute_here", lambda _scheduler, name, *, at_once: name == "d-1")
    half.operations._compute_here({"d-1", "gone"}, at_once=False)
    stats = half.stats()
    assert stats is not None and stats.data["computed_here"] == {"outdated": 1}


def test_a_prefill_at_a_decode_instance_counts_for_its_role(consumer: Consumer) -> None:
    half, _ = consumer
    half.serve([b"manifest"], [TOKEN])
    assert end(half, PREFILL) is None and counted(half) == {"role": 1}


def test_weights_without_a_name_are_shown_and_what_is_not_held_for_them(producer: SchedulerHalf) -> None:
    stats = producer.stats()
    assert stats is not None and stats.data["gauges"]["weights unnamed"] == 0
    producer.epochs.own.changing()
    for name in ("p-1", "p-2"):
        assert end(producer, PREFILL, name) is None
    stats = producer.stats()
    assert stats is not None and stats.data["not_held"] == {"weights": 2}
    assert stats.data["gauges"]["weights unnamed"] == 1
    producer.epochs.own.named("v2")
    hand_over(producer, "p-3")
    stats = producer.stats()
    assert stats is not None and not stats.data["not_held"] and stats.data["gauges"]["weights unnamed"] == 0


def refused_for(receive: Any) -> Refusal:
    assert isinstance(receive.source, BadParameters)
    return receive.source.kind


def test_every_refusal_is_a_kind_of_failure() -> None:
    assert {refusal.value for refusal in Refusal} <= {kind.value for kind in FailureKind}


def test_malformed_parameters_are_refused_as_such(producer: SchedulerHalf, consumer: Consumer) -> None:
    half, pool = consumer
    request = make_request("d-1", hand_over(producer) | {"remote_host": ""})
    assert refused_for(receive_of(half, pool, request)) is Refusal.BAD_PARAMETERS


def test_an_instance_that_is_not_trusted_is_told_from_malformed_parameters(
    producer: SchedulerHalf, consumer: Consumer
) -> None:
    half, pool = consumer
    request = make_request("d-1", hand_over(producer) | {"remote_host": "10.9.8.7"})
    assert refused_for(receive_of(half, pool, request)) is Refusal.NOT_TRUSTED


def test_so_are_parameters_without_a_good_signature(producer: SchedulerHalf, tmp_path: Any) -> None:
    create_secret(tmp_path / "params.secret")
    half, pool = make_half("kv_consumer", params_secret=str(tmp_path / "params.secret"))
    assert refused_for(receive_of(half, pool, make_request("d-1", hand_over(producer)))) is Refusal.NOT_TRUSTED


def test_so_is_a_concurrent_hand_off_that_nobody_can_sign(tmp_path: Any) -> None:
    create_secret(tmp_path / "params.secret")
    half, pool = serving_half("kv_consumer", mode="push", params_secret=str(tmp_path / "params.secret"))
    params = {
        "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "t-1", "remote_engine_id": "p-0",
        "remote_host": "127.0.0.1", "remote_port": 5600,
    }  # fmt: skip
    assert refused_for(receive_of(half, pool, make_request("d-1", params))) is Refusal.NOT_TRUSTED


def test_weights_without_a_name_refuse_what_comes_for_them(producer: SchedulerHalf, consumer: Consumer) -> None:
    half, pool = consumer
    half.epochs.own.changing()
    receive = receive_of(half, pool, make_request("d-1", hand_over(producer)))
    assert refused_for(receive) is Refusal.WEIGHTS and "not named yet" in receive.source.reason


def test_what_an_adapter_s_change_makes_void_is_told_from_other_weights(
    producer: SchedulerHalf, consumer: Consumer
) -> None:
    half, pool = consumer
    request = make_request("d-1", hand_over(producer))
    half.on_new_request(request)
    half.consumer.outdate("lora_request: adapter 'a' was loaded in place", {"d-1"})
    allocate(half, pool, request)
    [receive] = half.build_metadata(EMPTY_STEP).receives
    assert refused_for(receive) is Refusal.WITHDRAWN
