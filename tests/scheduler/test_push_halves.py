"""The scheduler halves of a pushing pair: pairing, held blocks, steps, parameters of both shapes of router."""

from __future__ import annotations

import time

import pytest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from tests.support.push.asked import asked_for
from tests.support.scheduler.halves import (
    BLOCK,
    FULL,
    PROMPT,
    TOKEN,
    WINDOW,
    abort,
    allocate,
    make_request,
    new_prompt,
    receive_of,
    serving_half,
    until,
)
from tests.support.scheduler.push_halves import ASK, ATTEMPT, Prefill, concurrent, digest_of, step
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.protocol.push import command_queue
from vllm_pd_connector.protocol.wire import push_messages as pm
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.net.sockets import endpoint

LEASE_S = 2.0


def test_each_step_orders_what_it_completes_and_holds_it_first(prefill):
    request, answer = prefill.arrive_asked_for()
    prefill.tables["p-1"] = [[5, 6]]
    assert step(prefill.half, p_1=(0, 20)).step == 1
    assert prefill.held() == 2
    [receive] = prefill.commands()
    assert (receive.ready, receive.step, receive.final) == (20, 1, False)
    assert receive.source == (BlockTable.of(0, (5, 6)),)
    prefill.tables["p-1"] = [[5, 6, 7]]
    assert step(prefill.half, p_1=(20, 20)).step == 2
    orders = prefill.commands()
    assert prefill.half.request_finished(request, ([5, 6, 7],))[1]["transfer_mode"] == "push"
    assert [(o.ready, o.step, o.final) for o in orders + prefill.commands()] == [(40, 2, False), (40, 2, True)]
    assert prefill.held() == 3
    prefill.ended()
    assert answer() == pm.Pushed(pm.PushState.DONE, "", True, request_id="p-1")
    assert prefill.held() == 0


def test_blocks_that_another_connector_failed_to_load_fail_the_push_that_wrote_from_them(prefill):
    """vLLM computes their tokens again and finishes the request, but decode has what was there before."""
    request, answer = prefill.arrive_asked_for()
    prefill.tables["p-1"] = [[5, 6, 7]]
    step(prefill.half, p_1=(0, 30))
    assert len(prefill.commands()) == 1
    prefill.half.update_output(KVConnectorOutput(invalid_block_ids={9}))  # of a request that nobody waits for
    assert asked_for(prefill.half.producer._server.pushes, "p-1") and prefill.held() == 3
    prefill.half.update_output(KVConnectorOutput(invalid_block_ids={6, 7}))
    reply = answer()
    assert (reply.state, reply.terminal) == (pm.PushState.FAILED, False) and "failed to load" in reply.reason
    assert [type(receive) for receive in prefill.commands()] == [pm.CancelCommand]
    prefill.ended(ok=False)
    step(prefill.half, p_1=(16, 24))
    assert prefill.held() == 0, "blocks of a push that has failed"
    prefill.half.request_finished(request, ([5, 6, 7],))
    assert prefill.held() == 0, "a lease that nobody has a use for"


@pytest.mark.parametrize("prefill", [{"push_when": "end"}], indirect=True)
def test_everything_can_be_kept_for_the_end(prefill):
    request, _ = prefill.arrive_asked_for()
    step(prefill.half, p_1=(0, 40))
    assert prefill.held() == 0
    prefill.half.request_finished(request, ([5, 6, 7],))
    [receive] = prefill.commands()
    assert isinstance(receive, pm.WriteCommand) and receive.final


@pytest.mark.parametrize("prefill", [{"spec": (FULL, WINDOW)}], indirect=True)
def test_windows_are_not_ordered_before_the_end(prefill):
    request = new_prompt("p-1", ASK, PROMPT)
    prefill.half.on_new_request(request)
    assert request.num_prompt_tokens == len(PROMPT) - 1, "decode computes the last token"
    prefill.register(digest_of(request), stop=len(PROMPT) - 1)
    prefill.tables["p-1"] = [[5, 6], [8, 9]]
    step(prefill.half, p_1=(0, 20))
    [receive] = prefill.commands()
    assert receive.source == (BlockTable.of(0, (5, 6)), BlockTable.of(0, ()))
    assert prefill.held() == 2


