"""What one request has under way: slices go out a few at a time, and what was given up is no success."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_pd_connector.errors import PeerLost, TransferError
from vllm_pd_connector.geometry.runs import Runs
from vllm_pd_connector.geometry.spans import Slices
from vllm_pd_connector.protocol import receive
from vllm_pd_connector.protocol.push import push
from vllm_pd_connector.protocol.transfers import TransferDone, TransferFailed
from vllm_pd_connector.protocol.wire.push_messages import WriteCommand
from vllm_pd_connector.transport.base import TransferStatus
from vllm_pd_connector.worker.in_flight import POLL_DRAINING_S, SLICES_UNDER_WAY, InFlight
from vllm_pd_connector.worker.poll_interval import FIRST_S, LONGEST_OF_OLD_S
from vllm_pd_connector.worker.staging.stream import Stream

NOTHING: Any = SimpleNamespace()
IDLE: Any = SimpleNamespace(
    holds=lambda owner: False, moves=lambda owner: False, cancel=lambda owner: None, landed=lambda owner: 0
)
STATUS = TransferStatus


class Transport:
    """Remembers what it was given; each transfer is what `ends` says of it."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.ends: dict[int, TransferStatus | Exception] = {}
        self.parts = 1

    def write(self, peer: object, runs: Runs) -> Any:
        return self.read(peer, runs)

    def read(self, peer: object, runs: Runs) -> Any:
        self.given.append(SimpleNamespace(number=len(self.given), left=self.parts, descriptors=len(runs)))
        return self.given[-1]

    def poll(self, transfer: Any) -> TransferStatus:
        end = self.ends.get(transfer.number, STATUS.RUNNING)
        if isinstance(end, Exception):
            raise end
        return end


class Sliced(Slices):
    """So many slices of one run each."""

    def __iter__(self) -> Any:
        one = np.ones(1, dtype=np.int64)
        return iter([Runs(one, one, one)] * len(self.paired))


@pytest.fixture
def transport() -> Transport:
    return Transport()


@pytest.fixture
def flight(transport: Transport) -> InFlight:
    link: Any = SimpleNamespace(connection=NOTHING, watch_of=lambda peer: None)
    return InFlight("a read", NOTHING, link, transport, IDLE, writes=False)  # type: ignore[arg-type]


def begin(flight: InFlight, slices: int) -> Callable[..., list[Any]]:
    flight.start(0, NOTHING, Sliced((NOTHING,) * slices))
    return lambda until=math.inf: list(flight.poll(0.0, until))


def test_a_long_transfer_goes_out_a_few_slices_at_a_time_and_ends_with_the_last(flight, transport):
    look = begin(flight, SLICES_UNDER_WAY + 3)
    for ended in range(SLICES_UNDER_WAY + 3):
        assert not look() and len(transport.given) == min(SLICES_UNDER_WAY + ended, SLICES_UNDER_WAY + 3)
        assert flight.arrived == 2 * ended
        transport.ends[ended] = STATUS.DONE
    assert look() == [(TransferDone(0), None)]
    assert not flight.may_write and flight.moved.runs == SLICES_UNDER_WAY + 3


def test_one_slice_begins_where_the_turn_has_no_more_time(flight, transport):
    look = begin(flight, 3)
    for begun in range(1, 4):
        assert flight.next_look(0.0, draining=False) == [0.0]
        assert not look(0.0) and len(transport.given) == begun
    assert not look(0.0) and flight.next_look(0.0, draining=False)[0] > 0.0


@pytest.mark.parametrize("end", ["given", "given up"])
def test_a_slice_whose_making_took_the_rest_of_a_turn_is_given_in_the_next(flight, transport, monkeypatch, end):
    now = 1.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def made() -> Any:
        nonlocal now
        for runs in Sliced((NOTHING,) * 2):
            now += 0.002
            yield runs

    flight.start(0, NOTHING, Sliced((NOTHING,)))
    flight.transfers[0].rest = made()
    for begun in range(3):  # the one that was made is given first
        assert not list(flight.poll(now, now + 0.001)) and len(transport.given) == begun
        if end == "given up":
            flight.cancel()
            assert [type(told) for told, _ in flight.poll(now, now + 0.001)] == [TransferFailed]
            assert not transport.given and not flight.may_write
            return
        assert flight.posts == (begun < 2)
    assert flight.moved.runs == 2


