"""The scheduler half as vLLM's scheduler drives it: hand-over, queueing, aborts in every state, quarantine, leases."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from tests.support.scheduler.halves import (
    BLOCK,
    EMPTY_STEP,
    FULL,
    PROMPT,
    TOKEN,
    WINDOW,
    abort,
    allocate,
    freed,
    hand_over,
    make_half,
    make_request,
    new_prompt,
    receive_of,
    serving_half,
    until,
)
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.metadata import WorkerReport
from vllm_pd_connector.protocol.wire.messages import ReadDone
from vllm_pd_connector.protocol.wire.push_messages import Moved, Taken
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.sidechannel.waiting import ask
from vllm_pd_connector.wake import Wake


def test_a_finished_prefill_is_held_and_its_parameters_lead_to_an_order(producer, consumer):
    half, pool = consumer
    params = hand_over(producer)
    request = make_request("d-1", params)
    half.on_new_request(request)
    count, blocks = allocate(half, pool, request, computed=16)
    assert count == 24
    [receive] = half.build_metadata(EMPTY_STEP).receives
    assert (receive.start, receive.stop) == (16, 40)
    assert receive.blocks == (BlockTable.of(1, tuple(block.block_id for block in blocks[1:])),), "what is to be filled"
    assert receive.read.blocks == (BlockTable.of(0, (5, 6, 7)),)
    assert half.build_metadata(EMPTY_STEP).receives == [], "an order is given once"
    assert half.num_matched_tokens(request, 0) == (0, False), "a loading request has nothing more to load"
    half.update_after_alloc(request, KVCacheBlocks((blocks,)), 0)
    assert half.build_metadata(EMPTY_STEP).receives == []


def test_held_blocks_stay_out_of_the_pool_until_the_lease_ends():
    half, pool = serving_half("kv_producer", kv_lease_duration=60)
    free = pool.get_num_free_blocks()
    hand_over(half, "p-1")
    assert pool.get_num_free_blocks() == free - 3 and half.producer.num_leases == 1
    hand_over(half, "p-1")  # the same request id again: the older lease is given up
    assert pool.get_num_free_blocks() == free - 3 and half.producer.num_leases == 1
    half.producer._server.drop("p-1")
    half.on_new_request(make_request("other", None))
    assert pool.get_num_free_blocks() == free and half.producer.num_leases == 0


def test_an_idle_prefill_instance_whose_leases_ended_can_forget_its_prefixes():
    half, pool = serving_half("kv_producer")
    hand_over(half)
    assert not pool.reset_prefix_cache(), "the blocks are under a lease"
    half.producer._server.drop("p-1")
    assert pool.reset_prefix_cache(), "no step was taken since"
    assert half.producer.num_leases == 0


def test_a_step_without_news_waits_for_nobody_who_is_served(producer):
    hand_over(producer)
    producer.stats()
    server = producer.producer._server
    step = threading.Thread(target=lambda: (producer.build_metadata(EMPTY_STEP), producer.stats()), daemon=True)
    with server._lock:  # as the side channel's thread holds it while it answers
        server._news = False
        step.start()
        step.join(5.0)
        assert not step.is_alive()


def test_leading_null_blocks_are_left_out_and_counted(producer):
    producer.on_new_request(request := make_request("p-1", {"do_remote_decode": True}))
    _, params = producer.request_finished(request, ([0, 0, 7],))
    assert params is not None
    assert params["remote_block_ids"] == [[7]] and params["pd_connector"]["first_blocks"] == [2]


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_a_prefill_that_did_not_finish_holds_nothing(producer, status):
    request = make_request("p-1", {"do_remote_decode": True}, status=status)
    assert producer.request_finished(request, ([5],)) == (False, None)


@pytest.mark.parametrize("ended", ["ERROR", "IGNORED", "ABORTED"])
def test_the_log_says_why_nothing_is_held_unless_the_client_has_gone(producer, caplog, ended):
    request = make_request("p-1", {"do_remote_decode": True}, status=RequestStatus[f"FINISHED_{ended}"])
    assert producer.request_finished(request, ([5],)) == (False, None)
    assert ("p-1: nothing of it is held: the prefill ended as" in caplog.text) == (ended != "ABORTED")


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_REPETITION])
def test_a_prefill_that_stopped_by_itself_is_handed_over(producer, status):
    """At its first token, or after several that repeat themselves (`repetition_detection`)."""
    assert hand_over(producer, status=status)["remote_num_tokens"] == 40


def test_an_ordinary_request_is_none_of_our_business(producer, consumer):
    half, _pool = consumer
    request = make_request("x", None)
    half.on_new_request(request)
    assert half.num_matched_tokens(request, 0) == (0, False)
    assert producer.request_finished(request, ([5],)) == (False, None)


def test_what_was_read_of_a_prefill_is_counted_once_and_by_whom(producer, consumer):
    half, pool = consumer
    request = make_request("d-1", hand_over(producer))
    receive = receive_of(half, pool, request)
    done = ReadDone(receive.lease, 0, 1, receive.attempt, taken=Taken("decode-1", Moved(bytes=4096)))
    where = endpoint(receive.read.peer.host, receive.read.peer.port)
    with contextlib.closing(SideChannelClient()) as client, contextlib.closing(Wake()) as wake:
        assert [ask(client, wake, where, done, 20.0).held for _ in range(2)] == [True, True]
    until(lambda: freed(producer) == ["p-1"], "the lease to end")
    counted = producer.stats().data
    assert (counted["given"], counted["given_bytes"], counted["leases_expired"]) == (1, 4096, 0)
    assert counted["peer_given"] == {"decode-1": 1} and counted["peer_given_bytes"] == {"decode-1": 4096}
    assert producer.stats() is None


def test_a_lease_that_nobody_renews_ends_and_is_reported_once():
    producer, _ = serving_half("kv_producer", kv_lease_duration=2.0)
    hand_over(producer)
    sent: list[str] = []
    until(lambda: bool(sent.extend(freed(producer)) or sent), "the lease to end")
    assert sent == ["p-1"] and freed(producer) == []
    stats = producer.stats()
    assert stats is not None and stats.data["leases_expired"] == 1 and stats.data["gauges"]["leases"] == 0
    assert producer.stats() is None, "nothing changed since"


def test_a_lease_lives_as_long_as_the_request_queues_and_ends_when_it_leaves(consumer):
    producer, _ = serving_half("kv_producer", kv_lease_duration=4.0)
    half, _pool = consumer
    request = make_request("d-1", hand_over(producer))
    half.on_new_request(request)
    queued = time.monotonic()
    until(lambda: time.monotonic() - queued > 6.0 or bool(freed(producer)), "more than a lease duration")
    assert time.monotonic() - queued > 6.0, "the lease ended while the request was queued"
    abort(half, request)
    until(lambda: freed(producer) == ["p-1"], "the lease to be released")


@pytest.mark.parametrize("length", [1, 2 * BLOCK + 1])
def test_a_prompt_that_is_cached_up_to_its_last_token_reads_nothing_and_releases(producer, consumer, length):
    """vLLM caps its hits there: decode computes the last prompt token itself. Of one token, that is all."""
    half, pool = consumer
    request = make_request("d-1", hand_over(producer, prompt=PROMPT[:length]), prompt=PROMPT[:length])
    half.on_new_request(request)
    assert allocate(half, pool, request, computed=length - 1)[0] == 0
    assert half.build_metadata(EMPTY_STEP).receives == []
    until(lambda: freed(producer) == ["p-1"], "the lease to be released")


def test_a_prompt_that_lacks_more_than_its_last_token_reads_what_it_lacks(producer, consumer):
    half, pool = consumer
    prompt = PROMPT[: 2 * BLOCK + 2]
    request = make_request("d-1", hand_over(producer, prompt=prompt), prompt=prompt)
    half.on_new_request(request)
    assert allocate(half, pool, request, computed=2 * BLOCK)[0] == 2
    [receive] = half.build_metadata(EMPTY_STEP).receives
    assert (receive.start, receive.stop) == (2 * BLOCK, 2 * BLOCK + 2)


def test_refused_parameters_fail_a_request_whose_prompt_is_cached(producer, consumer):
    half, pool = consumer
    prompt = PROMPT[: 2 * BLOCK + 1]
    request = make_request("d-1", hand_over(producer, prompt=prompt) | {"remote_host": ""}, prompt=prompt)
    half.on_new_request(request)
    assert allocate(half, pool, request, computed=2 * BLOCK)[0] == 1
    [receive] = half.build_metadata(EMPTY_STEP).receives
    assert "remote_host" in receive.source.reason


def test_an_abort_while_loading_is_passed_to_the_workers_and_ends_with_their_report(producer, consumer):
    half, pool = consumer
    request = make_request("d-1", hand_over(producer))
    half.on_new_request(request)
    allocate(half, pool, request)
    half.build_metadata(EMPTY_STEP)
    request.status = RequestStatus.FINISHED_ABORTED
    half.request_finished(request, ([1, 2, 3],))
    assert half.build_metadata(EMPTY_STEP).aborts == ["d-1"]
    half.update_output(KVConnectorOutput(finished_recving={"d-1"}, failed_recving={"d-1"}))
    assert half.consumer.blocks_of("d-1") == []


@pytest.mark.parametrize(("spec", "left"), [(FULL, 0), (WINDOW, 1)])
def test_prefill_leaves_decode_what_decode_must_compute_itself(spec, left):
    """With a window, the block of a token that the last prompt token attends to is gone once the prompt is whole."""
    producer, _ = serving_half("kv_producer", spec=spec)
    consumer, pool = make_half("kv_consumer", spec=spec)
    prefill = new_prompt("p-1", {"do_remote_decode": True}, PROMPT)
    producer.on_new_request(prefill)
    assert len(prefill.prompt_token_ids) == prefill.num_prompt_tokens == len(PROMPT) - left
    prefill.num_computed_tokens = prefill.num_prompt_tokens
    _, params = producer.request_finished(prefill, ([0, 6, 7],))
    decode = new_prompt("d-1", json.loads(json.dumps(params)), PROMPT)
    consumer.on_new_request(decode)
    assert allocate(consumer, pool, decode)[0] == len(PROMPT) - left
    [receive] = consumer.build_metadata(EMPTY_STEP).receives
    assert receive.read is not None and receive.stop == len(PROMPT) - left


def test_a_prompt_of_one_token_is_computed_by_decode_where_prefill_must_leave_one(producer):
    half, pool = make_half("kv_consumer", spec=WINDOW)
    request = make_request("d-1", hand_over(producer, prompt=[7]), prompt=[7])
    half.on_new_request(request)
    assert allocate(half, pool, request)[0] == 0
    until(lambda: freed(producer) == ["p-1"], "the lease to be released")


def test_refused_parameters_fail_a_prompt_of_one_token_too(producer):
    half, pool = make_half("kv_consumer", spec=WINDOW)
    request = make_request("d-1", hand_over(producer, prompt=[7]) | {"remote_host": ""}, prompt=[7])
    half.on_new_request(request)
    assert allocate(half, pool, request)[0] == 1
    [receive] = half.build_metadata(EMPTY_STEP).receives
    assert "remote_host" in receive.source.reason


def test_a_whole_prompt_offered_to_a_windowed_model_is_refused(producer):
    half, pool = make_half("kv_consumer", spec=WINDOW)
    request = make_request("d-1", hand_over(producer))
    receive = receive_of(half, pool, request)
    assert "remote_num_tokens" in receive.source.reason


def test_a_whole_prompt_that_decode_computes_anyway_is_given_back(producer):
    """Routers that pass everything on ask both sides for the log-probabilities of a prompt: neither shortens it."""
    half, pool = make_half("kv_consumer", spec=WINDOW)
    request = make_request("d-1", hand_over(producer), get_skip_reading_prefix_cache=lambda: True)
    half.on_new_request(request)
    half.num_matched_tokens(request, 0)
    half.update_after_alloc(request, KVCacheBlocks((pool.get_new_blocks(3),)), 0)  # vLLM loads nothing for it
    half.shutdown()
    assert producer.producer._server.counts()["Release"] == 1


def bad(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda params: params | changes


@pytest.mark.parametrize(
    "break_it",
    [
        bad(remote_port="5600"),
        bad(remote_block_ids=[[5, 6, 7], [1]]),
        bad(remote_host=""),
        bad(remote_num_tokens=41),
        bad(remote_num_tokens=39),
        bad(do_remote_decode=True),
        lambda params: {key: value for key, value in params.items() if key != "remote_engine_id"},
        lambda params: {key: value for key, value in params.items() if key != "pd_connector"},
    ],
)
def test_refused_parameters_become_a_failing_order_and_not_an_exception(producer, consumer, break_it):
    half, pool = consumer
    request = make_request("d-1", break_it(hand_over(producer)))
    half.on_new_request(request)
    assert allocate(half, pool, request)[0] == 40
    [receive] = half.build_metadata(EMPTY_STEP).receives
    assert receive.source.reason
    half.request_finished(request, ([1, 2, 3],))


def test_another_number_of_groups_is_for_the_workers_to_map(producer, consumer):
    """It follows from the layout, the parallel sizes and a drafter, and layers are matched by name."""
    half, pool = consumer
    params = hand_over(producer)
    params["remote_block_ids"] = params["remote_block_ids"] * 2
    params["pd_connector"]["first_blocks"] = params["pd_connector"]["first_blocks"] * 2
    receive = receive_of(half, pool, make_request("d-1", params))
    assert receive.read is not None and len(receive.read.blocks) == 2 and len(receive.blocks) == 1


def test_parameters_of_another_prompt_are_refused(producer, consumer):
    half, pool = consumer
    request = make_request("d-1", hand_over(producer), prompt=[*PROMPT[:-1], 99])
    receive = receive_of(half, pool, request)
    assert "same prompt" in receive.source.reason


def test_quarantined_blocks_stay_out_of_the_pool_until_every_rank_has_drained(producer, consumer):
    half, pool = consumer
    free_before = pool.get_num_free_blocks()
    request = make_request("d-1", hand_over(producer))
    half.on_new_request(request)
    _, blocks = allocate(half, pool, request)
    half.build_metadata(EMPTY_STEP)
    half.update_output(KVConnectorOutput(kv_connector_worker_meta=WorkerReport(quarantined={"d-1": 1})))
    half.update_output(
        KVConnectorOutput(
            finished_recving={"d-1"},
            failed_recving={"d-1"},
            kv_connector_worker_meta=WorkerReport(quarantined={"d-1": 1}),
        )
    )
    pool.free_blocks(reversed(blocks))  # vLLM frees the failed request
    assert pool.get_num_free_blocks() == free_before - 3
    assert half.stats().data["gauges"]["quarantined blocks"] == 3
    half.update_output(KVConnectorOutput(kv_connector_worker_meta=WorkerReport(drained={"d-1": 1})))
    assert pool.get_num_free_blocks() == free_before - 3
    half.update_output(KVConnectorOutput(kv_connector_worker_meta=WorkerReport(drained={"d-1": 1})))
    assert pool.get_num_free_blocks() == free_before


def test_what_one_rank_could_not_receive_the_others_give_up(producer, consumer):
    """In mode push they might wait for as long as the prefill is computed."""
    half, pool = consumer
    for name in ("d-1", "d-2"):
        receive_of(half, pool, make_request(name, hand_over(producer, f"p-{name}")))
    gone = make_request("d-2", None)
    half.consumer.finished(gone)
    assert half.build_metadata(EMPTY_STEP).aborts == ["d-2"]
    for _ in range(2):
        half.update_output(KVConnectorOutput(kv_connector_worker_meta=WorkerReport(failed={"d-1", "d-2", "unknown"})))
    assert half.build_metadata(EMPTY_STEP).aborts == ["d-1"], "once, and nothing of what was given up before"
    report = WorkerReport(failed={"d-1"})
    half.update_output(
        KVConnectorOutput(finished_recving={"d-1"}, failed_recving={"d-1"}, kv_connector_worker_meta=report)
    )
    assert not half.consumer.loads("d-1") and not half.build_metadata(EMPTY_STEP).aborts


def test_a_failed_receive_gives_its_lease_back_also_where_no_worker_could_ask(consumer):
    half, pool = consumer
    producer, _ = serving_half("kv_producer", kv_lease_duration=60)
    receive_of(half, pool, make_request("d-1", hand_over(producer)))
    half.update_output(
        KVConnectorOutput(
            finished_recving={"d-1"}, failed_recving={"d-1"}, kv_connector_worker_meta=WorkerReport(failed={"d-1"})
        )
    )
    until(lambda: freed(producer) == ["p-1"], "the lease to end")


def test_a_consumer_asked_to_prefill_says_so_and_holds_nothing(consumer):
    half, _ = consumer
    half.serve([b"manifest"], [TOKEN])
    half.on_new_request(request := make_request("d-1", {"do_remote_decode": True}))
    assert half.request_finished(request, ([5],)) == (False, None)


def test_a_release_on_shutdown_still_reaches_the_prefill_side(producer):
    half, _ = make_half("kv_consumer")
    request = make_request("d-1", hand_over(producer))
    half.on_new_request(request)
    abort(half, request)
    half.shutdown()
    assert producer.producer._server.counts()["Release"] == 1


@pytest.mark.parametrize("params", [{"do_remote_decode": True, "surprise": 1}, {"do_remote_decode": "yes"}])
def test_a_prefill_request_with_refused_parameters_holds_nothing(producer, params):
    producer.on_new_request(request := make_request("p-1", params))
    assert producer.request_finished(request, ([5],)) == (False, None)


def test_a_request_id_that_no_decode_instance_would_accept_holds_nothing(producer):
    producer.on_new_request(request := make_request("x" * 1000, {"do_remote_decode": True}))
    assert producer.request_finished(request, ([5],)) == (False, None)
    assert producer.producer.num_leases == 0


def test_two_instances_at_one_port_are_refused_with_the_reason():
    first, _ = serving_half("kv_producer")
    with pytest.raises(Exception, match=str(first.producer._port)):
        serving_half("kv_producer", side_channel_port=first.producer._port)


def test_a_decode_instance_that_ends_gives_back_what_queues_there():
    producer, _ = serving_half("kv_producer", kv_lease_duration=600.0)  # so that only a release ends the lease
    half, _ = make_half("kv_consumer")
    half.on_new_request(make_request("d-1", hand_over(producer)))
    half.shutdown()
    until(lambda: freed(producer) == ["p-1"], "the lease to be released")
