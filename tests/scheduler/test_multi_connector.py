"""The scheduler half in vLLM's MultiConnector, beside a connector that knows one KV-cache group only.

The MultiConnector is vLLM's own. It then calls the older form of `request_finished`, tells of allocations that are
another connector's, and passes the workers' handshake metadata on as it finds it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from tests.support.scheduler.halves import (
    EMPTY_STEP,
    TOKEN,
    allocate,
    freed,
    hand_over,
    make_half,
    make_request,
    serving_half,
    until,
)
from tests.support.scheduler.push_halves import step
from vllm_pd_connector.connector import EncodedManifest, PDConnector
from vllm_pd_connector.errors import InvalidConfig, PDConnectorError
from vllm_pd_connector.scheduler.half import SchedulerHalf

KEEP = {"do_remote_decode": True, "do_remote_prefill": False}


class Store:
    """A connector without `SupportsHMA`, which has the first `tokens` of every prompt."""

    def __init__(self, tokens: int = 0) -> None:
        self.tokens = tokens

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return max(self.tokens - computed, 0), False

    def request_finished(self, request: Any, blocks: list[int]) -> tuple[bool, None]:
        return False, None

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def connector(half: SchedulerHalf) -> PDConnector:
    made = PDConnector.__new__(PDConnector)
    made._scheduler, made._worker = half, None
    return made


def together(*connectors: Any) -> Any:
    multi = MultiConnector.__new__(MultiConnector)
    multi._connectors, multi._all_support_hma = list(connectors), False
    multi._requests_to_connector, multi._extra_async_saves = {}, {}
    return multi


@pytest.fixture
def producer() -> SchedulerHalf:
    return serving_half("kv_producer", kv_lease_duration=60.0)[0]


def test_a_finished_prefill_is_handed_over(producer: SchedulerHalf) -> None:
    request = make_request("p-1", KEEP)
    multi = together(connector(producer), Store())
    multi.on_new_request(request)
    delay, params = multi.request_finished_all_groups(request, ([5, 6, 7],))
    assert not delay and params is not None and params["remote_block_ids"] == [[5, 6, 7]]
    assert producer.producer.num_leases == 1


def test_an_abort_reaches_the_workers_that_load(producer: SchedulerHalf, consumer: Any) -> None:
    half, pool = consumer
    multi = together(connector(half), Store())
    request = make_request("d-1", hand_over(producer))
    multi.on_new_request(request)
    blocks = pool.get_new_blocks(3)
    count, is_async = multi.get_num_new_matched_tokens(request, 0)
    assert is_async
    multi.update_state_after_alloc(request, KVCacheBlocks((blocks,)), count)
    half.build_metadata(EMPTY_STEP)
    request.status = RequestStatus.FINISHED_ABORTED
    multi.request_finished_all_groups(request, ([block.block_id for block in blocks],))
    assert half.build_metadata(EMPTY_STEP).aborts == ["d-1"]


@pytest.mark.parametrize("receive", ["sent, received", "received, sent", "both"])
def test_a_request_that_is_received_and_sent_is_freed_once_and_when_it_was_received(
    producer: SchedulerHalf, consumer: Any, receive: str
) -> None:
    """Aborted while it loads, beside a connector that has it kept and lets go in the next step. vLLM's scheduler frees
    a request at the first report of either kind, and asserts at the second that it knows it."""
    half, pool = consumer
    multi = together(connector(half), Store())
    request = make_request("d-1", hand_over(producer))
    multi.on_new_request(request)
    allocate(half, pool, request)
    request.status = RequestStatus.FINISHED_ABORTED
    multi.request_finished_all_groups(request, ([1, 2, 3],))
    requests, freed_after = {"d-1": request}, list[str]()
    scheduler: Any = SimpleNamespace(connector=multi, requests=requests, finished_recving_kv_req_ids=set())
    scheduler._free_blocks = lambda request: (freed_after.append(word), requests.pop(request.request_id))
    for word in receive.split(", "):
        sent, received = ({"d-1"} if word in (kind, "both") else None for kind in ("sent", "received"))
        output = KVConnectorOutput(finished_sending=sent, finished_recving=received)
        Scheduler._update_from_kv_xfer_finished(scheduler, output)
    assert freed_after == ["both" if receive == "both" else "received"]


def test_what_others_send_is_not_touched(consumer: Any) -> None:
    half, _ = consumer
    output = KVConnectorOutput(finished_sending={"d-1"})
    together(connector(half), Store()).update_connector_output(output)
    assert output.finished_sending == {"d-1"}


def test_an_abort_before_allocation_gives_the_lease_up(producer: SchedulerHalf, consumer: Any) -> None:
    half, _ = consumer
    multi = together(connector(half), Store())
    request = make_request("d-1", hand_over(producer))
    multi.on_new_request(request)
    request.status = RequestStatus.FINISHED_ABORTED
    multi.request_finished_all_groups(request, ([],))
    until(lambda: freed(producer) == ["p-1"], "the lease to be given up")


def test_a_connector_that_comes_first_and_has_the_prompt_gives_the_lease_up(
    producer: SchedulerHalf, consumer: Any
) -> None:
    half, pool = consumer
    multi = together(Store(tokens=32), connector(half))
    request = make_request("d-1", hand_over(producer))
    multi.on_new_request(request)
    count, is_async = multi.get_num_new_matched_tokens(request, 0)
    assert (count, is_async) == (32, False)
    multi.update_state_after_alloc(request, KVCacheBlocks((pool.get_new_blocks(3),)), count)
    assert not half.build_metadata(EMPTY_STEP).receives
    until(lambda: freed(producer) == ["p-1"], "the lease to be given up")


def test_a_store_behind_it_does_not_take_a_prompt_that_is_remote(producer: SchedulerHalf, consumer: Any) -> None:
    half, pool = consumer
    request = make_request("d-1", hand_over(producer))
    multi = together(connector(half), Store(tokens=32))
    multi.on_new_request(request)
    assert multi.get_num_new_matched_tokens(request, 0) == (40, True)
    allocate(half, pool, request)
    assert len(half.build_metadata(EMPTY_STEP).receives) == 1


@pytest.mark.parametrize("by_stage", [True, False], ids=["by stage and rank", "by rank"])
def test_manifests_of_the_workers_are_served(by_stage: bool) -> None:
    half, _ = make_half("kv_producer")
    served: list[Any] = []
    half.serve = lambda manifests, tokens, weights: served.append((manifests, tokens))  # type: ignore[method-assign]
    multi, metas = together(connector(half)), [EncodedManifest(bytes([i]), TOKEN) for i in range(2)]
    if by_stage:
        multi.set_xfer_handshake_metadata_pp_aware({(1, 0): metas[1], (0, 0): metas[0]})
    else:
        multi.set_xfer_handshake_metadata({1: metas[1], 0: metas[0]})
    assert served == [([b"\0", b"\1"], [TOKEN, TOKEN])]


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
@pytest.mark.parametrize("by_stage", [True, False], ids=["by stage and rank", "by rank"])
def test_another_connectors_handshake_metadata_is_refused(role: str, by_stage: bool) -> None:
    half, _ = make_half(role)
    multi, foreign = together(connector(half)), {"agent": b""}
    with pytest.raises(InvalidConfig, match=r"dict where EncodedManifest of PDConnector .* name PDConnector first"):
        if by_stage:
            multi.set_xfer_handshake_metadata_pp_aware({(0, 0): foreign})
        else:
            multi.set_xfer_handshake_metadata({0: foreign})
    assert half.producer.home is None


def test_who_cannot_hear_of_failures_is_not_told_of_successes(consumer: Any) -> None:
    half, _ = consumer
    with pytest.raises(PDConnectorError, match="get_transfer_results"):
        connector(half).get_finished(set())


def test_the_step_that_completes_a_prefill_for_a_decode_instance_says_so(producer: SchedulerHalf) -> None:
    request = make_request("p-1", KEEP)
    other = make_request("p-2", None)
    for arrived in (request, other):
        producer.on_new_request(arrived)
    assert [step(producer, p_1=(0, 20), p_2=(0, 40)).ends_prefill, step(producer, p_1=(20, 20)).ends_prefill] == [
        False,
        True,
    ]
    assert step(producer, p_1=(40, 1)).ends_prefill, "a prefill that goes on with tokens of its own"
    producer.request_finished(request, ([5, 6, 7],))
    assert not step(producer, p_2=(40, 1)).ends_prefill


def test_a_prefill_that_was_aborted_ends_in_no_step(producer: SchedulerHalf) -> None:
    request = make_request("p-1", KEEP, status=RequestStatus.FINISHED_ABORTED)
    producer.on_new_request(request)
    producer.request_finished(request, ([],))
    assert not step(producer, p_1=(0, 40)).ends_prefill
