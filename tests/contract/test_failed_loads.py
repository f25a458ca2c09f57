"""Loads that fail, through vLLM's own scheduler: who asked hears of it once, and nobody gets what did not come.

What vLLM's tests of failed loads intend (`test_kv_load_failure_recovery.py`, `test_error_propagation.py`,
`test_invalid_blocks_correctness.py`, `test_cache_pollution_prevention.py`), for a connector that loads asynchronously
and reports failures per request, as it must where caches have several groups.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.support.scheduler import talks
from tests.support.scheduler.engines import (
    BLOCK,
    FULL,
    KEEP,
    STATES,
    WINDOWED,
    given_back,
    loading,
    prefilled,
    read,
    transfer,
)
from tests.support.scheduler.halves import broken
from vllm_pd_connector.compat.blocks import drop_other_params
from vllm_pd_connector.metadata import BadParameters, WorkerReport
from vllm_pd_connector.protocol.lease import End

PROMPT = list(range(40))
GROUPS = pytest.mark.parametrize(
    "groups", [(FULL,), (FULL, WINDOWED), (FULL, STATES)], ids=["full", "window", "states"]
)


@GROUPS
def test_the_client_of_a_failed_load_hears_of_an_error_and_others_go_on(engine: Any, groups: Any) -> None:
    prefill, decode = engine("kv_producer", groups=groups), engine("kv_consumer", groups=groups)
    other = [*PROMPT[::-1], 3]
    loading(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    loading(decode, "d-2", other, prefilled(prefill, "p-2", other))
    decode.add("plain", PROMPT[::-2], max_tokens=20)
    decode.step()
    decode.step(received={"d-2"}, failed={"d-1"})
    assert decode.ended("d-1").finish_reason is FinishReason.ERROR
    decode.run("d-2", "plain")
    assert decode.ended("d-2").finish_reason is decode.ended("plain").finish_reason is FinishReason.LENGTH
    decode.check_empty()


@GROUPS
def test_nothing_of_a_failed_load_is_found_by_the_next_request(engine: Any, groups: Any) -> None:
    prefill, decode = engine("kv_producer", groups=groups), engine("kv_consumer", groups=groups)
    loading(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    decode.step(failed={"d-1"})
    decode.check_empty()
    assert decode.shared([*PROMPT, 0]) == 0
    assert all(block.block_hash is None for block in decode.pool.blocks)


def test_blocks_that_a_failed_load_may_still_write_are_given_to_nobody(engine: Any) -> None:
    """The failure comes first, the end of the last transfer later; vLLM frees the request at the first."""
    prefill, decode = engine("kv_producer"), engine("kv_consumer", blocks=9)
    loading(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    suspect = {block.block_id for block in decode.blocks_of("d-1")}
    decode.step(failed={"d-1"}, report=WorkerReport(quarantined={"d-1": 1}))
    decode.rest()
    assert not decode.scheduler.requests and decode.held() == len(suspect)
    decode.add("plain", PROMPT[::-1], max_tokens=30)
    decode.step()
    assert not suspect & {block.block_id for block in decode.blocks_of("plain")}
    decode.run("plain")
    decode.step(report=WorkerReport(drained={"d-1": 1}))
    decode.check_empty()


def test_what_a_second_failed_load_of_one_name_may_still_write_is_given_to_nobody(engine: Any) -> None:
    prefill, decode = engine("kv_producer"), engine("kv_consumer", blocks=12)
    suspect: set[int] = set()
    for lease in ("p-1", "p-2"):
        loading(decode, "d-1", PROMPT, prefilled(prefill, lease, PROMPT))
        suspect |= {block.block_id for block in decode.blocks_of("d-1")}
        decode.step(failed={"d-1"}, report=WorkerReport(quarantined={"d-1": 1}))
        decode.rest()
    assert decode.held() == len(suspect) == 6
    decode.step(report=WorkerReport(drained={"d-1": 1}))
    decode.add("plain", PROMPT[::-1])
    decode.step()
    assert not suspect & {block.block_id for block in decode.blocks_of("plain")}, "one of them may still write"
    decode.run("plain")
    decode.step(report=WorkerReport(drained={"d-1": 1}))
    decode.check_empty()


def test_a_failed_load_whose_client_left_meanwhile_is_freed_once(engine: Any) -> None:
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    loading(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    decode.step()
    decode.scheduler.finish_requests("d-1", RequestStatus.FINISHED_ABORTED)
    decode.step(failed={"d-1"}, report=WorkerReport(quarantined={"d-1": 1}))
    decode.rest()
    assert decode.held() == 3
    decode.step(report=WorkerReport(drained={"d-1": 1}))
    decode.check_empty()


@GROUPS
def test_with_the_policy_recompute_a_failed_load_is_computed_here(engine: Any, groups: Any) -> None:
    prefill = engine("kv_producer", groups=groups)
    decode = engine("kv_consumer", groups=groups, policy="recompute")
    loading(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    decode.step()
    decode.step(failed={"d-1"})
    assert decode.step().num_scheduled_tokens == {"d-1": len(PROMPT)}
    decode.run("d-1")
    assert decode.ended("d-1").finish_reason is FinishReason.LENGTH
    assert sum(len(told.receives) for told in decode.told) == 1, "it is not loaded again"
    if STATES not in groups:  # of states vLLM keeps those at the ends of steps
        assert decode.shared([*PROMPT, 0]) == 2 * BLOCK, "and shared as what was computed here"
    decode.check_empty()


def test_with_the_policy_recompute_nothing_is_computed_into_blocks_that_may_still_be_written(engine: Any) -> None:
    prefill, decode = engine("kv_producer"), engine("kv_consumer", policy="recompute")
    loading(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    suspect = {block.block_id for block in decode.blocks_of("d-1")}
    decode.step()
    decode.step(failed={"d-1"}, report=WorkerReport(quarantined={"d-1": 1}))
    assert decode.step().num_scheduled_tokens == {"d-1": len(PROMPT)}
    assert not suspect & {block.block_id for block in decode.blocks_of("d-1")}
    decode.run("d-1")
    decode.step(report=WorkerReport(drained={"d-1": 1}))
    decode.check_empty()


@pytest.mark.parametrize("params", [{"do_remote_prefill": True}, {"do_remote_prefill": True, "remote_block_ids": "x"}])
def test_parameters_that_lead_nowhere_fail_the_request_and_not_the_engine(engine: Any, params: Any) -> None:
    decode = engine("kv_consumer")
    loading(decode, "d-1", PROMPT, params)
    assert isinstance(decode.receive_of("d-1").source, BadParameters)
    decode.step(failed={"d-1"})
    assert decode.ended("d-1").finish_reason is FinishReason.ERROR
    decode.check_empty()


LARGER = (replace(FULL, block_size=2 * BLOCK), replace(STATES, block_size=2 * BLOCK))
UNEQUAL = (FULL, replace(WINDOWED, block_size=2 * BLOCK))
NOWHERE = {"do_remote_prefill": True}


@pytest.mark.parametrize(
    "groups",
    [(FULL,), (FULL, WINDOWED), (FULL, STATES), LARGER, UNEQUAL],
    ids=["full", "window", "states", "larger", "unequal"],
)
@pytest.mark.parametrize("length", [10, 3 * BLOCK, 100, 111])
@pytest.mark.parametrize("before", [0, BLOCK, 40, 49, 100], ids="{} tokens found at most".format)
def test_a_refused_request_takes_one_block_and_is_never_computed(
    engine: Any, groups: Any, length: int, before: int
) -> None:
    """Whatever of its prompt is cached, also where a hit ends inside a block, which vLLM prefers to as little more."""
    block = max(group.block_size for group in groups)
    decode = engine("kv_consumer", groups=groups, block=block, hash_block=BLOCK)
    prompt = list(range(length))
    if before:
        decode.add("before", [*prompt[:before], *range(500, 510)], max_tokens=1)
        decode.run("before")
        decode.rest()
    found = decode.shared(prompt)
    bad = loading(decode, "bad", prompt, NOWHERE)
    took = decode.receive_of("bad").stop
    assert found < bad.num_computed_tokens and 0 < took <= block
    assert decode.held() <= sum(-(-bad.num_computed_tokens // group.block_size) + 1 for group in groups)
    decode.step()
    decode.step(failed={"bad"})
    assert decode.ended("bad").finish_reason is FinishReason.ERROR
    assert not any("bad" in step for step in decode.scheduled)
    decode.check_empty()


def test_refused_requests_leave_in_the_prefix_cache_what_is_there(engine: Any) -> None:
    decode = engine("kv_consumer", blocks=16)
    cached = list(range(1000, 1000 + 12 * BLOCK))
    decode.add("before", cached, max_tokens=1)
    decode.run("before")
    for number in range(3):
        loading(decode, f"bad-{number}", list(range(number, number + 10 * BLOCK)), NOWHERE)
        decode.step()
        decode.step(failed={f"bad-{number}"})
    assert decode.shared([*cached, 0]) == len(cached)


def test_a_refused_request_that_vllm_admits_for_its_whole_prompt_gets_room_for_that(engine: Any) -> None:
    """Else it would wait at the head of the queue for ever (`scheduler_reserve_full_isl`)."""
    prefill = engine(transfer("kv_producer", **talks.ON))
    decode = engine(transfer("kv_consumer", **talks.ON), blocks=8)
    talks.first_turn(prefill, decode)
    loading(decode, "bad", list(range(1000, 1000 + 6 * BLOCK)), NOWHERE)
    assert not decode.connector.scheduler.producer.lending.num_held
    decode.step()
    decode.step(failed={"bad"})
    decode.check_empty()


def test_a_read_after_the_lease_has_ended_is_told_so(engine: Any) -> None:
    """The verdict is what the decode worker makes a failure of."""
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    loading(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    prefill.connector.scheduler.producer._server.drop("p-1")
    assert not read(decode.receive_of("d-1"))
    decode.step()
    decode.step(failed={"d-1"})
    decode.check_empty()
    given_back(prefill)


@pytest.mark.parametrize("params", ["x", 5, 0.5, [1]])
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_parameters_that_are_no_object_fail_their_request_alone(engine: Any, role: str, params: Any) -> None:
    """A client's `vllm_xargs` can have them; vLLM asks them for a key when its connector has heard of the request."""
    one = engine(role)
    bad = one.add("bad", PROMPT, params)
    assert not bad.sampling_params.extra_args, "another connector would look for them there"
    again = one.add("again", PROMPT, params)  # as another choice of it, whose parameters are the same object
    again.sampling_params.extra_args = shared = {"kv_transfer_params": params}
    drop_other_params(SimpleNamespace(kv_transfer_params=params, sampling_params=again.sampling_params))
    assert shared == {"kv_transfer_params": params} == again.sampling_params.extra_args
    one.scheduler.finish_requests("again", RequestStatus.FINISHED_ABORTED)
    one.add("plain", PROMPT[::-1])
    one.step()
    source = one.receive_of("bad").source
    assert isinstance(source, BadParameters) and "expected an object" in source.reason
    one.step(failed={"bad"})
    one.run("bad", "plain")
    assert one.ended("bad").finish_reason is FinishReason.ERROR
    assert one.ended("plain").finish_reason is FinishReason.LENGTH
    one.check_empty()


