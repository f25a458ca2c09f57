"""Leases that several requests bring, that no request reads, or that nobody gives back: the two scheduler halves."""

from __future__ import annotations

import logging
import queue
import time
from typing import Any

import pytest
from vllm import envs
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.request import RequestStatus

from tests.support.scheduler.halves import (
    EMPTY_STEP,
    PROMPT,
    abort,
    allocate,
    freed,
    hand_over,
    make_half,
    make_request,
    receive_of,
    serving_half,
    until,
)
from tests.support.scheduler.push_halves import ASK, PushPeer, concurrent, digest_of
from vllm_pd_connector.compat.engine import EngineLoop
from vllm_pd_connector.config import parse_config
from vllm_pd_connector.errors import InvalidConfig
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.protocol.lease import SHARED_S
from vllm_pd_connector.protocol.wire.messages import ReadDone, ReadVerdict
from vllm_pd_connector.protocol.wire.push_messages import PushState
from vllm_pd_connector.scheduler import half
from vllm_pd_connector.scheduler.half import SchedulerHalf
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.net.sockets import endpoint

LONG_S = 600.0
"""A lease that only a message ends within a test."""


@pytest.fixture
def pair():
    producer, _ = serving_half("kv_producer", kv_lease_duration=LONG_S)
    consumer, pool = make_half("kv_consumer")
    return producer, consumer, pool


def count(producer: SchedulerHalf, message: str) -> int:
    server = producer.producer._server
    assert server is not None
    return server.counts().get(message, 0)


def reject(half: SchedulerHalf, params: Any) -> None:
    """What vLLM's API server tells of a request that it refused: another id, one token, aborted at once."""
    request = make_request("of-the-api-server", params, [0], abort_immediately=True)
    half.on_new_request(request)
    request.status = RequestStatus.FINISHED_ABORTED
    assert half.request_finished(request, ([],)) == (False, None)


def reports(producer: SchedulerHalf, half: SchedulerHalf) -> list[Any]:
    """The prefill side's verdicts on the reads that were ordered, as a worker asks for them."""
    client, verdicts = SideChannelClient(), []
    try:
        for receive in half.build_metadata(EMPTY_STEP).receives:
            where = endpoint(receive.read.peer.host, receive.read.peer.port)
            client.send(where, ReadDone(receive.lease, 0, 1, receive.attempt, receive.shared), 20.0)
            until(lambda: bool(verdicts.extend(said for _, said in client.receive()) or verdicts), "a verdict")
    finally:
        client.close()
    return verdicts


class Core(EngineCoreProc):  # type: ignore[misc]
    """vLLM's own engine core, with nothing but what it looks at; its scheduler never sees what it refuses."""

    def __init__(self) -> None:
        self.input_queue = queue.Queue()
        self.shutdown_state = EngineShutdownState.RUNNING
        self.reject_new_requests = False  # vLLM 0.33
        self.taken, self.answered = [], []

    def add_request(self, request: Any, request_wave: int = 0) -> None:
        self.taken.append(request)

    def _send_abort_outputs_to_client(self, request_ids: list[str], client_index: int) -> None:
        self.answered += request_ids

    def reach(self, name: str, params: Any) -> None:
        self._handle_client_request(EngineCoreRequestType.ADD, (make_request(name, params, client_index=0), 0))


