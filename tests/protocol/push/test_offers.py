"""What of a running prefill is written at once for who asks in the midst of a step."""

from __future__ import annotations

from tests.support.push.table_world import DIGEST, NAME, NONCE, PATIENCE, REQUEST, STOP, TABLES, into
from vllm_pd_connector.protocol.push.table import PushTable
from vllm_pd_connector.protocol.wire import push_messages as pm


def ordered(table: PushTable) -> list[tuple[int, int]]:
    """(`ready`, `step`) of the orders to write that a worker gets."""
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
