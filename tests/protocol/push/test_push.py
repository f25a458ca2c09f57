"""One rank's part of a push: every order of what can happen, and what each phase is for."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace

import pytest

from vllm_pd_connector.protocol.push import push as p
from vllm_pd_connector.protocol.transfers import TransferDone, TransferFailed
from vllm_pd_connector.protocol.wire.push_messages import WriteCommand

LIMIT, LATE = 20.0, 1000.0
ATTEMPT = b"a" * 16
FIRST = WriteCommand(ATTEMPT, (), 16, 1, final=False)
LAST = WriteCommand(ATTEMPT, (), 40, 2, final=True)

EVENTS: list[tuple[p.Event, float]] = [
    (p.Linked(), 0.0),
    (p.LinkLost("lost"), 0.0),
    (p.LinkStalled("stands still"), 0.0),
    (p.StepsDone(1), 0.0),
    (p.StepsDone(2), 0.0),
    (p.WavesDone(1, 1), 0.0),
    (p.WavesDone(1, 2), 0.0),
    (p.WavesDone(2, 1), 0.0),
    (p.GivenUp("cancelled"), 0.0),
    *((TransferDone(index), 0.0) for index in range(3)),
    *((TransferFailed(index, "reset", terminal), 0.0) for index in range(3) for terminal in (True, False)),
    (p.PushTick(), 0.0),
    (p.PushTick(), LATE),
    (p.PushTick(moved=True), LATE),
]


@dataclass(frozen=True)
class Seen:
    """What an observer knows of a push, independently of the machine. `running` may write; the even ones of them are
    begun by our own process, so that they may end when they are stopped."""

    commanded: int = 0
    linked: bool = False
    running: frozenset[int] = frozenset()
    begun: int = 0
    bound: frozenset[int] = frozenset()  # steps
    waves: int = 0  # of the first step
    partly: int = 0  # the step of whose command a piece was bound
    failed: bool = False
    stopped: bool = False
    told: bool = False
    ended: p.Report | None = None


def before(seen: Seen, event: p.Event) -> Seen:
    match event:
        case p.Commanded():
            return replace(seen, commanded=seen.commanded + 1)
        case p.Linked():
            return replace(seen, linked=True)
        case TransferDone(index) | TransferFailed(index, _, True):
            failed = isinstance(event, TransferFailed) and index in seen.running
            return replace(seen, running=seen.running - {index}, failed=seen.failed or failed)
        case TransferFailed(index):
            return replace(seen, failed=seen.failed or index in seen.running)
        case p.Stopped(over):
            return replace(seen, running=seen.running - over)
        case p.Bound(_, more=True):
            step = max(seen.bound)
            return replace(seen, bound=seen.bound - {step}, partly=step)
    return seen


def after(seen: Seen, event: p.Event, action: p.Action) -> Seen:
    """Check an action against what must hold, and remember it."""
    assert seen.ended is None, "something follows the last report"
    match action:
        case p.Bind(command):
            assert seen.linked and not seen.failed and not seen.stopped
            assert isinstance(event, p.StepsDone) and command.step <= event.step
            assert all(step < command.step for step in seen.bound), "bound twice, or after a later one"
            return replace(seen, bound=seen.bound | {command.step})
        case p.BindWaves(command, first, stop):
            assert seen.linked and not seen.failed and not seen.stopped
            assert isinstance(event, p.WavesDone) and command.step == event.step and event.waves == stop
            assert command == FIRST and not seen.bound, "of the end, or of a step that was bound"
            assert first == seen.waves < stop, "bound twice, or left out"
            assert not seen.partly, "of a step that is done"
            return replace(seen, waves=stop)
        case p.StartWrites():
            assert isinstance(event, p.Bound) and event.transfers and not seen.stopped
            new = frozenset(range(seen.begun, seen.begun + event.transfers))
            return replace(seen, running=seen.running | new, begun=seen.begun + event.transfers)
        case p.WantLink():
            assert isinstance(event, p.LinkStalled) and not seen.running and not seen.stopped
            return replace(seen, linked=False)
        case p.Stop(reason):
            assert reason and not seen.stopped
            return replace(seen, stopped=True, failed=True)
        case p.Report(ok, reason, terminal):
            assert terminal == (not seen.running)
            assert ok == (not seen.failed) and ok == (not reason)
            assert not ok or (2 in seen.bound and terminal), "done, and not all was written"
            assert terminal or not seen.told
            return replace(seen, told=seen.told or not terminal, ended=action if terminal else None)


def looked_at(push: p.Push, event: p.Event) -> bool | None:
    """Whether it is said of the push that this event, of a step, changes something."""
    match event:
        case p.StepsDone(step):
            return push.goes_on(step, 0, 0)
        case p.WavesDone(step, waves):
            return push.goes_on(0, step, waves)
    return None


def handled(push: p.Push, seen: Seen, event: p.Event, now: float) -> list[tuple[p.Push, Seen]]:
    """What may come of an event, by what the actions that need an answer are answered."""
    push = deepcopy(push)
    seen, known = before(seen, event), (push.next_step, push.waves)
    goes_on = looked_at(push, event)
    actions = push.handle(event, now)
    assert goes_on is None or goes_on == (bool(actions) or known != (push.next_step, push.waves))
    for action in actions:
        seen = after(seen, event, action)
    answers: list[p.Event] = []
    match actions:
        case [p.Bind()] | [p.BindWaves()]:
            answers = [p.Bound(0), p.Bound(1), p.Bound(2), p.GivenUp("does not bind")]
            if not seen.partly and isinstance(actions[0], p.Bind):
                answers.append(p.Bound(1, more=True))
        case [p.Stop()]:
            answers = [p.Stopped(frozenset()), p.Stopped(frozenset(i for i in seen.running if i % 2 == 0))]
    if not answers:
        return [(push, seen)]
    return [end for answer in answers for end in handled(push, seen, answer, now)]


def last_word(push: p.Push, seen: Seen) -> p.Report:
    """What is reported in the end if the push is given up now and all that runs ends."""
    [(push, seen)] = handled(push, seen, p.GivenUp("enough"), 0.0)[:1]
    for index in sorted(seen.running):
        [(push, seen)] = handled(push, seen, TransferDone(index), 0.0)
    assert seen.ended is not None
    return seen.ended


def test_every_order_of_events_reports_the_end_once_and_truthfully() -> None:
    frontier = [(p.Push(LIMIT), Seen())]
    known, ends = set(), set()
    while frontier:
        push, seen = frontier.pop()
        assert seen.ended is not None or last_word(push, seen).terminal, "nobody is told"
        command = ((p.Commanded((FIRST, LAST)[seen.commanded]), 0.0),) if seen.commanded < 2 else ()
        for event, now in (*command, *EVENTS):
            for next_push, watched in handled(push, seen, event, now):
                assert next_push.writing == (watched.running if watched.ended is None else frozenset())
                waits = watched.commanded == 2 and not watched.stopped and watched.ended is None
                assert (next_push.next_deadline() is not None) == waits, "nobody notices that it takes too long"
                assert next_push.over == (watched.ended is not None)
                if watched.ended is not None:
                    ends.add((watched.ended.ok, watched.told, next_push.phase))
                key = (next_push.phase, next_push.next_step, watched)
                if key not in known:
                    known.add(key)
                    frontier.append((next_push, watched))
    assert ends == {
        (True, False, p.PushPhase.DONE),
        (False, False, p.PushPhase.FAILED),
        (False, True, p.PushPhase.FAILED),
    }
    assert len(known) > 100


def drive(*events: p.Event) -> tuple[p.Push, list[p.Action]]:
    push = p.Push(LIMIT)
    return push, [action for event in events for action in push.handle(event, 1.0)]


WHOLE = (p.Commanded(LAST), p.Linked(), p.StepsDone(2))


def test_a_push_that_works() -> None:
    both = p.Commanded(FIRST), p.Commanded(LAST), p.Linked()
    steps = p.StepsDone(1), p.Bound(1), p.StepsDone(2), p.Bound(1)
    push, actions = drive(*both, *steps, TransferDone(1), TransferDone(0))
    writes = [p.Bind(FIRST), p.StartWrites(), p.Bind(LAST), p.StartWrites()]
    assert actions == [*writes, p.Report(ok=True, reason="", terminal=True)]
    assert push.phase is p.PushPhase.DONE and push.next_deadline() is None


def test_a_part_that_is_empty_is_done_at_once() -> None:
    assert drive(*WHOLE, p.Bound(0))[1] == [p.Bind(LAST), p.Report(ok=True, reason="", terminal=True)]


def test_commands_whose_steps_ended_together_are_one() -> None:
    assert drive(p.Commanded(FIRST), *WHOLE)[1] == [p.Bind(LAST)]


def test_waves_of_layers_go_before_their_step_is_done_each_once() -> None:
    waves = p.WavesDone(1, 2), p.Bound(1), p.WavesDone(1, 2), p.WavesDone(1, 3), p.Bound(0)
    push, actions = drive(p.Commanded(FIRST), p.Linked(), p.WavesDone(2, 5), *waves)
    assert actions == [p.BindWaves(FIRST, 0, 2), p.StartWrites(), p.BindWaves(FIRST, 2, 3)]
    assert push.waves == 3
    assert push.handle(p.StepsDone(1), 1.0) == [p.Bind(FIRST)] and push.waves == 0


def test_no_wave_goes_of_the_command_that_ends_a_prefill() -> None:
    push, actions = drive(p.Commanded(LAST), p.Linked(), p.WavesDone(2, 1))
    assert actions == [] and push.waves == 1, "nobody asks for this wave again"


def test_nothing_is_written_before_the_decode_instance_is_linked_and_the_step_is_done() -> None:
    push, actions = drive(p.Commanded(FIRST), p.StepsDone(1))
    assert not actions and push.next_step is None
    assert not push.handle(p.Linked(), 1.0) and push.next_step == 1
    assert not push.handle(p.StepsDone(0), 1.0)
    assert push.handle(p.StepsDone(1), 1.0) == [p.Bind(FIRST)]


def test_a_failure_is_reported_at_once_and_again_when_nothing_is_written_any_more() -> None:
    push, actions = drive(*WHOLE, p.Bound(2), TransferFailed(0, "unclear", terminal=False), p.Stopped(frozenset()))
    assert actions[2:] == [p.Stop("unclear"), p.Report(ok=False, reason="unclear", terminal=False)]
    assert push.handle(TransferDone(1), 2.0) == []
    end = push.handle(TransferFailed(0, "the worker has ended", terminal=True), 3.0)
    assert end == [p.Report(ok=False, reason="unclear", terminal=True)]


def test_what_stopping_ends_needs_no_second_report() -> None:
    _, actions = drive(*WHOLE, p.Bound(2), p.GivenUp("cancelled"), p.Stopped(frozenset({0, 1})))
    assert actions[2:] == [p.Stop("cancelled"), p.Report(ok=False, reason="cancelled", terminal=True)]


@pytest.mark.parametrize("writes", [False, True])
def test_who_waits_for_a_step_is_linked_anew_and_who_writes_fails(writes: bool) -> None:
    push, _ = drive(p.Commanded(FIRST), p.Linked(), p.StepsDone(1), p.Bound(int(writes)))
    action = p.Stop("stands still") if writes else p.WantLink()
    assert push.handle(p.LinkStalled("stands still"), 1.0) == [action]
    assert (push.phase is p.PushPhase.LINKING) == (not writes)


def test_a_lost_connection_fails_what_goes_over_it_and_nobody_who_waits_for_one() -> None:
    push, actions = drive(p.Commanded(LAST), p.LinkLost("reset"))
    assert not actions
    push.handle(p.Linked(), 1.0)
    assert push.handle(p.LinkLost("reset"), 1.0) == [p.Stop("reset")]


def test_a_push_of_which_something_has_moved_gets_more_time() -> None:
    push, _ = drive(p.Commanded(FIRST))
    push.handle(p.Commanded(LAST), 5.0)
    assert push.handle(p.PushTick(moved=True), 5.0 + LIMIT) == []
    assert push.next_deadline() == 5.0 + 2 * LIMIT
    assert push.handle(p.PushTick(), 5.0 + 2 * LIMIT) == [p.Stop("writing took longer than 20 s")]


def test_the_deadline_runs_from_the_end_of_the_prefill() -> None:
    push, _ = drive(p.Commanded(FIRST))
    assert push.next_deadline() is None
    push.handle(p.Commanded(LAST), 5.0)
    assert push.next_deadline() == 5.0 + LIMIT
    assert push.handle(p.PushTick(missing="2 transfers have not ended"), 4.0 + LIMIT) == []
    [stop] = push.handle(p.PushTick(missing="2 transfers have not ended"), 5.0 + LIMIT)
    assert stop == p.Stop("writing took longer than 20 s: 2 transfers have not ended")
