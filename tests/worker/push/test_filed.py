"""Where a turn finds what there is to be done: not by looking at each push, with as many of them as prefills run."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.support.worker.decode_instance import in_its_thread, set_faults, until, until_in
from tests.support.worker.prefill_instance import P_BLOCKS
from tests.support.worker.writer import ask_early, writes
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.protocol.wire.push_messages import PushInto
from vllm_pd_connector.worker.in_flight import InFlight
from vllm_pd_connector.worker.push.active import ActivePush
from vllm_pd_connector.worker.push.driver import Pushes
from vllm_pd_connector.worker.push.link import Part, WriteLink
from vllm_pd_connector.worker.transfer_loop import TransferLoop


def test_a_turn_looks_at_no_push_that_only_waits_for_a_step(writer, target, monkeypatch):
    for name in "abc":
        ask_early(writer, target, f"d-{name}", name)
        writer.server.pushes.progressed([(f"p-{name}", (BlockTable.of(0, P_BLOCKS[:2]),), 6)], 1)
    for loop in writer.loops:
        until_in(loop, lambda loop=loop: sum(map(len, loop._pushes._waiting_for.values())) == 3, "the orders")
    looked, look = [], Pushes._look
    monkeypatch.setattr(Pushes, "_look", lambda pushes, push, *given: (looked.append(push), look(pushes, push, *given)))

    def turn(loop: TransferLoop, now: float) -> None:
        assert loop._pushes is not None
        loop._pushes.turn(now, now + 60.0)
        assert loop._pushes.waiting and not loop._pushes._awake

    for loop in writer.loops:
        in_its_thread(loop, partial(turn, loop))
    assert not looked
    writer.step_done(1)
    for loop in writer.loops:
        until_in(loop, lambda loop=loop: not loop._pushes._waiting_for and not loop._pushes._awake, "the first page")
    assert looked


def waiting(writer: Any, target: Any, *names: str) -> None:
    """Pushes that wait, each for a step of its own, the first for the first."""
    for step, name in enumerate(names, start=1):
        ask_early(writer, target, f"d-{name}", name)
        writer.server.pushes.progressed([(f"p-{name}", (BlockTable.of(0, P_BLOCKS[:2]),), 6)], step)
    for loop in writer.loops:
        until_in(loop, lambda loop=loop: sum(map(len, loop._pushes._waiting_for.values())) == len(names), "the orders")


def test_a_turn_without_time_binds_one_push_and_the_next_turn_another(writer, target, monkeypatch):
    """As when a decode instance links late: each of its pushes is due, under a step of its own."""
    waiting(writer, target, "a", "b", "c")
    bound, bind = [], WriteLink.bind_push

    def noted(link: WriteLink, into: PushInto, *given: Any) -> Part:
        bound.append(into)
        return bind(link, into, *given)

    monkeypatch.setattr(WriteLink, "bind_push", noted)

    def turns(loop: TransferLoop, now: float) -> None:
        assert loop._pushes is not None
        loop._pushes._clock.launched(3, lambda: True)
        for number in range(1, 4):
            loop._pushes.turn(now, now - 1.0)
            assert len({into.prefill.name for into in bound}) == len(bound) == number
        bound.clear()

    for loop in writer.loops:
        in_its_thread(loop, partial(turns, loop))


def test_a_push_whose_transfers_cannot_be_looked_at_fails_alone(writer, target, monkeypatch):
    set_faults(writer.transports, held=True)
    writer.whole("a")
    writer.whole("b")
    target.loop.submit([target.request(writer, "d-a", "a"), target.request(writer, "d-b", "b")], [])
    until(lambda: all(writes(loop) for loop in writer.loops), "the writes of every worker")
    poll, broken, mended = InFlight.poll, writer.loops[0], []

    def defective(flight: InFlight, *given: Any) -> Any:
        owner = flight.owner
        if isinstance(owner, ActivePush) and owner.into.prefill.name == "a" and not mended:
            raise KeyError("a defect")
        return poll(flight, *given)

    monkeypatch.setattr(InFlight, "poll", defective)
    assert target.wait_for("d-a") == [False] and target.quarantined == {"d-a"}
    set_faults(writer.transports, held=False)
    assert target.wait_for("d-b") == [True] and broken.runs
    mended.append(True)
    target.until(lambda: target.drained == {"d-a"}, "the quarantine to end")
