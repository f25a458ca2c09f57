"""Pushes on the prefill side: every order of what can happen, with workers that are quick or slow."""

from __future__ import annotations

from itertools import chain, permutations, product

import pytest

from tests.support.push.table_world import DIGEST, NAME, NONCE, PATIENCE, REQUEST, STOP, TABLES, WORKERS, World, into
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.protocol.push import registrations
from vllm_pd_connector.protocol.push.command_queue import IDLE_ANSWER_S
from vllm_pd_connector.protocol.push.table import ANSWER_S, PushTable
from vllm_pd_connector.protocol.wire import push_messages as pm
from vllm_pd_connector.protocol.wire.fields import LeaseRef

NORMAL = ("register 0", "register 1", "start", "progress", "finish")
FAILURES = ("close", "withdraw", "drop")


@pytest.mark.parametrize("late", [False, True], ids=["a quick thread", "a late thread"])
@pytest.mark.parametrize("quick", [True, False], ids=["quick workers", "slow workers"])
def test_every_order_of_events_ends_with_every_answer_given_and_every_block_free(quick: bool, late: bool) -> None:
    """Both sides of this, in which a prefill can end in more ways, are in `tooling/test_push_world.py`."""
    results = set()
    # Slow workers end their writes after everything else: what fails then hides what else would.
    failures = [FAILURES] if quick else [(), *((failure,) for failure in FAILURES)]
    for command in chain.from_iterable(permutations(NORMAL + some) for some in failures):
        world = World(quick, late)
        table = world.table  # an event without effect where it stands is left out, so shorter histories are here, too
        for event in command:
            world.do(event)
        world.work()
        table.tick(world.now + PATIENCE)
        world.settle()
        world.close()
        world.settle()
        world.work()
        assert not table._registrations and not table._draining and not table._rendezvous, command
        for reader in (0, 1):
            world.do(f"register {reader}")  # who had no answer but how far it was asks again
            last = world.answers[into(reader).attempt][-1]
            assert last.terminal, command
            results.add(last.state)
    assert results == {pm.PushState.DONE, pm.PushState.FAILED}


def test_without_failures_every_order_is_served() -> None:
    for command, quick in product(permutations(NORMAL), (True, False)):
        if command.index("start") > command.index("finish"):
            continue
        world = World(quick)
        for event in command:
            world.do(event)
        world.work()
        done = pm.Pushed(pm.PushState.DONE, "", True, request_id=REQUEST)
        assert [world.answers[into(r).attempt][-1] for r in (0, 1)] == [done] * 2, command
        served = sorted(world.table.served.take(), key=lambda report: report.reader)
        assert [(report.reader, report.taken.engine_id) for report in served] == [
            (r, into(r).home.engine_id) for r in (0, 1)
        ]
        world.close()
        world.settle()
        assert world.freed == 1 and not world.asked


def test_an_answer_is_repeated_for_a_message_that_is_repeated() -> None:
    world = World()
    for event in ("start", "finish", "register 0", "register 1", "register 0"):
        world.do(event)
    assert [answer.state for answer in world.answers[into(0).attempt]] == [pm.PushState.DONE] * 2


def test_who_waits_hears_from_time_to_time_how_far_it_is() -> None:
    world = World(quick=False)
    states = []
    for event in ("register 0", "start", "progress", "finish"):
        world.do(event)
        world.now += ANSWER_S
        world.settle()
        states.append(world.answers[into(0).attempt][-1].state)
        world.do("register 0")
    assert states == ["expected", "computing", "computing", "writing"]


def test_a_prefill_that_does_not_come_fails_who_waits_for_it() -> None:
    world = World()
    world.do("register 0")
    assert world.table.next_deadline() == ANSWER_S
    world.now = PATIENCE
    world.settle()
    assert world.answers[into(0).attempt][-1].state is pm.PushState.FAILED
    assert "no prefill request named cmpl-1 came within 30 s" in world.answers[into(0).attempt][-1].reason


STEP_S = 60.0


def test_a_prefill_whose_engine_hangs_fails_who_waits_for_it() -> None:
    world = World(quick=False, table=PushTable(WORKERS, PATIENCE, STEP_S))
    for event in ("start", "register 0", "progress"):
        world.do(event)
    answers = world.answers.setdefault(into(0).attempt, [])
    for moment in range(10, 110, 10):
        world.now = float(moment)
        if moment <= 40:
            world.table.stepped(world.now)
        world.settle()
        world.do("register 0")
    assert [answer.state for answer in answers[:10]] == [pm.PushState.COMPUTING] * 10
    world.now = 110.0
    world.settle()
    assert answers[-1].state is pm.PushState.FAILED and "no engine step for 60 s" in answers[-1].reason
    assert not answers[-1].terminal, "its workers may write when they go on"
    for worker in range(WORKERS):
        world.report(worker, into(0).attempt, ok=False, terminal=True)
    world.do("register 0")
    assert answers[-1].terminal


