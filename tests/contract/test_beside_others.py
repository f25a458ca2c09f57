"""In vLLM's MultiConnector, made by vLLM from a configuration, through its own scheduler.

The other connector is one that has every finished request kept and lets go of it in the next step, which is the one
that has met vLLM's assertions, or the scheduler half of vLLM's OffloadingConnector, whose workers need a GPU.
`tests/scheduler/test_multi_connector.py` has what each call does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.support.scheduler.beside import (
    PROMPT,
    among_others,
    beside,
    offloading,
    prefilled_beside,
    run_to_its_end,
    until_true,
)
from tests.support.scheduler.cores import Core
from tests.support.scheduler.engines import (
    BLOCK,
    FULL,
    KEEP,
    STATES,
    WINDOWED,
    Engine,
    loading,
    prefilled,
    read,
    transfer,
)
from vllm_pd_connector.metadata import WorkerReport
from vllm_pd_connector.protocol.lease import End


@pytest.fixture
def pair(engine: Any) -> tuple[Engine, Engine]:
    prefill, decode = (engine(beside(role), wrap=among_others) for role in ("kv_producer", "kv_consumer"))
    assert isinstance(prefill.connector, MultiConnector)
    return prefill, decode


def test_a_prefill_is_kept_by_both_and_freed_when_both_are_done(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    params = prefilled_beside(prefill)
    loading(decode, "d-1", PROMPT, params)
    assert read(decode.receive_of("d-1"))
    decode.step()
    decode.step(received={"d-1"})
    run_to_its_end(decode)
    assert decode.ended("d-1").finish_reason is FinishReason.LENGTH
    decode.check_empty()


def test_a_request_that_ends_while_it_loads_is_freed_by_its_receive(pair: tuple[Engine, Engine]) -> None:
    """The other connector says first that it is done; vLLM would free the blocks at that."""
    prefill, decode = pair
    loading(decode, "d-1", PROMPT, prefilled_beside(prefill))
    decode.step()
    decode.scheduler.finish_requests("d-1", RequestStatus.FINISHED_ABORTED)
    decode.step(sent={"d-1"})
    decode.rest()
    assert decode.held() == 3, "bytes may still land there"
    decode.step(failed={"d-1"})
    decode.check_empty()


def test_a_request_with_the_name_of_one_that_left_while_it_loaded_is_freed_as_any_other(
    pair: tuple[Engine, Engine],
) -> None:
    prefill, decode = pair
    loading(decode, "d-1", PROMPT, prefilled_beside(prefill))
    decode.step()
    decode.scheduler.finish_requests("d-1", RequestStatus.FINISHED_ABORTED)
    decode.step(sent={"d-1"})
    decode.step(failed={"d-1"})
    decode.rest()
    decode.add("d-1", PROMPT[::-1])
    run_to_its_end(decode)
    decode.check_empty()


def test_a_failure_is_one_beside_others_too(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    loading(decode, "d-1", PROMPT, prefilled_beside(prefill))
    decode.step()
    decode.step(failed={"d-1"}, report=WorkerReport(quarantined={"d-1": 1}))
    assert decode.ended("d-1").finish_reason is FinishReason.ERROR
    decode.step(sent={"d-1"})
    decode.rest()
    assert decode.held() == 3
    decode.step(report=WorkerReport(drained={"d-1": 1}))
    decode.check_empty()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("groups", "few"), [((FULL,), 12), ((FULL, WINDOWED), 20), ((FULL, STATES), 13)], ids=["full", "window", "states"]
)
def test_what_a_store_copies_of_an_ended_request_is_copied_before_it_is_loaded_over(
    engine: Any, groups: Any, few: int, first: bool
) -> None:
    """vLLM gives its blocks back at once, and the store would keep what comes as the ended request's."""
    prompt = list(range(8 * BLOCK))
    prefill = engine("kv_producer", groups=groups)
    decode = engine(offloading("kv_consumer", first=first), groups=groups, blocks=few, wrap=among_others)
    told: list[Any] = []
    decode.compute = lambda output: told.append(output.kv_connector_metadata.metadata[1 if first else 0])
    decode.add("ended", range(500, 500 + 6 * BLOCK), max_tokens=1)
    decode.run("ended")
    loading(decode, "d-1", prompt, prefilled(prefill, "p-1", prompt))
    written = {i for table in decode.receive_of("d-1").blocks for i in table.ids.tolist()}
    copied = {name: set(job.src_spec.block_ids.tolist()) for one in told for name, job in one.store_jobs.items()}
    over = {name for name, blocks in copied.items() if blocks & written}
    assert over, "there are few blocks"
    assert over <= {name for one in told for name in one.jobs_to_flush}


