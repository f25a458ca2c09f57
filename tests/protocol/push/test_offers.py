"""What of a running prefill is written at once for who asks in the midst of a step."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.push.table_world import DIGEST, NAME, NONCE, PATIENCE, REQUEST, STOP, TABLES, into
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.protocol.push.command_queue import IDLE_ANSWER_S
from vllm_pd_connector.protocol.push.registrations import Prefill, PushRegistration
from vllm_pd_connector.protocol.push.table import PushTable
from vllm_pd_connector.protocol.wire import push_messages as pm
from vllm_pd_connector.protocol.wire.push_messages import PushState


def ordered(table: PushTable) -> list[tuple[int, int]]:
    """(`ready`, `step`) of the orders to write that a worker gets."""
    table.tick(0.0)
    table.await_commands(pm.AwaitCommands(b"t" * 16, 0, 0), (b"w", 0), 0.0)
    [commands] = [reply for ticket, reply in table.replies.take() if ticket == (b"w", 0)]
    assert isinstance(commands, pm.Commands)
    return [(one.ready, one.step) for one in commands.orders if isinstance(one, pm.WriteCommand)]


def test_who_asks_in_the_midst_of_a_step_is_written_at_once_what_came_before_it() -> None:
    table = PushTable(1, PATIENCE)
    table.started(REQUEST, NAME, STOP, DIGEST, 0.0)
    for ready, step in ((8, 1), (16, 2), (24, 3)):
        table.progressed(REQUEST, TABLES, ready, step)
    table.register(into(readers=1), (b"client", 1), 0.0)
    assert ordered(table) == [(16, 2), (24, 3)]


def test_what_was_taken_back_is_not_written_and_neither_is_an_older_part_of_a_prefill_that_has_finished() -> None:
    table = PushTable(1, PATIENCE)
    table.started(REQUEST, NAME, STOP, DIGEST, 0.0)
    table.progressed(REQUEST, TABLES, 8, 1)
    [prefill] = table.running([REQUEST])
    assert prefill.take_back()
    table.progressed(REQUEST, TABLES, 16, 2)
    table.register(into(readers=2), (b"client", 1), 0.0)
    assert ordered(table) == [(16, 2)]
    table.finished(REQUEST, NONCE, TABLES, 3)
    table.register(into(1, readers=2), (b"client", 2), 0.0)
    assert ordered(table) == [(16, 2), (STOP, 3), (STOP, 3)]


def test_who_is_behind_by_several_steps_is_written_at_once_what_came_before_the_running_one() -> None:
    """The thread that orders is not the engine's, and may stand still while that steps."""
    table = PushTable(1, PATIENCE)
    table.started(REQUEST, NAME, STOP, DIGEST, 0.0)
    table.register(into(readers=1), (b"client", 1), 0.0)
    for ready, step in ((8, 1), (16, 2)):
        table.progressed(REQUEST, TABLES, ready, step)
    assert ordered(table) == [(8, 1), (16, 2)]
    for ready, step in ((24, 3), (32, 4), (40, 5)):
        table.progressed(REQUEST, TABLES, ready, step)
    assert ordered(table) == [(8, 1), (16, 2), (32, 4), (40, 5)]


def test_what_a_step_completes_is_ordered_by_the_thread_that_looks_after_it_and_in_one_answer() -> None:
    table = PushTable(1, PATIENCE)
    for number in range(3):
        table.started(f"p-{number}", f"t-{number}", STOP, DIGEST, 0.0)
        want = msgspec.structs.replace(into(number, readers=3), prefill=pm.PrefillRef(f"t-{number}", None))
        table.register(want, (b"client", number), 0.0)
    table.await_commands(pm.AwaitCommands(b"t" * 16, 0, 0), (b"w", 0), 0.0)
    assert all(table.progressed(f"p-{number}", TABLES, 16, 1) for number in range(3))
    assert not table.progressed("p-9", TABLES, 16, 1), "nobody knows it"
    assert not table.replies
    table.tick(0.0)
    [(ticket, answer)] = table.replies.take()
    assert ticket == (b"w", 0) and isinstance(answer, pm.Commands) and len(answer.orders) == 6


