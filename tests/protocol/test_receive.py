"""One receive: the whole graph of its states is walked, with every event in every state that can be reached."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace

import pytest

from vllm_pd_connector.protocol import receive as r

LIMITS = r.PhaseLimits(wait_s=10.0, read_s=20.0, confirm_s=5.0)
HELD = r.Verdict(held=True, reason="")
LATE = 1e6

EVENTS: list[tuple[r.Event, float]] = [
    (r.PeerReady(0), 0.0),
    (r.PeerReady(1), 0.0),
    (r.PeerReady(3), 0.0),
    (r.PeerReady(2, staged=frozenset({0, 1})), 0.0),
    (r.PeerReady(3, staged=frozenset({1})), 0.0),
    (r.PeerFailed("refused"), 0.0),
    *[(r.TransferDone(i), 0.0) for i in range(4)],
    *[(r.TransferFailed(i, "broken", terminal), 0.0) for i in range(4) for terminal in (True, False)],
    (r.Compared(""), 0.0),
    (r.Compared("layer 3 differs"), 0.0),
    (HELD, 0.0),
    (r.Verdict(held=False, reason="expired"), 0.0),
    (r.VerdictTimeout(), 0.0),
    (r.Abort(), 0.0),
    (r.ReceiveTick(), 0.0),
    (r.ReceiveTick(), LATE),
]


@dataclass(frozen=True)
class Seen:
    """What an observer knows of a receive, independently of the machine."""

    started: int = -1
    staged: frozenset[int] = frozenset()
    ended: frozenset[int] = frozenset()
    failed: bool = False
    verifying: bool = False
    equal: bool = False
    verdict: bool = False
    confirming: bool = False
    reported: r.Report | None = None
    drained: bool = False


def observe(seen: Seen, event: r.Event, actions: list[r.Action], verify: bool) -> Seen:
    """Check the actions against what must hold, and remember them."""
    running = frozenset(range(max(0, seen.started))) - seen.ended  # an event of an ended transfer changes nothing
    if isinstance(event, r.TransferDone) and event.index in running:
        seen = replace(seen, ended=seen.ended | {event.index})
    if isinstance(event, r.TransferFailed) and event.index in running:
        seen = replace(seen, failed=True, ended=seen.ended | ({event.index} if event.terminal else set()))
    if isinstance(event, r.Compared) and seen.verifying and seen.reported is None:
        seen = replace(seen, equal=seen.equal or (not event.problem and not seen.confirming))
    if isinstance(event, r.Verdict) and seen.confirming and seen.reported is None:
        seen = replace(seen, verdict=event.held)
    if isinstance(event, r.PeerReady) and seen.started < 0 and seen.reported is None:
        seen = replace(seen, started=event.transfers, staged=event.staged)
    for action in actions:
        if isinstance(action, r.Report) and not action.ok:
            seen = replace(seen, ended=seen.ended | seen.staged)
        unfinished = len(seen.ended) < seen.started
        match action:
            case r.StartReads():
                assert isinstance(event, r.PeerReady) and event.transfers > 0
            case r.Compare():
                assert verify and not unfinished and not seen.failed and not seen.verifying and seen.reported is None
                seen = replace(seen, verifying=True)
            case r.Confirm():
                assert not verify or seen.equal or seen.started == 0, "confirmed unverified"
                assert seen.started >= 0 and not unfinished and not seen.failed and seen.reported is None
                seen = replace(seen, confirming=True)
            case r.Report(ok, reason, quarantined):
                assert seen.reported is None, "reported twice"
                assert not ok or (seen.verdict and seen.confirming and not unfinished and not seen.failed)
                assert ok or reason
                assert quarantined == unfinished
                seen = replace(seen, reported=action)
            case r.Drained():
                assert seen.reported is not None and seen.reported.quarantined and not unfinished and not seen.drained
                seen = replace(seen, drained=True)
    if seen.reported is not None and seen.reported.quarantined:
        assert seen.drained == (len(seen.ended) == seen.started)
    return seen


@pytest.mark.parametrize("verify", [False, True])
def test_every_order_of_events_reports_once_and_truthfully(verify):
    frontier = [(r.Receive(LIMITS, 0.0, verify), Seen())]
    known = set()
    ends = set()
    while frontier:
        machine, seen = frontier.pop()
        for event, now in EVENTS:
            after = deepcopy(machine)
            watched = observe(seen, event, after.handle(event, now), verify)
            assert (after.next_deadline() is None) == (watched.reported is not None)
            key = (after.state, after.writing, watched)
            if watched.reported is not None:
                ends.add((after.state, watched.reported.ok, watched.reported.quarantined, watched.drained))
            if key not in known:
                known.add(key)
                frontier.append((after, watched))
    assert ends == {
        (r.ReceiveState.DONE, True, False, False),
        (r.ReceiveState.FAILED, False, False, False),
        (r.ReceiveState.DRAINING, False, True, False),
        (r.ReceiveState.FAILED, False, True, True),
    }
    assert len(known) > 100


def drive(*events: r.Event) -> tuple[r.Receive, list[r.Action]]:
    machine = r.Receive(LIMITS, 0.0)
    actions = [action for event in events for action in machine.handle(event, 1.0)]
    return machine, actions


def test_a_receive_that_works():
    machine, actions = drive(r.PeerReady(2), r.TransferDone(1), r.TransferDone(0), HELD)
    assert actions == [r.StartReads(), r.Confirm(), r.Report(ok=True, reason="", quarantined=False)]
    assert machine.state is r.ReceiveState.DONE


def test_nothing_to_read_is_still_confirmed():
    assert drive(r.PeerReady(0), HELD)[1] == [r.Confirm(), r.Report(ok=True, reason="", quarantined=False)]


def test_an_aborted_request_that_waits_is_reported():
    assert drive(r.Abort())[1] == [r.Report(ok=False, reason="aborted", quarantined=False)]


def test_one_failed_transfer_is_reported_at_once_and_the_others_are_waited_for():
    machine, actions = drive(r.PeerReady(3), r.TransferDone(0), r.TransferFailed(1, "reset", terminal=True))
    assert actions[1:] == [r.Report(ok=False, reason="reset", quarantined=True)]
    assert machine.writing == {2}
    assert machine.handle(r.TransferDone(2), 2.0) == [r.Drained()]


def test_a_failed_transfer_that_may_still_write_keeps_the_quarantine():
    machine, actions = drive(r.PeerReady(1), r.TransferFailed(0, "timeout", terminal=False))
    assert actions[1:] == [r.Report(ok=False, reason="timeout", quarantined=True)]
    assert machine.state is r.ReceiveState.DRAINING
    assert machine.handle(r.TransferFailed(0, "peer removed", terminal=True), 2.0) == [r.Drained()]


def test_staged_transfers_stop_with_a_failed_receive_and_need_no_quarantine():
    machine, actions = drive(r.PeerReady(2, staged=frozenset({0, 1})), r.Abort())
    assert actions[1:] == [r.Report(ok=False, reason="aborted", quarantined=False)]
    assert not machine.writing and machine.state is r.ReceiveState.FAILED
    machine, actions = drive(r.PeerReady(3, staged=frozenset({1})), r.TransferDone(0), r.Abort())
    assert actions[1:] == [r.Report(ok=False, reason="aborted", quarantined=True)]
    assert machine.handle(r.TransferDone(2), 2.0) == [r.Drained()]


def test_a_refused_verdict_fails_the_request_with_its_reason():
    _, actions = drive(r.PeerReady(1), r.TransferDone(0), r.Verdict(held=False, reason="the lease expired"))
    assert isinstance(actions[-1], r.Report) and not actions[-1].ok and "the lease expired" in actions[-1].reason


def test_an_unanswered_confirmation_is_repeated_until_the_deadline():
    machine, _ = drive(r.PeerReady(0))
    assert machine.handle(r.VerdictTimeout(), 5.0) == [r.Confirm()]
    assert machine.next_deadline() == 6.0
    (report,) = machine.handle(r.ReceiveTick(), 6.0)
    assert isinstance(report, r.Report) and "confirming the read took longer than 5 s" in report.reason


@pytest.mark.parametrize(
    ("events", "phase"),
    [((), "waiting for the peer took longer than 10 s"), ((r.PeerReady(1),), "reading took longer than 20 s")],
)
def test_each_phase_has_its_deadline(events, phase):
    machine, _ = drive(*events)
    deadline = machine.next_deadline()
    assert machine.handle(r.ReceiveTick(), deadline - 0.001) == []
    (report,) = machine.handle(r.ReceiveTick(), deadline)
    assert phase in report.reason and report.quarantined == bool(events)


@pytest.mark.parametrize(("events", "more"), [((), LIMITS.wait_s), ((r.PeerReady(0),), LIMITS.confirm_s)])
def test_what_goes_on_gets_more_time(events, more):
    machine, _ = drive(*events)
    deadline = machine.next_deadline()
    assert machine.handle(r.ReceiveTick(moved=True), deadline - 1.0) == [] and machine.next_deadline() == deadline
    assert machine.handle(r.ReceiveTick(moved=True), deadline) == []
    assert machine.next_deadline() == deadline + more
    (report,) = machine.handle(r.ReceiveTick(), deadline + more)
    assert not report.ok


def test_a_read_of_which_something_has_moved_gets_more_time():
    machine, _ = drive(r.PeerReady(2))
    deadline = machine.next_deadline()
    assert machine.handle(r.ReceiveTick(moved=True), deadline) == []
    assert machine.next_deadline() == deadline + LIMITS.read_s
    (report,) = machine.handle(r.ReceiveTick(missing="2 transfers have not ended"), deadline + LIMITS.read_s)
    assert report.reason == "deadline: reading took longer than 20 s: 2 transfers have not ended"


@pytest.mark.parametrize("arrived", [None, 7])
def test_a_push_that_is_not_heard_of_says_so(arrived):
    machine = r.Receive(LIMITS, 0.0)
    machine.handle(r.PushReady(), 1.0)
    machine.handle(r.PushAlive(arrived), 2.0)
    assert machine.next_deadline() == 2.0 + LIMITS.silent_s
    report, *_ = machine.handle(r.ReceiveTick(missing="it did not answer"), machine.next_deadline())
    assert report.reason.endswith(f"took longer than {LIMITS.silent_s:g} s: it did not answer")


PUSH_EVENTS: list[tuple[r.Event, float]] = [
    (r.PushReady(), 0.0),
    (r.PushAlive(None), 0.0),
    (r.PushAlive(1), 0.0),
    (r.PushAlive(1), LATE),
    (r.PushSilent(), 0.0),
    (r.PushDone(), 0.0),
    (r.PushDone(comparable=True), 0.0),
    (r.Compared(""), 0.0),
    (r.Compared("layer 3 differs"), 0.0),
    (r.PushFailed("aborted", terminal=False), 0.0),
    (r.PushFailed("broken", terminal=True), 0.0),
    (r.PeerFailed("lost"), 0.0),
    (r.TransferDone(1), 0.0),
    (HELD, 0.0),
    (r.Verdict(held=False, reason="expired"), 0.0),
    (r.VerdictTimeout(), 0.0),
    (r.Abort(), 0.0),
    (r.ReceiveTick(), 0.0),
    (r.ReceiveTick(), LATE),
]


@dataclass(frozen=True)
class Pushing:
    """What an observer knows of a push: was it asked for, has the prefill side said its last word, what was done."""

    asked: bool = False
    over: bool = False
    comparing: bool = False
    confirming: bool = False
    reported: r.Report | None = None
    withdrawn: bool = False
    drained: bool = False


@pytest.mark.parametrize("verify", [False, True])
def test_every_order_of_events_of_a_push_reports_once_and_truthfully(verify):
    frontier = [(r.Receive(LIMITS, 0.0, verify), Pushing())]
    known, ends = set(), set()
    while frontier:
        machine, seen = frontier.pop()
        for event, now in PUSH_EVENTS:
            after = deepcopy(machine)
            actions = after.handle(event, now)
            watched = seen
            if seen.asked and isinstance(event, r.PushDone | r.PushFailed):
                watched = replace(watched, over=seen.over or getattr(event, "terminal", True))
            for action in actions:
                match action:
                    case r.AskPush():
                        assert watched.reported is None and not watched.over
                        watched = replace(watched, asked=True)
                    case r.Withdraw():
                        assert watched.reported is not None and watched.reported.quarantined and not watched.over
                        watched = replace(watched, withdrawn=True)
                    case r.Compare():
                        assert verify and event == r.PushDone(comparable=True) and watched.reported is None
                        watched = replace(watched, comparing=True)
                    case r.Confirm():
                        assert watched.comparing and watched.reported is None
                        assert event == r.Compared("") or watched.confirming, "confirmed unverified"
                        watched = replace(watched, confirming=True)
                    case r.Report(ok, reason, quarantined):
                        assert watched.reported is None, "reported twice"
                        good = event == HELD if watched.comparing else isinstance(event, r.PushDone)
                        assert ok == good and watched.comparing <= (watched.confirming or not ok)
                        assert bool(reason) != ok
                        assert quarantined == (watched.asked and not watched.over)
                        watched = replace(watched, reported=action)
                    case r.Drained():
                        assert watched.withdrawn and watched.over and not watched.drained
                        watched = replace(watched, drained=True)
                    case _:
                        raise AssertionError(f"{action} in a push")
            if watched.reported is not None and watched.reported.quarantined:
                assert watched.withdrawn and watched.drained == watched.over
            assert (after.next_deadline() is None) == (watched.reported is not None)
            if watched.reported is not None:
                ends.add((after.state, watched.reported.ok, watched.reported.quarantined, watched.drained))
            key = (after.state, after.writing, watched)
            if key not in known:
                known.add(key)
                frontier.append((after, watched))
    assert ends == {
        (r.ReceiveState.DONE, True, False, False),
        (r.ReceiveState.FAILED, False, False, False),
        (r.ReceiveState.DRAINING, False, True, False),
        (r.ReceiveState.FAILED, False, True, True),
    }


def test_a_push_that_computes_or_writes_for_long_is_waited_for_and_one_of_which_nothing_moves_is_not():
    machine = r.Receive(LIMITS, 0.0)
    machine.handle(r.PushReady(), 1.0)
    assert machine.next_deadline() == 1.0 + LIMITS.silent_s
    for now in (10.0, 20.0, 500.0):
        assert machine.handle(r.PushAlive(None), now) == [r.AskPush()]
        assert machine.next_deadline() == now + LIMITS.silent_s
    for now in (510.0, 525.0, 540.0, 1000.0):
        assert machine.handle(r.PushAlive(int(now)), now) == [r.AskPush()]
    assert machine.handle(r.PushAlive(1000), 1000.0 + LIMITS.read_s - 0.1) == [r.AskPush()]
    [report, withdrawn] = machine.handle(r.PushAlive(1000), 1000.0 + LIMITS.read_s)
    assert withdrawn == r.Withdraw() and report.quarantined
    assert "took longer than 20 s: the prefill side answers" in report.reason and "1000" in report.reason


def test_what_was_read_is_compared_before_it_is_confirmed():
    machine = r.Receive(LIMITS, 0.0, verify=True)
    assert [a for e in (r.PeerReady(1), r.TransferDone(0)) for a in machine.handle(e, 1.0)][1:] == [r.Compare()]
    assert machine.next_deadline() == 21.0
    assert machine.handle(r.Compared(""), 2.0) == [r.Confirm()]


def test_a_difference_fails_the_request_with_its_place():
    machine = r.Receive(LIMITS, 0.0, verify=True)
    for event in (r.PeerReady(1), r.TransferDone(0)):
        machine.handle(event, 1.0)
    [report] = machine.handle(r.Compared("layer 3 differs"), 2.0)
    assert report == r.Report(ok=False, reason="verification: layer 3 differs", quarantined=False)


def test_what_was_written_is_compared_if_the_prefill_side_keeps_it_for_that():
    for comparable, actions in ((True, [r.Compare()]), (False, [r.Report(ok=True, reason="", quarantined=False)])):
        machine = r.Receive(LIMITS, 0.0, verify=True)
        machine.handle(r.PushReady(), 1.0)
        assert machine.handle(r.PushDone(comparable), 2.0) == actions
    machine = r.Receive(LIMITS, 0.0, verify=True)
    for event in (r.PushReady(), r.PushDone(comparable=True)):
        machine.handle(event, 2.0)
    assert machine.next_deadline() == 2.0 + LIMITS.read_s
    assert machine.handle(r.Compared(""), 3.0) == [r.Confirm()]
    assert machine.handle(HELD, 4.0) == [r.Report(ok=True, reason="", quarantined=False)]