def test_nothing_begins_in_a_turn_that_the_look_has_taken_all_of(flight, transport, monkeypatch):
    look, now = begin(flight, 3), 1.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    look(0.0)

    def poll(transfer: object) -> TransferStatus:
        nonlocal now
        now += 0.003
        return STATUS.RUNNING

    monkeypatch.setattr(transport, "poll", poll)
    for _ in range(2):
        assert not look(now + 0.001) and len(transport.given) == 1, "a turn is as long as both together"
        assert flight.next_look(now, draining=False) == [now], "the next begins it"
    assert not look(now) and len(transport.given) == 2, "its turn came late by what others took"
    assert not look(now + 0.01) and len(transport.given) == 3


def test_transfers_of_several_ranks_take_turns_where_there_is_no_time_for_all(flight, transport, monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 1.0)  # making a slice takes long where nobody runs this process
    looks: list[int] = []
    poll = transport.poll
    monkeypatch.setattr(transport, "poll", lambda transfer: (looks.append(transfer.number), poll(transfer))[1])
    for index in range(3):
        flight.start(index, NOTHING, Sliced((NOTHING,) * 2))
    for turn in range(1, 7):
        assert not list(flight.poll(0.0, 0.0)) and len(transport.given) == turn, "more than one was begun"
        assert flight.next_look(0.0, draining=False) == [0.0]
    assert looks == [0, 1, 2]
    transport.ends = dict.fromkeys(range(6), STATUS.DONE)
    ends = [list(flight.poll(0.0, 0.0)) for _ in range(6)]
    assert sorted(end.index for turn in ends for end, _ in turn) == [0, 1, 2]
    assert max(map(len, ends)) == 1 and not flight.transfers


def test_what_was_over_when_it_had_been_posted_is_looked_at_at_once(flight, transport):
    """On one host libraries copy in the call that posts. What has no part left then and goes on, as a failed one that
    settles, is looked at as others are."""
    look = begin(flight, 2)
    look()
    assert flight.next_look(0.0, draining=False) > [0.0]
    transport.given[1].left = 0
    assert flight.next_look(0.0, draining=False) == [0.0]
    look()
    assert flight.next_look(0.0, draining=False) > [0.0]


def test_one_slice_that_is_over_when_it_was_posted_ends_its_transfer_in_that_turn(flight, transport):
    """Also where the turn has no more time: the next would only find that out."""
    transport.parts, transport.ends[0] = 0, TransferStatus.DONE
    flight.start(0, NOTHING, Sliced((NOTHING,), single=True))
    assert list(flight.poll(0.0, -math.inf)) == [(TransferDone(0), None)]
    assert not flight.transfers and flight.moved.runs == 1


def test_one_slice_that_failed_when_it_was_posted_ends_its_transfer_in_that_turn(flight, transport):
    transport.parts, transport.ends[0] = 0, TransferError("gone")
    flight.start(0, NOTHING, Sliced((NOTHING,), single=True))
    [(end, blame)] = flight.poll(0.0, -math.inf)
    assert isinstance(end, TransferFailed) and end.terminal and blame is transport.ends[0]


def test_no_slice_is_begun_while_the_transport_wants_time_for_the_last(flight, transport):
    look = begin(flight, 3)
    look(0.0)
    transport.ends[0] = STATUS.POSTING
    assert not look() and len(transport.given) == 1 and flight.next_look(0.0, draining=False) == [0.0]
    transport.ends[0] = STATUS.RUNNING
    assert not look() and len(transport.given) == 3


def test_what_moves_when_it_is_looked_at_is_looked_at_soon(flight, transport):
    """However old it is and however little was asked for."""
    look = begin(flight, 2)
    look()
    transport.ends[0] = STATUS.MOVING
    assert not look() and flight.next_look(flight.posted_at + 60.0, draining=False) == [
        flight.posted_at + 60.0 + FIRST_S
    ]
    transport.ends[0] = STATUS.RUNNING
    look()
    assert flight.next_look(flight.posted_at + 60.0, draining=False) == [flight.posted_at + 60.0 + LONGEST_OF_OLD_S]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_failed_slice_ends_its_transfer_when_the_others_have_ended(flight, transport, terminal):
    look = begin(flight, SLICES_UNDER_WAY + 1)
    look()
    error = transport.ends[1] = TransferError("reset", terminal=terminal)
    assert look() == [(TransferFailed(0, "reset", terminal=False), error)]
    assert flight.may_write == {0} and flight.moves
    for other in range(SLICES_UNDER_WAY):
        assert not look()
        transport.ends[other] = STATUS.DONE
    assert len(transport.given) == SLICES_UNDER_WAY, "a slice was begun after one had failed"
    assert look() == ([(TransferFailed(0, "reset", terminal=True), None)] if terminal else [])
    assert flight.may_write == (set() if terminal else {0}) and not flight.moves