def test_a_question_that_is_due_is_answered_with_what_is_ordered_in_that_moment() -> None:
    table = PushTable(1, PATIENCE)
    table.started(REQUEST, NAME, STOP, DIGEST, 0.0)
    table.register(into(readers=1), (b"client", 1), 0.0)
    table.await_commands(pm.AwaitCommands(b"t" * 16, 0, 0), (b"w", 0), 0.0)
    table.progressed(REQUEST, TABLES, 16, 1)
    table.tick(IDLE_ANSWER_S)
    [answer] = [reply for ticket, reply in table.replies.take() if ticket == (b"w", 0)]
    assert isinstance(answer, pm.Commands) and len(answer.orders) == 2


def test_a_defect_that_one_order_meets_keeps_no_other_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill that has finished is ordered no second time."""
    table = PushTable(1, PATIENCE)
    for number in range(2):
        table.started(f"p-{number}", f"t-{number}", STOP, DIGEST, 0.0)
        want = msgspec.structs.replace(into(number, readers=2), prefill=pm.PrefillRef(f"t-{number}", None))
        table.register(want, (b"client", number), 0.0)
        table.finished(f"p-{number}", NONCE, TABLES, 1)
    add = table._commands.add

    def first_fails(*orders: pm.Command) -> None:
        monkeypatch.setattr(table._commands, "add", add)
        raise ValueError("a defect")

    monkeypatch.setattr(table._commands, "add", first_fails)
    table.tick(0.0)
    [(ticket, answer)] = table.replies.take()
    assert ticket == (b"client", 0) and isinstance(answer, pm.Pushed) and "unexpected ValueError" in answer.reason
    assert ordered(table) == [(STOP, 1)]


@pytest.mark.parametrize("closed", [False, True], ids=["it runs on", "it has ended"])
def test_a_rank_that_begins_when_the_prefill_has_failed_another_is_told_so(closed: bool) -> None:
    """Stages of a pipeline learn of a request one after the other. It would wait for the next prefill of that name, and
    take the place of a rank that wants that."""
    table = PushTable(1, 30.0)
    assert table.started(REQUEST, NAME, STOP, DIGEST, 0.0)
    table.register(into(0, reading=b"a" * 16), (b"d", 0), 1.0)
    table.progressed(REQUEST, TABLES, 16, 1)
    table.tick(1.0)
    table.fail(REQUEST, "a defect")
    table.ended(pm.PushEnded(b"t" * 16, 0, into(0).attempt, False, "a defect", True))
    if closed:
        table.close(REQUEST, "it was aborted", 1.5)
    table.replies.take()
    table.register(into(1, reading=b"a" * 16), (b"d", 1), 2.0)
    [(ticket, answer)] = table.replies.take()
    assert ticket == (b"d", 1) and answer.state is pm.PushState.FAILED and "a defect" in answer.reason
    table.register(into(1, reading=b"b" * 16, attempt=b"z" * 16), (b"e", 1), 2.0)
    assert not table.replies.take(), "another request's waits for the next prefill of that name"
    if not closed:
        table.close(REQUEST, "it was aborted", 2.5)
    assert table.started("p-2", NAME, STOP, DIGEST, 3.0)
    table.progressed("p-2", TABLES, 16, 2)
    table.tick(3.0)
    table.await_commands(pm.AwaitCommands(b"t" * 16, 0, 0), (b"w", 0), 3.0)
    orders = [order for _, reply in table.replies.take() if isinstance(reply, pm.Commands) for order in reply.orders]
    assert [o.into.attempt for o in orders if isinstance(o, pm.BeginCommand)] == [b"z" * 16]


@pytest.mark.parametrize(
    ("offered", "at_the_end", "compared"),
    [
        (BlockTable.of(1, [4, 5, 6]), BlockTable.of(2, [5, 6]), True),
        (BlockTable.of(0, [4, 5, 6]), BlockTable.of(0, [4, 5]), True),
        (BlockTable.of(0, [4, 5]), BlockTable.of(0, [4, 5, 6]), True),
        (BlockTable.of(1, [4, 5, 6]), BlockTable.of(2, [7, 8]), False),
    ],
    ids=["a window goes on", "a drafter's block beyond the prompt", "it grows", "preempted"],
)
def test_what_was_written_early_is_compared_unless_its_blocks_are_others_now(
    offered: BlockTable, at_the_end: BlockTable, compared: bool
) -> None:
    """Before, nothing of the first two was compared, and nothing said so."""
    registration = PushRegistration(into(readers=1, compare_s=30.0), state=PushState.DONE)
    registration.prefill = Prefill(REQUEST, NAME, STOP, DIGEST, 0.0, NONCE)
    registration.write_from((offered,))
    registration.write_from((at_the_end,))
    assert (registration.compared_with() is not None) is compared
