"""Steps that are held back while only caches are waited for, and idle engines that are asked for one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput

from tests.support.scheduler.halves import EMPTY_STEP, TOKEN, allocate, hand_over, make_half, make_request, until
from tests.support.scheduler.loops import ATTEMPT, WAITING, Core, Loop, hold_steps, made, take_step
from vllm_pd_connector.compat.engine import EngineLoop
from vllm_pd_connector.metadata import StepMetadata, WorkerReport
from vllm_pd_connector.protocol.params.bootstrap import HostPort
from vllm_pd_connector.protocol.wire.messages import FoundConversation
from vllm_pd_connector.scheduler import step_hold as hold_module
from vllm_pd_connector.scheduler.half import SchedulerHalf
from vllm_pd_connector.scheduler.step_hold import LONGEST_S, SHORT_S, StepHold
from vllm_pd_connector.sidechannel.bell import ENDED, HERE, RECEIVED, ring

OTHER = b"o" * 16
TURN = {
    **{"do_remote_decode": True, "do_remote_prefill": False},
    **{"remote_engine_id": "d", "remote_host": "127.0.0.1", "remote_port": 5, "remote_request_id": "d-1"},
}
LOOKED_UP = {
    **{"do_remote_prefill": True, "do_remote_decode": False},
    **{"remote_bootstrap_addr": "http://127.0.0.1:9", "remote_engine_id": "p", "transfer_id": "t-1"},
}


def test_a_step_in_which_only_caches_are_waited_for_is_held(hold: StepHold, loop: Loop) -> None:
    assert take_step(hold)
    assert loop.waits == [LONGEST_S]


@pytest.mark.parametrize("change", [{"computes": True}, {"waiting": False}])
def test_an_engine_with_something_to_do_is_not_held(hold: StepHold, loop: Loop, change: dict[str, Any]) -> None:
    take_step(hold, **change)
    assert not loop.waits


def test_no_step_is_held_while_a_request_is_computed() -> None:
    """With overlapping batches vLLM schedules nothing while the results of what it computes are out."""
    loop = Loop(Core(running=["r-1"]))
    hold = made(loop)
    assert not take_step(hold)
    assert not loop.waits
    hold.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"requests": {"d-1": None, "d-2": None}},
        {"connector": SimpleNamespace(has_pending_push_work=lambda: True)},
        {"ec_connector": object()},
    ],
    ids=["another request", "another connector", "an encoder cache"],
)
def test_what_shows_no_sign_is_looked_at_soon(fields: dict[str, Any]) -> None:
    loop = Loop(Core(**fields))
    hold = made(loop)
    take_step(hold)
    assert loop.waits == [SHORT_S]
    hold.close()


def test_a_worker_that_was_never_heard_is_asked_soon(loop: Loop) -> None:
    hold = made(loop, (TOKEN, OTHER), heard=False)
    hold._rung(HERE + TOKEN)
    take_step(hold)
    hold._rung(HERE + OTHER)
    take_step(hold)
    assert loop.waits == [SHORT_S, LONGEST_S]
    hold.close()


def test_a_stranger_rings_in_vain(loop: Loop) -> None:
    hold = made(loop, heard=False)
    hold._rung(ENDED + OTHER)
    assert not hold.asked
    take_step(hold)
    assert loop.waits == [SHORT_S]
    hold.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nothing_is_held_until_the_results_of_an_end_were_looked_at(depth: int) -> None:
    """With batches that overlap, vLLM looks at a step's results in a later one."""
    loop = Loop(Core(depth))
    hold = made(loop)
    hold._rung(ENDED + TOKEN)
    for _ in range(depth):
        assert not take_step(hold), "the workers are ready for what follows"
    assert not loop.waits
    assert take_step(hold)
    assert loop.waits == [LONGEST_S]
    hold.close()


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_what_ended_beside_the_last_token_of_a_request_is_looked_at_without_a_hold(depth: int) -> None:
    """vLLM looks at the step with the token `depth` - 1 steps later, and then goes on with the results behind it."""
    loop = Loop(Core(depth, running=["r-1"]))
    hold = made(loop)
    take_step(hold, computes=True)
    for _ in range(depth - 2):
        take_step(hold)
    hold._rung(ENDED + TOKEN)
    take_step(hold)  # a worker hands the end over in this one, and vLLM finds that the request has ended
    loop._core.scheduler.running.clear()
    take_step(hold)
    for _ in range(depth - 2):
        take_step(hold)
    assert not loop.waits
    take_step(hold)
    assert loop.waits == [LONGEST_S]
    hold.close()


