"""Turns of the transfer thread are short: what is long or comes in numbers is done piece by piece, over the loopback
transport, with slices of one page, one of which is under way at a time, and no time but for one piece in a turn."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from tests.support.worker.decode_instance import in_its_thread, set_deadline, set_faults, until, until_in
from tests.support.worker.writer import CONFIG
from vllm_pd_connector.config import Config
from vllm_pd_connector.geometry import spans
from vllm_pd_connector.protocol import peer as peers
from vllm_pd_connector.protocol.receive import ReceiveState
from vllm_pd_connector.worker import in_flight, transfer_loop
from vllm_pd_connector.worker.in_flight import InFlight
from vllm_pd_connector.worker.transfer_loop import TransferLoop

STRAIGHT = msgspec.structs.replace(CONFIG, staging_bytes=0)


@pytest.fixture
def config() -> Config:
    return STRAIGHT


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "SLICE_RUNS", 1)
    monkeypatch.setattr(in_flight, "SLICES_UNDER_WAY", 1)
    monkeypatch.setattr(transfer_loop, "TURN_S", 0.0)


def linked(decode, prefill) -> None:
    assert decode.received(prefill.request("warm")) == [True]
    decode.collect()


def half_begun(decode, name: str):
    """Wait until the first slices of a receive run and others were not begun."""
    active = decode.loop._receives._active

    def is_half() -> bool:
        transfers = active[name].in_flight.transfers.values() if name in active else ()
        return bool(transfers) and all(len(one.running) == 1 and one.rest is not None for one in transfers)

    until_in(decode.loop, is_half, "the first slices to run")
    return decode.active(name)


def test_a_read_in_many_slices_puts_every_byte_in_place(prefill, decode):
    assert decode.received(prefill.request("a")) == [True]
    assert (decode.worker.memory == decode.expected()).all()


def test_a_half_posted_read_that_is_aborted_waits_for_what_was_posted_alone(prefill, decode):
    linked(decode, prefill)
    decode.transport.faults.held = True
    runs, decode.worker.memory[:] = decode.runs, decode.before
    decode.loop.submit([prefill.request("a")], [])
    active = half_begun(decode, "a")
    decode.loop.submit([], ["a"])
    assert decode.wait_for("a") == [False]
    assert decode.quarantined == {"a"} and not decode.drained
    assert active.machine.state is ReceiveState.DRAINING and active.machine.writing
    decode.transport.faults.held = False
    decode.until(lambda: decode.drained == {"a"}, "the quarantine to end")
    assert not decode.active("a") and not active.in_flight.transfers
    posted = active.in_flight.moved.runs
    assert posted < runs and (decode.worker.memory != decode.written()).any(), "all of it was posted"


def test_a_half_posted_read_whose_peer_is_gone_fails_and_is_drained(prefill, decode):
    linked(decode, prefill)
    decode.transport.faults.held = True
    decode.loop.submit([prefill.request("a")], [])
    half_begun(decode, "a")
    set_faults(prefill.transports, lost=True)
    assert decode.wait_for("a") == [False]
    decode.until(lambda: decode.drained == decode.quarantined, "the quarantine to end")
    assert not decode.active("a")


def test_a_half_posted_read_fails_by_its_deadline_only_when_no_slice_ends(prefill, decode):
    linked(decode, prefill)
    decode.transport.faults.held = True
    decode.loop.submit([prefill.request("a")], [])
    active = half_begun(decode, "a")
    first = active.machine.next_deadline()
    set_deadline(decode.loop, active)
    assert decode.wait_for("a") == [False]
    assert decode.failures == {"deadline": 1} and first is not None
    decode.transport.faults.held = False
    decode.until(lambda: decode.drained == {"a"}, "the quarantine to end")


def test_half_posted_reads_end_with_the_thread_and_are_reported(prefill, decode):
    """As when vLLM puts the worker to sleep: the memory goes away, and nothing may land."""
    linked(decode, prefill)
    decode.transport.faults.held = True
    decode.loop.submit([prefill.request("a")], [])
    half_begun(decode, "a")
    decode.loop.close()
    assert not decode.loop.runs
    assert decode.wait_for("a") == [False] and decode.quarantined == decode.drained == {"a"}


def test_many_requests_of_one_moment_are_begun_over_many_turns_and_all_end(prefill, decode, monkeypatch):
    names = [f"r{number}" for number in range(12)]
    turns, turn = [], decode.loop._turn
    monkeypatch.setattr(decode.loop, "_turn", lambda now: (turns.append(len(decode.loop._receives._active)), turn(now)))
    assert decode.received(*(prefill.request(name) for name in names)) == [True] * len(names)
    assert set(range(1, 5)) <= set(turns), "several requests were begun in one turn"


def test_a_turn_that_binding_has_taken_all_of_moves_nothing_and_the_next_one_does(prefill, decode, monkeypatch):
    linked(decode, prefill)
    did: list[str] = []
    bind, begin, turn = decode.loop._receives._bind, InFlight._begin_slice, decode.loop._turn
    monkeypatch.setattr(decode.loop._receives, "_bind", lambda *given: (did.append("bind"), bind(*given)))
    monkeypatch.setattr(InFlight, "_begin_slice", lambda *given: (did.append("slice"), begin(*given))[1])
    monkeypatch.setattr(
        decode.loop, "_poll_staged", lambda now, poll=decode.loop._poll_staged: (did.append("staged"), poll(now))
    )
    monkeypatch.setattr(decode.loop, "_turn", lambda now: (did.append("turn"), turn(now)))
    names = ["a", "b", "c"]

    def at_once(now: float) -> None:
        for name in names:
            decode.loop._receives.begin(prefill.request(name), now)

    in_its_thread(decode.loop, at_once)
    assert decode.wait_for(*names) == [True] * len(names)
    turns = [one.split() for one in " ".join(did).split("turn")]
    assert all(turn == ["bind"] or "bind" not in turn for turn in turns), turns
    assert ["staged"] in turns or ["staged", "slice"] in turns or ["slice", "staged"] in turns
    bound = [number for number, turn in enumerate(turns) if "bind" in turn]
    assert bound == list(range(bound[0], bound[0] + 2 * len(bound), 2)), "binding has every second turn"
    assert len(bound) > len(names), "each was bound in one piece"


def test_binding_waits_a_turn_where_orders_have_taken_all_of_it(prefill, decode, monkeypatch):
    """Both of a long prompt are a millisecond or more, and one turn with both was too long."""
    linked(decode, prefill)
    did: list[str] = []
    bind, order, turn = decode.loop._receives._bind, decode.loop._begin, decode.loop._turn
    monkeypatch.setattr(decode.loop._receives, "_bind", lambda *given: (did.append("bind"), bind(*given)))
    monkeypatch.setattr(decode.loop, "_begin", lambda *given: (did.append("order"), order(*given)))
    monkeypatch.setattr(decode.loop, "_turn", lambda now: (did.append("turn"), turn(now)))
    assert decode.received(*(prefill.request(name) for name in "abc")) == [True] * 3
    turns = [set(one.split()) for one in " ".join(did).split("turn")]
    assert {"order"} in turns and {"bind"} in turns and {"order", "bind"} not in turns, turns


def test_a_turn_costs_nothing_for_those_that_only_wait(prefill, decode, monkeypatch):
    """Their deadlines are far, and nothing of theirs moves: a thousand of them were 2 ms of each turn."""
    linked(decode, prefill)
    decode.transport.faults.held = True
    monkeypatch.setattr(transfer_loop, "TURN_S", 1.0)
    decode.loop.submit([prefill.request(name) for name in "abcdef"], [])
    receives = decode.loop._receives
    until_in(decode.loop, lambda: len(receives._looks) == 6, "all reads")
    looked: list[str] = []
    monkeypatch.setattr(receives, "_tick", lambda active, now: looked.append(active.prefill))
    decode.transport.faults.held = False
    assert decode.wait_for(*"abcdef") == [True] * 6
    assert not looked
    until_in(decode.loop, lambda: not receives._looks and not receives._active, "nothing to be left")


def test_what_drains_is_looked_at_again_after_a_defect(prefill, decode, monkeypatch):
    """It was taken out to be looked at; lost there, its blocks would stay in quarantine for good."""
    linked(decode, prefill)
    decode.transport.faults.held = True
    decode.loop.submit([prefill.request("a")], [])
    half_begun(decode, "a")
    decode.loop.submit([], ["a"])
    assert decode.wait_for("a") == [False] and decode.quarantined == {"a"}
    broken = decode.active("a").in_flight
    met, mended, poll = [], [], InFlight.poll

    def defective(flight: InFlight, *given: Any) -> Any:
        if flight is broken and not mended:
            met.append(flight)
            raise KeyError("a defect")
        return poll(flight, *given)

    monkeypatch.setattr(InFlight, "poll", defective)
    decode.until(lambda: len(met) > 1, "the defect, again and again")
    decode.transport.faults.held = False
    assert decode.received(prefill.request("b")) == [True], "others are not concerned"
    mended.append(True)
    decode.until(lambda: decode.drained == {"a"}, "the quarantine to end")


def test_a_receive_whose_transfers_cannot_be_looked_at_fails_alone(prefill, decode, monkeypatch):
    linked(decode, prefill)
    decode.transport.faults.held = True
    decode.loop.submit([prefill.request("a"), prefill.request("b")], [])
    half_begun(decode, "a")
    half_begun(decode, "b")
    broken, poll = decode.active("a").in_flight, InFlight.poll

    def defective(flight: InFlight, *given: Any) -> Any:
        if flight is broken and "a" not in decode.finished:
            raise KeyError("a defect")
        return poll(flight, *given)

    monkeypatch.setattr(InFlight, "poll", defective)
    assert decode.wait_for("a") == [False] and decode.quarantined == {"a"}
    decode.transport.faults.held = False
    assert decode.wait_for("b") == [True] and decode.failures == {"internal": 1}
    decode.until(lambda: decode.drained == {"a"}, "the quarantine to end")


def test_what_is_given_up_before_it_is_bound_is_not_kept_in_quarantine(prefill, decode):
    linked(decode, prefill)
    receives = decode.loop._receives

    def at_once(now: float) -> None:
        for name in ("a", "b"):
            receives.begin(prefill.request(name), now)
        assert list(receives._linked) == ["a", "b"]
        receives.abort("b", now)

    in_its_thread(decode.loop, at_once)
    assert decode.wait_for("a", "b") == [True, False]
    assert not decode.quarantined and decode.failures == {"aborted": 1}


def test_what_waits_to_be_bound_fails_with_its_link(prefill, decode):
    linked(decode, prefill)
    receives = decode.loop._receives

    def lose(now: float) -> None:
        receives.begin(prefill.request("a"), now)
        [link] = receives._links._links.values()
        receives._links._disconnect(link, "gone", now)
        assert not receives._linked

    in_its_thread(decode.loop, lose)
    assert decode.wait_for("a") == [False] and not decode.quarantined


def test_what_waits_to_be_bound_while_its_peer_is_in_doubt_waits_for_the_answer(prefill, decode):
    linked(decode, prefill)
    receives = decode.loop._receives

    def doubt(now: float) -> None:
        receives.begin(prefill.request("a"), now)
        [link] = receives._links._links.values()
        receives._links.drive(link, peers.Suspected("a test"), now)

    in_its_thread(decode.loop, doubt)
    assert decode.wait_for("a") == [True] and (decode.worker.memory == decode.expected()).all()


def test_a_push_in_many_slices_puts_every_byte_in_place(writer, target):
    nonce = writer.whole("a")
    assert target.received(target.request(writer, "d", "a", nonce)) == [True]
    assert (target.worker.memory == target.expected()).all()


def test_every_push_is_looked_at_beside_reads_that_take_all_of_a_turn(writer, target, monkeypatch):
    monkeypatch.setattr(transfer_loop, "TURN_S", 0.2)
    set_faults(writer.transports, held=True)
    names = ["a", "b", "c", "d"]
    for name in names:
        target.loop.submit([target.request(writer, name, name, writer.whole(name))], [])
    loop = writer.loops[0]
    pushes, receives = loop._pushes, loop._receives
    assert pushes is not None
    until_in(loop, lambda: len(pushes._pushes) == len(names), "all pushes to be ordered")
    turns: list[int] = []
    turn, look = pushes.turn, pushes._look

    def read_on(now: float, over: float) -> None:
        time.sleep(max(0.0, over - time.monotonic()))

    def begin_turn(now: float, over: float) -> None:
        turns.append(0)
        turn(now, over)

    def count(*arguments: Any) -> None:
        turns[-1] += 1
        look(*arguments)

    def beside_reads(now: float) -> None:
        monkeypatch.setattr(pushes, "_look", count)
        monkeypatch.setattr(pushes, "turn", begin_turn)
        monkeypatch.setattr(receives, "poll", read_on)

    in_its_thread(loop, beside_reads)
    until(lambda: turns[1:].count(len(names)) >= 2, "turns with a look at all pushes")
    assert max(turns) == len(names), "a push was looked at twice in a turn"


def test_a_half_posted_push_that_is_withdrawn_is_over_when_what_was_posted_is(writer, target):
    set_faults(writer.transports, held=True)
    nonce = writer.whole("a")
    target.loop.submit([target.request(writer, "d", "a", nonce)], [])

    def flights(loop: TransferLoop) -> list[InFlight]:
        assert loop._pushes is not None
        return [push.in_flight for push in loop._pushes._pushes.values()]

    def half_posted(loop: TransferLoop) -> bool:
        return bool(flights(loop)) and all(one.posts and one.moves for one in flights(loop))

    for loop in writer.loops:
        until_in(loop, lambda loop=loop: half_posted(loop), "the first slices to run")
    target.loop.submit([], ["d"])
    assert target.wait_for("d") == [False]
    assert target.quarantined == {"d"} and not target.drained
    for loop in writer.loops:
        until_in(loop, lambda loop=loop: not any(one.posts for one in flights(loop)), "the prefill side to hear of it")
    set_faults(writer.transports, held=False)
    target.until(lambda: target.drained == {"d"}, "the prefill side to say that nothing is written")
    assert (target.worker.memory != target.written()).any(), "all of it was written"


def test_a_thread_that_could_not_wait_goes_on(prefill, decode, monkeypatch, caplog):
    """Else nobody's receive would end, and every request would wait for ever."""
    waits, failed = decode.loop._calls.wait, []

    def no_memory(*all_of_it: Any, **more: Any) -> None:
        monkeypatch.setattr(decode.loop._calls, "wait", waits)
        failed.append(True)
        raise MemoryError

    monkeypatch.setattr(decode.loop._calls, "wait", no_memory)
    decode.loop.submit([], [])
    until(lambda: bool(failed), "it to wait")
    assert decode.received(prefill.request("a")) == [True]
    assert "could not wait" in caplog.text


