"""Mode auto: one pair of workers measures both ways and takes the faster one."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator
from dataclasses import replace

import msgspec
import pytest

from tests.support.worker.auto import both_ways, found
from tests.support.worker.decode_instance import in_its_thread, set_faults, until
from tests.support.worker.writer import CONFIG, Target, freed, whole, writes
from vllm_pd_connector.config import Config
from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.protocol.peer import Lost, Suspected
from vllm_pd_connector.worker.peers.bandwidth_test import Bandwidth
from vllm_pd_connector.worker.peers.pool import Links

AUTO = msgspec.structs.replace(CONFIG, mode="auto")


@pytest.fixture
def config() -> Config:
    return AUTO


@pytest.mark.parametrize(("bandwidth", "pushes"), [(Bandwidth(1e9, 9e9), 1), (Bandwidth(9e9, 1e9), 0)])
def test_mode_auto_takes_the_faster_way(writer, target, monkeypatch, bandwidth, pushes):
    monkeypatch.setattr("vllm_pd_connector.worker.peers.auto_mode.measure_bandwidth", found(bandwidth))
    assert target.received(both_ways(writer, target)) == [True]
    assert whole(target.worker.memory, target.expected())
    freed(writer, "a")
    counts = writer.server.counts()
    assert (counts.get("PushInto", 0) > 0, counts.get("ReadDone", 0)) == (bool(pushes), 1 - pushes)


def test_mode_auto_measures_both_ways_and_tells_what_it_found(writer, target, caplog):
    with caplog.at_level("INFO", logger="vllm_pd_connector"):
        assert target.received(both_ways(writer, target)) == [True]
    assert re.search(
        r"self-test with prefill engine p-0: reads \d+\.\d+ GB/s, writes \d+\.\d+ GB/s, "
        r"a run costs as much as \d+ bytes; it is",
        caplog.text,
    )
    assert whole(target.worker.memory, target.expected()), "the self-test touches no cache"


def test_a_self_test_that_meets_a_defect_costs_no_request(writer, target, monkeypatch):
    def broken(*_: object) -> Generator[None, None, Bandwidth]:
        yield
        raise RuntimeError("a defect")

    monkeypatch.setattr("vllm_pd_connector.worker.peers.auto_mode.measure_bandwidth", broken)
    set_faults(writer.transports, frozen=True)
    target.loop.submit([both_ways(writer, target)], [])
    until(lambda: target.reads("d"), "the read")
    until(lambda: not target.loop._auto_mode._running, "the self-test to end")
    set_faults(writer.transports, frozen=False)
    assert target.wait_for("d") == [True]


@pytest.mark.parametrize(("cost", "converted"), [(1, False), (1 << 20, True)])
def test_what_a_run_was_found_to_cost_decides_what_is_converted(writer, target, monkeypatch, cost, converted):
    measured = found(Bandwidth(9e9, 1e9, cost))
    monkeypatch.setattr("vllm_pd_connector.worker.peers.auto_mode.measure_bandwidth", measured)
    assert target.received(both_ways(writer, target)) == [True]
    (link,) = target.loop._receives._links._links.values()
    assert link.run_cost == cost
    assert any(staged.pairings for _, staged in link.edges) is converted


def test_what_is_asked_to_be_written_outlives_reads_that_stand_still(writer, target, monkeypatch):
    monkeypatch.setattr("vllm_pd_connector.worker.peers.auto_mode.measure_bandwidth", found(Bandwidth(1e9, 9e9)))
    target.transport._serves = False
    set_faults(writer.transports, held=True)
    target.loop.submit([both_ways(writer, target)], [])
    until(lambda: all(writes(loop) for loop in writer.loops), "the writes")
    link, links = target.active("d").link, target.loop._receives._links

    def stall(now: float) -> None:
        link.stalled = "a read took too long"
        links.drive(link, Suspected(link.stalled), now)

    in_its_thread(target.loop, stall)
    target.until(lambda: target.relinked == 1, "the new link")
    set_faults(writer.transports, held=False)
    assert target.wait_for("d") == [True]


def test_a_read_that_stands_still_is_one_whatever_is_found_meanwhile(writer, monkeypatch):
    monkeypatch.setattr("vllm_pd_connector.worker.peers.auto_mode.measure_bandwidth", found(Bandwidth(9e9, 1e9)))
    with contextlib.closing(Target(msgspec.structs.replace(AUTO, transfer_timeout=1.5))) as target:
        target.transport._serves = False
        target.transport.faults.stalled = 1
        monkeypatch.setattr(Links, "give_up", lambda *_: None)
        target.loop.submit([both_ways(writer, target)], [])
        until(lambda: target.reads("d"), "the read")
        target.active("d").link.bandwidth = Bandwidth(1e9, 9e9)
        assert target.wait_for("d") == [False]
        target.until(lambda: target.relinked == 1, "the new link")


def test_a_self_test_that_lasts_delays_nobody_and_lets_go_of_its_peer(writer, target):
    set_faults(writer.transports, frozen=True)
    target.loop.submit([both_ways(writer, target)], [])
    auto_mode = target.loop._auto_mode
    until(lambda: bool(auto_mode._running), "the self-test to begin")
    [(link, *_)] = auto_mode._running
    until(lambda: target.reads("d"), "the read that does not wait for it")
    set_faults(writer.transports, frozen=False)
    assert target.wait_for("d") == [True]
    until(lambda: not auto_mode._running, "the self-test to end")
    assert link.bandwidth is not None


def test_a_self_test_that_never_ends_is_over_with_the_worker(writer, target):
    """It was looked at for ever, and its peer was never forgotten."""
    set_faults(writer.transports, frozen=True)
    target.loop.submit([both_ways(writer, target)], [])
    auto_mode, links = target.loop._auto_mode, target.loop._receives._links
    until(lambda: target.reads("d") and bool(auto_mode._running), "the self-test to begin")
    target.see_workers()
    [(link, *_)] = auto_mode._running
    in_its_thread(target.loop, lambda now: links.drive(link, Lost("a reset"), now))
    assert target.wait_for("d") == [False] and auto_mode._running, "its transfer may end yet"
    for loop in writer.loops:
        with contextlib.suppress(TransferError):
            in_its_thread(loop, lambda _, loop=loop: loop._processes.close())
    until(lambda: not auto_mode._running, "the self-test to end")
    assert link.bandwidth is None


def test_a_prefill_side_that_cannot_write_is_read_from_on(writer, target, monkeypatch, caplog):
    """The self-test moves bytes from here alone: that the other side reaches this side channel it does not show."""
    monkeypatch.setattr("vllm_pd_connector.worker.peers.auto_mode.measure_bandwidth", found(Bandwidth(1e9, 9e9)))
    for transport in writer.transports:
        transport.faults.failures.append(TransferError("no way there"))
    assert target.received(both_ways(writer, target)) == [False]
    assert target.failures == {"transfer_failed": 1}
    assert "prefill engine p-0 is read from now on" in caplog.text
    (link,) = target.loop._receives._links._links.values()
    assert link.bandwidth is None


def test_a_question_for_which_there_was_no_room_says_nothing_of_the_way(writer, target, monkeypatch):
    monkeypatch.setattr("vllm_pd_connector.worker.peers.auto_mode.measure_bandwidth", found(Bandwidth(1e9, 9e9)))
    monkeypatch.setattr("vllm_pd_connector.sidechannel.client.MAX_PENDING", 0)
    object.__setattr__(target.loop._receives._limits, "silent_s", 0.2)
    assert target.received(both_ways(writer, target)) == [False]
    assert target.failures == {"deadline": 1}
    (link,) = target.loop._receives._links._links.values()
    assert link.bandwidth is not None


def test_parameters_that_come_twice_say_nothing_of_the_way(writer, target, monkeypatch):
    monkeypatch.setattr("vllm_pd_connector.worker.peers.auto_mode.measure_bandwidth", found(Bandwidth(1e9, 9e9)))
    set_faults(writer.transports, held=True)
    request = both_ways(writer, target)
    target.loop.submit([request], [])
    until(lambda: all(writes(loop) for loop in writer.loops), "the writes")
    link = target.active("d").link
    target.loop.submit([replace(request, request_id="again")], [])
    assert target.wait_for("again") == [False] and target.failures == {"bad_parameters": 1}
    assert link.bandwidth == Bandwidth(1e9, 9e9)
    set_faults(writer.transports, held=False)
    assert target.wait_for("d") == [True]


def test_what_a_client_gave_up_says_nothing_of_the_way(writer, target, monkeypatch):
    monkeypatch.setattr("vllm_pd_connector.worker.peers.auto_mode.measure_bandwidth", found(Bandwidth(1e9, 9e9)))
    set_faults(writer.transports, held=True)
    target.loop.submit([both_ways(writer, target)], [])
    until(lambda: all(writes(loop) for loop in writer.loops), "the writes")
    link = target.active("d").link
    target.loop.submit([], ["d"])
    assert target.wait_for("d") == [False]
    assert link.bandwidth == Bandwidth(1e9, 9e9)
    set_faults(writer.transports, held=False)


def test_the_way_that_a_receive_took_is_its_own_whatever_is_found_meanwhile(writer, target, monkeypatch):
    monkeypatch.setattr("vllm_pd_connector.worker.peers.auto_mode.measure_bandwidth", found(Bandwidth(9e9, 1e9)))
    target.transport.faults.held = True
    target.loop.submit([both_ways(writer, target)], [])
    until(lambda: target.reads("d"), "the read")
    active = target.active("d")
    before = active.run_cost
    active.link.bandwidth = Bandwidth(1e9, 9e9)
    active.link.run_cost = before + 1
    assert not active.asks and active.run_cost == before
    target.transport.faults.held = False
    assert target.wait_for("d") == [True]
