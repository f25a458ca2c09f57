"""Pushes whose prefill side has other weights than the decode side goes on with, or changes them meanwhile."""

from __future__ import annotations

import pytest

from tests.support.push.table_world import World, into
from vllm_pd_connector.protocol.wire.fields import Weights
from vllm_pd_connector.protocol.wire.push_messages import PushState


def test_other_weights_than_the_decode_side_s_are_not_written() -> None:
    world = World()
    world.table.compute_with(Weights("version v1", 3), "new weights", 0.0)
    world.do("start")
    world.do("register 0")
    [answer] = world.answers[into(0).attempt]
    assert answer.state is PushState.FAILED and answer.terminal
    assert "weights: 'version v1' there, '' here" in answer.reason


@pytest.mark.parametrize("events", [("start", "register 0"), ("register 0", "start", "progress")])
def test_a_push_that_has_begun_fails_when_weights_change(events: tuple[str, ...]) -> None:
    world = World()
    for event in events:
        world.do(event)
    ordered = bool(world.owed)
    world.table.compute_with(Weights("version v2", 1), "the weights are changed in place", 0.0)
    world.settle()
    answer = world.answers[into(0).attempt][-1]
    assert answer.state is PushState.FAILED and answer.reason == "the weights are changed in place"
    assert answer.terminal is not ordered, "its workers may write until they say that they do not"
    world.do("finish")
    assert not world.finished or world.closed, "it is not handed over"


def test_who_waits_for_a_prefill_that_has_not_begun_goes_on_with_the_new_weights() -> None:
    world = World()
    world.table.compute_with(Weights("version v2", 1), "", 0.0)
    world.table.register(into(0, weights=Weights("version v2", 4)), world.ticket(into(0).attempt), 0.0)
    world.settle()
    world.table.compute_with(Weights("version v2", 2), "the weights are changed in place", 0.0)
    for event in ("start", "progress"):
        world.do(event)
    assert world.owed, "it is written"


@pytest.mark.parametrize("events", [(), ("start",), ("start", "progress")])
def test_the_same_name_again_leaves_pushes_alone(events: tuple[str, ...]) -> None:
    world = World()
    v1 = Weights("version v1")
    world.table.compute_with(v1, "", 0.0)
    world.table.register(into(0, weights=v1), world.ticket(into(0).attempt), 0.0)
    for event in events:
        world.do(event)
    world.table.compute_with(v1, "", 0.0)
    world.settle()
    assert not world.answers.get(into(0).attempt), "nobody is told that it is over"
    if not events:
        world.do("start")
    world.do("finish")
    assert world.owed and not world.closed


@pytest.mark.parametrize("events", [(), ("start",), ("start", "progress")])
@pytest.mark.parametrize("reason", ["", "the weights are called 'v2' from now on"])
def test_a_new_name_fails_pushes_for_the_old_one(events: tuple[str, ...], reason: str) -> None:
    """Also one whose prefill has not begun: it would be computed with the new weights."""
    world = World()
    v1, v2 = Weights("version v1"), Weights("version v2", 1)
    world.table.compute_with(v1, "", 0.0)
    world.table.register(into(0, weights=v1), world.ticket(into(0).attempt), 0.0)
    for event in events:
        world.do(event)
    world.table.compute_with(v2, reason, 0.0)
    world.settle()
    answer = world.answers[into(0).attempt][-1]
    told = "weights: 'version v2' there, 'version v1' here" if not reason or not events else reason
    assert answer.state is PushState.FAILED and told in answer.reason
    world.work()
    for event in () if events else ("start", "progress"):
        world.do(event)
    assert not any(world.owed.values()), "nothing of the new ones is written"
