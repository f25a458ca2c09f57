"""Requests from their arrival to their last block, through vLLM's own scheduler, with and without overlapping steps.

What vLLM's tests of `test_remote_prefill_lifecycle.py` and `test_remote_decode_lifecycle.py` intend, for this
connector: a prefill is handed over whole and costs nothing once it is read; a load holds blocks that nobody finds, lets
others run, and ends as if the request had been computed here.
"""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

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
)
from tests.support.scheduler.halves import TOKEN, until
from vllm_pd_connector.compat.engine import EngineLoop
from vllm_pd_connector.metadata import WorkerReport
from vllm_pd_connector.sidechannel.bell import RECEIVED

PROMPT = list(range(40))
"""Two blocks and a half."""


@pytest.mark.parametrize("length", [40, 2 * BLOCK, BLOCK // 2], ids=["half a block", "whole blocks", "no block"])
def test_a_prompt_is_computed_there_and_continued_here(engine: Any, length: int) -> None:
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    prompt = PROMPT[:length]
    params = prefilled(prefill, "p-1", prompt)
    blocks = -(-length // BLOCK)
    assert prefill.ended("p-1").finish_reason is FinishReason.LENGTH
    assert [len(ids) for ids in params["remote_block_ids"]] == [blocks]
    prefill.rest()
    assert not prefill.scheduler.requests, "vLLM keeps no request whose blocks we keep"
    assert prefill.held() == blocks

    loading(decode, "d-1", prompt, params)
    receive = decode.receive_of("d-1")
    assert (receive.start, receive.stop) == (0, length)
    own = decode.blocks_of("d-1")
    assert [block.block_id for block in own] == list(receive.blocks[0].ids) and len(own) == blocks
    assert all(block.ref_cnt == 1 and block.block_hash is None for block in own)
    decode.step()
    assert not decode.scheduler.running, "nothing is scheduled while the caches come"
    assert read(receive)
    decode.step(received={"d-1"})
    scheduled = decode.step()
    assert scheduled.num_scheduled_tokens == {"d-1": 1}, "the last prompt token alone is computed here"
    assert [block.block_id for block in decode.blocks_of("d-1")][:blocks] == list(receive.blocks[0].ids)
    decode.run("d-1")
    assert decode.ended("d-1").finish_reason is FinishReason.LENGTH
    assert decode.shared([*prompt, 0]) == length // BLOCK * BLOCK, "what came is shared as if it was computed here"
    decode.check_empty()
    given_back(prefill)


def test_a_prefix_hit_of_the_prefill_side_is_handed_over_too(engine: Any) -> None:
    prefill = engine("kv_producer")
    prefill.add("plain", PROMPT)
    prefill.run("plain")
    prefill.add("p-1", PROMPT, KEEP, max_tokens=1)
    assert prefill.step().num_scheduled_tokens == {"p-1": len(PROMPT) - 2 * BLOCK}
    prefill.run("p-1")
    params = prefill.ended("p-1").kv_transfer_params
    assert params is not None and [len(ids) for ids in params["remote_block_ids"]] == [3]


def test_a_prefill_in_several_steps_is_handed_over_after_the_last(engine: Any) -> None:
    prefill = engine("kv_producer", step_tokens=BLOCK)
    params = prefilled(prefill, "p-1", PROMPT)
    assert [len(ids) for ids in params["remote_block_ids"]] == [3]
    assert sum(told.ends_prefill for told in prefill.told) == 1


def test_a_prefill_that_is_aborted_holds_nothing(engine: Any) -> None:
    prefill = engine("kv_producer", step_tokens=BLOCK)
    prefill.add("p-1", PROMPT, KEEP, max_tokens=1)
    prefill.step()
    prefill.scheduler.finish_requests("p-1", RequestStatus.FINISHED_ABORTED)
    prefill.rest()
    prefill.check_empty()


def test_others_run_while_a_request_loads(engine: Any) -> None:
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    params = prefilled(prefill, "p-1", PROMPT)
    decode.add("a", PROMPT[::-1], max_tokens=30)
    decode.step()
    decode.add("b", PROMPT[::-2], max_tokens=30)
    loading(decode, "d-1", PROMPT, params)
    for _ in range(3):
        assert decode.step().num_scheduled_tokens == {"a": 1, "b": 1}
    decode.step(received={"d-1"})
    assert decode.step().num_scheduled_tokens == {"a": 1, "b": 1, "d-1": 1}
    decode.run("a", "b", "d-1")
    decode.check_empty()


def having_read(engine: Any) -> Any:
    """A decode engine whose worker has read d-1, and has not said so."""
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    loading(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    decode.step()
    read(decode.receive_of("d-1"))
    return decode


def tell(decode: Any, request_id: str) -> None:
    """Every worker has rung for a receive: vLLM is told between two steps, the reports come with the next."""
    half = decode.connector.scheduler
    half._loop = EngineLoop(SimpleNamespace(input_queue=queue.Queue(), scheduler=decode.scheduler), "wake")
    half._received({request_id})


@pytest.mark.parametrize("reports", [1, 0], ids=["with its results", "later"])
def test_what_every_worker_rang_for_is_computed_in_the_next_step_and_their_reports_change_nothing(
    engine: Any, reports: int
) -> None:
    decode = having_read(engine)
    tell(decode, "d-1")
    assert decode.step(received=["d-1"] * reports).num_scheduled_tokens == {"d-1": 1}
    if not reports:
        decode.step(received=["d-1"])
    decode.run("d-1")
    assert decode.ended("d-1").finish_reason is FinishReason.LENGTH
    assert decode.shared([*PROMPT, 0]) == len(PROMPT) // BLOCK * BLOCK
    decode.check_empty()


def test_a_ring_for_an_ended_request_is_not_heard_for_another_of_its_name(engine: Any) -> None:
    """It waited in the kernel; a client may use a name again."""
    prefill, decode = engine("kv_producer"), having_read(engine)
    decode.step(received={"d-1"})
    decode.run("d-1")
    decode.rest()
    former, other = decode.receive_of("d-1").attempt, PROMPT[::-1]
    decode.told.clear()
    loading(decode, "d-1", other, prefilled(prefill, "p-2", other))
    hold, heard = decode.connector.scheduler.hold, []
    hold._loop = SimpleNamespace(wake=lambda: heard.append(hold._whole.copy()))
    hold._rung(RECEIVED + TOKEN + former + b"d-1")
    assert not heard
    hold._rung(RECEIVED + TOKEN + decode.receive_of("d-1").attempt + b"d-1")
    assert heard == [{"d-1"}]


def test_a_request_with_the_name_of_one_that_left_while_it_loaded_is_given_up_as_any_other(engine: Any) -> None:
    prefill, decode = engine("kv_producer"), having_read(engine)
    decode.scheduler.finish_requests("d-1", RequestStatus.FINISHED_ABORTED)
    decode.step(failed={"d-1"})
    decode.rest()
    loading(decode, "d-1", PROMPT, prefilled(prefill, "p-2", PROMPT))
    decode.connector.scheduler.operations.weights_changing("reload_weights")
    decode.step(received={"d-1"})
    assert decode.step().num_scheduled_tokens == {"d-1": len(PROMPT)}, "computed here"
    decode.run("d-1")


def test_a_request_with_the_name_of_one_that_left_when_it_was_told_begins_behind_the_former_s_report(
    engine: Any,
) -> None:
    """A worker that has ended both says the name once: the second would be waited for for ever."""
    prefill, decode = engine("kv_producer"), having_read(engine)
    tell(decode, "d-1")
    decode.scheduler.finish_requests("d-1", RequestStatus.FINISHED_ABORTED)
    decode.told.clear()
    loading(decode, "d-1", PROMPT[::-1], prefilled(prefill, "p-2", PROMPT[::-1]))
    assert not any(told.receives for told in decode.told)
    decode.step(received={"d-1"})
    decode.step()
    assert decode.receive_of("d-1").attempt
    decode.step(failed={"d-1"})
    decode.run("d-1")
    assert decode.ended("d-1").finish_reason is FinishReason.ERROR


def test_what_was_to_be_given_up_when_its_end_was_told_is_not_said_of_another_of_its_name(engine: Any) -> None:
    """vLLM takes aborts in the midst of a step, too, and the next is told of what every worker rang for meanwhile."""
    prefill, decode = engine("kv_producer"), having_read(engine)
    decode.scheduler.finish_requests("d-1", RequestStatus.FINISHED_ABORTED)
    tell(decode, "d-1")
    decode.told.clear()
    loading(decode, "d-1", PROMPT[::-1], prefilled(prefill, "p-2", PROMPT[::-1]))
    decode.step(received={"d-1"})
    decode.step()
    assert decode.receive_of("d-1").attempt
    assert not any(told.aborts for told in decode.told)
    decode.step(received={"d-1"})
    decode.run("d-1")


@pytest.mark.parametrize("told", ["before it ends", "when it has ended"])
def test_a_request_that_ends_beside_what_its_workers_rang_for_gives_its_blocks_back_once(
    engine: Any, told: str
) -> None:
    decode = having_read(engine)
    if told == "before it ends":
        tell(decode, "d-1")
    decode.scheduler.finish_requests("d-1", RequestStatus.FINISHED_ABORTED)
    if told == "when it has ended":
        tell(decode, "d-1")
    assert "d-1" not in decode.scheduler.requests
    decode.step(received=["d-1"])
    decode.rest()
    decode.check_empty()


def test_nobody_finds_blocks_that_are_still_to_come(engine: Any) -> None:
    """Another request with the same prompt arrives meanwhile; it is computed here."""
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    loading(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    assert decode.shared([*PROMPT, 0]) == 0
    decode.add("same", PROMPT)
    assert decode.step().num_scheduled_tokens == {"same": len(PROMPT)}
    mine, others = decode.blocks_of("d-1"), decode.blocks_of("same")
    assert not {block.block_id for block in mine} & {block.block_id for block in others}
    assert all(block.ref_cnt == 1 and block.block_hash is None for block in mine)
    decode.step(received={"d-1"})
    decode.run("d-1", "same")
    decode.check_empty()


def test_a_request_that_has_no_room_to_go_on_after_its_load_ends_all_the_same(engine: Any) -> None:
    """Both prompts fill their blocks, and one block is left: whoever comes second is preempted and computed anew."""
    prefill, decode = engine("kv_producer"), engine("kv_consumer", blocks=6)
    prompt = PROMPT[: 2 * BLOCK]
    params = prefilled(prefill, "p-1", prompt)
    decode.add("plain", prompt[::-1], max_tokens=8)
    decode.step()
    loading(decode, "d-1", prompt, params)
    assert read(decode.receive_of("d-1"))
    decode.step(received={"d-1"})
    decode.run("plain", "d-1")
    assert decode.ended("d-1").finish_reason is FinishReason.LENGTH
    assert sum(len(told.receives) for told in decode.told) == 1, "a lease is read once"
    decode.check_empty()
    given_back(prefill)


def test_a_request_that_ends_while_it_loads_keeps_its_blocks_until_the_workers_say_so(engine: Any) -> None:
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    loading(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    decode.step()
    decode.scheduler.finish_requests("d-1", RequestStatus.FINISHED_ABORTED)
    decode.rest()
    assert [told.aborts for told in decode.told if told.aborts] == [["d-1"]]
    assert decode.held() == 3, "bytes may still land there"
    decode.step(failed={"d-1"})
    decode.check_empty()
    assert decode.shared([*PROMPT, 0]) == 0


def test_a_request_that_ends_before_it_gets_blocks_gives_its_prefill_back(engine: Any) -> None:
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    decode.add("d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    decode.scheduler.finish_requests("d-1", RequestStatus.FINISHED_ABORTED)
    decode.check_empty()
    given_back(prefill)


def test_more_requests_load_than_may_run_at_once(engine: Any) -> None:
    """vLLM counts those that run; what loads meanwhile runs in its turn."""
    prefill, decode = engine("kv_producer"), engine("kv_consumer", requests=2)
    prompts = {f"d-{first}": [first, *PROMPT] for first in (100, 101, 102)}
    for name, prompt in prompts.items():
        decode.add(name, prompt, prefilled(prefill, f"p-{name}", prompt), max_tokens=20)
    decode.step()
    assert all(read(decode.receive_of(name)) for name in prompts)
    decode.step()
    decode.step(received=prompts)
    assert decode.step().num_scheduled_tokens == {"d-100": 1, "d-101": 1}
    decode.run(*prompts)
    decode.check_empty()
    given_back(prefill)


def test_what_a_step_says_to_the_workers_does_not_change_later(engine: Any) -> None:
    """vLLM pickles it for other processes; a worker in the engine core's own gets the object."""
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    before = decode.step().kv_connector_metadata
    loading(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    assert not before.receives
    before = decode.step().kv_connector_metadata
    decode.scheduler.finish_requests("d-1", RequestStatus.FINISHED_ABORTED)
    assert not before.aborts
    decode.step()
    decode.step(failed={"d-1"})


@pytest.mark.parametrize("groups", [(FULL, WINDOWED), (FULL, STATES)], ids=["window", "states"])
def test_caches_of_several_groups_are_handed_over_group_by_group(engine: Any, groups: Any) -> None:
    prefill, decode = engine("kv_producer", groups=groups), engine("kv_consumer", groups=groups)
    params = prefilled(prefill, "p-1", PROMPT)
    assert len(params["remote_block_ids"]) == 2
    loading(decode, "d-1", PROMPT, params)
    receive = decode.receive_of("d-1")
    assert read(receive)
    decode.step(received={"d-1"})
    scheduled = decode.step().num_scheduled_tokens
    assert scheduled == {"d-1": len(PROMPT) - receive.stop or 1}
    decode.run("d-1")
    decode.check_empty()
    given_back(prefill)


def test_a_prefix_cache_with_leased_blocks_is_not_reset_and_one_whose_leases_ended_is(engine: Any) -> None:
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    params = prefilled(prefill, "p-1", PROMPT)
    prefill.rest()
    assert not prefill.scheduler.reset_prefix_cache()
    loading(decode, "d-1", PROMPT, params)
    assert read(decode.receive_of("d-1"))
    until(prefill.scheduler.reset_prefix_cache, "the lease to end")
    assert prefill.shared([*PROMPT, 0]) == 0
    decode.step(failed={"d-1"}, report=WorkerReport())