def test_a_prefill_that_comes_after_a_pause_of_the_engine_has_its_time() -> None:
    world = World(quick=False, table=PushTable(WORKERS, PATIENCE, STEP_S))
    world.table.stepped(0.0)
    world.now = 10 * STEP_S
    for event in ("start", "register 0"):
        world.do(event)
    world.now += STEP_S
    world.settle()
    assert world.answers[into(0).attempt][-1].state is pm.PushState.COMPUTING


def test_a_prefill_that_was_aborted_before_anybody_asked_is_remembered() -> None:
    world = World()
    for event in ("start", "close"):
        world.do(event)
    message = into(0, waited_s=1.0)
    world.table.register(message, world.ticket(message.attempt), world.now)
    world.settle()
    assert world.answers[message.attempt] == [pm.Pushed(pm.PushState.FAILED, f"prefill {NAME}: aborted", True)]
    world.now = PATIENCE
    world.settle()
    assert world.table.next_deadline() == pytest.approx(PATIENCE + IDLE_ANSWER_S), "only the workers wait"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stop": STOP - 1}, "39 tokens"),
        ({"prompt_digest": "f" * 16}, "digest f"),
        ({"reader": 2}, "reader 2 of 2"),
        ({"readers": 3}, "contradicts"),
        ({"attempt": b"z" * 16}, "registered already"),
    ],
)
def test_a_registration_that_contradicts_the_prefill_is_refused_and_harms_nobody(changes, reason) -> None:
    world = World(quick=False)
    for event in ("start", "register 0", "finish"):
        world.do(event)
    message = into(**{"reader": 0, "attempt": b"y" * 16} | changes)
    world.table.register(message, world.ticket(message.attempt), world.now)
    world.settle()
    [answer] = world.answers[message.attempt]
    assert answer.state is pm.PushState.FAILED and answer.terminal and reason in answer.reason
    world.do("register 1")
    world.work()
    assert {world.answers[into(r).attempt][-1].state for r in (0, 1)} == {pm.PushState.DONE}


def test_a_prefill_that_nobody_needs_is_told_to_its_scheduler() -> None:
    table = PushTable(WORKERS, PATIENCE)
    table.decline(pm.DeclinePush(pm.PrefillRef(NAME, None)), 0.0)
    assert table.started(REQUEST, NAME, STOP, DIGEST, 1.0)
    assert not table.finished(REQUEST, NONCE, TABLES, 1)
    table.close(REQUEST, "not needed", 1.0)
    assert table.freed.take() == [REQUEST]
    assert table.started(REQUEST, NAME, STOP, DIGEST, 2.0), "the word is used up"
    assert table.finished(REQUEST, NONCE, TABLES, 2)
    table.decline(pm.DeclinePush(pm.PrefillRef(REQUEST, NONCE)), 3.0)
    assert table.unneeded.take() == [REQUEST]


def test_the_lease_of_a_finished_prefill_is_known_by_both_its_names() -> None:
    table = PushTable(WORKERS, PATIENCE)
    named, by_id = pm.PrefillRef(NAME, None), pm.PrefillRef(REQUEST, NONCE)
    assert table.keep(named) is None
    assert table.started(REQUEST, NAME, STOP, DIGEST, 0.0)
    assert table.keep(named) is None, "it has none before it has finished"
    assert table.finished(REQUEST, NONCE, TABLES, 1)
    assert table.keep(named) == table.keep(by_id) == LeaseRef(REQUEST, NONCE)
    table.close(REQUEST, "the lease expired", 1.0)
    assert table.keep(named) is None


def test_a_prefill_that_somebody_asks_for_is_not_declined_by_another() -> None:
    world = World(quick=False)
    for event in ("start", "register 0", "finish"):
        world.do(event)
    world.table.decline(pm.DeclinePush(pm.PrefillRef(NAME, None)), 0.0)
    stranger = pm.WithdrawPush(pm.PrefillRef(NAME, None), b"s" * 16)
    world.table.withdraw(stranger, world.ticket(stranger.attempt), world.now)
    world.do("register 1")
    world.work()
    assert {world.answers[into(r).attempt][-1].state for r in (0, 1)} == {pm.PushState.DONE}


def test_a_router_s_second_attempt_is_served_although_the_first_gave_up_before_the_prefill_came() -> None:
    world = World()
    world.do("register 0")
    world.do("withdraw")
    second = into(0, attempt=b"2" * 16, readers=1)
    world.table.register(second, world.ticket(second.attempt), world.now)
    for event in ("start", "finish"):
        world.do(event)
    assert world.answers[second.attempt][-1].state is pm.PushState.DONE


