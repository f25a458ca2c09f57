"""The transfer thread against a real side channel and the loopback transport: bytes, reports, quarantine."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.ports import free_port
from tests.support.processor_time import seconds_of
from tests.support.worker.decode_instance import (
    D_BLOCKS,
    D_SIDE,
    Prefill,
    changed_model,
    in_its_thread,
    lacking,
    request_of,
    set_faults,
    until,
    until_in,
)
from tests.support.worker.prefill_instance import MODEL, instance, real
from vllm_pd_connector.bounded import Pieces
from vllm_pd_connector.config import Config
from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.staging.strided_copy import Copy
from vllm_pd_connector.metadata import BadParameters, ReceiveRequest
from vllm_pd_connector.protocol.lease import End
from vllm_pd_connector.protocol.receive import VerdictTimeout
from vllm_pd_connector.protocol.wire.fields import Weights
from vllm_pd_connector.transport.loopback import LoopbackTransport
from vllm_pd_connector.worker.outbox import Outbox
from vllm_pd_connector.worker.receive import ending
from vllm_pd_connector.worker.receive.read_link import Bound, ReadLink
from vllm_pd_connector.worker.transfer_loop import TransferLoop


def test_a_read_puts_the_logical_elements_in_place_and_ends_the_lease(prefill, decode):
    assert decode.received(prefill.request("a")) == [True]
    assert (decode.worker.memory == decode.expected()).all()
    assert decode.bytes > 0 and not decode.failures and not decode.quarantined
    until(lambda: [freed.request_id for freed in prefill.server.take_freed()] == ["p-a"], "the lease to end")
    [given] = prefill.server.take_given()
    assert (given.request_id, given.taken.engine_id, given.whole) == ("p-a", "decode-1", True)
    assert given.taken.moved.bytes == decode.bytes
    assert decode.of_peers == {"peer_bytes": {"p-0": decode.bytes}, "peer_receives": {"p-0": 1}}


def test_blocks_that_a_group_names_before_the_range_are_not_reported_as_received(prefill, decode):
    """They are none of a prefix hit, which are not named: nothing would be written into them."""
    request = replace(prefill.request("a"), blocks=(lacking(D_BLOCKS, 0),))
    assert decode.received(request, prefill.request("b")) == [False, True]
    assert (decode.worker.memory == decode.expected()).all()


def test_a_receive_whose_blanks_cannot_be_zeroed_fails(prefill, decode, monkeypatch):
    def broken(copies: Iterable[Copy]) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(decode.loop._stager.copier, "blank", broken)
    assert decode.received(prefill.request("a")) == [False] and not decode.quarantined
    monkeypatch.undo()
    assert decode.received(prefill.request("b")) == [True]


def test_the_step_that_hears_of_a_failed_receive_hears_why(prefill, decode, monkeypatch):
    monkeypatch.setattr(decode.outbox, "flush", lambda: None)  # the end of the turn is too late: it may be hours away
    decode.transport.faults.failures.append(TransferError("a cable was pulled"))
    assert decode.received(prefill.request("a")) == [False]
    assert decode.failures == {"transfer_failed": 1} and decode.of_peers == {"peer_failures": {"p-0": 1}}


def test_the_handshake_happens_once_for_many_requests(prefill, decode):
    names = [f"r{i}" for i in range(20)]
    assert all(decode.received(*(prefill.request(name) for name in names)))
    assert prefill.server.counts()["GetManifests"] == 1


def test_the_line_of_a_link_says_what_moves_the_bytes(prefill, decode, caplog):
    with caplog.at_level(logging.INFO, logger="vllm_pd_connector"):
        assert decode.received(prefill.request("a")) == [True]
    [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("linked to")]
    assert " over loopback, cpu memory in " in line


@pytest.mark.parametrize("hold", [True, False])
def test_a_read_that_the_prefill_side_does_not_vouch_for_fails(prefill, decode, hold):
    request = prefill.request("a", hold=hold)
    if hold:
        prefill.server.drop("p-a")
    assert decode.received(request) == [False]
    assert decode.failures == {"lease_lost": 1} and not decode.quarantined


def test_a_lease_of_another_use_of_the_same_request_id_is_not_enough(prefill, decode):
    stale = prefill.request("a", hold=False)
    prefill.request("a")
    assert decode.received(stale) == [False]
    assert decode.failures == {"lease_lost": 1}


@pytest.mark.parametrize("change", [{"remote_block_ids": [[3, 1, 6]]}, {"remote_num_tokens": 11}], ids=str)
def test_other_blocks_than_those_that_were_handed_over_are_not_vouched_for(prefill, decode, change):
    assert decode.received(prefill.request("a", **change)) == [False]
    assert decode.failures == {"lease_lost": 1}


def test_other_weights_than_those_of_the_lease_are_not_vouched_for(prefill, decode):
    held = prefill.hand_over("a")
    changed = msgspec.structs.replace(held.pd_connector, weights=Weights("version mine"))
    assert decode.received(request_of("a", msgspec.structs.replace(held, pd_connector=changed))) == [False]
    assert decode.failures == {"lease_lost": 1}


def test_an_incompatible_peer_is_refused_once_and_remembered(decode):
    with contextlib.closing(Prefill(version=1, model=changed_model(dtype="float16"))) as prefill:
        decode.received(prefill.request("a"))
        decode.loop.submit([prefill.request("b")], [])
        assert decode.wait_for("a", "b") == [False, False]
        assert decode.failures == {"incompatible_peer": 2}
        assert prefill.server.counts()["GetManifests"] == 1
        assert (decode.worker.memory == decode.before).all()


def test_weights_of_the_start_say_nothing_where_both_sides_are_known_to_have_the_same(decode):
    """They were changed in place since, and are compared with each such request, of which it says nothing for others:
    anybody can make parameters that name the weights which are here."""
    with contextlib.closing(Prefill(model=changed_model(weights="content b"))) as prefill:
        assert decode.received(prefill.request("a")) == [False] and decode.failures == {"incompatible_peer": 1}
        assert decode.received(replace(prefill.request("b"), same_weights=True)) == [True]
        assert (decode.worker.memory == decode.expected()).all()
        assert decode.received(prefill.request("c")) == [False] and decode.failures == {"incompatible_peer": 2}
        assert decode.received(replace(prefill.request("d"), same_weights=True)) == [True]


def test_a_foreign_engine_at_the_address_fails_the_request(prefill, decode):
    assert decode.received(prefill.request("a", remote_engine_id="p-9")) == [False]
    assert decode.failures == {"peer_unreachable": 1}
    assert decode.received(prefill.request("b")) == [True]


def test_another_incarnation_than_announced_fails_the_request(prefill, decode):
    request = prefill.request("a")
    forged = replace(request.read, peer=replace(request.read.peer, incarnation="f" * 32))
    assert decode.received(replace(request, source=forged)) == [False]


def test_manifests_that_are_junk_refuse_the_peer(prefill, decode):
    prefill.server.set_manifests([b"\xc1junk", b"\x81"])
    assert decode.received(prefill.request("a")) == [False]
    assert decode.failures == {"incompatible_peer": 1}


@pytest.mark.parametrize("ids", [(3, 1, 8), (3, 1), (3, 1, 1 << 30)])
def test_block_ids_that_do_not_fit_fail_that_request_alone(prefill, decode, ids):
    bad, ends = prefill.request("bad", hold=False, remote_block_ids=[list(ids)]), {}
    assert bad.lease is not None
    prefill.server.hold(bad.lease.request_id, bad.lease.nonce, 60.0)  # it is the prefill side's own mistake
    assert decode.received(bad, prefill.request("good")) == [False, True]
    assert decode.failures == {"bad_parameters": 1}
    until(lambda: ends.update(prefill.server.take_freed()) or len(ends) == 2, "both leases to end")
    assert ends == {"p-bad": End.RELEASED, "p-good": End.READ}


def test_refused_parameters_are_reported_as_a_failed_receive(decode):
    assert decode.received(ReceiveRequest("a", BadParameters("remote_port: Expected int"), (), 0, 4)) == [False]
    assert decode.failures == {"bad_parameters": 1}


@pytest.mark.parametrize("decode", [{"transfer_timeout": 0.3}], indirect=True)
def test_a_frozen_peer_fails_the_request_in_time_and_its_blocks_wait_in_quarantine(prefill, decode):
    prefill.transports[1].faults.frozen = True
    assert decode.received(prefill.request("a")) == [False]
    assert decode.failures == {"deadline": 1}
    assert decode.quarantined == {"a"} and not decode.drained
    prefill.transports[1].faults.frozen = False
    decode.until(lambda: decode.drained == {"a"}, "the quarantine to end")


def test_an_aborted_read_is_reported_and_drained(prefill, decode):
    prefill.transports[0].faults.frozen = True
    decode.loop.submit([prefill.request("a")], [])
    until(lambda: decode.reads("a"), "the read to begin")
    transfers = decode.active("a").in_flight.transfers
    until_in(decode.loop, lambda: len(transfers) == 1 and all(d.running for d in transfers.values()), "it alone to run")
    decode.loop.submit([], ["a"])
    assert decode.wait_for("a") == [False]
    assert decode.quarantined == {"a"} and not decode.drained
    prefill.transports[0].faults.frozen = False
    decode.until(lambda: decode.drained == {"a"}, "the quarantine to end")
    assert decode.failures == {"aborted": 1}


def test_a_read_that_drains_is_not_forgotten_for_another_request_of_its_name(prefill, decode, monkeypatch):
    """Names are used again where vLLM's randomization of request ids is off."""
    drained: list[str] = []
    monkeypatch.setattr(decode.outbox, "drained", drained.append)
    prefill.transports[0].faults.frozen = True
    before = None
    for lease in "12":
        decode.finished.clear()
        decode.loop.submit([request_of("a", prefill.hand_over(lease))], [])
        until(lambda before=before: decode.active("a") not in (None, before) and decode.reads("a"), "it to read")
        before = decode.active("a")
        decode.loop.submit([], ["a"])
        assert decode.wait_for("a") == [False]
    decode.finished.clear()
    monkeypatch.setattr(decode.loop._receives._links, "get", lambda *_, **__: 1 / 0)
    decode.loop.submit([request_of("a", prefill.hand_over("3"))], [])
    assert decode.wait_for("a") == [False], "one that cannot begin is reported beside them"
    prefill.transports[0].faults.frozen = False
    until(lambda: drained == ["a", "a"] and not decode.loop._receives._active, "both to end")


