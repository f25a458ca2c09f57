"""Reads that stand still though their peer is well: it is linked anew (see `Transport.replace_endpoint`)."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.support.patience import PATIENCE_S
from tests.support.worker.decode_instance import (
    D_BLOCKS,
    D_SIDE,
    Decode,
    PatientInTheEnd,
    in_its_thread,
    lacking,
    set_deadline,
    set_faults,
    until,
)
from tests.support.worker.prefill_instance import MODEL, TOKENS, table, write
from tests.support.worker.writer import SOURCE, ask_early, begin_writes, pushed, whole
from vllm_pd_connector.config import Config
from vllm_pd_connector.errors import BindError, PeerLost, TransferError
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.protocol.peer import Peer, PeerKey, PeerState
from vllm_pd_connector.protocol.wire.push_messages import InstanceAddress, PrefillRef, PushInto
from vllm_pd_connector.transport import loopback
from vllm_pd_connector.transport.loopback import LoopbackTransport
from vllm_pd_connector.worker.push.link import WriteLink


@pytest.fixture(params=[0, 8 << 10], ids=["straight", "staged"])
def reader(request: pytest.FixtureRequest) -> Iterator[Decode]:
    config = Config(transport="loopback", staging_bytes=request.param, transfer_timeout=1.5)
    made = PatientInTheEnd(config, transport=LoopbackTransport(serves=False))
    yield made
    made.loop.close()


def begin_reads(reader: Decode, *names: str) -> Any:
    """Wait until these receives read; their link."""
    reader.until(lambda: reader.reads(*names), "reads to begin")
    return reader.active(names[0]).link  # type: ignore[union-attr]


def let_go(reader: Decode) -> None:
    """The old reads end after all: blocks and slots come back."""
    staging = reader.loop._stager.staging
    reader.until(
        lambda: reader.drained == reader.quarantined and staging.free == staging.length, "the blocks and the slots"
    )


def test_a_peer_whose_reads_stand_still_though_it_answers_is_linked_anew(prefill, reader):
    reader.transport.faults.stalled = 1
    assert reader.received(prefill.request("a")) == [False]
    reader.until(lambda: reader.relinked == 1, "the new link")
    assert reader.received(prefill.request("b")) == [True]
    assert (reader.worker.memory == reader.expected()).all()
    assert not reader.drained and reader.failures == {"deadline": 1}
    reader.transport.faults.stalled = 0
    let_go(reader)
    assert reader.relinked == 1


@pytest.mark.parametrize("reader", [0], ids=["straight"], indirect=True)
def test_a_read_that_takes_long_goes_on_as_long_as_parts_of_it_end(prefill, reader, monkeypatch):
    ended = itertools.count()
    monkeypatch.setattr(loopback._Transfer, "left", property(lambda transfer: -next(ended)))
    object.__setattr__(reader.loop._receives._limits, "read_s", 0.2)
    reader.transport.faults.held = True
    reader.loop.submit([prefill.request("a")], [])
    begin_reads(reader, "a")
    active = reader.active("a")
    first = active.machine.next_deadline()
    reader.until(lambda: active.machine.next_deadline() > first + 0.5, "several deadlines to pass")
    reader.transport.faults.held = False
    assert reader.wait_for("a") == [True]
    assert (reader.worker.memory == reader.expected()).all()
    assert reader.relinked == 0 and not reader.failures


def test_what_stood_still_is_in_the_message(prefill, reader, caplog):
    reader.transport.faults.stalled = 1
    assert reader.received(prefill.request("a")) == [False]
    assert "deadline: reading took longer than 1.5 s: 2 transfers have not ended" in caplog.text
    reader.transport.faults.stalled = 0


def test_a_peer_whose_reads_are_all_given_up_before_their_deadline_is_linked_anew_too(prefill, reader):
    reader.transport.faults.stalled = 1
    object.__setattr__(reader.loop._receives._limits, "read_s", 600.0)
    reader.loop.submit([prefill.request("a")], [])
    begin_reads(reader, "a")
    reader.loop.submit([], ["a"])
    assert reader.wait_for("a") == [False]
    reader.until(lambda: reader.relinked == 1, "the new link")
    assert reader.failures == {"aborted": 1} and not reader.drained
    assert reader.received(prefill.request("b")) == [True]
    reader.transport.faults.stalled = 0
    let_go(reader)
    assert not reader.loop._receives._links._given_up and reader.relinked == 1


@pytest.mark.parametrize("reader", [0], ids=["straight"], indirect=True)
def test_reads_that_were_given_up_and_move_are_given_more_time(prefill, reader, monkeypatch):
    """A slow link's, say: its peer is well, and others' reads from it go on."""
    links, ended = reader.loop._receives._links, itertools.count()
    object.__setattr__(reader.loop._receives._limits, "read_s", 600.0)
    links._config = msgspec.structs.replace(links._config, transfer_timeout=0.05)
    moves = monkeypatch.context()
    with moves as patch:
        patch.setattr(loopback._Transfer, "left", property(lambda transfer: -next(ended)))
        reader.transport.faults.stalled = 1
        reader.loop.submit([prefill.request("a")], [])
        begin_reads(reader, "a")
        reader.loop.submit([], ["a"])
        assert reader.wait_for("a") == [False]

        def due(_: float) -> float:
            [entry] = links._given_up
            return entry.due

        first = in_its_thread(reader.loop, due)
        until(lambda: in_its_thread(reader.loop, due) > first + 0.2, "several times to be looked at")
        reader.collect()
        assert reader.relinked == 0 and prefill.server.counts()["GetManifests"] == 1
    reader.until(lambda: reader.relinked == 1, "the new link, now that nothing of it moves")
    reader.transport.faults.stalled = 0
    let_go(reader)


def test_reads_that_were_given_up_and_have_ended_say_nothing_of_their_peer(prefill, reader):
    links = reader.loop._receives._links
    links._config = msgspec.structs.replace(links._config, transfer_timeout=600.0)
    object.__setattr__(reader.loop._receives._limits, "read_s", 600.0)
    reader.transport.faults.held = True
    reader.loop.submit([prefill.request("a")], [])
    link = begin_reads(reader, "a")
    reader.loop.submit([], ["a"])
    assert reader.wait_for("a") == [False]
    reader.transport.faults.held = False
    let_go(reader)
    [entry] = links._given_up
    links._given_up = [replace(entry, due=0.0)]
    links._due.lower(0.0)
    assert reader.received(prefill.request("b")) == [True]
    assert not links._given_up and not link.stalled and prefill.server.counts()["GetManifests"] == 1


def test_a_peer_that_is_lost_before_it_answers_is_linked_once(prefill, reader):
    assert reader.received(prefill.request("a")) == [True]
    [link] = reader.loop._receives._links._links.values()
    link.stalled = "a read took too long"
    reader.transport.faults.failures.append(PeerLost("connection reset"))
    assert reader.received(prefill.request("b")) == [False]
    assert reader.received(prefill.request("c")) == [True]
    assert reader.relinked == 0


def test_what_stands_still_beside_it_fails_at_once(prefill, reader):
    reader.transport.faults.stalled = 1
    object.__setattr__(reader.loop._receives._limits, "read_s", 600.0)
    reader.loop.submit([prefill.request("a"), prefill.request("b")], [])
    link = begin_reads(reader, "a", "b")
    set_deadline(reader.loop, reader.active("a"))
    assert reader.wait_for("a", "b") == [False, False]
    assert reader.failures == {"deadline": 1, "transfer_failed": 1}
    until(lambda: link.ranks, "the new link")
    reader.transport.faults.stalled = 0
    let_go(reader)


@pytest.mark.parametrize("reader", [512], indirect=True, ids=["a full staging buffer"])
def test_a_receive_that_only_waited_for_room_says_nothing_of_its_peer(prefill, other, reader):
    staging = reader.loop._stager.staging
    assert reader.received(prefill.request("warm")) == [True]
    [link] = reader.loop._receives._links._links.values()
    taken = []

    def fill(_: float) -> None:
        while staging.free:
            taken.append(staging.take(64, len(taken)))

    def empty(_: float) -> None:
        for slot in taken:
            staging.give(slot)

    in_its_thread(reader.loop, fill)
    assert reader.received(prefill.request("a")) == [False]
    until(lambda: prefill.server.counts()["GetManifests"] == 2, "the peer to be asked whether it lives")
    until(lambda: link.machine.state is PeerState.READY, "its answer")
    reader.collect()
    assert reader.relinked == 0 and reader.failures == {"deadline": 1}
    in_its_thread(reader.loop, empty)
    assert reader.received(prefill.request("b")) == [True]


def test_other_peers_keep_their_links_and_their_reads(prefill, other, reader):
    assert reader.received(other.request("warm")) == [True]
    reader.transport.faults.stalled = 1
    reader.loop.submit([prefill.request("a")], [])
    begin_reads(reader, "a")
    object.__setattr__(reader.loop._receives._limits, "read_s", 600.0)
    reader.loop.submit([other.request("b")], [])
    link = begin_reads(reader, "b")
    ranks = dict(link.ranks)
    reader.until(lambda: reader.relinked == 1, "the new link of the stalled peer")
    assert "b" not in reader.finished and link.ranks == ranks
    reader.transport.faults.stalled = 0
    assert reader.wait_for("b") == [True]
    let_go(reader)


@pytest.mark.parametrize("reader", [0], indirect=True, ids=["straight"])
@pytest.mark.parametrize("failure", [PeerLost("connection reset"), TransferError("who knows", terminal=False)])
def test_what_fails_on_the_old_link_says_nothing_of_the_new_one(prefill, reader, failure):
    reader.transport.faults.stalled = 1
    assert reader.received(prefill.request("a")) == [False]
    reader.until(lambda: reader.relinked == 1, "the new link")
    reader.transport.faults.held = True
    reader.loop.submit([prefill.request("b")], [])
    link = begin_reads(reader, "b")
    ranks, asked = dict(link.ranks), prefill.server.counts()["GetManifests"]

    def fail_the_old_one(now: float) -> None:
        receives = reader.loop._receives
        receives._looks.set(receives._active["a"], 0.0)  # a's turn comes first, and it takes it
        reader.transport.faults.failures.append(failure)

    in_its_thread(reader.loop, fail_the_old_one)
    reader.until(lambda: prefill.server.counts()["GetManifests"] > asked, "the peer to be asked whether it lives")
    reader.until(lambda: link.machine.state is PeerState.READY, "its answer")
    assert link.ranks == ranks and not link.stalled and reader.relinked == 1
    reader.transport.faults.held, reader.transport.faults.stalled = False, 0
    assert reader.wait_for("b") == [True]


@pytest.mark.parametrize("reader", [0], indirect=True, ids=["straight"])
def test_a_read_that_failed_and_may_still_write_has_its_peer_linked_anew(prefill, reader):
    reader.transport.faults.failures.append(TransferError("who knows", terminal=False))
    assert reader.received(prefill.request("a")) == [False]
    reader.until(lambda: reader.relinked == 1, "the new link")
    assert reader.received(prefill.request("b")) == [True]


@pytest.mark.parametrize("method", ["replace_endpoint", "connect"])
def test_a_peer_that_cannot_be_linked_anew_is_used_as_it_is_or_tried_again(prefill, reader, monkeypatch, method):
    reader.transport.faults.stalled = 1
    reader.loop.submit([prefill.request("a")], [])
    link = begin_reads(reader, "a")
    tried: list[str] = []
    real = getattr(reader.transport, method)

    def fails_once(*arguments: Any) -> Any:
        tried.append(method)
        if len(tried) == 1:
            raise TransferError("no")
        return real(*arguments)

    monkeypatch.setattr(reader.transport, method, fails_once)
    assert reader.wait_for("a") == [False]
    reader.until(lambda: tried and link.machine.state is PeerState.READY, "the peer to be ready")
    reader.transport.faults.stalled = 0
    assert reader.received(prefill.request("b")) == [True]
    assert reader.relinked == (method == "connect")
    let_go(reader)


def test_a_defect_while_a_peer_is_linked_anew_leaves_it_to_be_tried_again(prefill, reader, monkeypatch):
    reader.transport.faults.stalled = 1
    reader.loop.submit([prefill.request("a")], [])
    begin_reads(reader, "a")
    real, met = reader.transport.replace_endpoint, itertools.count()
    monkeypatch.setattr(reader.transport, "replace_endpoint", lambda peer: real(peer) if next(met) else 1 // 0)
    assert reader.wait_for("a") == [False]
    assert reader.received(prefill.request("b")) == [True], "who waits for the peer waits for ever"
    reader.until(lambda: reader.relinked == 1, "the count")
    reader.transport.faults.stalled = 0
    let_go(reader)


def test_an_endpoint_that_is_being_made_is_asked_for_again(prefill, reader, monkeypatch):
    monkeypatch.setattr("vllm_pd_connector.worker.peers.pool._REMAKE_S", 0.05)
    reader.transport.faults.stalled = 1
    reader.loop.submit([prefill.request("a")], [])
    link = begin_reads(reader, "a")
    refused: list[str] = []
    real = reader.transport.replace_endpoint

    def is_being_made(peer: Any) -> None:
        if len(refused) < 8:  # more often than a peer may fail to answer
            refused.append("a")
            raise TransferError("it is being made", retryable=True)
        real(peer)

    monkeypatch.setattr(reader.transport, "replace_endpoint", is_being_made)
    assert reader.wait_for("a") == [False]
    reader.until(lambda: reader.relinked == 1 and link.machine.state is PeerState.READY, "the new link")
    reader.transport.faults.stalled = 0
    assert reader.received(prefill.request("b")) == [True]
    let_go(reader)


def test_a_transport_that_peers_write_into_is_never_replaced(prefill):
    decode = Decode(Config(transport="loopback", transfer_timeout=0.5, staging_bytes=0))
    with contextlib.closing(decode.loop):
        decode.transport.faults.stalled = 1
        assert decode.received(prefill.request("a")) == [False]
        until(lambda: prefill.server.counts()["GetManifests"] == 2, "the peer to be asked whether it lives")
        until(lambda: decode.active("a").link.machine.state is PeerState.READY, "its answer")
        decode.transport.faults.stalled = 0
        decode.until(lambda: decode.drained == decode.quarantined == {"a"}, "the blocks")
        assert decode.relinked == 0


@pytest.mark.parametrize("config", [{"transfer_timeout": 0.5}], indirect=True)
def test_writes_that_are_all_given_up_have_the_decode_instance_linked_anew_too(writer, target, config):
    for transport, loop in zip(writer.transports, writer.loops, strict=True):
        transport._serves = False
        transport.faults.stalled = 1
        loop._pushes._config = msgspec.structs.replace(config, transfer_timeout=600.0)
    begin_writes(writer, target)
    target.loop.submit([], ["d"])
    assert target.wait_for("d") == [False]
    until(lambda: all(transport._incarnation == 1 for transport in writer.transports), "every worker's new endpoint")
    assert target.quarantined == {"d"} and not target.drained
    set_faults(writer.transports, stalled=0)
    target.until(lambda: target.drained == {"d"}, "the old writes to end")


def test_what_is_to_be_written_while_no_new_link_can_be_had_is_written_when_there_is_one(writer, target, monkeypatch):
    ask_early(writer, target)
    writer.compute(0, TOKENS)
    writer.server.pushes.progressed([("p-a", SOURCE, 6)], 1)
    writer.step_done(1)
    partly = target.before.copy()
    write(MODEL, D_SIDE, target.worker, [table(*D_BLOCKS)], partly, 0, 4)
    target.until(lambda: whole(target.worker.memory, partly), "the first page")

    [stalled, _], tried, ordered = writer.transports, [], threading.Event()
    connect = stalled.connect

    def refuses(*arguments: Any) -> Any:
        tried.append(ordered.is_set())
        if len(tried) == 2:
            assert ordered.wait(PATIENCE_S)
        if len(tried) <= 2:
            raise TransferError("no")
        return connect(*arguments)

    monkeypatch.setattr(stalled, "connect", refuses)
    stalled._serves = False
    stalled.faults.failures.append(TransferError("who knows", terminal=False))
    writer.whole("b")
    target.loop.submit([target.request(writer, "e", "b", blocks=(lacking((1, 3, 5)),))], [])
    until(lambda: tried, "the link to be cut")
    writer.finish(step=2)
    writer.step_done(2)
    ordered.set()
    assert target.wait_for("d") == [True]
    assert len(tried) == 3 and not tried[0]
    mine = target.expected(0) != target.before
    assert whole(target.worker.memory[mine], target.expected(0)[mine])


def test_a_rank_that_is_not_connected_does_not_pass_for_one_that_gets_nothing():
    link = WriteLink(Peer(PeerKey("h", 1, ""), lambda: 0.5), "decode-1", "", 0.0)
    home = InstanceAddress("decode-1", "0" * 32, "h", 1)
    into = PushInto(PrefillRef("a", None), home, 0, 0, 0, 0, 1, b"a" * 16, (BlockTable(0, b""),), 0, TOKENS, "0" * 16)
    with pytest.raises(BindError, match=r"rank \(0, 0, 0\).*connected are \[\]"):
        link.reach(into, TOKENS, 0, final=True)
    with pytest.raises(BindError, match="connected"):
        link.bind_push(into, into.blocks, 0, TOKENS, whole=True)


@pytest.mark.parametrize("config", [{"transfer_timeout": 3.0}], indirect=True)  # every worker begins by then
def test_a_decode_instance_whose_writes_stand_still_though_it_answers_is_linked_anew(writer, target, config):
    for transport in writer.transports:
        transport._serves = False  # as NIXL, whose target and whose initiator are two agents
        transport.faults.stalled = 1
    begin_writes(writer, target)
    assert target.wait_for("d") == [False]
    until(lambda: all(transport._incarnation == 1 for transport in writer.transports), "every worker's new endpoint")
    object.__setattr__(target.loop._receives._limits, "read_s", 60.0)  # what follows succeeds
    for loop in writer.loops:
        loop._pushes._config = msgspec.structs.replace(config, transfer_timeout=60.0)
    assert pushed(writer, target, "e", "b")
    assert (target.worker.memory == target.expected()).all()
    assert target.quarantined == {"d"} and not target.drained
    set_faults(writer.transports, stalled=0)
    target.until(lambda: target.drained == {"d"}, "the old writes to end")