def again(world: World, request_id: str, now: float) -> None:
    """The prefill of a router's next attempt comes and finishes."""
    assert world.table.started(request_id, NAME, STOP, DIGEST, now)
    assert world.table.finished(request_id, b"2" * 16, TABLES, 2), "its lease is given up"
    world.finished = True
    world.settle()


@pytest.mark.parametrize("end", ["aborted", "the lease read"])
@pytest.mark.parametrize("first", ["decode", "prefill"])
def test_a_name_is_used_again_at_once_in_either_order(end: str, first: str) -> None:
    """The decode leg of the next attempt is not told why the last one's prefill ended."""
    world = World(quick=False)
    assert world.table.started(REQUEST, NAME, STOP, DIGEST, 0.0)
    world.table.close(REQUEST, end, 5.0)
    assert world.table.freed.take() == [REQUEST]
    world.now = 6.0
    second = into(0, readers=1, attempt=b"2" * 16, waited_s=0.5)
    if first == "prefill":
        again(world, "cmpl-1-second", 6.0)
    world.table.register(second, world.ticket(second.attempt), world.now)
    world.settle()
    if first == "decode":
        again(world, "cmpl-1-second", 6.5)
    world.work()
    assert world.answers[second.attempt][-1].state is pm.PushState.DONE


def test_a_late_leg_of_an_attempt_that_has_ended_is_told_so_and_one_that_waits_in_vain_why_it_may_be() -> None:
    world = World(quick=False)
    assert world.table.started(REQUEST, NAME, STOP, DIGEST, 0.0)
    world.table.close(REQUEST, "aborted", 5.0)
    assert world.table.freed.take() == [REQUEST]
    world.now = 6.0
    for message in (into(0, waited_s=3.0), into(1, waited_s=0.5)):
        world.table.register(message, world.ticket(message.attempt), world.now)
    world.settle()
    assert [answer.reason for answer in world.answers[into(0).attempt]] == [f"prefill {NAME}: aborted"]
    assert into(1).attempt not in world.answers
    world.now = 6.0 + PATIENCE
    world.settle()
    world.table.register(into(1), world.ticket(into(1).attempt), world.now)
    world.settle()
    assert "no prefill request named" in world.answers[into(1).attempt][-1].reason


@pytest.mark.parametrize(("waited_s", "declined"), [(4.0, False), (0.5, True)])
def test_what_a_request_declines_is_the_prefill_of_its_own_attempt(waited_s: float, declined: bool) -> None:
    """An aborted request's word may come when its prefill has ended, and before the next attempt's comes or after."""
    for late in (False, True):
        table = PushTable(WORKERS, PATIENCE)
        assert table.started(REQUEST, NAME, STOP, DIGEST, 0.0)
        table.close(REQUEST, "aborted", 3.0)
        word = pm.DeclinePush(pm.PrefillRef(NAME, None), waited_s)
        if late:
            assert table.started("cmpl-1-second", NAME, STOP, DIGEST, 4.0)
        table.decline(word, 4.0)
        if not late:
            assert table.started("cmpl-1-second", NAME, STOP, DIGEST, 4.0)
        assert table.finished("cmpl-1-second", b"2" * 16, TABLES, 2) is not declined


def test_who_will_ask_takes_back_what_another_declined() -> None:
    for late in (False, True):
        table = PushTable(WORKERS, PATIENCE)
        table.decline(pm.DeclinePush(pm.PrefillRef(NAME, None)), 0.0)
        if late:
            assert table.started(REQUEST, NAME, STOP, DIGEST, 1.0)
        assert table.keep(pm.PrefillRef(NAME, None)) is None
        if not late:
            assert table.started(REQUEST, NAME, STOP, DIGEST, 1.0)
        assert table.finished(REQUEST, NONCE, TABLES, 1)


def test_a_failed_prefill_that_is_still_written_from_does_not_stand_for_the_next_attempt() -> None:
    world = World(quick=False)
    for event in ("start", "register 0", "finish"):
        world.do(event)
    world.now = 5.0
    first = pm.WithdrawPush(pm.PrefillRef(NAME, None), into(0).attempt)
    world.table.withdraw(first, world.ticket(first.attempt), world.now)
    world.settle()
    assert any(world.owed.values())
    second = into(0, readers=1, attempt=b"2" * 16)
    world.now = 6.0
    world.table.register(second, world.ticket(second.attempt), world.now)
    world.settle()
    assert second.attempt not in world.answers
    again(world, "cmpl-1-second", 6.0)
    world.work()
    assert world.answers[second.attempt][-1].state is pm.PushState.DONE