def in_core(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves that are made from now on are its."""
    monkeypatch.setattr(half, "calling_loop", lambda: EngineLoop(core, EngineCoreRequestType.WAKEUP))


def test_what_a_request_came_for_is_given_back_that_reaches_an_engine_when_it_ends(monkeypatch: Any) -> None:
    producer, _ = serving_half("kv_producer", kv_lease_duration=LONG_S)
    in_core(core := Core(), monkeypatch)
    make_half("kv_consumer")
    core.reach("taken", hand_over(producer, "p-taken"))
    core.shutdown_state = EngineShutdownState.REQUESTED
    core.reach("late", hand_over(producer, "p-late"))
    assert [request.request_id for request in core.taken] == ["taken"] and core.answered == ["late"]
    until(lambda: count(producer, "Release") == 1, "the lease to be given back")


def test_a_prefill_that_reaches_an_engine_when_it_ends_is_waited_for_by_nobody(monkeypatch: Any) -> None:
    in_core(core := Core(), monkeypatch)
    producer, _ = serving_half("kv_producer", mode="push", kv_lease_duration=LONG_S)
    peer = PushPeer(producer)
    answer = peer.register(digest_of(make_request("late", ASK)))
    core.shutdown_state = EngineShutdownState.REQUESTED
    core.reach("late", ASK)
    said = answer()
    peer.close()
    assert said.state is PushState.FAILED and "FINISHED_ABORTED" in said.reason
    assert not core.taken and not producer.share.step()


# -- requests that vLLM refused ----------------------------------------------------------------------------------------


def test_the_lease_of_a_request_that_vllm_refused_is_given_back_and_one_line_says_so(pair, caplog):
    producer, consumer, _ = pair
    caplog.set_level(logging.INFO, logger="vllm_pd_connector")
    reject(consumer, hand_over(producer, "p-1"))
    until(lambda: freed(producer) == ["p-1"], "the lease to be given back")
    [line] = caplog.records
    assert line.levelno == logging.INFO and "p-1" in line.getMessage()


def test_parameters_with_another_nonce_give_nothing_back(pair):
    producer, consumer, _ = pair
    params = hand_over(producer, "p-1")
    params["pd_connector"]["nonce"] = "0" * 32
    reject(consumer, params)
    until(lambda: count(producer, "Release") == 1, "the message")
    assert freed(producer) == [] and producer.producer.num_leases == 1


def test_a_stranger_is_not_told_of_a_request_that_vllm_refused(pair, caplog):
    producer, consumer, _ = pair
    params = hand_over(producer, "p-1") | {"remote_host": "192.0.2.1"}
    reject(consumer, params)
    assert consumer.consumer._renewer._thread is None, "something was to be sent"
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]


@pytest.mark.parametrize("params", [{"do_remote_prefill": "yes"}, {"do_remote_prefill": True}])
def test_a_request_whose_parameters_are_none_is_refused_in_one_line(pair, caplog, params):
    _, consumer, pool = pair
    request = make_request("d-1", params)
    consumer.on_new_request(request)
    allocate(consumer, pool, request)
    consumer.consumer.received("d-1")
    request.status = RequestStatus.FINISHED_ERROR
    consumer.request_finished(request, ([1, 2, 3],))
    reject(consumer, params)
    [line] = [record for record in caplog.records if record.levelno >= logging.INFO]
    assert line.levelno == logging.ERROR and "d-1" in line.getMessage()


def test_a_refused_request_gives_its_lease_back_in_one_line(pair, caplog):
    producer, consumer, pool = pair
    params = hand_over(producer, "p-1")
    request = make_request("d-1", params, prompt=[*PROMPT[:-1], 99])
    consumer.on_new_request(request)
    until(lambda: freed(producer) == ["p-1"], "the lease to be given back")
    allocate(consumer, pool, request)
    consumer.consumer.received("d-1")
    reject(consumer, params)
    [line] = [record for record in caplog.records if record.levelno >= logging.INFO]
    assert line.levelno == logging.ERROR and "is not this request's" in line.getMessage()
    pinned = "VLLM_SYSTEM_START_DATE"  # by which vLLM's templates of gpt-oss write one date on both sides
    assert pinned in line.getMessage() and pinned in envs.environment_variables


def test_what_a_failed_request_came_for_is_not_given_back_twice(pair, caplog):
    producer, consumer, pool = pair
    caplog.set_level(logging.INFO, logger="vllm_pd_connector")
    params = hand_over(producer, "p-1")
    request = make_request("d-1", params)
    consumer.on_new_request(request)
    allocate(consumer, pool, request)
    consumer.consumer.received("d-1", failed=True)  # which gives the lease back
    reject(consumer, params)
    consumer.shutdown()
    assert count(producer, "Release") == 1 and not caplog.records


def test_a_prefill_is_declined_for_a_request_that_vllm_refused_behind_a_concurrent_router(prefill):
    consumer, _ = serving_half("kv_consumer", mode="push")
    home = prefill.half.producer.home
    request = prefill.arrive()
    reject(consumer, concurrent(home.port, transfer_id="t-1"))
    until(lambda: prefill.count("DeclinePush") == 1, "the message")
    prefill.half.request_finished(request, ([5, 6, 7],))
    until(lambda: prefill.held() == 0, "the blocks to be given back")


# -- parameters that come again ----------------------------------------------------------------------------------------


def reads(half: SchedulerHalf, pool: Any, name: str, params: Any) -> Any:
    """A request that receives what it came for, and what its worker was told."""
    receive = receive_of(half, pool, make_request(name, params))
    half.consumer.received(name)
    return receive


@pytest.mark.parametrize("cached", [False, True], ids=["received", "needless"])
def test_what_brings_the_parameters_of_an_earlier_request_is_computed(pair, caplog, cached):
    """Between the tool calls of a response vLLM's API server sends the same ones, behind a longer prompt each time."""
    producer, consumer, pool = pair
    params = hand_over(producer, "p-1")
    if cached:
        first = make_request("d-1_0", params)
        consumer.on_new_request(first)
        assert allocate(consumer, pool, first, computed=len(PROMPT) - 1)[0] == 0
    else:
        reads(consumer, pool, "d-1_0", params)
    caplog.set_level(logging.INFO, logger="vllm_pd_connector")
    for round_, prompt in enumerate(([*PROMPT, 7, 8], [*PROMPT[:20], 9]), 1):
        again = make_request(f"d-1_{round_}", params, prompt)
        consumer.on_new_request(again)
        assert allocate(consumer, pool, again)[0] == 0
    assert consumer.build_metadata(EMPTY_STEP).receives == []
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 2
    assert all("d-1_" in line and "an earlier request has had what it brings" in line for line in caplog.messages)


def test_a_later_round_of_a_response_asks_for_nothing_whichever_engine_gets_it(pair):
    producer, consumer, pool = pair
    for name, waits in (("resp_x_1-0123abcd", False), ("resp_x_0-0123abcd", True)):
        consumer.on_new_request(round_ := make_request(name, hand_over(producer, name)))
        assert bool(allocate(consumer, pool, round_)[0]) is waits


def test_what_another_waits_for_or_failed_to_get_is_asked_for_again(pair):
    """While a use of it goes on a lease is held, and of one that failed it is the prefill side that knows why."""
    producer, consumer, pool = pair
    params = hand_over(producer, "p-1")
    waits = make_request("waits", params)
    consumer.on_new_request(waits)
    for name in ("d-1", "d-2"):
        assert reads(consumer, pool, name, params).read is not None
    failing = hand_over(producer, "p-2")
    receive_of(consumer, pool, make_request("d-3", failing))
    consumer.consumer.received("d-3", failed=True)
    assert reads(consumer, pool, "d-4", failing).read is not None


def test_a_choice_that_comes_when_another_has_read_is_not_computed(pair):
    producer, consumer, pool = pair
    params = hand_over(producer, "p-1")
    assert [reads(consumer, pool, f"{choice}_d-1", params).shared for choice in (0, 1)] == [True, True]


# -- several prompts ---------------------------------------------------------------------------------------------------


def test_of_a_completion_with_several_prompts_the_first_is_read_and_nothing_is_held_for_the_others():
    """A router that passes it on gets the parameters of the first alone, and gives them to all."""
    producer, blocks = serving_half("kv_producer", kv_lease_duration=60)
    consumer, pool = make_half("kv_consumer")
    free = blocks.get_num_free_blocks()
    params = hand_over(producer, "cmpl-a-0-0123abcd")
    hand_over(producer, "cmpl-a-1-4567abcd", prompt=[9] * 41)
    until(lambda: freed(producer) == ["cmpl-a-1-4567abcd"], "what nobody can name to be freed")
    assert blocks.get_num_free_blocks() == free - 3
    other = make_request("cmpl-a-1-89abcdef", params, [9] * 41)
    consumer.on_new_request(other)
    assert consumer.num_matched_tokens(other, 0) == (0, False), "it is computed here"
    first = make_request("cmpl-a-0-89abcdef", params)
    assert receive_of(consumer, pool, first).read.blocks == (BlockTable.of(0, (5, 6, 7)),)
    assert not producer.producer.drain(), "the lease is the first's"


# -- several choices ---------------------------------------------------------------------------------------------------


def test_the_choices_of_a_request_read_under_one_lease_which_ends_with_the_last(pair):
    producer, consumer, pool = pair
    params = hand_over(producer, "p-1")
    first, second = (make_request(f"{choice}_d-1", params) for choice in (0, 1))
    for request in (first, second):
        consumer.on_new_request(request)
    until(lambda: count(producer, "Renew") >= 2, "both are announced")
    allocate(consumer, pool, first)
    assert reports(producer, consumer) == [ReadVerdict(True, "")]
    read = time.monotonic()
    until(lambda: time.monotonic() - read > 2 * SHARED_S or bool(freed(producer)), "longer than a lease waits")
    allocate(consumer, pool, second)
    assert reports(producer, consumer) == [ReadVerdict(True, "")]
    until(lambda: freed(producer) == ["p-1"], "the lease to end")


def test_a_choice_that_leaves_the_queue_takes_nothing_from_the_others(pair):
    producer, consumer, pool = pair
    params = hand_over(producer, "p-1")
    first, second = (make_request(f"{choice}_d-1", params) for choice in (0, 1))
    for request in (first, second):
        consumer.on_new_request(request)
    abort(consumer, first)
    until(lambda: count(producer, "Release") == 1, "the message")
    allocate(consumer, pool, second)
    assert freed(producer) == [] and reports(producer, consumer) == [ReadVerdict(True, "")]
    until(lambda: freed(producer) == ["p-1"], "the lease to end")


def test_the_choices_of_a_request_are_read_also_where_its_prefill_would_be_asked_to_write():
    producer, _ = serving_half("kv_producer", mode="push", kv_lease_duration=LONG_S)
    for mode in ("push", "auto"):
        consumer, pool = serving_half("kv_consumer", mode=mode)
        params = hand_over(producer, f"p-{mode}")
        alone, choice = make_request("d-1", params), make_request("0_d-2", params)
        receives = {}
        for request in (alone, choice):
            consumer.on_new_request(request)
            allocate(consumer, pool, request)
            [receives[request.request_id]] = consumer.build_metadata(EMPTY_STEP).receives
        assert receives["d-1"].push is not None and receives["0_d-2"].push is None
        assert receives["0_d-2"].read is not None and receives["0_d-2"].shared


def test_only_the_choice_that_ended_last_keeps_its_blocks_for_the_router(pair):
    producer, consumer, pool = pair
    handed = [hand_over(producer, f"{choice}_p-1") for choice in (1, 0, 2)]
    assert freed(producer) == ["0_p-1"] and producer.producer.num_leases == 1, "1_p-1 ended before the last arrived"
    request = make_request("d-1", handed[-1])
    consumer.on_new_request(request)
    allocate(consumer, pool, request)
    assert reports(producer, consumer) == [ReadVerdict(True, "")]
    until(lambda: freed(producer) == ["2_p-1"], "the lease to end")
    assert not producer.producer._choices


def test_the_choices_of_two_legs_that_are_sent_at_once_pair_off_one_by_one(prefill):
    consumer, pool = serving_half("kv_consumer", mode="push")
    params = concurrent(prefill.half.producer.home.port, transfer_id="t-1")
    table = prefill.half.producer._server.pushes._table
    for choice in (0, 1):
        prefill.half.on_new_request(make_request(f"{choice}_p-1", ASK))
    for choice in (0, 1):
        request = make_request(f"{choice}_d-1", params)
        receive = receive_of(consumer, pool, request)
        found = table._rendezvous.find(receive.push.prefill)
        assert found is not None and found.request_id == f"{choice}_p-1"
        assert receive.push.prompt_digest == digest_of(make_request("any", ASK))


# -- leases that nobody ends -------------------------------------------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_no_decode_instance_keeps_blocks_for_longer_than_the_limit(caplog):
    """Two instances that prefill for each other may each keep what the other needs to go on."""
    producer, _ = serving_half("kv_producer", kv_lease_duration=8.0, kv_lease_limit=10.0)
    consumer, pool = make_half("kv_consumer")
    request = make_request("d-1", hand_over(producer, "p-1"))
    consumer.on_new_request(request)
    until(lambda: freed(producer) == ["p-1"], "the lease to end though it is renewed")
    stats = producer.stats()
    assert (stats.data["leases_expired"], stats.data["leases_over_limit"]) == (1, 1)
    [said] = [line for line in warnings(caplog) if "p-1" in line and "freed" in line]
    assert "kv_lease_limit" in said and "kv_lease_duration" not in said
    allocate(consumer, pool, request)
    [verdict] = reports(producer, consumer)
    assert not verdict.held and "kv_lease_limit" in verdict.reason


def test_the_advice_of_a_lease_that_expired_is_that_for_its_cause(caplog):
    producer, _ = serving_half("kv_producer", kv_lease_duration=1.5)
    hand_over(producer, "p-unclaimed")
    until(lambda: freed(producer) == ["p-unclaimed"], "the lease to end")
    consumer, _ = make_half("kv_consumer")
    consumer.on_new_request(make_request("d-1", hand_over(producer, "p-silent")))
    until(lambda: count(producer, "Renew") >= 1, "a renewal")
    consumer.consumer._renewer._leases.clear()  # as when its host freezes
    consumer.consumer._renewer._due.clear()
    until(lambda: freed(producer) == ["p-silent"], "the lease to end")
    unclaimed, silent = (line for line in warnings(caplog) if "its blocks are freed" in line)
    assert "p-unclaimed" in unclaimed and "sent no decode request" in unclaimed
    assert "p-silent" in silent and "fell silent" in silent


def test_a_limit_below_the_duration_is_refused():
    with pytest.raises(InvalidConfig, match=r"kv_lease_limit is 10.0, and kv_lease_duration 30.0"):
        parse_config({"kv_lease_limit": 10.0})
