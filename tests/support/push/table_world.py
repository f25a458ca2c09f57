"""A table of pushes with the workers of its instance and two decode workers who want one prefill.

Events come one by one, in any order; after each the world does what the instance's server does, and checks what must
hold whatever came before: whose answer may say what, and that no block is given back while what is read of it counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.protocol.push.table import PushTable
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.protocol.wire import push_messages as pm

HOME = pm.InstanceAddress("decode-0", "ab" * 16, "127.0.0.1", 5600)
NONCE, DIGEST, STOP = b"n" * 16, "0" * 16, 40
TABLES = (BlockTable(0, b"\1\0\0\0"),)
WORKERS, PATIENCE = 2, 30.0
NAME, REQUEST = "cmpl-1", "cmpl-1-0123abcd"


def into(reader: int = 0, *, nonce: bytes | None = None, readers: int = 2, **changes: Any) -> pm.PushInto:
    fields: dict[str, Any] = {"attempt": bytes([reader]) * 16, "start": 0, "stop": STOP, "prompt_digest": DIGEST}
    ref = pm.PrefillRef(REQUEST if nonce else NAME, nonce)
    return pm.PushInto(ref, HOME, 0, 0, reader, reader, readers, blocks=TABLES, **(fields | changes))


@dataclass
class World:
    """See the module; `settle` checks what must hold.

    Attributes:
        quick: workers end their writes after each event.
        late: the server's thread does not look before the next event after one of the scheduler's.
        begun: worker and attempt of every push that a worker was told the blocks of.
        owed: for every attempt, the workers that were ordered to write and have not reported the end.
        asked: tickets that wait for an answer; a withdrawal takes the place of its registration.
    """

    quick: bool = True
    late: bool = False
    table: PushTable = field(default_factory=lambda: PushTable(WORKERS, PATIENCE))
    now: float = 0.0
    seen: list[int] = field(default_factory=lambda: [0] * WORKERS)
    begun: set[tuple[int, bytes]] = field(default_factory=set)
    owed: dict[bytes, set[int]] = field(default_factory=dict)
    ordered_final: set[bytes] = field(default_factory=set)
    failed: set[bytes] = field(default_factory=set)
    answers: dict[bytes, list[pm.Pushed]] = field(default_factory=dict)
    asked: dict[tuple[bytes, int], bytes] = field(default_factory=dict)
    tickets: int = 0
    closed: bool = False
    freed: int = 0
    lost: set[bytes] = field(default_factory=set)  # what was written when the blocks were given back
    started: bool = False
    finished: bool = False

    def ticket(self, attempt: bytes) -> tuple[bytes, int]:
        self.tickets += 1
        made = (b"client", self.tickets)
        self.asked[made] = attempt
        return made

    def settle(self) -> None:
        """What the server does after every event, and the workers' questions for commands."""
        self.table.tick(self.now)
        for worker in range(WORKERS):
            self.table.await_commands(pm.AwaitCommands(b"t" * 16, worker, self.seen[worker]), (b"w", worker), self.now)
        for ticket, reply in self.table.replies.take():
            if ticket[0] == b"w":
                self.obey(ticket[1], reply)
            else:
                self.answered(self.asked.pop(ticket), reply)
        if freed := len(self.table.freed.take()):
            self.freed += freed
            self.lost = {attempt for attempt, workers in self.owed.items() if workers}
            assert all(map(self.is_over, self.lost)), "blocks are given back while they are read for somebody"
        assert self.freed == self.closed, "blocks wait for a worker that may never know"

    def obey(self, worker: int, reply: m.Reply) -> None:
        assert isinstance(reply, pm.Commands)
        assert all(number > 0 for number in (reply.last,)) or not reply.orders
        self.seen[worker] = max(self.seen[worker], reply.last)
        for command in reply.orders:
            if isinstance(command, pm.BeginCommand):
                self.begun.add((worker, command.into.attempt))
            if isinstance(command, pm.WriteCommand):
                assert not self.freed and (worker, command.attempt) in self.begun
                self.owed.setdefault(command.attempt, set()).add(worker)
                if command.final:
                    self.ordered_final.add(command.attempt)

    def answered(self, attempt: bytes, reply: m.Reply) -> None:
        assert isinstance(reply, pm.Pushed)
        self.answers.setdefault(attempt, []).append(reply)
        if reply.terminal:
            assert not self.owed.get(attempt), "terminal, and a worker may still write"
        if reply.state is pm.PushState.DONE:
            assert attempt in self.ordered_final and attempt not in self.failed | self.lost and self.finished
        if reply.state is pm.PushState.FAILED:
            assert reply.reason

    def report(self, worker: int, attempt: bytes, ok: bool, terminal: bool) -> None:
        if not ok:
            self.failed.add(attempt)
        if terminal:
            self.owed[attempt].discard(worker)
        reason = "" if ok else "a link dropped"
        self.table.ended(pm.PushEnded(b"t" * 16, worker, attempt, ok, reason, terminal))
        self.settle()

    def work(self) -> None:
        """Workers end what they can."""
        for attempt, worker in [(a, w) for a, workers in self.owed.items() for w in workers]:
            if attempt in self.ordered_final or self.is_over(attempt):
                self.report(worker, attempt, ok=not self.is_over(attempt), terminal=True)

    def is_over(self, attempt: bytes) -> bool:
        registration = self.table._registrations.get(attempt)
        return registration is None or registration.state is pm.PushState.FAILED

    # What can happen

    def register(self, reader: int) -> None:
        message = into(reader)
        self.table.register(message, self.ticket(message.attempt), self.now)

    def start(self) -> None:
        self.started = self.table.started(REQUEST, NAME, STOP, DIGEST, self.now)

    def progress(self) -> None:
        if any(prefill.needed for prefill in self.table.running([REQUEST])):
            self.table.progressed(REQUEST, TABLES, 16, 1)

    def finish(self) -> None:
        if self.started and not self.closed:
            self.finished = True
            if not self.table.finished(REQUEST, NONCE, TABLES, 2):
                self.close()

    def close(self) -> None:
        """The prefill is aborted, or its lease ends."""
        if self.started and not self.closed:
            self.closed = True
            self.table.close(REQUEST, "aborted", self.now)

    def withdraw(self) -> None:
        for reader in (0, 1):
            message = pm.WithdrawPush(into(reader).prefill, into(reader).attempt)
            self.table.withdraw(message, self.ticket(message.attempt), self.now)

    def drop_link(self) -> None:
        for attempt, workers in self.owed.items():
            if 0 in workers:
                self.report(0, attempt, ok=False, terminal=False)

    def do(self, event: str) -> None:
        match event:
            case "register 0" | "register 1":
                self.register(int(event[-1]))
            case "start":
                self.start()
            case "progress":
                self.progress()
            case "finish":
                self.finish()
            case "close":
                self.close()
            case "withdraw":
                self.withdraw()
            case "drop":
                self.drop_link()
        if self.late and event in ("start", "progress", "finish", "close"):
            return
        self.settle()
        if self.quick:
            self.work()
