"""Commands to the workers of a prefill instance: each is kept until the worker has asked for the ones after it.

A worker's question is answered when there is something to do, and otherwise after a while with nothing, so that it is
known to be alive. An answer holds the oldest commands up to a limit in bytes; the worker's next question brings those
after them. No clock or socket in here; a `ticket` is a client's identity and sequence number, and never looked into.
Methods return the answers that have become due.
"""

from __future__ import annotations

import msgspec

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.protocol.wire.fields import MAX_REPLY_FRAME
from vllm_pd_connector.protocol.wire.messages import Reply, body_size
from vllm_pd_connector.protocol.wire.push_messages import AwaitCommands, Command, Commands

Ticket = tuple[bytes, int]

IDLE_ANSWER_S = 30.0
MAX_COMMANDS_BYTES = MAX_REPLY_FRAME // 2  # of one answer's commands, and so of each command


class _Numbered(msgspec.Struct, frozen=True):
    number: int
    command: Command
    size: int


class CommandQueue:
    """The commands of one instance with `workers` workers; every command is for all of them."""

    def __init__(self, workers: int) -> None:
        self._commands: list[list[_Numbered]] = [[] for _ in range(workers)]
        self._number = 0
        self._awaiting: dict[int, tuple[Ticket, int, float]] = {}

    def add(self, *commands: Command) -> list[tuple[Ticket, Reply]]:
        """New commands, in their order.

        Raises:
            ProtocolError: one is too large to be handed out; none is then.
        """
        added = []
        for number, command in enumerate(commands, self._number + 1):
            if (size := body_size(command)) > MAX_COMMANDS_BYTES:
                raise ProtocolError(
                    f"an order of {size} bytes, the limit is {MAX_COMMANDS_BYTES}: it has too many blocks"
                )
            added.append(_Numbered(number, command, size))
        self._number += len(added)
        for queue in self._commands:
            queue += added
        if not self._awaiting:
            return []
        return [answer for worker in sorted(self._awaiting) for answer in self._hand_out(worker)]

    def await_commands(self, message: AwaitCommands, ticket: Ticket, now: float) -> list[tuple[Ticket, Reply]]:
        """A worker is ready for commands after number `seen`."""
        worker = message.worker
        self._commands[worker] = [numbered for numbered in self._commands[worker] if numbered.number > message.seen]
        self._awaiting[worker] = (ticket, message.seen, now + IDLE_ANSWER_S)
        return self._hand_out(worker)

    def tick(self, now: float) -> list[tuple[Ticket, Reply]]:
        """Tell who has waited long enough that there is nothing."""
        late = {worker: (ticket, seen) for worker, (ticket, seen, due) in self._awaiting.items() if due <= now}
        for worker in late:
            del self._awaiting[worker]
        return [(ticket, Commands(seen, ())) for ticket, seen in late.values()]

    def moments(self) -> list[float]:
        """When a `tick` is due for each worker that waits."""
        return [due for _, _, due in self._awaiting.values()]

    def _hand_out(self, worker: int) -> list[tuple[Ticket, Reply]]:
        commands = self._commands[worker]
        if not commands or worker not in self._awaiting:
            return []
        ticket, _, _ = self._awaiting.pop(worker)
        given, size = 0, 0
        while given < len(commands) and size + commands[given].size <= MAX_COMMANDS_BYTES:
            size += commands[given].size
            given += 1
        return [
            (ticket, Commands(commands[given - 1].number, tuple(numbered.command for numbered in commands[:given])))
        ]
