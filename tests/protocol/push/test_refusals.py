"""Registrations that the prefill side refuses: it stays so, because the decode side gives its blocks to others then."""

from __future__ import annotations

import pytest

from tests.support.push.table_world import World, into
from vllm_pd_connector.protocol.push import registrations
from vllm_pd_connector.protocol.push.table import ANSWER_S, REMEMBER
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.protocol.wire import push_messages as pm
from vllm_pd_connector.protocol.wire.fields import Weights
from vllm_pd_connector.protocol.wire.push_messages import PushState


def test_a_copy_of_a_refused_message_that_comes_late_is_refused_too() -> None:
    world, attempt = World(), into(0).attempt
    world.table.compute_with(Weights("version v2"), "", 0.0)
    world.do("register 0")
    [refusal] = world.answers[attempt]
    assert refusal.state is PushState.FAILED and refusal.terminal
    world.table.compute_with(Weights(), "", 0.0)
    for event in ("register 0", "start", "register 0", "finish", "register 0"):
        world.do(event)
    assert world.answers[attempt] == [refusal] * 4, "the same answer"
    assert not world.table._registrations and not world.begun, "it is written into blocks that others have"
    world.do("register 1")
    assert world.begun, "another one is served"


@pytest.mark.parametrize("limit", ["MAX_WAITING", "MAX_WAITING_BYTES"])
def test_who_finds_no_room_is_not_refused_but_asked_to_come_again(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    world, message = World(), into(0)
    with monkeypatch.context() as patch:
        patch.setattr(registrations, limit, 0)
        for number in range(2):
            world.table.register(message, (b"full", number), 0.0)
        replies = [reply for _, reply in world.table.replies.take()]
        assert [type(reply) for reply in replies] == [m.Failure] * 2 and not world.table._registrations
        assert all(isinstance(reply, m.Failure) and reply.code is m.FailureCode.BUSY for reply in replies)
    for event in ("start", "finish", "register 0"):
        world.do(event)
    assert world.answers[message.attempt][-1].state is PushState.DONE


def test_who_found_no_room_and_gave_up_is_not_written_for_when_a_copy_comes_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, message = World(), into(0)
    with monkeypatch.context() as patch:
        patch.setattr(registrations, "MAX_WAITING", 0)
        world.table.register(message, (b"full", 0), 0.0)
        world.table.replies.take()
        world.do("withdraw")
    for event in ("start", "finish", "register 0"):
        world.do(event)
    assert world.answers[message.attempt][-1].terminal and not world.begun


def test_refusals_make_no_other_answer_forgotten() -> None:
    world = World()
    for event in ("start", "finish", "register 0", "register 1"):
        world.do(event)
    done = world.answers[into(0).attempt][-1]
    assert done.state is PushState.DONE
    for number in range(registrations.REMEMBER_REFUSED + 2):
        message = into(attempt=number.to_bytes(16, "big"), weights=Weights("version v2"))
        world.table.register(message, (b"flood", number), 0.0)
    world.table.replies.take()
    assert len(world.table._registrations.refused) == registrations.REMEMBER_REFUSED
    world.do("register 0")
    assert world.answers[into(0).attempt][-1] == done


def test_who_withdraws_hears_that_it_goes_on_before_it_takes_the_connection_to_be_broken() -> None:
    world = World(quick=False)
    for event in ("start", "register 0", "finish", "withdraw"):
        world.do(event)
    attempt = into(0).attempt
    told = len(world.answers.get(attempt, ()))
    world.now += ANSWER_S
    world.settle()
    assert [(a.state, a.terminal) for a in world.answers[attempt][told:]] == [(pm.PushState.FAILED, False)]
    world.table.withdraw(pm.WithdrawPush(into(0).prefill, attempt), world.ticket(attempt), world.now)
    world.work()
    assert world.answers[attempt][-1].terminal


def test_whatever_strangers_withdraw_nothing_that_was_said_is_forgotten() -> None:
    """Each may say it of any attempt, and there is no end of them."""
    world = World()
    for event in ("start", "finish", "register 0", "register 1"):
        world.do(event)
    done, message = world.answers[into(0).attempt][-1], into(0)
    assert done.state is PushState.DONE
    for number in range(REMEMBER + 2):
        world.table.withdraw(pm.WithdrawPush(message.prefill, number.to_bytes(16, "big")), (b"flood", number), 0.0)
    world.table.replies.take()
    world.do("register 0")
    assert world.answers[into(0).attempt][-1] == done