def test_a_late_answer_for_a_receive_that_is_over_does_not_end_another_of_its_name(prefill, decode):
    decode.received(prefill.request("warm"))
    decode.transport.faults.held = True
    decode.loop.submit([prefill.request("a")], [])
    until(lambda: decode.reads("a"), "it to read")
    ended = decode.active("a")
    decode.transport.faults.held = False
    assert decode.wait_for("a") == [True]
    decode.transport.faults.held = True
    decode.finished.clear()
    decode.loop.submit([request_of("a", prefill.hand_over("b"))], [])
    until(lambda: decode.reads("a"), "the other to read")
    in_its_thread(decode.loop, lambda now: decode.loop._receives._handle(ended, VerdictTimeout(), now))
    decode.transport.faults.held = False
    assert decode.wait_for("a") == [True]


def test_an_abort_before_the_peer_answers_is_reported(decode):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        request = announced_at(silent.getsockname()[1])
        decode.loop.submit([request], [])
        decode.loop.submit([], ["a", "unknown"])
        assert decode.wait_for("a") == [False]
        assert decode.failures == {"aborted": 1} and not decode.quarantined


def announced_at(port: int) -> ReceiveRequest:
    with contextlib.closing(Prefill()) as prefill:
        return prefill.request("a", remote_port=port)


