"""Where a turn finds what there is to be done: not by looking at each push, with as many of them as prefills run."""

from __future__ import annotations

from functools import partial

from tests.support.worker.decode_instance import in_its_thread, until_in
from tests.support.worker.prefill_instance import P_BLOCKS
from tests.support.worker.writer import ask_early
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.worker.push.driver import Pushes
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
