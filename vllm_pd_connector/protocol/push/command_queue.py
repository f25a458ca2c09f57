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

from collections import OrderedDict
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


class _Queue:
    """One worker's commands, by their rising numbers. A call takes the time of what it adds, drops or hands out: there
    may be thousands of pushes, which may fail at once."""

    def __init__(self) -> None:
        self.commands: OrderedDict[int, _Numbered] = OrderedDict()
        self._kept: dict[bytes, set[int]] = {}  # those that were not handed out, by their attempt

    def add(self, added: _Numbered) -> None:
        self.commands[added.number] = added
        self._kept.setdefault(_attempt_of(added.command), set()).add(added.number)

    def hand_out(self) -> Commands | None:
        """The oldest, as many as fit into one answer; None if there are none."""
        given, size = [], 0
        for one in self.commands.values():
            if (size := size + one.size) > MAX_COMMANDS_BYTES:
                break
            given.append(one)
            self._is_out(one)
        return Commands(given[-1].number, tuple(one.command for one in given)) if given else None

    def seen(self, last: int) -> None:
        """The worker has had them up to this number."""
        while self.commands and (number := next(iter(self.commands))) <= last:
            self._is_out(self.commands.pop(number))

    def drop(self, attempt: bytes) -> bool:
        """Keep nothing of an attempt that was not handed out. Whether its beginning was."""
        dropped = [self.commands.pop(number) for number in self._kept.pop(attempt, ())]
        return not any(isinstance(one.command, BeginCommand) for one in dropped)

    def _is_out(self, one: _Numbered) -> None:
        attempt = _attempt_of(one.command)
        if kept := self._kept.get(attempt):
            kept.discard(one.number)
            if not kept:
                del self._kept[attempt]


class CommandQueue:
    """The commands of one instance with `workers` workers; every command that is added is for all of them."""

    def __init__(self, workers: int) -> None:
        self._queues = [_Queue() for _ in range(workers)]
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
        for queue in self._queues:
            for one in added:
                queue.add(one)

    def cancel(self, attempt: bytes, reason: str, workers: Collection[int]) -> set[int]:
        """Have these workers write no more for an attempt. Returns those that may have begun: they are told. The others
        never hear of it, so for them it has ended."""
        if not workers:
            return set()
        command, begun = CancelCommand(attempt, reason), set()
        self._number += 1
        numbered = _Numbered(self._number, command, body_size(command))
        for worker in workers:
            if self._queues[worker].drop(attempt):
                self._queues[worker].add(numbered)
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
        self._queues[worker].seen(message.seen)
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
        answer = self._queues[worker].hand_out()
        return [] if answer is None else [(ticket, answer) for ticket in self._awaiting.pop(worker)]


def _attempt_of(command: Command) -> bytes:
    return command.into.attempt if isinstance(command, BeginCommand) else command.attempt


def among_latest(waiting: dict[Ticket, Waits], ticket: Ticket, waits: Waits) -> None:
    """Have a question wait among the latest ones; the oldest does no longer, where they are too many."""
    waiting.pop(ticket, None)
    waiting[ticket] = waits
    if len(waiting) > MAX_TICKETS:
        del waiting[next(iter(waiting))]
