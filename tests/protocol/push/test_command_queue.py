"""Orders to workers: in their order, each at least once, and in answers that fit a frame."""

from __future__ import annotations

import pytest

from vllm_pd_connector.geometry.blocks import MAX_TABLE_BYTES, BlockTable
from vllm_pd_connector.protocol.push import command_queue
from vllm_pd_connector.protocol.push.command_queue import IDLE_ANSWER_S, MAX_COMMANDS_BYTES, MAX_TICKETS, CommandQueue
from vllm_pd_connector.protocol.push.table import PushTable
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.protocol.wire import push_messages as pm

HOME = pm.InstanceAddress("decode-0", "ab" * 16, "127.0.0.1", 5600)
DIGEST, STOP = "0" * 16, 131072
LONG = (BlockTable(0, bytes(MAX_TABLE_BYTES)),)
WORKER = (b"w", 0)


def into(reader: int = 0, readers: int = 1, name: str = "t-1") -> pm.PushInto:
    attempt = reader.to_bytes(16, "big")
    return pm.PushInto(pm.PrefillRef(name, None), HOME, 0, 0, reader, reader, readers, attempt, LONG, 0, STOP, DIGEST)


def taken(book: CommandQueue) -> list[list[pm.Command]]:
    """What a worker without any order gets, answer by answer."""
    seen, answers = 0, []
    while True:
        book.await_commands(pm.AwaitCommands(b"t" * 16, 0, seen), WORKER, 0.0)
        if not (replies := book.hand_out()):
            return answers
        [(_, reply)] = replies
        assert isinstance(reply, pm.Commands)
        assert m.decode_reply(m.encode(1, reply)) == (1, reply)
        seen = reply.last
        answers.append(list(reply.orders))


def ordered(workers: int) -> PushTable:
    """Of so many workers, with one push that they are to begin."""
    table = PushTable(workers, 30.0)
    table.started("p-1", "t-1", STOP, DIGEST, 0.0)
    table.register(into(), (b"d", 0), 0.0)
    table.progressed("p-1", LONG, 16, 1)
    table.tick(0.0)
    return table


def test_orders_that_do_not_fit_one_answer_come_in_several() -> None:
    book = CommandQueue(1)
    added = [pm.WriteCommand(into(reader).attempt, LONG, STOP, 1, final=True) for reader in range(40)]
    for command in added:
        book.add(command)
    assert book.hand_out() == []
    answers = taken(book)
    assert [command for answer in answers for command in answer] == added
    assert 1 < len(answers) < len(added)


