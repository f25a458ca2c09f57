"""Pushes that failed and of whose writes nobody says that they have ended, as of a decode host that fell silent."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.support.push.table_world import DIGEST, PATIENCE, STOP, TABLES, WORKERS, World, into
from vllm_pd_connector.protocol.push import draining, registrations
from vllm_pd_connector.protocol.push.table import ANSWER_S, PushTable
from vllm_pd_connector.protocol.wire import push_messages as pm


def attempt_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def lose(table: PushTable, number: int, now: float) -> pm.Pushed:
    """A push is ordered and its decode side is lost: the workers say that it failed and may go on, and then nothing.
    Returns what the decode side was told."""
    request_id = f"p-{number}"
    assert table.started(request_id, f"n-{number}", STOP, DIGEST, now)
    message = structs.replace(into(attempt=attempt_of(number)), prefill=pm.PrefillRef(f"n-{number}", None))
    table.register(message, (b"d", number), now)
    table.finished(request_id, b"n" * 16, TABLES, 1)
    table.tick(now)
    for worker in range(WORKERS):
        table.await_commands(pm.AwaitCommands(b"t" * 16, worker, 0), (b"w", worker), now)
    assert {ticket for ticket, _ in table.replies.take()} >= {(b"w", worker) for worker in range(WORKERS)}
    for worker in range(WORKERS):
        table.ended(pm.PushEnded(b"t" * 16, worker, attempt_of(number), False, "it fell silent", False))
    table.close(request_id, "it failed", now)
    for worker in range(WORKERS):
        table.await_commands(pm.AwaitCommands(b"t" * 16, worker, 1 << 30), (b"w", worker), now)
    return dict(table.replies.take())[(b"d", number)]  # type: ignore[return-value]


def asked(table: PushTable, number: int, now: float) -> list[pm.Pushed]:
    """What a decode side is told that gives one up and waits."""
    table.withdraw(pm.WithdrawPush(pm.PrefillRef(f"n-{number}", None), attempt_of(number)), (b"d", number), now)
    table.tick(now + ANSWER_S)
    return [answer for ticket, answer in table.replies.take() if ticket == (b"d", number)]  # type: ignore[misc]


def test_pushes_that_are_lost_take_no_room_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrations, "MAX_WAITING", 8)
    monkeypatch.setattr(registrations, "MAX_WAITING_BYTES", 8 * len(TABLES[0].packed))
    table, now = PushTable(WORKERS, PATIENCE), 0.0
    for number in range(40):
        told = lose(table, number, now := now + 60.0)
        assert (told.state, told.terminal, told.reason) == (pm.PushState.FAILED, False, "it fell silent"), number
    assert not table._registrations and len(table._draining) == 40
    assert (table.next_deadline() or 1e9) >= now + PATIENCE, "the table is looked at for what nobody asks for"
    for hours in range(3):
        assert [answer.terminal for answer in asked(table, 0, now + hours * 3600.0)] == [False], "it may go on"


def test_what_drains_is_over_when_the_last_worker_says_so() -> None:
    table = PushTable(WORKERS, PATIENCE)
    lose(table, 0, 0.0)
    assert [answer.terminal for answer in asked(table, 0, 1.0)] == [False]
    for ticket in ((b"d", 9), (b"e", 1)):  # whoever asks: of two connections nobody knows on which it is heard
        table.withdraw(pm.WithdrawPush(pm.PrefillRef("n-0", None), attempt_of(0)), ticket, 10.0)
    for worker in range(WORKERS):
        assert not table.replies.take()
        moved = pm.Moved(8, 1, 1)
        for _ in range(2):  # the second is a copy
            table.ended(pm.PushEnded(b"t" * 16, worker, attempt_of(0), False, "later", True, moved=moved))
    replies = table.replies.take()
    expected = pm.Pushed(pm.PushState.FAILED, "it fell silent", True, moved=pm.Moved(16, 2, 2), request_id="p-0")
    assert replies == [((b"d", 9), expected), ((b"e", 1), expected)]
    table.register(into(attempt=attempt_of(0)), (b"d", 10), 11.0)
    assert table.replies.take() == [((b"d", 10), expected)] and not len(table._draining)
    table.tick(100.0)
    assert not [ticket for ticket, _ in table.replies.take() if ticket[0] == b"d"], "somebody is answered twice"


def test_of_too_many_the_oldest_is_forgotten_that_nobody_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "REMEMBER_DRAINING", 4)
    table = PushTable(WORKERS, PATIENCE)
    for number in range(4):
        lose(table, number, 0.0)
    assert [answer.terminal for answer in asked(table, 0, 1.0)] == [False]
    table.withdraw(pm.WithdrawPush(pm.PrefillRef("n-1", None), attempt_of(1)), (b"d", 1), 2.0)
    for number in (4, 5):
        lose(table, number, 3.0)
    known = [number for number in range(6) if table._draining.get(attempt_of(number)) is not None]
    assert known == [0, 1, 4, 5]
    for number in range(6, 10):
        lose(table, number, 4.0)
    table.tick(2.0 + ANSWER_S)
    assert not [ticket for ticket, _ in table.replies.take() if ticket[0] == b"d"], (
        "there is no answer to what was forgotten, and no defect either"
    )


def test_a_registration_that_drains_is_refused_and_not_taken_anew() -> None:
    world = World(quick=False)
    for event in ("start", "register 0", "finish", "close"):
        world.do(event)
    told = len(world.answers[into(0).attempt])
    world.do("register 0")
    assert [(a.state, a.terminal) for a in world.answers[into(0).attempt][told:]] == [(pm.PushState.FAILED, False)]
    assert not world.table._registrations