def test_a_prefill_that_ends_while_a_part_of_it_is_computed_again_is_not_handed_over(engine: Any) -> None:
    """Another connector failed to load for a step while the last one was under way, whose token ends the request: vLLM
    computes that part again in blocks that nobody waits for."""
    prefill = engine("kv_producer", policy="recompute", step_tokens=BLOCK)
    prompt = list(range(2 * BLOCK))
    prefill.add("p-1", prompt, KEEP, max_tokens=1)
    if prefill.overlapping:
        prefill.step()
    prefill.step(invalid={prefill.blocks_of("p-1")[0].block_id} if prefill.overlapping else {1})
    prefill.run("p-1")
    params = prefill.ended("p-1").kv_transfer_params
    assert (params is None) == prefill.overlapping, "without overlapping steps all of it was computed again before"
    if params is not None:
        prefill.connector.scheduler.producer.end_leases(End.DROPPED)
    prefill.check_empty()


@pytest.mark.parametrize("engine", [True], ids=["overlapping steps"], indirect=True)  # else all is computed before
def test_of_a_prefill_that_ends_with_its_blocks_given_back_nothing_stays(engine: Any) -> None:
    """As above, and the step that would compute it again has no room for it: it ends without a block."""
    prefill = engine(transfer("kv_producer", mode="push"), policy="recompute", step_tokens=BLOCK)
    prefill.add("p-1", list(range(2 * BLOCK)), KEEP, max_tokens=1)
    prefill.step()
    prefill.step(invalid={prefill.blocks_of("p-1")[0].block_id})
    prefill.scheduler.max_num_scheduled_tokens = 0
    prefill.step()
    prefill.scheduler.max_num_scheduled_tokens = BLOCK
    assert prefill.ended("p-1").kv_transfer_params is None
    prefill.rest()
    producer = prefill.connector.scheduler.producer
    assert not producer.progress._running and not producer._server.pushes._table._rendezvous._prefills
    prefill.check_empty()