@pytest.mark.parametrize("outer", ["kv_producer", "kv_both"])
def test_nothing_is_loaded_into_blocks_that_a_step_in_flight_may_still_write(engine: Any, outer: str) -> None:
    """vLLM keeps blocks of aborted requests back by the outer role alone, which says nothing of what is loaded here."""
    prefill = engine("kv_producer")
    config = {"kv_connector": "MultiConnector", "kv_role": outer}
    extra = {"connectors": [transfer("kv_consumer")]}
    decode = engine(config | {"kv_connector_extra_config": extra}, blocks=10)
    params = prefilled(prefill, "p-1", PROMPT)
    decode.add("other", range(500, 500 + 8 * BLOCK), max_tokens=9)
    decode.step()
    asks = decode.add("d-1", PROMPT, params)
    decode.step()
    assert asks.status is RequestStatus.WAITING, "there is no room beside the other"
    assert len(decode.in_flight) == decode.overlapping
    writes = {block.block_id for block in decode.blocks_of("other")}
    decode.scheduler.finish_requests("other", RequestStatus.FINISHED_ABORTED)
    decode.step()
    assert len(decode.told[-1].receives) == (not decode.overlapping)
    decode.step()
    [table] = decode.receive_of("d-1").blocks
    assert writes & set(table.ids.tolist()), "no step writes them any more"
    assert read(decode.receive_of("d-1"))
    decode.step(received={"d-1"})
    decode.run("d-1")


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("ends", ["received", "failed", "aborted"])
def test_beside_a_store_every_receive_ends(engine: Any, ends: str, first: bool) -> None:
    prefill = engine("kv_producer")
    decode = engine(offloading("kv_consumer", first=first), wrap=among_others)
    loading(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    if ends == "aborted":
        decode.scheduler.finish_requests("d-1", RequestStatus.FINISHED_ABORTED)
    if ends == "received":
        assert read(decode.receive_of("d-1"))
        decode.step(received={"d-1"})
    else:
        decode.step(failed={"d-1"})
    decode.run("d-1")
    decode.check_empty()


def test_a_window_that_came_in_part_is_kept_by_no_store(engine: Any) -> None:
    """Its block has a hash by which the store would find it, for requests that look further back in it."""
    groups = (FULL, replace(WINDOWED, sliding_window=BLOCK - 4))
    prefill = engine("kv_producer", groups=groups)
    decode = engine(offloading("kv_consumer"), groups=groups, wrap=among_others)
    told: list[Any] = []
    decode.compute = lambda output: told.append(output)
    loading(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    window = decode.receive_of("d-1").blocks[1]
    decode.step(received={"d-1"}, report=WorkerReport(unshareable={"d-1": {1: window.first_block}}))
    decode.run("d-1")
    decode.rest()
    computed = next(at for at, output in enumerate(told) if "d-1" in output.num_scheduled_tokens)
    assert told[computed].num_scheduled_tokens["d-1"] == len(PROMPT)
    stores = [output.kv_connector_metadata.metadata[1].store_jobs for output in told]
    assert not any(stores[:computed]) and any(stores[computed:])
    assert decode.ended("d-1").finish_reason is FinishReason.LENGTH
    decode.check_empty()


@pytest.mark.parametrize("unused", ["failed", "of other weights", "before it is scheduled"])
def test_who_notes_a_request_s_blocks_forgets_those_of_a_load_that_is_not_used(engine: Any, unused: str) -> None:
    """LMCache keeps what is in the blocks that it knows under the request's prompt, for all its engines."""
    prefill = engine("kv_producer")
    config = beside("kv_consumer", "LMCacheMPConnectorTracking", "tracking")
    decode = engine(config, policy="recompute", wrap=among_others)
    ours, theirs = decode.connector.sub_connectors
    request = loading(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    first = [block.block_id for block in decode.blocks_of("d-1")]
    assert theirs.request_trackers["d-1"].allocated_block_ids == first
    if unused == "of other weights":
        ours.scheduler.operations.weights_changing("a test")
    decode.step(**{"failed" if unused == "failed" else "received": {"d-1"}})
    if unused == "before it is scheduled":
        ours.scheduler.operations.resetting(forced=True)
    until_true(decode, lambda: request.num_computed_tokens >= len(PROMPT))
    now = [block.block_id for block in decode.blocks_of("d-1")]
    assert theirs.request_trackers["d-1"].allocated_block_ids == now != first
    run_to_its_end(decode)
    decode.check_empty()


@pytest.mark.parametrize("reset", ["before", "after"])
def test_what_a_store_holds_of_former_weights_is_not_handed_over_until_it_is_reset(engine: Any, reset: str) -> None:
    core = Core(
        lambda: engine(offloading("kv_producer"), wrap=lambda said: MultiKVConnectorWorkerMetadata((None, said)))
    )
    prefill, told = core.engine, list[Any]()
    prefill.compute = lambda output: told.append(output.kv_connector_metadata.metadata[1])

    def done() -> Any:
        """Of the store's one worker."""
        jobs = {name for one in told for name in (*one.store_jobs, *one.load_jobs)}
        told.clear()
        return OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(jobs, 1))

    def handed_over(name: str, *, loads: bool) -> bool:
        prefill.add(name, PROMPT, KEEP, max_tokens=1)
        prefill.step()
        assert any(one.load_jobs for one in told) is loads
        if loads:
            prefill.step(received={name}, report=done())
        prefill.run(name)
        prefill.rest()
        prefill.step(report=done())
        return prefill.ended(name).kv_transfer_params is not None

    assert handed_over("p-1", loads=False)
    prefill.connector._connectors[0].scheduler.producer.end_leases(End.RESET)
    prefill.rest()
    if reset == "before":
        assert core.scheduler.reset_prefix_cache(False, False)
    core.collective_rpc("reload_weights")
    core.set_weight_version("v2")
    if reset == "after":
        assert core.scheduler.reset_prefix_cache(False, False)
    assert not handed_over("p-2", loads=True)
    assert core.scheduler.reset_prefix_cache(False, True)
    assert handed_over("p-3", loads=False)
    prefill.connector._connectors[0].scheduler.producer.end_leases(End.RESET)
    prefill.rest()
    assert core.scheduler.reset_prefix_cache(False, True)
    core.collective_rpc("reload_weights")
    core.set_weight_version("v3")
    assert handed_over("p-4", loads=False)
    assert handed_over("p-5", loads=False), "reset before, nobody held anything of the former"