UNSURE, SURE = TransferError("it may go on", terminal=False), TransferError("it is over", terminal=True)


@pytest.mark.parametrize("errors", [(SURE, UNSURE), (UNSURE, SURE), (UNSURE, UNSURE)])
def test_blocks_that_are_read_into_stay_in_quarantine_whichever_slice_failed_first(flight, transport, errors):
    machine = receive.Receive(receive.PhaseLimits(60, 60, 60), 0.0)
    machine.handle(receive.PeerReady(1), 0.0)
    look = begin(flight, 2)
    look()
    transport.ends = dict(enumerate(errors))
    actions = [action for end, _ in look() for action in machine.handle(end, 0.0)]
    assert actions == [receive.Report(ok=False, reason=str(errors[0]), quarantined=True)]
    assert machine.writing == flight.may_write == {0} and flight.stuck == {0}


@pytest.mark.parametrize("errors", [(SURE, UNSURE), (UNSURE, SURE), (UNSURE, UNSURE)])
def test_blocks_that_are_written_from_are_kept_whichever_slice_failed_first(flight, transport, errors):
    flight.writes, machine = True, push.Push(60.0)
    command = WriteCommand(b"", (), 0, 0, final=True)
    for event in (push.Linked(), push.Commanded(command), push.StepsDone(0), push.Bound(1)):
        machine.handle(event, 0.0)
    look = begin(flight, 2)
    look()
    transport.ends = dict(enumerate(errors))
    reports: list[Any] = []
    for end, _ in flight.poll(0.0, math.inf):
        for action in machine.handle(end, 0.0):
            assert isinstance(action, push.Stop)
            flight.cancel()
            reports += machine.handle(push.Stopped(machine.writing - flight.may_write), 0.0)
    assert reports == [push.Report(ok=False, reason=str(errors[0]), terminal=False)]
    assert machine.writing == flight.may_write == {0} and flight.stuck == {0}


def test_of_a_slice_that_cannot_be_looked_at_nobody_knows_whether_it_writes(flight, transport):
    look = begin(flight, SLICES_UNDER_WAY + 2)
    look()
    transport.ends = {1: RuntimeError("a defect")}
    [(end, error)] = look()
    assert "unexpected RuntimeError: a defect" in end.reason and not (end.terminal or error.terminal)
    transport.ends |= dict.fromkeys((0, 2, 3), STATUS.DONE)
    assert not look(), "it is told as done, or as one that writes no more"
    assert flight.may_write == {0} and len(transport.given) == SLICES_UNDER_WAY


def test_two_slices_that_failed_for_certain_leave_nothing_behind(flight, transport):
    look = begin(flight, 3)
    look(0.0), look(0.0), look(0.0)
    transport.ends = {0: SURE, 1: SURE, 2: STATUS.DONE}
    assert [(end.terminal, error) for end, error in look()] == [(True, SURE), (True, None)]
    assert not flight.may_write and not flight.transfers and not look()


def test_a_link_is_blamed_once_for_what_several_slices_met_and_again_for_what_may_go_on(flight, transport):
    look = begin(flight, 4)
    look()
    flight.cancel()
    blamed = []
    for number, error in enumerate((PeerLost("gone"), PeerLost("gone"), UNSURE, UNSURE)):
        transport.ends[number] = error
        blamed += [told for _, told in look()]
    assert [str(error) for error in blamed] == ["gone", "None", str(UNSURE), str(UNSURE)]
    assert flight.stuck == {0}


