"""Commands to the workers of a prefill instance: each is kept until the worker has asked for the ones after it.

A worker's question is answered when there is something to do, and otherwise after a while with nothing, so that it is
known to be alive. After a broken connection it asks again over another one, and what it had sent over the first may be
read behind that, where nobody hears an answer any more: so its latest questions are all answered. An answer holds the
oldest commands up to a limit in bytes; the worker's next question brings those after them. Of a push that is cancelled
nothing is kept that was not handed out: for a worker that does not ask it would gather for ever. No clock or socket in
here; a `ticket` is a client's identity and sequence number, and never looked into. `hand_out` and `tick` return the
answers that have become due.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.blocks import unsendable
from vllm_pd_connector.protocol.wire.fields import MAX_REPLY_FRAME
from vllm_pd_connector.protocol.wire.messages import Reply, body_size
from vllm_pd_connector.protocol.wire.push_messages import (
    AwaitCommands,
    BeginCommand,
    CancelCommand,
    Command,
    Commands,
    WriteCommand,
)

if TYPE_CHECKING:
    from collections.abc import Collection

Ticket = tuple[bytes, int]
Waits = TypeVar("Waits")

IDLE_ANSWER_S = 30.0
MAX_TICKETS = 4
"""So many of the latest questions of one worker, or for one registration, wait for an answer."""
MAX_COMMANDS_BYTES = MAX_REPLY_FRAME // 2  # of one answer's commands, and so of each command


class _Numbered(msgspec.Struct, frozen=True):
    number: int
    command: Command
    size: int


class CommandQueue:
    """The commands of one instance with `workers` workers; every command that is added is for all of them."""

    def __init__(self, workers: int) -> None:
        self._commands: list[list[_Numbered]] = [[] for _ in range(workers)]
        self._given = [0] * workers  # the number of the last command that was handed out to each
        self._number = 0
        self._awaiting: dict[int, dict[Ticket, tuple[int, float]]] = {}

    def add(self, *commands: Command) -> None:
        """New commands, in their order; `hand_out` answers with them.

        Raises:
            ProtocolError: one is too large to be handed out, or to be decoded; none is then.
        """
        added = []
        for number, command in enumerate(commands, self._number + 1):
            if (size := body_size(command)) > MAX_COMMANDS_BYTES:
                raise ProtocolError(
                    f"an order of {size} bytes, the limit is {MAX_COMMANDS_BYTES}: it has too many blocks"
                )
            if isinstance(command, WriteCommand) and (reason := unsendable(command.source)):
                raise ProtocolError(reason)
            added.append(_Numbered(number, command, size))
        self._number += len(added)
        for queue in self._commands:
            queue += added

    def cancel(self, attempt: bytes, reason: str, workers: Collection[int]) -> set[int]:
        """Have these workers write no more for an attempt. Returns those that may have begun: they are told. The others
        never hear of it, so for them it has ended."""
        if not workers:
            return set()
        command, begun = CancelCommand(attempt, reason), set()
        self._number += 1
        numbered = _Numbered(self._number, command, body_size(command))
        for worker in workers:
            queue, given = self._commands[worker], self._given[worker]
            dropped = [one for one in queue if one.number > given and _attempt_of(one.command) == attempt]
            numbers = {one.number for one in dropped}
            self._commands[worker] = [one for one in queue if one.number not in numbers]
            if not any(isinstance(one.command, BeginCommand) for one in dropped):
                self._commands[worker].append(numbered)
                begun.add(worker)
        return begun

    def hand_out(self) -> list[tuple[Ticket, Reply]]:
        """The answers to all workers that wait and have commands."""
        if not self._awaiting:
            return []
        return [answer for worker in sorted(self._awaiting) for answer in self._hand_out_to(worker)]

    def await_commands(self, message: AwaitCommands, ticket: Ticket, now: float) -> None:
        """A worker is ready for commands after number `seen`."""
        worker = message.worker
        self._commands[worker] = [numbered for numbered in self._commands[worker] if numbered.number > message.seen]
        among_latest(self._awaiting.setdefault(worker, {}), ticket, (message.seen, now + IDLE_ANSWER_S))

    def tick(self, now: float) -> list[tuple[Ticket, Reply]]:
        """Tell who has waited long enough that there is nothing."""
        late: list[tuple[Ticket, Reply]] = []
        for worker, waiting in list(self._awaiting.items()):
            late += [(ticket, Commands(seen, ())) for ticket, (seen, due) in waiting.items() if due <= now]
            left = {ticket: (seen, due) for ticket, (seen, due) in waiting.items() if due > now}
            if left:
                self._awaiting[worker] = left
            else:
                del self._awaiting[worker]
        return late

    def moments(self) -> list[float]:
        """When a `tick` is due for each worker that waits."""
        return [due for waiting in self._awaiting.values() for _, due in waiting.values()]

    def _hand_out_to(self, worker: int) -> list[tuple[Ticket, Reply]]:
        commands = self._commands[worker]
        if not commands:
            return []
        given, size = 0, 0
        while given < len(commands) and size + commands[given].size <= MAX_COMMANDS_BYTES:
            size += commands[given].size
            given += 1
        answer = Commands(commands[given - 1].number, tuple(numbered.command for numbered in commands[:given]))
        self._given[worker] = max(self._given[worker], answer.last)
        return [(ticket, answer) for ticket in self._awaiting.pop(worker)]


def _attempt_of(command: Command) -> bytes:
    return command.into.attempt if isinstance(command, BeginCommand) else command.attempt


def among_latest(waiting: dict[Ticket, Waits], ticket: Ticket, waits: Waits) -> None:
    """Have a question wait among the latest ones; the oldest does no longer, where they are too many."""
    waiting.pop(ticket, None)
    waiting[ticket] = waits
    if len(waiting) > MAX_TICKETS:
        del waiting[next(iter(waiting))]