@pytest.mark.parametrize("prefill", [{"spec": (FULL, WINDOW), "push_when": "layers"}], indirect=True)
def test_windows_are_ordered_with_the_last_step_where_its_layers_are_written(prefill):
    request = new_prompt("p-1", ASK, PROMPT)
    prefill.half.on_new_request(request)
    stop = len(PROMPT) - 1
    prefill.register(digest_of(request), stop=stop)
    prefill.tables["p-1"] = [[5, 6], [8, 9]]
    step(prefill.half, p_1=(0, 20))
    prefill.tables["p-1"] = [[5, 6, 7], [0, 9, 10]]
    step(prefill.half, p_1=(20, stop - 20))
    first, last = prefill.commands()
    assert (first.whole, first.source[1]) == (False, BlockTable.of(0, ()))
    assert (last.whole, last.final, last.ready) == (True, False, stop)
    assert last.source == (BlockTable.of(0, (5, 6, 7)), BlockTable.of(1, (9, 10)))
    assert prefill.held() == 5
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    request.num_computed_tokens = stop
    prefill.half.request_finished(request, ([5, 6, 7], [0, 9, 10]))
    [end] = prefill.commands()
    assert (end.final, end.whole, end.source) == (True, False, last.source)
    prefill.ended()
    assert prefill.held() == 0


def test_who_asks_while_the_only_step_is_computed_is_written_to_in_its_course(prefill):
    """Both legs are sent at once, and the prefill instance is idle: its step is scheduled before anybody can ask."""
    request = prefill.arrive()
    prefill.tables["p-1"] = [[5, 6, 7]]
    step(prefill.half, p_1=(0, 40))
    assert prefill.held() == 3, "they may be written from as soon as somebody asks"
    prefill.register(digest_of(request))
    [order] = prefill.commands()
    assert (order.ready, order.step, order.final) == (40, 1, False)
    assert order.source == (BlockTable.of(0, (5, 6, 7)),)
    assert prefill.held() == 3


def test_what_nobody_has_asked_for_is_taken_back_where_blocks_are_needed_and_offered_again(prefill):
    request = prefill.arrive()
    prefill.tables["p-1"] = [[5, 6]]
    step(prefill.half, p_1=(0, 20))
    prefill.half.producer.progress.take_back()
    assert prefill.held() == 0
    prefill.register(digest_of(request))  # others may have the blocks by now
    prefill.tables["p-1"] = [[7, 8]]
    step(prefill.half, p_1=(0, 20))
    prefill.half.producer.progress.take_back()
    assert prefill.held() == 2, "they are written from"
    [order] = prefill.commands()
    assert (order.ready, order.step, order.source) == (20, 2, (BlockTable.of(0, (7, 8)),))


def test_blocks_that_nobody_has_asked_for_are_not_missed_when_another_connector_fails_to_load_them(prefill):
    request = prefill.arrive()
    prefill.tables["p-1"] = [[5, 6]]
    step(prefill.half, p_1=(0, 20))
    prefill.half.update_output(KVConnectorOutput(invalid_block_ids={6}))
    assert prefill.held() == 0
    prefill.register(digest_of(request))  # what lies there is wrong
    step(prefill.half, p_1=(16, 4))
    [order] = prefill.commands()
    assert (order.ready, order.step) == (20, 2)


def test_the_end_of_a_prefill_waits_for_its_own_last_step_and_not_for_others_(prefill):
    """vLLM may have begun the next step before it has the results of this one."""
    request, _ = prefill.arrive_asked_for()
    prefill.tables["p-1"] = [[5, 6, 7]]
    step(prefill.half, p_1=(0, 40))
    orders = prefill.commands()
    step(prefill.half, other=(0, 100))
    prefill.half.request_finished(request, ([5, 6, 7],))
    assert [(one.step, one.final) for one in orders + prefill.commands()] == [(1, False), (1, True)]


