"""Push between workers: real side channels, the loopback transport, the scheduler halves' part played by the test."""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.support.worker.decode_instance import D_BLOCKS, D_SIDE, changed_model, in_its_thread, set_faults, until
from tests.support.worker.prefill_instance import MODEL, P_BLOCKS, P_SIDE, TOKENS, real, table, write
from tests.support.worker.writer import (
    CONFIG,
    SOURCE,
    TINY,
    Target,
    Writer,
    ask_early,
    freed,
    hold_writes,
    over,
    pushed,
    whole,
    writes,
)
from vllm_pd_connector.config import Config
from vllm_pd_connector.errors import PeerLost, ProtocolError, TransferError
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.protocol.wire.messages import Failure, FailureCode
from vllm_pd_connector.protocol.wire.push_messages import DeclinePush, PrefillRef, PushEnded, PushInto, WriteCommand
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.worker.push.completion import RETRY_S
from vllm_pd_connector.worker.push.link import Part, WriteLink


@pytest.fixture(params=[0, TINY], ids=["direct", "by way of the slab"])
def staging_bytes(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def config(request: pytest.FixtureRequest, staging_bytes: int) -> Config:
    return msgspec.structs.replace(CONFIG, **({"staging_bytes": staging_bytes} | getattr(request, "param", {})))


@pytest.mark.parametrize("by_lease", [False, True])
def test_a_prefill_that_finished_before_anybody_asked_is_written(writer, target, by_lease):
    nonce = writer.whole()
    assert target.received(target.request(writer, nonce=nonce if by_lease else None)) == [True]
    assert whole(target.worker.memory, target.expected())
    assert not target.failures and not target.quarantined
    freed(writer, "a")


def test_what_was_asked_for_late_is_bound_in_pieces(writer, target, monkeypatch):
    """All of half a million tokens at once would keep the transfer thread from everything else for milliseconds."""
    bound, bind = [], WriteLink.bind_push

    def noted(link: WriteLink, into: PushInto, source: object, *piece: Any) -> Part:
        bound.append((link, *piece[:3]))  # from, up to, and whether with all else
        return bind(link, into, source, *piece)

    monkeypatch.setattr(WriteLink, "bind_push", noted)
    monkeypatch.setattr("vllm_pd_connector.worker.push.active.PIECE_TOKENS", P_SIDE.block_tokens)
    writer.whole()
    assert target.received(target.request(writer)) == [True]
    assert whole(target.worker.memory, target.expected()) and not target.failures
    freed(writer, "a")
    for one in {link for link, *_ in bound}:
        pieces = [piece for link, *piece in bound if link is one]
        assert len(pieces) > 1 and [last for *_, last in pieces] == [False] * (len(pieces) - 1) + [True]
        assert all(one[1] == then[0] for one, then in itertools.pairwise(pieces)) and pieces[-1][1] == TOKENS


def test_a_decode_instance_that_asks_first_is_served_when_the_prefill_comes(writer, target):
    target.loop.submit([target.request(writer)], [])
    until(lambda: writer.server.counts().get("PushInto", 0) >= 1, "the registration")
    target.collect()
    assert not target.finished
    writer.whole()
    assert target.wait_for("d") == [True]
    assert whole(target.worker.memory, target.expected())
    freed(writer, "a")


def test_complete_pages_go_out_while_the_next_step_computes(writer, target):
    ask_early(writer, target)
    writer.compute(0, 6)
    writer.server.pushes.progressed([("p-a", (BlockTable.of(0, P_BLOCKS[:2]),), 6)], 1)
    writer.wait_for_orders()
    assert whole(target.worker.memory, target.before), "its own forward of step 1 is not done"
    writer.step_done(1)
    partly = target.before.copy()
    write(MODEL, D_SIDE, target.worker, [table(*D_BLOCKS)], partly, 0, 4)
    target.until(lambda: whole(target.worker.memory, partly), "the first page of 4 tokens, and no more")
    for worker in writer.workers:  # what was written is not read again
        write(MODEL, P_SIDE, worker, [table(*P_BLOCKS)], worker.memory, 4, TOKENS)
        page = worker.manifest.tensors[0].page_stride
        worker.memory[P_BLOCKS[0] * page : (P_BLOCKS[0] + 1) * page] ^= 0xFF
    writer.finish(step=2)
    writer.wait_for_orders()
    target.collect()
    assert not target.finished
    writer.step_done(2)
    assert target.wait_for("d") == [True]
    assert whole(target.worker.memory, target.expected(0))
    freed(writer, "a")


def test_a_step_that_is_done_is_written_although_the_next_is_ordered_already(writer, target):
    ask_early(writer, target)
    writer.compute(0, 6)
    writer.server.pushes.progressed([("p-a", SOURCE, 6)], 1)
    writer.server.pushes.progressed([("p-a", SOURCE, 8)], 2)
    until(lambda: all(sum(len(p.machine._commands) for p in part) == 2 for part in writer.pushes()), "both")
    writer.step_done(1)
    partly = target.before.copy()
    write(MODEL, D_SIDE, target.worker, [table(*D_BLOCKS)], partly, 0, 4)
    target.until(lambda: whole(target.worker.memory, partly), "what the first step completed")
    writer.compute(6, TOKENS)
    writer.finish(step=3)
    for step in (2, 3):
        writer.step_done(step)
    assert target.wait_for("d") == [True]
    assert whole(target.worker.memory, target.expected(0))


def test_many_pushes_at_once(writer, target):
    names = [f"r{i}" for i in range(20)]
    writer.compute(0, TOKENS)
    for i, name in enumerate(names):
        if i % 2:
            writer.whole(name)
        target.loop.submit([target.request(writer, f"d-{name}", name)], [])
        if not i % 2:
            writer.whole(name)
    assert all(target.wait_for(*(f"d-{name}" for name in names)))
    freed(writer, *names)
    assert target.server.counts()["GetManifests"] == len(writer.workers), "one handshake per rank"


def test_a_pair_that_cannot_work_is_refused_before_anything_moves(writer, config):
    with contextlib.closing(Target(config, model=changed_model(dtype="float16"))) as target:
        # The decode worker's own check passes, since only what it serves is damaged: the prefill side refuses.
        assert not pushed(writer, target)
        assert whole(target.worker.memory, target.before)
        freed(writer, "a")
        for request, prefill in ("e", "b"), ("f", "c"), ("g", "d"):
            assert not pushed(writer, target, request, prefill)
            freed(writer, prefill)
        assert target.server.counts()["GetManifests"] <= len(writer.workers), "the refusal is remembered"


def test_the_decode_side_refuses_too(target, config):
    other = Writer(config)
    with contextlib.closing(other):
        [first, *_] = other.workers
        wrong = msgspec.structs.replace(real(first), model=changed_model(dtype="float16"))
        other.server.set_manifests([msgspec.msgpack.encode(wrong)])
        assert target.received(target.request(other)) == [False]
        assert target.failures == {"incompatible_peer": 1} and not target.quarantined
        until(lambda: other.server.counts().get("DeclinePush") == 1, "the word that nothing will be fetched")
        assert "PushInto" not in other.server.counts()


def test_an_aborted_prefill_fails_the_request_at_once(writer, target):
    target.loop.submit([target.request(writer, waited_s=60.0), target.request(writer, "e", "late", waited_s=60.0)], [])
    writer.begin()
    writer.server.pushes.aborted("p-a", "the client left")
    writer.begin("late")
    writer.server.pushes.aborted("p-late", "the client left")
    assert target.wait_for("d", "e") == [False, False]
    target.until(lambda: target.quarantined == target.drained, "the quarantine to end")
    freed(writer, "a", "late")


def test_a_request_for_a_prefill_that_was_aborted_before_fails_at_once(writer, target):
    writer.begin()
    writer.server.pushes.aborted("p-a", "the client left")
    assert target.received(target.request(writer, waited_s=60.0)) == [False]
    freed(writer, "a")


def test_a_router_may_use_a_name_again_though_its_last_prefill_was_aborted(writer, target):
    """The decode leg of its next attempt may be the first to come."""
    writer.begin()
    writer.server.pushes.aborted("p-a", "the client left")
    writer.compute(0, TOKENS)
    target.loop.submit([target.request(writer)], [])
    until(lambda: writer.server.counts().get("PushInto", 0) > 0, "the decode leg")
    freed(writer, "a")
    writer.begin()
    writer.finish()
    assert target.wait_for("d") == [True]
    assert whole(target.worker.memory, target.expected())
    freed(writer, "a")


@pytest.mark.parametrize("config", [{"kv_lease_duration": 0.2}], indirect=True)
def test_a_prefill_that_never_comes_fails_the_request_with_the_reason(writer, target, caplog):
    assert target.received(target.request(writer)) == [False]
    assert "no prefill request named a came" in caplog.text
    assert not target.quarantined


def test_another_prompt_is_not_written(writer, target):
    writer.whole()
    terms = target.request(writer).push
    other = replace(terms, prompt_digest="f" * 16)
    assert target.received(target.request(writer, source=other)) == [False]
    assert whole(target.worker.memory, target.before)


def test_a_stale_nonce_is_refused(writer, target):
    writer.whole()
    assert target.received(target.request(writer, nonce=b"x" * 16)) == [False]
    assert whole(target.worker.memory, target.before)


def test_a_failed_write_fails_the_request_with_the_reason_and_frees_both_sides(writer, target, caplog):
    writer.transports[1].faults.failures.append(TransferError("a cable was pulled"))
    assert not pushed(writer, target)
    assert "a cable was pulled" in caplog.text
    target.until(lambda: target.quarantined == target.drained, "the quarantine to end")
    freed(writer, "a")
    assert pushed(writer, target, "e", "b")


def test_an_unexpected_error_fails_the_pushes_that_it_may_have_cut_short(writer, target, monkeypatch):
    hold_writes(writer, target)

    def broken(loop):
        poll = loop._stager.poll

        def fail():
            monkeypatch.setattr(loop._stager, "poll", poll)
            raise RuntimeError("a defect")

        monkeypatch.setattr(loop._stager, "poll", fail)

    broken(writer.loops[0])
    assert target.wait_for("d") == [False]
    set_faults(writer.transports, held=False)
    target.until(lambda: target.quarantined == target.drained, "the quarantine to end")
    freed(writer, "a")


def test_an_error_while_pushes_are_ended_does_not_end_the_thread(writer, target, monkeypatch):
    loop, orders = writer.loops[0], writer.loops[0]._pushes
    poll, drive, met = loop._stager.poll, orders._drive, []

    def broken() -> None:
        monkeypatch.setattr(loop._stager, "poll", poll)
        monkeypatch.setattr(orders, "_drive", broken_too)
        raise RuntimeError("a defect")

    def broken_too(*_: object) -> None:
        monkeypatch.setattr(orders, "_drive", drive)
        met.append("both")
        raise RuntimeError("another")

    writer.transports[0].faults.held = True
    writer.whole()
    target.loop.submit([target.request(writer)], [])
    until(lambda: writes(loop), "the writes")
    monkeypatch.setattr(loop._stager, "poll", broken)
    until(lambda: met, "both defects")
    writer.transports[0].faults.held = False
    assert pushed(writer, target, "e", "b")


def test_whoever_answers_in_place_of_who_was_asked_frees_no_blocks(writer, target, monkeypatch):
    """The question may have reached the one before: it is sent again when its connection is lost."""
    serve, foreign = writer.server.pushes.serve, Failure(FailureCode.FOREIGN_ENGINE, "another engine")
    another = lambda request, *of: foreign if isinstance(request, PushInto) else serve(request, *of)  # noqa: E731
    monkeypatch.setattr(writer.server.pushes, "serve", another)
    assert not pushed(writer, target)
    assert target.quarantined == {"d"}


def test_an_order_that_comes_after_its_push_has_failed_is_not_carried_out(writer, target, monkeypatch):
    pushes = writer.loops[1]._pushes
    commands, obey = [], pushes._obey
    monkeypatch.setattr(pushes, "_obey", lambda command, now: (commands.append(command), obey(command, now)))
    writer.transports[1].faults.failures.append(TransferError("a cable was pulled"))
    assert not pushed(writer, target)
    freed(writer, "a")
    over(writer)
    begun, [write] = [], [command for command in commands if isinstance(command, WriteCommand)]
    in_its_thread(writer.loops[1], lambda now: begun.append((obey(write, now), dict(pushes._pushes))))
    assert begun == [(None, {})], "blocks were written into that the decode instance has for others"


def test_a_report_that_cannot_be_sent_or_is_not_noted_is_sent_again_after_a_while(writer, target, monkeypatch):
    calls = writer.loops[1]._calls
    ask, tried = calls.ask, []

    def fails_at_first(address, request, timeout_s, handler=None):
        if not isinstance(request, PushEnded) or not request.terminal:
            return ask(address, request, timeout_s, handler)
        tried.append(time.monotonic())
        if len(tried) == 1:
            raise ProtocolError("1024 requests are under way")
        if len(tried) == 2:
            request = msgspec.structs.replace(request, token=bytes(16))  # is refused at once
        return ask(address, request, timeout_s, handler)

    monkeypatch.setattr(calls, "ask", fails_at_first)
    assert pushed(writer, target)
    freed(writer, "a")
    assert len(tried) == 3 and tried[2] - tried[0] >= 2 * RETRY_S


def test_an_abort_on_the_decode_side_keeps_its_blocks_until_nothing_is_written(writer, target):
    hold_writes(writer, target)
    target.loop.submit([], ["d"])
    assert target.wait_for("d") == [False]
    until(lambda: all(push.machine.failed for part in writer.pushes() for push in part), "the word to give it up")
    target.collect()
    assert target.quarantined == {"d"} and not target.drained
    freed(writer, "a")
    set_faults(writer.transports, held=False)
    target.until(lambda: target.drained == {"d"}, "the quarantine to end")
    assert target.failures == {"aborted": 1}


def test_an_abort_before_the_prefill_came_is_over_at_once(writer, target):
    target.loop.submit([target.request(writer)], [])
    until(lambda: writer.server.counts().get("PushInto", 0) >= 1, "the registration")
    target.loop.submit([], ["d"])
    assert target.wait_for("d") == [False]
    target.until(lambda: target.quarantined == target.drained, "the quarantine to end")
    writer.whole()
    freed(writer, "a")
    assert whole(target.worker.memory, target.before)


@pytest.mark.parametrize("config", [{"transfer_timeout": 5.0}], indirect=True)
def test_a_write_that_does_not_end_fails_in_time_and_keeps_the_decode_sides_blocks(writer, target):
    writer.transports[0].faults.held = True
    assert not pushed(writer, target)
    freed(writer, "a")
    assert target.quarantined == {"d"} and not target.drained
    writer.transports[0].faults.held = False
    target.until(lambda: target.drained == {"d"}, "the quarantine to end")


@pytest.mark.parametrize("config", [{"handshake_timeout": 5.0}], indirect=True)
def test_a_prefill_instance_that_dies_while_it_writes_ends_the_quarantine(target, config):
    writer = Writer(config)
    hold_writes(writer, target)
    writer.close()
    assert target.wait_for("d") == [False]
    target.until(lambda: target.drained == target.quarantined, "the quarantine to end")


def test_a_decode_instance_that_died_fails_its_push_and_frees_the_prefill(writer, config):
    target = Target(config)
    writer.transports[0].faults.held = True
    writer.whole()
    target.loop.submit([target.request(writer)], [])
    until(lambda: writes(writer.loops[0]), "the write")
    target.transport.faults.lost = True
    target.close()
    writer.transports[0].faults.failures.append(PeerLost("connection reset"))
    freed(writer, "a")


def test_what_a_lost_connection_may_still_bring_keeps_blocks_of_decode_and_the_next_push_connects_anew(writer, target):
    writer.transports[0].faults.failures.append(PeerLost("connection reset", terminal=False))
    assert not pushed(writer, target)
    freed(writer, "a")
    assert pushed(writer, target, "e", "b"), "others go on"
    freed(writer, "b")
    target.collect()
    assert target.quarantined == {"d"} and not target.drained
    counted = [stats.data for loop in writer.loops if (stats := loop._outbox.take_stats()) is not None]
    assert counted and not any(data["relinked"] for data in counted), "no other endpoint is needed"
    until(lambda: not any(writer.pushes()), "it to be forgotten")


def test_a_prefill_of_which_nothing_is_needed_is_freed_at_once(writer):
    with contextlib.closing(SideChannelClient()) as sender:
        address = endpoint("127.0.0.1", writer.server.port)
        writer.whole()
        sender.send(address, DeclinePush(PrefillRef("a", None)), 10.0)
        freed(writer, "a")
        sender.send(address, DeclinePush(PrefillRef("b", None)), 10.0)
        until(lambda: writer.server.counts().get("DeclinePush") == 2, "the second message")
        writer.whole("b")
        freed(writer, "b")
