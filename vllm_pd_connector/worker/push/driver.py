"""A prefill worker's part of pushes: it takes orders from its scheduler half, writes, and says when it is over.

Orders come over the instance's own side channel and not with the step's metadata, because an idle engine has no steps
and a decode instance may ask when the prefill finished long ago. A worker keeps one question for commands open there;
waiting costs nothing. An order may name a step that is still being computed: the worker writes when its own forward
of that step is done.

A push is written with a cursor, and its end is reported once everything was written: done when all transfers are, or
failed with the reason. A failure is reported at once, and again when no transfer can write any more. Every order's
attempt is reported, also by a rank whose part is empty.

Where a part goes by way of the staging buffer (`staging.stager`), its copies read this worker's cache in the transfer
thread, some time after the part was bound. They see what a direct write would: the part is bound when the step's
forward is done, and the scheduler half keeps the blocks until this side has reported that nothing writes any more.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from vllm_pd_connector.bounded import Bounded
from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.errors import BindError, ProtocolError, TransferError, UnauthenticatedPeer
from vllm_pd_connector.observability.stats import FailureKind, PDStats, Phase
from vllm_pd_connector.protocol import peer as peers
from vllm_pd_connector.protocol.peer import PeerKey
from vllm_pd_connector.protocol.push.command_queue import IDLE_ANSWER_S
from vllm_pd_connector.protocol.wire.fields import MAX_TEXT
from vllm_pd_connector.protocol.wire.messages import Describe, Manifests
from vllm_pd_connector.protocol.wire.push_messages import (
    AwaitCommands,
    CancelCommand,
    Commands,
    Moved,
    PushEnded,
    PushInto,
    WriteCommand,
)
from vllm_pd_connector.sidechannel.net.keys import keys_of, require_known_server
from vllm_pd_connector.transport.base import Transfer, TransferStatus, Transport, TransportPeer
from vllm_pd_connector.worker.peers.pool import Links
from vllm_pd_connector.worker.peers.process_watch import LOOK_S, ProcessWatch, ProcessWatches
from vllm_pd_connector.worker.poll_interval import pause
from vllm_pd_connector.worker.push.completion import HOME_TIMEOUT_S, RETRY_S, CompletionReports
from vllm_pd_connector.worker.push.link import WriteLink

if TYPE_CHECKING:
    from vllm_pd_connector.config import Config
    from vllm_pd_connector.geometry.manifest import Manifest
    from vllm_pd_connector.geometry.runs import Runs
    from vllm_pd_connector.sidechannel.client import Outcome
    from vllm_pd_connector.worker.peers.link import Link
    from vllm_pd_connector.worker.push.step_clock import StepClock
    from vllm_pd_connector.worker.rpc import PendingCalls
    from vllm_pd_connector.worker.staging.stager import Stager, Stream

logger = init_logger(__name__)

POLL_DRAINING_S = 0.05
REMEMBER = 4096  # attempts that failed, for commands to go on that were on their way


@dataclass(frozen=True, slots=True)
class PushSetup:
    """What a worker that writes needs besides: its scheduler half's endpoint, its secret there, the steps done."""

    home: str
    token: bytes
    clock: StepClock


@dataclass(eq=False, slots=True)
class Push:
    """One rank's part of a push under way. `posted_at` is when the latest direct write began, `connection` the
    link's since it is linked; `watch` is of the rank that is written into."""

    into: PushInto
    link: WriteLink
    cursor: int
    commands: deque[WriteCommand] = field(default_factory=deque)  # not carried out yet, in the order of their steps
    linked: bool = False
    connection: object = None
    watch: ProcessWatch | None = None
    complete: bool = False  # everything was posted
    failure: str = ""
    stuck: bool = False  # a transfer failed and may still write
    transfers: list[Transfer] = field(default_factory=list)
    posted_at: float = 0.0
    first_valid_tokens: dict[int, int] = field(default_factory=dict)
    moved: Moved = Moved()
    deadline: float = inf

    @property
    def key(self) -> str:
        return self.into.attempt.hex()

    @property
    def next_step(self) -> int | None:
        """The step whose end lets this push go on, None if nothing does."""
        return self.commands[0].step if self.commands and self.linked and not self.failure else None

    def take(self, step: int) -> WriteCommand | None:
        """The latest command whose step is done; orders of several steps that ended together are one."""
        command = None
        while (waiting := self.next_step) is not None and waiting <= step:
            command = self.commands.popleft()
        return command