def test_a_request_id_that_is_still_written_from_is_taken_again_and_nothing_of_the_old_one_meets_the_new() -> None:
    world = World(quick=False)
    for event in ("start", "register 0", "finish", "close"):
        world.do(event)
    assert any(world.owed.values()) and not world.table.failed.take(), "a lease that is gone is not dropped again"
    assert world.table.started(REQUEST, NAME, STOP, DIGEST, 2.0)
    assert world.table.finished(REQUEST, b"2" * 16, TABLES, 3)
    world.work()
    assert not world.table.freed.take() and not world.table.failed.take() and not world.table.served.take()
    assert world.answers[into(0).attempt][-1].state is pm.PushState.FAILED


COMPARE_S = 60.0


def compared(world: World, *events: str, source: tuple[BlockTable, ...] = TABLES) -> pm.Pushed:
    """The answer to the one reader of a prefill who compares what is written; `source` is that of the end."""
    message = into(readers=1, compare_s=COMPARE_S)
    for event in events:
        if event == "ask":
            world.table.register(message, world.ticket(message.attempt), world.now)
        elif event == "finish":
            world.finished = world.table.finished(REQUEST, NONCE, source, 2)
        else:
            world.do(event)
        world.settle()
        world.work()
    return world.answers[message.attempt][-1]


@pytest.mark.parametrize("events", [("ask", "start", "progress", "finish"), ("start", "finish", "ask")])
def test_a_reader_who_compares_is_given_the_lease_and_not_taken_for_served(events) -> None:
    world = World()
    answer = compared(world, *events)
    assert answer == pm.Pushed(pm.PushState.DONE, "", True, request_id=REQUEST, lease=LeaseRef(REQUEST, NONCE))
    assert world.table.kept.take() == [(LeaseRef(REQUEST, NONCE), COMPARE_S)]
    assert not world.table.served.take() and not world.table.kept.take()


def test_a_part_that_was_written_before_a_preemption_is_not_compared() -> None:
    """It was computed again, with other chunks: equal within rounding only."""
    world = World()
    grown, other = (BlockTable(0, TABLES[0].packed + b"\2\0\0\0"),), (BlockTable(0, b"\3\0\0\0\2\0\0\0"),)
    assert compared(World(), "ask", "start", "progress", "finish", source=grown).lease is not None
    assert compared(world, "ask", "start", "progress", "finish", source=other).lease is None
    assert [report.reader for report in world.table.served.take()] == [0] and not world.table.kept.take()
    assert compared(World(), "start", "progress", "finish", "ask", source=other).lease is not None, "written at the end"


def test_who_gives_up_instead_of_comparing_frees_the_prefill() -> None:
    world = World()
    compared(world, "start", "finish", "ask")
    message = pm.WithdrawPush(into().prefill, into().attempt)
    world.table.withdraw(message, world.ticket(message.attempt), world.now)
    world.settle()
    assert world.answers[message.attempt][-1].terminal
    assert world.table.failed.take() == [REQUEST]


def test_a_group_begins_as_late_as_the_worker_that_wrote_least_of_it() -> None:
    world = World()
    for step in (lambda: world.register(0), world.start, world.finish):
        step()
        world.settle()
    attempt = into().attempt
    for worker, late in enumerate(({1: 20}, {1: 12, 2: 8})):
        world.owed[attempt].discard(worker)
        world.table.ended(pm.PushEnded(b"t" * 16, worker, attempt, True, "", True, late))
    world.settle()
    last = world.answers[attempt][-1]
    assert (last.state, last.late_starts) == (pm.PushState.DONE, {1: 20, 2: 8})


def test_reports_of_what_is_not_known_change_nothing() -> None:
    table = World().table
    table.ended(pm.PushEnded(b"t" * 16, 0, b"q" * 16, True, "", True))
    table.close("unknown", "pulled", 0.0)
    assert table.freed.take() == ["unknown"], "a prefill that is read has no push"


def test_registrations_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches the side channel makes them, for prefills that never come."""
    monkeypatch.setattr(registrations, "MAX_WAITING_BYTES", 10 * len(TABLES[0].packed))
    table = PushTable(WORKERS, PATIENCE)
    for number in range(12):
        table.register(into(attempt=bytes([number]) * 16), (b"client", number), 0.0)
    refused = [(ticket[1], answer.message) for ticket, answer in table.replies.take()]
    assert [number for number, _ in refused] == [10, 11] and all("44 bytes, 40" in reason for _, reason in refused)
    table.tick(PATIENCE)
    table.register(into(attempt=b"x" * 16), (b"client", 13), PATIENCE)
    assert (b"client", 13) not in dict(table.replies.take()), "there is room again"