def test_a_lost_peer_fails_no_request_that_waits_for_another_whose_name_one_had_that_was_to_be_bound(prefill, decode):
    """The first was aborted behind a long one that was being bound; its name is used again, and its link in doubt."""
    linked(decode, prefill)
    receives = decode.loop._receives
    request = prefill.request("a")

    def again_and_lost(now: float) -> ReceiveState:
        receives.begin(request, now)
        first = receives._active["a"]
        receives.abort("a", now)
        assert receives._linked["a"] is first and first.reported
        receives._links.drive(first.link, peers.Suspected("a test"), now)
        receives.begin(request, now)
        second = receives._active["a"]
        receives.lost(second.link, "a test", now)
        return second.machine.state

    assert in_its_thread(decode.loop, again_and_lost) is ReceiveState.WAITING
    decode.loop.submit([], ["a"])
    until_in(decode.loop, lambda: not receives._active, "its end")


def test_an_error_that_every_turn_meets_does_not_keep_a_core_busy(prefill, decode, monkeypatch):
    """As of a device that has failed while its worker's first thread stands in a collective."""
    linked(decode, prefill)
    met: list[float] = []

    def broken(*_: object) -> None:
        met.append(time.monotonic())
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(transfer_loop.ProcessWatches, "tick", broken)
        in_its_thread(decode.loop, lambda _: None)
        until(lambda: len(met) >= 6, "turns that fail")
    assert met[5] - met[1] >= 4 * transfer_loop.PAUSE_S * 0.9
    assert decode.received(prefill.request("later")) == [True]