@pytest.mark.parametrize("declined", [True, False])
def test_of_a_prefill_that_nobody_needs_nothing_is_held(prefill, declined):
    prefill.arrive()
    if declined:
        prefill.send(pm.DeclinePush(pm.PrefillRef("t-1", None)))()
    else:
        prefill.register("f" * 16)()  # another prompt
        prefill.half.producer._server.pushes.failed("p-1", "for the test")
    step(prefill.half, p_1=(0, 20))
    assert prefill.held() == 0


def test_an_abort_in_mid_prefill_reaches_the_decode_side_and_gives_the_blocks_back(prefill):
    """The decode side keeps its own until nothing is written; what is written there nobody takes."""
    request, answer = prefill.arrive_asked_for()
    prefill.tables["p-1"] = [[5, 6]]
    step(prefill.half, p_1=(0, 20))
    assert len(prefill.commands()) == 1
    request.status = RequestStatus.FINISHED_ABORTED
    assert prefill.half.request_finished(request, ([5, 6],)) == (False, None)
    told = answer()
    assert told.state is pm.PushState.FAILED and not told.terminal and "FINISHED_ABORTED" in told.reason
    assert prefill.held() == 0
    over = prefill.send(pm.WithdrawPush(pm.PrefillRef("t-1", None), ATTEMPT))
    prefill.ended(ok=False, reason="given up")
    assert over().terminal
    assert prefill.held() == 0


def test_a_running_prefill_whose_push_has_failed_gets_its_blocks_back_though_its_writes_may_go_on(prefill):
    """Preempted, it may not be able to go on without them."""
    request, _ = prefill.arrive_asked_for()
    prefill.tables["p-1"] = [[5, 6]]
    assert step(prefill.half, p_1=(0, 20)) and len(prefill.commands()) == 1
    prefill.ended(ok=False, reason="a link dropped", terminal=False)
    step(prefill.half)
    assert prefill.held() == 0
    prefill.ended(ok=False, reason="a link dropped")
    step(prefill.half)
    assert prefill.held() == 0
    prefill.tables["p-1"] = [[7, 8, 9]]
    step(prefill.half, p_1=(0, 40))
    assert prefill.held() == 0
    prefill.half.request_finished(request, ([7, 8, 9],))
    assert prefill.held() == 0


def test_a_request_that_finds_no_block_waits_for_those_of_a_push_that_has_failed(prefill):
    """Another would be preempted for it, and what the push has left would be free in the next step."""
    prefill.arrive_asked_for()
    prefill.tables["p-1"] = [[5, 6]]
    step(prefill.half, p_1=(0, 20))
    assert not prefill.half.frees_blocks() and len(prefill.commands()) == 1
    prefill.ended(ok=False, reason="a link dropped")
    assert prefill.half.frees_blocks()
    assert not prefill.half.frees_blocks() and prefill.held() == 0


def test_a_running_prefill_whose_orders_cannot_be_told_gets_its_blocks_back(prefill, monkeypatch):
    now, server = [0.0], prefill.half.producer._server
    server._clock = server.pushes._clock = lambda: now[0]
    _, answer = prefill.arrive_asked_for()
    now[0] = 50.0
    server._wake.set()
    assert answer().state is pm.PushState.COMPUTING, "nobody waits for an answer now"
    until(lambda: not server.has_news(), "the server's thread to sleep")
    monkeypatch.setattr(command_queue, "MAX_COMMANDS_BYTES", 1)
    prefill.tables["p-1"] = [[5, 6]]
    step(prefill.half, p_1=(0, 20))
    until(lambda: step(prefill.half) and prefill.pool.get_num_free_blocks() == prefill.free, "the blocks")