class Pushes:
    """See the module. Lives in the transfer thread; it is the `peers.pool.User` of the links to decode instances.

    Args:
        stager: carries out what goes by way of the staging buffer; whoever polls it brings its results to `staged`.
        worker: this worker's number in its instance.
        stats: where this thread counts.
    """

    def __init__(
        self,
        config: Config,
        manifest: Manifest,
        transport: Transport,
        stager: Stager,
        calls: PendingCalls,
        processes: ProcessWatches,
        setup: PushSetup,
        worker: int,
        stats: PDStats,
    ) -> None:
        self._config = config
        self._transport = transport
        self._stager = stager
        self._calls = calls
        self._home, self._token, self._clock = setup.home, setup.token, setup.clock
        self._reports = CompletionReports(calls, self._home)
        self._worker = worker
        self._keys = keys_of(config)
        self._own: tuple[bytes, ...] = ()
        self._stats = stats
        shared = (config, manifest, transport, stager.chunk_bytes, calls, processes, self, self._observe)
        self._links = Links(*shared, self._make_link, "decode instance")
        self._pushes: dict[str, Push] = {}
        self._failed: Bounded[bytes, None] = Bounded(REMEMBER)
        self.waiting = False  # whether a push waits for the end of a step; read by other threads
        self._seen = 0
        self._push_requester = False
        self._ask_at = 0.0

    def _make_link(self, machine: peers.Peer, engine_id: str, endpoint: str, now: float) -> WriteLink:
        return WriteLink(machine, engine_id, endpoint, now, own=self._own)

    def turn(self, now: float) -> None:
        """One round: ask for commands, write what may be written, look at transfers and deadlines."""
        if not self._push_requester and self._ask_at <= now:
            self._await_commands(now)
        self._reports.turn(now)
        step = self._clock.done()
        for push in list(self._pushes.values()):
            if (command := push.take(step)) is not None:
                self._write(push, command, now)
            self._look(push, now)
        self._links.tick(now)
        self.waiting = any(push.next_step is not None for push in self._pushes.values())

    def next_deadline(self, now: float) -> float | None:
        """When a turn is due at the latest."""
        moments = [] if self._push_requester else [self._ask_at]
        moments += [due for due in (self._links.next_deadline(), self._reports.next_deadline()) if due is not None]
        for push in self._pushes.values():
            moments.append(push.deadline)
            if push.stuck:
                moments.append(now + LOOK_S)
            if push.transfers:
                moments.append(now + (POLL_DRAINING_S if push.failure else pause(now - push.posted_at)))
            if (step := push.next_step) is not None and (until_look := self._clock.pause(step)) is not None:
                moments.append(now + until_look)
        return min(moments, default=None)

    def departed(self, endpoint: str, now: float) -> None:
        """The instance at this endpoint says that it ends."""
        self._links.departed(endpoint, now)

    # Orders

    def _await_commands(self, now: float) -> None:
        message = AwaitCommands(self._token, self._worker, self._seen)
        try:
            self._calls.ask(self._home, message, IDLE_ANSWER_S + HOME_TIMEOUT_S, self._ordered)
            self._push_requester = True
        except ProtocolError as error:
            logger.error("orders of the scheduler half: %s", error)
            self._ask_at = now + RETRY_S

    def _ordered(self, outcome: Outcome, now: float) -> None:
        self._push_requester = False
        match outcome:
            case Commands(last=last, orders=commands):
                if commands and not self._own:
                    self._learn_own(now)
                    return
                self._seen = max(self._seen, last)
                for command in commands:
                    self._try(command, now)
            case _:
                logger.debug("orders of the scheduler half: %s", outcome)
                self._ask_at = now + RETRY_S

    def _learn_own(self, now: float) -> None:
        """Fetch the manifests of this instance's ranks; the commands are handed out again afterwards."""
        self._push_requester = True
        try:
            self._calls.ask(self._home, Describe(), HOME_TIMEOUT_S, self._learned)
        except ProtocolError as error:
            self._learned(error, now)

    def _learned(self, outcome: Outcome, now: float) -> None:
        self._push_requester = False
        if isinstance(outcome, Manifests):
            self._own = outcome.manifests
        else:
            logger.warning("manifests of this instance: %s", outcome)
            self._ask_at = now + RETRY_S

    def _obey(self, command: WriteCommand | CancelCommand, now: float) -> None:
        if isinstance(command, CancelCommand):
            push = self._pushes.get(command.attempt.hex())
            if push is not None:
                self._fail(push, command.reason, now)
            else:
                self._report(command.attempt, command.reason, terminal=True)
            return
        push = self._pushes.get(command.into.attempt.hex())
        if push is None and command.into.attempt in self._failed:
            return  # the decode instance was told that nothing of it lands any more, and may use the blocks again
        if push is None:
            home = command.into.home
            try:
                require_known_server(
                    home.host, home.server_key, self._keys, self._config.allow_unauthenticated_peers, "decode instance"
                )
            except UnauthenticatedPeer as error:
                self._report(command.into.attempt, str(error), terminal=True)
                return
            key = PeerKey(home.host, home.port, home.incarnation, home.server_key)
            link = self._links.get(key, home.engine_id, now)
            assert isinstance(link, WriteLink)
            push = self._pushes[command.into.attempt.hex()] = Push(command.into, link, command.into.start)
            self._links.drive(link, peers.Wanted(push.key), now)
        push.commands.append(command)
        if command.final and not push.failure:
            push.deadline = now + self._config.transfer_timeout

    def _try(self, command: WriteCommand | CancelCommand, now: float) -> None:
        try:
            self._obey(command, now)
        except Exception as error:  # one order must not cost the others, which are not handed out again
            logger.exception("an order of the scheduler half failed")
            attempt = command.attempt if isinstance(command, CancelCommand) else command.into.attempt
            self._obey(CancelCommand(attempt, f"unexpected {type(error).__name__}: {error}"[:MAX_TEXT]), now)

    # Links

    def ready(self, request_id: str, now: float) -> None:
        """The decode instance is connected."""
        push = self._pushes[request_id]
        push.linked, push.connection = True, push.link.connection
        push.watch = push.link.watches.get(push.into.rank)

    def refused(self, request_id: str, reason: str, kind: FailureKind, now: float) -> None:
        """The decode instance cannot be written into."""
        self._stats.fail(kind, "failed_pushes")
        self._fail(self._pushes[request_id], reason, now)

    def lost(self, link: Link, reason: str, now: float) -> None:
        """The decode instance is lost."""
        for push in [p for p in self._pushes.values() if p.link is link and p.linked]:
            self._fail(push, reason, now)

    def stalled(self, link: Link, reason: str, now: float) -> None:
        """What is written on this link stands still: it fails now, and its blocks come back when it has ended. What
        waits for the end of a step waits for the new connection besides."""
        self._stats.count("relinked")
        for push in [p for p in self._pushes.values() if p.link is link and p.linked]:
            if self._writes(push):
                self._fail(push, reason, now)
            elif not push.failure and not push.complete:
                push.linked = False
                self._links.drive(link, peers.Wanted(push.key), now)

    def uses(self, link: Link) -> bool:
        return any(push.link is link for push in self._pushes.values())

    # Writing

    def _write(self, push: Push, command: WriteCommand, now: float) -> None:
        try:
            reach = push.link.reach(push.into, command.ready, push.cursor, command.final)
            if reach == push.cursor and not command.final:
                return
            part = push.link.bind_push(push.into, command.source, push.cursor, reach, command.final)
            push.first_valid_tokens |= part.first_valid_tokens
            if len(part.runs):
                self._post(push, part.runs)
            if part.staged is not None:
                self._stager.start(push, 0, push.link, self._peer(push), part.staged, push.watch)
            push.cursor, push.complete = reach, command.final
        except (BindError, TransferError) as error:
            self._transfer_failed(push, error, now)
        except Exception as error:  # a defect of ours that one push met must not reach the others
            logger.exception("push of prefill %s", push.into.prefill.name)
            self._fail(push, f"{type(error).__name__}: {error}", now)

    def _peer(self, push: Push) -> TransportPeer:
        return push.link.ranks[push.into.rank]

    def _post(self, push: Push, runs: Runs) -> None:
        transfer = self._transport.write(self._peer(push), runs)
        push.transfers.append(transfer)
        push.posted_at = time.monotonic()
        push.moved += Moved(runs.total_bytes, len(runs), transfer.descriptors)

    def staged(self, push: Push, stream: Stream, failure: TransferError | None, now: float) -> None:
        """A transfer by way of the staging buffer has ended, or a part of it failed."""
        if failure is not None:
            self._transfer_failed(push, failure, now)
        else:
            push.moved += Moved(stream.bytes, stream.runs, stream.descriptors)

    def _look(self, push: Push, now: float) -> None:
        if push.stuck and push.watch is not None:
            push.watch.look(now)
            push.stuck = not push.watch.over
        for transfer in list(push.transfers):
            try:
                if self._transport.poll(transfer) is TransferStatus.RUNNING:
                    continue
                push.transfers.remove(transfer)
            except TransferError as error:
                push.transfers.remove(transfer)
                self._transfer_failed(push, error, now)
        if push.deadline <= now:
            missing = f": {len(push.transfers)} transfers have not ended" if push.transfers else ""
            self._fail(push, f"writing took longer than {self._config.transfer_timeout:g} s{missing}", now)
            if self._writes(push):  # else it waited for room or for our own copies
                push.link.stalled = "a write took too long"
            self._links.drive(push.link, peers.Suspected("a push exceeded its deadline"), now)
        if self._writes(push) or self._pushes.get(push.key) is not push:
            return
        if push.failure or push.complete:
            del self._pushes[push.key]
            self._send(self._end(push))

    def _writes(self, push: Push) -> bool:
        """Whether something of a push may still be written."""
        return bool(push.transfers) or push.stuck or self._stager.holds(push)

    def _transfer_failed(self, push: Push, error: BindError | TransferError, now: float) -> None:
        self._stats.fail(FailureKind.TRANSFER_FAILED, "failed_pushes")
        if isinstance(error, TransferError) and not error.terminal:
            push.stuck = True
        self._fail(push, str(error), now)
        if isinstance(error, TransferError):
            self._links.failed(push.link, push.connection, error, "a write failed and may still go on", now)

    def _fail(self, push: Push, reason: str, now: float) -> None:
        push.deadline = inf
        if push.failure:
            return
        push.failure = reason or "failed"
        account = f" ({found})" if (found := self._stager.account(push)) else ""
        logger.error("push of prefill %s into %s: %s%s", push.into.prefill.name, push.link.machine.key, reason, account)
        self._links.drive(push.link, peers.Unwanted(push.key), now)
        self._stager.cancel(push)
        if self._writes(push):
            self._links.give_up(push.link, lambda: not self._writes(push), now)
            self._report(push.into.attempt, push.failure, terminal=False)

    # Reports

    def _report(self, attempt: bytes, failure: str, *, terminal: bool) -> None:
        self._send(PushEnded(self._token, self._worker, attempt, not failure, failure[:MAX_TEXT], terminal))

    def _end(self, push: Push) -> PushEnded:
        attempt, failure = push.into.attempt, push.failure[:MAX_TEXT]
        return PushEnded(
            self._token, self._worker, attempt, not failure, failure, True, push.first_valid_tokens, push.moved
        )

    def _send(self, report: PushEnded) -> None:
        if report.terminal and not report.ok:
            self._failed[report.attempt] = None
        self._reports.send(report)

    def _observe(self, phase: Phase, seconds: float) -> None:
        self._stats.observe_phase(phase, seconds)