@pytest.mark.parametrize("refused", [{"transfer_id": 5}, {}], ids=["for its name", "for a defect"])
def test_a_refused_prefill_that_is_computed_all_the_same_is_not_handed_over(
    engine: Any, monkeypatch: pytest.MonkeyPatch, refused: dict[str, Any]
) -> None:
    """Under `recompute`: with which weights it began, and what it will lease, nobody has noted."""
    prefill = engine("kv_producer", policy="recompute")
    if not refused:
        monkeypatch.setattr(prefill.connector.scheduler.producer._tables, "follow", broken)
    prefill.add("p-1", PROMPT, KEEP | refused, max_tokens=1)
    prefill.step()
    prefill.step(failed={"p-1"})
    prefill.run("p-1")
    assert prefill.ended("p-1").finish_reason is FinishReason.LENGTH
    assert prefill.ended("p-1").kv_transfer_params is None
    prefill.check_empty()


def test_nothing_is_kept_of_a_refused_decode_request_that_is_computed_all_the_same(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = engine("kv_producer"), engine(transfer("kv_consumer", conversations=True), policy="recompute")
    for name, whole in (("d-1", True), ("d-2", False)):
        params = prefilled(prefill, name, PROMPT)
        with monkeypatch.context() as patch:
            if not whole:
                patch.setattr(decode.connector.scheduler.consumer, "add", broken)
            loading(decode, name, PROMPT, params)
        decode.step(failed={name})
        decode.run(name)
        assert (decode.ended(name).kv_transfer_params is not None) == whole


@pytest.mark.parametrize("broken_part", ["turns", "sources"], ids=["before it gets blocks", "when it gets blocks"])
def test_a_turn_that_meets_a_defect_is_computed_whatever_the_policy(
    engine: Any, monkeypatch: pytest.MonkeyPatch, broken_part: str
) -> None:
    prefill, decode = talks.both(engine)
    params = talks.first_turn(prefill, decode)
    consumer = prefill.connector.scheduler.consumer
    if broken_part == "turns":
        monkeypatch.setattr(consumer.turns, "may_read", broken)
        talks.computed(prefill, "p-2", talks.next_prompt(), params)
    else:
        monkeypatch.setattr(consumer.sources, "from_here", broken)
        request = talks.turn(prefill, "p-2", talks.next_prompt(), params)
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS and prefill.receive_of("p-2").spare
        prefill.step(received={"p-2"}, report=WorkerReport(spared={"p-2"}))
        prefill.run("p-2")
        assert talks.told(prefill, "p-2") is not None
    assert not consumer._receives
    given_back(decode)