def test_a_prefill_that_ends_by_a_stop_token_is_handed_over_like_any_other(prefill):
    request, answer = prefill.arrive_asked_for(status=RequestStatus.FINISHED_STOPPED)
    prefill.half.request_finished(request, ([5, 6, 7],))
    prefill.commands()
    prefill.ended()
    assert answer() == pm.Pushed(pm.PushState.DONE, "", True, request_id="p-1")


@pytest.mark.parametrize("prefill", [{"kv_lease_duration": 3.0}], indirect=True)
def test_a_prefill_that_nobody_asks_for_is_freed_when_its_lease_ends(prefill):
    request = prefill.arrive()
    prefill.half.request_finished(request, ([5, 6, 7],))
    assert prefill.held() == 3
    until(lambda: prefill.held() == 0, "the lease to end")


@pytest.mark.parametrize("prefill", [{"step_timeout": 60.0}], indirect=True)
def test_who_waits_for_a_prefill_hears_whether_the_engine_goes_on(prefill):
    now, server = [0.0], prefill.half.producer._server
    server._clock = server.pushes._clock = lambda: now[0]
    request = prefill.arrive()
    prefill.tables["p-1"] = [[5]]
    states = []
    for moment in (50.0, 100.0, 150.0):
        answer = prefill.register(digest_of(request))
        now[0] = moment
        if moment == 50.0:
            step(prefill.half, p_1=(0, 10))
        step(prefill.half)  # nothing could be scheduled: that is no step
        server._wake.set()
        states.append(answer().state)
    assert states == [pm.PushState.COMPUTING, pm.PushState.COMPUTING, pm.PushState.FAILED]


def test_orders_are_only_for_who_knows_the_workers_secret(prefill):
    answer = prefill.send(pm.AwaitCommands(b"x" * 16, 0, 0))()
    assert "token" in answer.message
    assert "token" in prefill.send(pm.AwaitCommands(TOKEN, 1, 0))().message


def test_an_instance_that_does_not_push_says_so():
    half, _ = serving_half("kv_producer")
    prefill = Prefill.__new__(Prefill)
    prefill.half, prefill.client, prefill.come = half, SideChannelClient(), {}
    prefill.address = endpoint("127.0.0.1", half.producer._port)
    told = prefill.register("0" * 16)()
    assert told.state is pm.PushState.FAILED and told.terminal and "mode push" in told.reason
    prefill.close()


# The decode side


@pytest.fixture
def consumer():
    return serving_half("kv_consumer", mode="push")


@pytest.mark.parametrize(
    ("params", "name"),
    [(concurrent(), "cmpl-7-0"), (concurrent(transfer_id="t-1"), "t-1")],
    ids=["request id", "transfer id"],
)
def test_a_concurrent_router_s_request_is_registered_under_the_name_of_both_legs(consumer, params, name):
    half, pool = consumer
    request = make_request("cmpl-7-0-0123abcd", params)
    receive = receive_of(half, pool, request, computed=16)
    assert (receive.start, receive.stop, receive.read) == (16, 40, None)
    assert receive.push.prefill == pm.PrefillRef(name, None) and receive.push.peer.incarnation == ""
    assert receive.push.home == half.producer.home and receive.push.prompt_digest == digest_of(request)


def test_a_serial_router_s_request_is_asked_for_by_its_lease(prefill, consumer):
    half, pool = consumer
    first = make_request("p-1", {"do_remote_decode": True})
    prefill.half.on_new_request(first)
    _, params = prefill.half.request_finished(first, ([5, 6, 7],))
    receive = receive_of(half, pool, make_request("d-1", params))
    assert receive.push.prefill.name == "p-1" and receive.push.prefill.nonce is not None
    assert receive.push.peer.incarnation == prefill.half.producer.home.incarnation


LONG = "cmpl-" + "x" * 600 + "-0-0123abcd"
"""A client's X-Request-Id, as vLLM hands it on."""


