"""`vllm:pd_failed_pushes`: a push that fails counts once on each rank, whatever it failed of and in how many parts."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.push.table_world import into
from tests.support.worker.decode_instance import changed_model, in_its_thread, set_faults, until
from tests.support.worker.prefill_instance import P_BLOCKS, TOKENS
from tests.support.worker.writer import CONFIG, TINY, Target, Writer, ask_early, freed, hold_writes, over, pushed
from vllm_pd_connector.config import Config
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.protocol.wire.push_messages import BeginCommand, CancelCommand
from vllm_pd_connector.worker.push.link import WriteLink

SOON = {"transfer_timeout": 1.0}


@pytest.fixture(params=[0, TINY], ids=["direct", "by way of the slab"])
def config(request: pytest.FixtureRequest) -> Config:
    return msgspec.structs.replace(CONFIG, staging_bytes=request.param)


def counts_once(writer: Writer, kind: str) -> bool:
    """Whether a worker has counted one push as this, and each other one, too, or as given up because that one had
    failed, or none, if that was before it was told to write. The instance ends, so that nothing is counted later."""
    over(writer)
    writer.close()
    found = []
    for loop in writer.loops:
        stats = loop._outbox.take_stats()
        found.append(dict(stats.data["failed_pushes"]) if stats is not None else {})
    return {kind: 1} in found and all(one in ({kind: 1}, {"aborted": 1}, {}) for one in found)


def in_flight(writer: Writer) -> list[int]:
    """How many transfers each worker's pushes have begun."""
    return [sum(push.begun for push in part) for part in writer.pushes()]


def test_many_parts_that_fail_are_one_push(writer: Writer, target: Target) -> None:
    set_faults(writer.transports, held=True)
    ask_early(writer, target)
    writer.compute(0, TOKENS)
    for step, tokens in ((1, 4), (2, 8)):
        writer.server.pushes.progressed([("p-a", (BlockTable.of(0, P_BLOCKS),), tokens)], step)
        writer.step_done(step)
        until(lambda step=step: all(begun >= step for begun in in_flight(writer)), "a part of every worker")
    writer.finish(step=3)
    writer.step_done(3)
    until(lambda: all(begun >= 3 for begun in in_flight(writer)), "the last part of every worker")
    target.transport.faults.lost = True
    assert target.wait_for("d") == [False]
    freed(writer, "a")
    assert counts_once(writer, "transfer_failed")


def test_one_that_takes_too_long_counts(config: Config, target: Target) -> None:
    writer = Writer(msgspec.structs.replace(config, **SOON))
    set_faults(writer.transports, held=True)
    assert not pushed(writer, target)
    until(lambda: all(push.machine.failed for part in writer.pushes() for push in part), "both to have failed")
    set_faults(writer.transports, held=False)
    freed(writer, "a")
    assert counts_once(writer, "deadline")


def test_one_that_is_given_up_counts(writer: Writer, target: Target) -> None:
    hold_writes(writer, target)
    target.loop.submit([], ["d"])
    until(lambda: all(push.machine.failed for part in writer.pushes() for push in part), "the order to give it up")
    set_faults(writer.transports, held=False)
    freed(writer, "a")
    assert counts_once(writer, "aborted")


def test_one_into_an_instance_that_is_refused_counts(writer: Writer, config: Config) -> None:
    target = Target(config, model=changed_model(dtype="float16"))
    assert not pushed(writer, target)
    freed(writer, "a")
    assert counts_once(writer, "incompatible_peer")
    target.close()


def test_one_into_an_instance_that_proves_nothing_of_itself_counts(writer: Writer, target: Target) -> None:
    target.home = msgspec.structs.replace(target.home, host="203.0.113.9")
    assert not pushed(writer, target)
    freed(writer, "a")
    assert counts_once(writer, "not_trusted")


def test_one_over_a_link_that_is_lost_counts(writer: Writer, target: Target) -> None:
    hold_writes(writer, target)
    for loop, [push] in zip(writer.loops, writer.pushes(), strict=True):
        in_its_thread(loop, lambda now, pushes=loop._pushes, link=push.link: pushes.lost(link, "it is gone", now))
    assert target.wait_for("d") == [False]
    set_faults(writer.transports, held=False)
    freed(writer, "a")
    assert counts_once(writer, "peer_unreachable")


def test_one_that_met_a_defect_counts(writer: Writer, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WriteLink, "bind_push", lambda *_: 1 // 0)
    assert not pushed(writer, target)
    freed(writer, "a")
    assert counts_once(writer, "internal")


def test_one_that_is_good_does_not_count(writer: Writer, target: Target) -> None:
    assert pushed(writer, target)
    freed(writer, "a")
    writer.close()
    assert not [stats for loop in writer.loops if (stats := loop._outbox.take_stats()) and stats.data["failed_pushes"]]


def test_an_order_that_meets_a_defect_does_not_end_a_push_that_was_forgotten(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushes, said = writer.loops[0]._pushes, []
    assert pushes is not None
    monkeypatch.setattr(pushes._reports, "send", said.append)
    monkeypatch.setattr(pushes, "_obey", lambda *_: 1 // 0)
    in_its_thread(writer.loops[0], lambda now: pushes._try(CancelCommand(b"a" * 16, "it failed"), now))
    assert not said, "what may still write was said to be over"
    begin = BeginCommand(into(attempt=b"b" * 16))
    in_its_thread(writer.loops[0], lambda now: pushes._try(begin, now))
    [ended] = said
    assert not ended.ok and ended.terminal, "nothing of it was begun"