def test_a_slice_that_cannot_begin_fails_its_transfer(flight, transport, monkeypatch):
    error = TransferError("no")
    monkeypatch.setattr(transport, "read", lambda *_: (_ for _ in ()).throw(error))
    assert begin(flight, 2)() == [(TransferFailed(0, "no", terminal=True), error)]
    assert not flight.may_write and not flight.transfers


def test_a_slice_that_the_transport_does_not_take_for_a_reason_of_its_own_may_have_begun(
    flight, transport, monkeypatch
):
    """Libraries post part after part, so an error that is none of ours may come in the middle."""
    monkeypatch.setattr(transport, "read", lambda *_: 1 // 0)
    [(end, error)] = begin(flight, 2)()
    assert "ZeroDivisionError" in end.reason and not (end.terminal or error.terminal)
    assert flight.may_write == {0} and flight.stuck == {0} and not flight.transfers


def test_a_slice_that_cannot_be_made_has_not_begun(flight, transport):
    flight.start(0, NOTHING, Sliced((NOTHING,)))
    flight.transfers[0].rest = (1 // 0 for _ in range(2))
    [(end, error)] = flight.poll(0.0, math.inf)
    assert "ZeroDivisionError" in end.reason and end.terminal and error.terminal
    assert not flight.may_write and not flight.transfers and not transport.given


def test_a_transfer_that_cannot_begin_costs_no_other(flight, transport, monkeypatch):
    flight.start(0, NOTHING, Sliced((NOTHING,)))
    monkeypatch.setattr(flight.link, "watch_of", lambda peer: 1 // 0)
    flight.start(1, NOTHING, Sliced((NOTHING,)))
    monkeypatch.undo()
    flight.start(2, NOTHING, Sliced((NOTHING,)))
    [(end, error)] = flight.poll(0.0, math.inf)
    assert end.index == 1 and end.terminal and "ZeroDivisionError" in end.reason and error is None
    assert flight.may_write == {0, 2} and len(transport.given) == 2


def test_what_is_given_up_begins_no_other_slice_and_is_over_with_those_that_run(flight, transport):
    look = begin(flight, 3)
    look(0.0)
    flight.cancel()
    assert not look() and flight.may_write == {0} and not flight.posts
    transport.ends[0] = STATUS.DONE
    assert look() == [(TransferFailed(0, "it was given up", terminal=True), None)]
    assert len(transport.given) == 1 and not flight.may_write


def test_what_is_given_up_before_it_began_may_not_write(flight, transport):
    look = begin(flight, 3)
    flight.cancel()
    assert not flight.may_write and flight.next_look(0.0, draining=True) == [0.0]
    assert look() == [(TransferFailed(0, "it was given up", terminal=True), None)] and not transport.given


def test_what_drains_is_looked_at_as_often_as_anything_while_it_moves(flight, transport):
    transport.parts = 2
    begin(flight, 1)
    at = flight.posted_at

    def until_next(later: float, draining: bool = True) -> float:
        assert not list(flight.poll(at + later, math.inf))
        [moment] = flight.next_look(at + later, draining)
        return moment - at - later

    assert until_next(0.0) == pytest.approx(FIRST_S, abs=1e-9), "but for what a clock of days cannot hold"
    flight.cancel()
    assert until_next(10.0) == pytest.approx(POLL_DRAINING_S)
    transport.given[0].left = 1
    assert until_next(10.0) == until_next(10.0, draining=False) == pytest.approx(LONGEST_OF_OLD_S)
    assert LONGEST_OF_OLD_S < until_next(10.4) < until_next(10.5) < until_next(12.0) == pytest.approx(POLL_DRAINING_S)


@pytest.mark.parametrize("unsure", [False, True])
def test_what_the_staging_buffer_holds_no_more_without_having_said_so_has_failed(unsure: bool) -> None:
    """Its end was lost, with an error elsewhere in the turn: bytes may be missing, and some may still come."""
    stream = Stream("a push", 3, NOTHING, NOTHING, iter(()), may_write=unsure)
    staged, watches = {3: stream}, {3: None}
    flight = InFlight("a push", NOTHING, NOTHING, NOTHING, IDLE, writes=True, staged=staged, watches=watches)
    [(end, error)] = flight.poll(0.0, 0.0)
    assert isinstance(end, TransferFailed) and end.index == 3 and end.terminal is not unsure and error is None
    assert flight.may_write == ({3} if unsure else set())