@pytest.mark.parametrize("prefill", [{"kv_lease_duration": LEASE_S}], indirect=True)
@pytest.mark.parametrize("beside", [(), (LONG,)], ids=["alone", "beside a name that no message takes"])
def test_a_prefill_is_kept_while_the_decode_request_queues(prefill, beside):
    half, _ = serving_half("kv_consumer", mode="push", kv_lease_duration=0.3)
    request = make_request("d-1", concurrent(prefill.half.producer._port, transfer_id="t-1"))
    half.on_new_request(request)
    for name in beside:
        half.on_new_request(make_request(name, concurrent(prefill.half.producer._port)))
    first = prefill.arrive()
    prefill.half.request_finished(first, ([5, 6, 7],))
    until_s = time.monotonic() + 1.5 * LEASE_S
    until(lambda: time.monotonic() > until_s, "more than the lease")
    assert prefill.count("KeepPrefills") > 1 and prefill.held() == 3
    abort(half, request)
    until(lambda: prefill.count("DeclinePush") == 1 and prefill.held() == 0, "the word to free the blocks")
    renewals = prefill.count("KeepPrefills")
    half.shutdown()
    assert prefill.count("KeepPrefills") - renewals <= 1, "nobody queues any more"


@pytest.mark.parametrize("aborted", [True, False], ids=["aborted", "full hit"])
def test_a_request_that_needs_nothing_gives_up_its_prefill_at_once(consumer, prefill, aborted):
    half, pool = consumer
    prompt = PROMPT[: 2 * BLOCK + 1]
    request = make_request("d-1", concurrent(prefill.half.producer._port, transfer_id="t-1"), prompt)
    half.on_new_request(request)
    if aborted:
        abort(half, request)
    else:  # the longest hit that vLLM reports
        assert allocate(half, pool, request, computed=2 * BLOCK)[0] == 0
        assert step(half).receives == []
    until(lambda: prefill.count("DeclinePush") == 1, "the word that nothing is needed")
    first = prefill.arrive(prompt)
    prefill.half.request_finished(first, ([5, 6, 7],))
    assert prefill.held() == 0


@pytest.mark.parametrize("prefill", [{"kv_lease_duration": 600.0}], indirect=True)
def test_a_full_hit_releases_a_prefill_that_has_finished_already(consumer, prefill):
    half, pool = consumer
    prompt = PROMPT[: 2 * BLOCK + 1]
    _, params = prefill.half.request_finished(prefill.arrive(prompt), ([5, 6, 7],))
    assert prefill.held() == 3
    request = make_request("d-1", params, prompt)
    half.on_new_request(request)
    assert allocate(half, pool, request, computed=2 * BLOCK)[0] == 0
    assert step(half).receives == []
    until(lambda: prefill.held() == 0, "the lease to be released")


def test_a_name_that_no_message_takes_is_refused_on_both_sides(prefill, consumer):
    asks = {"do_remote_decode": True}
    for side, pool, params in ((*consumer, concurrent()), (prefill.half, prefill.pool, asks)):
        receive = receive_of(side, pool, make_request(LONG, params))
        assert "X-Request-Id" in receive.source.reason


def test_parameters_of_another_shape_are_refused(consumer):
    half, pool = consumer
    receive = receive_of(half, pool, make_request("d-1", concurrent(remote_port=0)))
    assert "remote_port" in receive.source.reason


def test_a_prefill_whose_id_was_used_before_is_not_ended_by_the_older_ones_lease(prefill):
    request, _ = prefill.arrive_asked_for()
    prefill.tables["p-1"] = [[5, 6, 7]]
    step(prefill.half, p_1=(0, 40))
    prefill.half.request_finished(request, ([5, 6, 7],))
    prefill.arrive()
    runs = prefill.half.producer._server.pushes._such(["p-1"], lambda known: not known.finished)
    assert runs == {"p-1"} and prefill.held() == 0