@pytest.mark.parametrize("decode", [{"handshake_timeout": 0.5}], indirect=True)
def test_a_peer_that_does_not_answer_fails_the_request_in_time(decode):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert decode.received(announced_at(silent.getsockname()[1])) == [False]
        assert decode.failures == {"peer_unreachable": 1}


@pytest.mark.parametrize("decode", [{"handshake_timeout": 3600.0}], indirect=True)
def test_a_peer_that_nobody_listens_for_fails_the_request_at_once_and_is_named_once(decode, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(
        ending, "logger", SimpleNamespace(error=lambda text, *of: said.append(text % of), debug=lambda *_: None)
    )
    assert decode.received(announced_at(port := free_port())) == [False]
    assert decode.failures == {"peer_unreachable": 1}
    [line] = said
    assert "cannot be reached (4 attempts failed): connection refused" in line and line.count(str(port)) == 1


def test_a_failed_transfer_fails_only_its_request(prefill, decode):
    decode.transport.faults.failures.append(TransferError("a cable was pulled"))
    assert decode.received(prefill.request("a")) == [False]
    assert decode.received(prefill.request("b")) == [True]
    assert decode.failures == {"transfer_failed": 1}


def test_a_transfer_that_may_still_write_keeps_its_blocks_until_the_worker_has_ended(prefill, decode):
    decode.transport.faults.failures.append(TransferError("unclear", terminal=False))
    assert decode.received(prefill.request("a")) == [False]
    assert decode.quarantined == {"a"} and not decode.drained
    flight = decode.active("a").in_flight
    until_in(decode.loop, lambda: not flight.transfers, "the read from the other rank to end")
    until_in(
        decode.loop,
        lambda: all(watch is not None and watch.here for watch in flight.watches.values()),
        "a line to the worker that was read from",
    )
    prefill.end_workers()
    decode.until(lambda: decode.drained == {"a"}, "the quarantine to end")


def test_a_restarted_peer_at_the_same_address_works(prefill, decode):
    decode.received(prefill.request("a"))
    port = prefill.server.port
    set_faults(prefill.transports, lost=True)
    stale = prefill.request("stale")
    decode.hear_the_end_of(prefill)
    with contextlib.closing(Prefill(port=port)) as again:
        assert decode.received(stale, again.request("b")) == [False, True]


def test_an_unexpected_error_fails_requests_and_not_the_thread(prefill, decode, monkeypatch):
    binding, defects = ReadLink.binding, iter([False, True, False])

    def broken(link: ReadLink, *given: Any) -> Pieces[Bound]:
        assert not next(defects), "a defect"
        return (yield from binding(link, *given))

    monkeypatch.setattr(ReadLink, "binding", broken)
    assert decode.received(prefill.request("before"), prefill.request("a"), prefill.request("b")) == [True, False, True]
    assert decode.failures == {"internal": 1}


def test_a_read_that_met_a_defect_as_it_began_fails_alone_and_may_still_write(prefill, decode, monkeypatch):
    read, begun = decode.transport.read, []

    def broken(*what: Any) -> Any:
        begun.append(what)
        if len(begun) == 2:
            raise RuntimeError("a defect")
        return read(*what)

    monkeypatch.setattr(decode.transport, "read", broken)
    decode.loop.submit([prefill.request("a"), prefill.request("b")], [])
    ended = dict(zip("ab", decode.wait_for("a", "b"), strict=True))
    assert sorted(ended.values()) == [False, True], "one of the two, by whose turn came second"
    assert decode.quarantined == {name for name, good in ended.items() if not good} and not decode.drained


def test_a_link_that_cannot_be_watched_fails_its_requests_and_not_the_thread(prefill, decode, monkeypatch):
    watch = ReadLink.watch

    def broken(*_: object) -> None:
        monkeypatch.setattr(ReadLink, "watch", watch)
        raise OSError("a defect")

    monkeypatch.setattr(ReadLink, "watch", broken)
    assert decode.received(prefill.request("a")) == [True], "the next attempt links"


def test_an_error_while_receives_are_ended_does_not_end_the_thread(prefill, decode, monkeypatch):
    receives = decode.loop._receives
    poll, drive = receives.poll, receives._drive

    def broken(now: float, until: float) -> None:
        monkeypatch.setattr(receives, "poll", poll)
        monkeypatch.setattr(receives, "_drive", broken_too)
        raise RuntimeError("a defect")

    def broken_too(active: Any, *rest: Any) -> None:
        if active.request.request_id == "a":
            monkeypatch.setattr(receives, "_drive", drive)
            raise RuntimeError("another")
        drive(active, *rest)

    prefill.transports[0].faults.frozen = True
    decode.loop.submit([prefill.request("a"), prefill.request("b")], [])
    until(lambda: decode.reads("a", "b"), "reads")
    monkeypatch.setattr(receives, "poll", broken)
    decode.loop.submit([], [])
    assert decode.wait_for("b") == [False]
    prefill.transports[0].faults.frozen = False
    assert decode.wait_for("a") == [True]


def test_a_receive_whose_trace_cannot_be_written_is_reported_all_the_same(prefill, decode, monkeypatch):
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(decode.loop._receives, "_received", full)
    assert decode.received(prefill.request("a")) == [True]


def test_a_transport_that_cannot_start_stops_the_engine_with_its_reason_and_one_that_takes_long_is_told(monkeypatch):
    told = threading.Event()
    monkeypatch.setattr("vllm_pd_connector.worker.transfer_loop.START_LOG_S", 0.01)
    monkeypatch.setattr("vllm_pd_connector.worker.transfer_loop.logger.warning", lambda *words: told.set())

    def broken() -> LoopbackTransport:
        raise TransferError("no device mlx5_9" if told.wait(20) else "nobody was told")

    with pytest.raises(TransferError, match="mlx5_9"):
        TransferLoop(Config(transport="loopback"), real(*instance(MODEL, D_SIDE)), broken, Outbox(), 0, 1).start()


def test_an_idle_loop_burns_nothing(prefill, decode):
    decode.received(prefill.request("a"))
    [thread] = [t for t in threading.enumerate() if t is decode.loop._thread]
    before, began = seconds_of(thread), time.monotonic()
    until(lambda: time.monotonic() - began > 1.0, "a second")
    assert seconds_of(thread) - before <= 0.02, "of processor time in an idle second"