def test_workers_are_ready_for_the_step_after_an_end(hold: StepHold, loop: Loop) -> None:
    loop.meanwhile = lambda: hold._rung(ENDED + TOKEN)
    assert take_step(hold)
    assert not take_step(hold)
    assert loop.waits == [LONGEST_S]


@pytest.mark.parametrize("requests", [0, 1])
def test_workers_stay_calm_where_nobody_waits_for_what_ended(requests: int) -> None:
    """A lease that was read: an idle engine takes a step, and another only if a request wants its blocks."""
    loop = Loop(Core(requests=dict.fromkeys(range(requests))))
    hold = made(loop)
    hold.ask()
    assert take_step(hold, waiting=False) is not bool(requests)
    hold.close()


def test_a_worker_that_says_only_that_it_is_there_has_nothing_to_take_up(loop: Loop) -> None:
    hold = made(loop)
    assert not hold.asked
    assert take_step(hold)
    assert loop.waits == [LONGEST_S]
    hold.close()


def test_an_engine_that_is_not_known_steps_as_it_likes() -> None:
    hold = StepHold(None, lambda: 1, lambda *load: True, set().update)
    hold.listen([TOKEN])
    hold.ask()
    assert not hold.step(**WAITING)
    assert not hold.asked
    assert hold.bell == ""
    hold.close()


def test_several_ends_wake_the_engine_once(hold: StepHold, loop: Loop) -> None:
    for _ in range(3):
        hold.ask()
    assert loop._queue.qsize() == 1
    assert hold.asked
    take_step(hold)
    assert not hold.asked