def test_an_order_that_no_answer_could_hold_fails_its_prefill_and_stands_in_nobody_s_way() -> None:
    table = PushTable(1, 30.0)
    for request_id, name in (("p-1", "t-1"), ("p-2", "t-2")):
        assert table.started(request_id, name, STOP, DIGEST, 0.0)
    for reader in (0, 1):
        table.register(into(reader, 2), (b"d", reader), 0.0)
    table.register(into(2, 3, "t-2"), (b"d", 2), 0.0)
    table.progressed("p-1", LONG * (MAX_COMMANDS_BYTES // MAX_TABLE_BYTES), 16, 1)
    table.progressed("p-2", LONG, 16, 1)
    table.tick(0.0)
    for reader, (ticket, reply) in enumerate(table.replies.take()):
        assert isinstance(reply, pm.Pushed) and ticket == (b"d", reader)
        assert reply.state is pm.PushState.FAILED and reply.terminal and "too many blocks" in reply.reason
    table.await_commands(pm.AwaitCommands(b"t" * 16, 0, 0), WORKER, 0.0)
    begun = into(2, 3, "t-2")
    write = pm.WriteCommand(begun.attempt, LONG, 16, 1, final=False)
    assert table.replies.take() == [(WORKER, pm.Commands(2, (pm.BeginCommand(begun), write)))]


def test_an_order_that_no_worker_could_decode_fails_its_prefill_and_stands_in_nobody_s_way() -> None:
    """It would be handed out again and again, and nothing behind it ever."""
    table, longer = PushTable(1, 30.0), (BlockTable(0, bytes(MAX_TABLE_BYTES + 4)),)
    for request_id, name in (("p-1", "t-1"), ("p-2", "t-2")):
        assert table.started(request_id, name, STOP, DIGEST, 0.0)
        table.register(into(int(name == "t-2"), 2, name), (b"d", 0), 0.0)
    table.progressed("p-1", longer, 16, 1)
    table.progressed("p-2", LONG, 16, 1)
    table.tick(0.0)
    [(_, refusal)] = table.replies.take()
    assert isinstance(refusal, pm.Pushed) and refusal.state is pm.PushState.FAILED and refusal.terminal
    assert "a table of 131073 blocks, the limit is 131072" in refusal.reason
    table.await_commands(pm.AwaitCommands(b"t" * 16, 0, 0), WORKER, 0.0)
    [(_, reply)] = table.replies.take()
    assert isinstance(reply, pm.Commands) and len(reply.orders) == 2
    assert m.decode_reply(m.encode(1, reply)) == (1, reply)


def test_the_blocks_that_are_written_into_are_told_once() -> None:
    table = PushTable(1, 30.0)
    table.started("p-1", "t-1", STOP, DIGEST, 0.0)
    table.register(into(), (b"d", 0), 0.0)
    for ready in (16, 32, 48):
        assert table.progressed("p-1", (), ready, ready), "it is to be ordered"
        table.tick(0.0)
    table.finished("p-1", b"n" * 16, (), 64)
    table.tick(0.0)
    table.await_commands(pm.AwaitCommands(b"t" * 16, 0, 0), WORKER, 0.0)
    [(_, reply)] = table.replies.take()
    assert isinstance(reply, pm.Commands)
    first, *writes = reply.orders
    assert first == pm.BeginCommand(into())
    assert [write.ready for write in writes] == [16, 32, 48, STOP]
    assert m.body_size(reply) < 1.1 * MAX_TABLE_BYTES


def test_what_a_client_wrote_into_the_reason_of_a_failure_can_be_sent() -> None:
    table = ordered(1)
    table.await_commands(pm.AwaitCommands(b"t" * 16, 0, 0), WORKER, 0.0)
    table.replies.take()
    table.close("p-1", "unknown field `\ud800`", 0.0)
    table.await_commands(pm.AwaitCommands(b"t" * 16, 0, 2), WORKER, 0.0)
    replies = dict(table.replies.take())
    assert {type(reply) for reply in replies.values()} == {pm.Pushed, pm.Commands}
    for reply in replies.values():
        assert m.decode_reply(m.encode(1, reply))[1] == reply


def test_of_a_cancelled_push_nothing_is_kept_that_was_not_handed_out() -> None:
    book, begin = CommandQueue(2), pm.BeginCommand(into())
    attempt, other = begin.into.attempt, pm.WriteCommand(b"o" * 16, LONG, 16, 1, final=False)
    writes = [pm.WriteCommand(attempt, LONG, ready, ready, final=False) for ready in (16, 32)]
    book.add(begin, writes[0])
    book.await_commands(pm.AwaitCommands(b"t" * 16, 0, 0), WORKER, 0.0)
    assert book.hand_out() == [(WORKER, pm.Commands(2, (begin, writes[0])))]
    book.add(writes[1], other)
    assert book.cancel(attempt, "aborted", {0, 1}) == {0}, "the other never hears of it"
    cancel = pm.CancelCommand(attempt, "aborted")
    assert taken(book) == [[begin, writes[0], other, cancel]], "what was handed out may have been lost on its way"
    book.await_commands(pm.AwaitCommands(b"t" * 16, 1, 0), WORKER, 0.0)
    assert book.hand_out() == [(WORKER, pm.Commands(4, (other,)))]
    assert book.cancel(attempt, "again", set()) == set()


def test_for_a_worker_that_does_not_ask_nothing_gathers_of_pushes_that_have_failed() -> None:
    """It may hang for hours, while clients come and give up."""
    table, seen = PushTable(2, 30.0), 0
    for number in range(8):
        request_id, name = f"p-{number}", f"t-{number}"
        table.started(request_id, name, STOP, DIGEST, 0.0)
        message = into(number, 8, name)
        table.register(message, (b"d", number), 0.0)
        table.progressed(request_id, LONG, 16, number)
        table.tick(0.0)
        table.await_commands(pm.AwaitCommands(b"t" * 16, 0, seen), WORKER, 0.0)
        [(_, orders)] = table.replies.take()
        assert isinstance(orders, pm.Commands)
        seen = orders.last
        table.close(request_id, "aborted", 0.0)
        [(ticket, told)] = table.replies.take()
        assert ticket == (b"d", number) and isinstance(told, pm.Pushed) and not told.terminal, "the other may write"
        table.withdraw(pm.WithdrawPush(message.prefill, message.attempt), (b"d", number), 0.0)
        table.ended(pm.PushEnded(b"t" * 16, 0, message.attempt, False, "aborted", True))
        [(ticket, told)] = table.replies.take()
        assert ticket == (b"d", number) and isinstance(told, pm.Pushed) and told.terminal
    queue = table._commands._queues[1]
    assert not queue.commands and not queue._kept


def test_what_is_cancelled_is_found_without_looking_at_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of pushes may fail at once, as when weights change: in the scheduler's thread, under a lock."""
    book, looked = CommandQueue(2), list[pm.Command]()
    attempt_of = command_queue._attempt_of
    monkeypatch.setattr(command_queue, "_attempt_of", lambda one: (looked.append(one), attempt_of(one))[1])
    attempts = [n.to_bytes(16, "big") for n in range(256)]
    for attempt in attempts:
        book.add(pm.WriteCommand(attempt, (), 16, 1, final=False))
    looked.clear()
    for attempt in attempts:
        assert book.cancel(attempt, "aborted", {0, 1}) == {0, 1}
    assert len(looked) <= 4 * len(attempts), "of each worker the order and its cancellation"


def test_a_push_of_which_no_worker_has_heard_is_over_when_it_fails() -> None:
    table = ordered(2)
    table.close("p-1", "aborted", 0.0)
    [(_, told)] = table.replies.take()
    assert isinstance(told, pm.Pushed) and told.state is pm.PushState.FAILED and told.terminal
    table.register(into(), (b"d", 1), 0.0)
    assert table.replies.take() == [((b"d", 1), told)], "a copy that comes late is refused"


def test_a_copy_of_a_question_over_a_connection_that_has_ended_keeps_no_order_from_its_worker() -> None:
    """It is read behind the one over the new connection where the server's thread had stood still."""
    book, old, new = CommandQueue(1), (b"old", 8), (b"new", 8)
    for ticket in (new, old):
        book.await_commands(pm.AwaitCommands(b"t" * 16, 0, 0), ticket, 0.0)
    assert book.hand_out() == []
    order = pm.WriteCommand(into().attempt, LONG, 16, 1, final=False)
    book.add(order)
    assert dict(book.hand_out()) == dict.fromkeys((new, old), pm.Commands(1, (order,)))
    book.add(order)
    assert book.hand_out() == [] and book.moments() == []


def test_of_one_worker_s_questions_the_latest_wait_each_for_its_own_time() -> None:
    book = CommandQueue(1)
    for number in range(MAX_TICKETS + 3):
        book.await_commands(pm.AwaitCommands(b"t" * 16, 0, 0), (b"w", number), float(number))
    assert len(book.moments()) == MAX_TICKETS
    assert book.tick(IDLE_ANSWER_S + 3.5) == [((b"w", 3), pm.Commands(0, ()))]
    assert len(book.moments()) == MAX_TICKETS - 1
    rest = book.tick(IDLE_ANSWER_S + 100.0)
    assert [ticket for ticket, _ in rest] == [(b"w", number) for number in (4, 5, 6)] and not book.moments()


def test_a_copy_of_a_want_over_a_connection_that_has_ended_keeps_no_answer_from_who_wants() -> None:
    table = PushTable(1, 30.0)
    assert table.started("p-1", "t-1", STOP, DIGEST, 0.0)
    for ticket in ((b"new", 3), (b"old", 3)):
        table.register(into(), ticket, 0.0)
    table.close("p-1", "it was aborted", 0.0)
    assert {ticket for ticket, _ in table.replies.take()} == {(b"new", 3), (b"old", 3)}