@pytest.mark.parametrize("said", [ENDED, RECEIVED])
def test_a_bell_ends_the_wait(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(hold_module, "LONGEST_S", 600.0)
    loop = EngineLoop(Core(), "wake")
    loop.received = lambda request_ids: None  # type: ignore[method-assign]
    hold = made(loop)
    thread = threading.Thread(target=take_step, args=(hold,))
    thread.start()
    ring(hold.bell, said + TOKEN + ATTEMPT + b"d-1")
    thread.join()
    hold.close()


def test_what_went_well_on_every_worker_is_told_before_the_next_step(loop: Loop) -> None:
    hold = made(loop, (TOKEN, OTHER))

    def all_ring() -> None:
        for name in (b"d-1", b"d-2"):
            for token in (TOKEN, OTHER):
                hold._rung(RECEIVED + token + ATTEMPT + name)

    loop.meanwhile = all_ring
    assert take_step(hold)
    assert loop.told == [{"d-1", "d-2"}] and loop.waits == [LONGEST_S]
    assert not hold.asked, "no step is to fetch what the workers report"
    hold._rung(RECEIVED + OTHER + ATTEMPT + b"d-1")
    hold._rung(RECEIVED + TOKEN + ATTEMPT + b"d-1")
    take_step(hold, computes=True)
    assert len(loop.told) == 2, "also beside requests that are computed"
    hold.close()


def test_what_went_well_on_some_workers_is_waited_for_shortly_and_then_asked_for(
    monkeypatch: pytest.MonkeyPatch, loop: Loop
) -> None:
    """The others are slower, or their message was lost."""
    hold = made(loop, (TOKEN, OTHER))
    loop.meanwhile = lambda: hold._rung(RECEIVED + TOKEN + ATTEMPT + b"d-1")
    take_step(hold)
    assert not loop.told and hold.asked
    loop.meanwhile = lambda: None
    assert not take_step(hold), "the workers are ready for the step after its results"
    assert loop.waits == [LONGEST_S]
    monkeypatch.setattr(hold_module, "PARTS_S", 600.0)
    thread = threading.Thread(target=take_step, args=(hold,))
    thread.start()
    hold._rung(RECEIVED + OTHER + ATTEMPT + b"d-1")
    thread.join()
    assert loop.told == [{"d-1"}]
    hold.close()


def test_a_part_that_is_rung_for_while_nothing_is_held_is_not_waited_for() -> None:
    hold = made(Loop(Core(2)), (TOKEN, OTHER))  # which looks at a report later than in the step that brings it
    hold._rung(ENDED + OTHER)
    for said in (HERE, RECEIVED, HERE, HERE, HERE, HERE):
        hold.step(**WAITING)
        hold._rung(said + TOKEN + ATTEMPT + b"d-1")
        hold._between()
    assert hold._loop.waits == [LONGEST_S], "the other may be slow"
    hold.close()


def test_a_message_that_comes_behind_the_reports_changes_nothing() -> None:
    loop, loads = Loop(), {"d-1"}
    hold = StepHold(loop, lambda: 1, lambda name, attempt: name in loads, loop.received)
    hold.listen((TOKEN, OTHER))
    hold._rung(RECEIVED + TOKEN + ATTEMPT + b"d-1")
    loads.clear()
    hold.forget("d-1")
    hold._rung(RECEIVED + OTHER + ATTEMPT + b"d-1")
    take_step(hold)
    assert not loop.told and not hold.asked
    hold.close()


# The scheduler half


def step(half: SchedulerHalf) -> StepMetadata:
    metadata = half.build_metadata(EMPTY_STEP)
    half.hold._between()
    return metadata


@pytest.fixture
def producer() -> tuple[SchedulerHalf, Any, Loop]:
    half, pool = make_half("kv_producer", kv_lease_duration=600.0)
    loop = hold_steps(half)
    half.producer._ended = half.hold.ask_soon
    half.serve([b"manifest"], [TOKEN])
    return half, pool, loop


def test_an_idle_engine_is_asked_to_give_back_what_was_read(producer: tuple[SchedulerHalf, Any, Loop]) -> None:
    half, pool, loop = producer
    free = pool.get_num_free_blocks()
    hand_over(half)
    assert pool.get_num_free_blocks() < free
    assert not half.hold.asked
    half.producer._server.drop("p-1")
    until(lambda: half.hold.asked, "the engine is asked for a step")
    assert loop._queue.get() == ("wake", None)
    step(half)
    stats = half.stats()
    assert pool.get_num_free_blocks() == free
    assert stats is not None
    assert stats.data["gauges"] | {"leases": 0, "free blocks": free} == stats.data["gauges"]


NO_TEXT = json.dumps(
    {"do_remote_prefill": False, "do_remote_decode": True, "remote_block_ids": [[3]], "remote_engine_id": "e\ud800"}
    | {"remote_request_id": "d-1", "remote_host": "127.0.0.1", "remote_port": 5, "tp_size": 1, "remote_num_tokens": 16}
).encode()
"""Half of a pair of escapes, which JSON can write and nobody encode."""


@pytest.mark.parametrize("answer", [b"", NO_TEXT], ids=["nothing is kept", "no text"])
def test_a_turn_that_asks_for_its_conversation_is_waited_for_as_a_receive_is(
    monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    half, _ = make_half("kv_producer", conversations=True)
    loop = hold_steps(half)
    half.consumer.turns._wake = half.hold.ask
    half.serve([b"manifest"], [TOKEN])
    half.hold._rung(HERE + TOKEN)
    step(half)
    asked: list[Callable[[object], None]] = []
    monkeypatch.setattr(half.consumer.turns._renewer, "find", lambda where, name, heard: asked.append(heard))
    turn = make_request("p-2", TURN)
    half.on_new_request(turn)
    step(half)
    assert half.num_matched_tokens(turn, 0) == (None, False)
    step(half)
    assert loop.waits == [LONGEST_S] * len(loop.waits) != []
    asked[0](FoundConversation(answer))
    assert half.hold.asked
    assert half.num_matched_tokens(turn, 0) == (0, False)
    half.shutdown()


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_request_that_was_answered_and_that_vllm_does_not_come_for_waits_for_something_else(
    monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """A turn, or one whose prefill was looked up: it may wait for its grammar, which comes without a sign."""
    half, _ = make_half(role, mode="push", conversations=role == "kv_producer")
    loop = hold_steps(half)
    half.serve([b"manifest"], [TOKEN])
    half.hold._rung(HERE + TOKEN)
    answers: list[Callable[[object], None]] = []
    monkeypatch.setattr(half.consumer.turns._renewer, "find", lambda where, name, heard: answers.append(heard))
    found: Future[HostPort] = Future()
    monkeypatch.setattr(half.consumer._searches._directory, "find", lambda bootstrap, engine: found)
    half.on_new_request(make_request("d-1", TURN if role == "kv_producer" else LOOKED_UP))
    step(half)
    assert loop.waits == [LONGEST_S]
    if role == "kv_producer":
        answers[0](FoundConversation(b""))
    else:
        found.set_result(HostPort("127.0.0.1", 5))
    step(half)
    assert loop.waits == [LONGEST_S]
    half.shutdown()


@pytest.mark.parametrize(("others", "held_s"), [((), LONGEST_S), (("r-1",), SHORT_S)])
def test_a_turn_that_is_held_back_and_asks_is_one_request_that_waits(
    monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...], held_s: float
) -> None:
    """Another one's turn may come without a sign, as that of one that waits for its grammar."""
    half, _ = make_half("kv_producer", conversations=True, kv_lease_share=0.1)
    loop = hold_steps(half, Core(requests=dict.fromkeys(("p-2", *others))))
    half.serve([b"manifest"], [TOKEN])
    half.hold._rung(HERE + TOKEN)
    hand_over(half)
    monkeypatch.setattr(half.consumer.turns._renewer, "find", lambda where, name, heard: None)
    turn = make_request("p-2", TURN)
    half.on_new_request(turn)
    assert half.num_matched_tokens(turn, 0) == (None, False)
    step(half)
    assert half.share.num_held_back == 1 and half.consumer.waiting == {"p-2"}
    assert loop.waits == [held_s]


def test_a_decode_instance_holds_its_steps_from_the_order_to_the_report(
    producer: tuple[SchedulerHalf, Any, Loop],
) -> None:
    half, pool = make_half("kv_consumer")
    loop = hold_steps(half)
    half.serve([], [TOKEN])
    half.hold._rung(HERE + TOKEN)
    step(half)
    request = make_request("d-1", hand_over(producer[0]))
    half.on_new_request(request)
    step(half)
    allocate(half, pool, request)
    ordered = step(half)
    assert ordered.receives
    assert ordered.bell == half.hold.bell
    assert ordered.calm
    assert loop.waits == [LONGEST_S]
    waiting = step(half)
    assert waiting.calm
    assert loop.waits == [LONGEST_S] * 2
    half.hold._workers |= {OTHER}
    half.hold._rung(RECEIVED + OTHER + ordered.receives[0].attempt + b"d-1")
    assert half.hold._parts
    half.update_output(KVConnectorOutput(kv_connector_worker_meta=WorkerReport(), finished_recving={"d-1"}))
    assert not half.hold._parts, "the first worker's message was lost"
    step(half)
    assert loop.waits == [LONGEST_S] * 2
