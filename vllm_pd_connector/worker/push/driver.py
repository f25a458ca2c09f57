"""A prefill worker's part of pushes: it takes orders from its scheduler half, writes, and says when it is over.

Orders come over the instance's own side channel and not with the step's metadata, because an idle engine has no steps
and a decode instance may ask when the prefill finished long ago. A worker keeps one question for commands open there;
waiting costs nothing. An order may name a step that is still being computed: the worker writes when its own forward
of that step is done, or wave by wave of its layers (`waves`).

A push is written with a cursor, and its end is reported once everything was written: done when all transfers are, or
failed with the reason. A failure is reported at once, and again when no transfer can write any more. Every order's
attempt is reported, also by a rank whose part is empty. A write of which the library says no more, as of a decode host
that fell silent, may go on until that process ends, and then nobody asks any more: the scheduler half keeps it as one
without an end (`protocol.push.draining`), and this side forgets it.

Where a part goes by way of the staging buffer (`staging.stager`), its copies read this worker's cache in the transfer
thread, some time after the part was bound. They see what a direct write would: the part is bound when what it
reads was computed, and the scheduler half keeps the blocks until this side has reported the end, or a failure, after
which nobody takes what is written.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.errors import TransferError, UnauthenticatedPeer
from vllm_pd_connector.observability.stats import FailureKind
from vllm_pd_connector.protocol import peer as peers
from vllm_pd_connector.protocol.peer import PeerKey
from vllm_pd_connector.protocol.push import push as machines
from vllm_pd_connector.protocol.wire.fields import MAX_TEXT
from vllm_pd_connector.protocol.wire.push_messages import (
    BeginCommand,
    CancelCommand,
    Moved,
    PushEnded,
    WriteCommand,
)
from vllm_pd_connector.sidechannel.net.keys import keys_of, require_known_server
from vllm_pd_connector.worker.in_flight import InFlight
from vllm_pd_connector.worker.peers.pool import Links
from vllm_pd_connector.worker.peers.process_watch import LOOK_S
from vllm_pd_connector.worker.push.active import ActivePush, bind_push
from vllm_pd_connector.worker.push.completion import CompletionReports
from vllm_pd_connector.worker.push.link import WriteLink
from vllm_pd_connector.worker.push.orders import Orders
from vllm_pd_connector.worker.push.waves import say_that_a_step_announced_none

if TYPE_CHECKING:
    from vllm_pd_connector.config import Config
    from vllm_pd_connector.geometry.manifest import Manifest
    from vllm_pd_connector.observability.stats import PDStats
    from vllm_pd_connector.protocol.transfers import TransferEnd
    from vllm_pd_connector.protocol.wire.push_messages import Command, PushInto
    from vllm_pd_connector.transport.base import Transport
    from vllm_pd_connector.worker.peers.event_queue import EventQueue
    from vllm_pd_connector.worker.peers.link import PeerLink
    from vllm_pd_connector.worker.peers.process_watch import ProcessWatches
    from vllm_pd_connector.worker.push.step_clock import StepClock
    from vllm_pd_connector.worker.rpc import PendingCalls
    from vllm_pd_connector.worker.staging.stager import Stager
    from vllm_pd_connector.worker.staging.stream import Stream

logger = init_logger(__name__)

TELL_S = 1.0


@dataclass(frozen=True, slots=True)
class PushSetup:
    """What a worker that writes needs besides: its scheduler half's endpoint, its secret there, the steps done, and the
    waves of layers that are written before their step is done."""

    home: str
    token: bytes
    clock: StepClock
    waves: tuple[tuple[str, ...], ...] = ()


class Pushes:
    """See the module. Lives in the transfer thread; it is the `peers.user.User` of the links to decode instances.

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
        events: EventQueue,
        setup: PushSetup,
        worker: int,
        stats: PDStats,
    ) -> None:
        self._config = config
        self._transport = transport
        self._stager = stager
        self._calls = calls
        self._token, self._clock = setup.token, setup.clock
        self._waves = setup.waves
        self._orders = Orders(calls, setup.home, worker, setup.token, self._try)
        self._reports = CompletionReports(calls, setup.home)
        self._worker = worker
        self._keys = keys_of(config)
        self._stats = stats
        self._events = events
        observe = stats.observe_phase
        shared = (config, manifest, transport, stager.chunk_bytes, calls, processes, events, self, observe)
        self._links = Links(*shared, self._make_link, "decode instance")
        self._pushes: dict[str, ActivePush] = {}
        self._awake: dict[str, ActivePush] = {}  # of which something is to be looked at
        self._waiting_for: dict[int, dict[str, ActivePush]] = {}  # by step
        # Whether a push waits for a step and none has anything under way, which would be looked at soon: to wake this
        # thread holds up those that launch steps.
        self.waiting = False

    def _make_link(self, machine: peers.Peer, engine_id: str, endpoint: str, now: float) -> WriteLink:
        return WriteLink(machine, engine_id, endpoint, now, own=self._orders.own, waves=self._waves)

    def turn(self, now: float, until: float) -> None:
        """One round: ask for commands, write what may be written, look at transfers and deadlines, until the monotonic
        clock says `until`; what is left then goes first the next time."""
        self._orders.turn(now)
        self._reports.turn(now)
        step, ahead = self._clock.done(), self._clock.ahead()
        due = [some for number, some in self._waiting_for.items() if number <= step or number == ahead[0]]
        for push in [push for some in due for push in some.values() if push.machine.goes_on(step, *ahead)]:
            self._drive(push, machines.StepsDone(step), now)
            self._drive(push, machines.WavesDone(*ahead), now)
            if time.monotonic() >= until:
                break
        for push in [push for push in self._awake.values() if push.look_at <= now]:
            self._look(push, now, until)
            if push.key in self._awake:
                self._awake[push.key] = self._awake.pop(push.key)
            if time.monotonic() >= until:
                break
        self._links.tick(now)
        looks_soon = any(push.in_flight.moves and not push.machine.failed for push in self._awake.values())
        self.waiting = not looks_soon and bool(self._waiting_for)

    def next_deadline(self, now: float) -> float | None:
        """When a turn is due at the latest."""
        others = self._orders, self._links, self._reports
        moments = [due for due in (other.next_deadline() for other in others) if due is not None]
        for push in self._awake.values():
            looks = push.in_flight.next_look(now, draining=push.machine.failed)
            looks += [due for due in (push.machine.next_deadline(),) if due is not None]
            moments += [max(look, push.look_at) for look in looks]
        for step, pushes in self._waiting_for.items():
            until_look = self._clock.pause(step, min(push.machine.waves for push in pushes.values()))
            moments += [now + until_look] if until_look is not None else []
        return min(moments, default=None)

    def _file(self, push: ActivePush) -> None:
        """A push has changed: put it where a turn finds it, behind others that wait. A turn looks at none that only
        waits for a step."""
        if push.is_lost:
            self._pushes.pop(push.key, None)
        goes_on = self._pushes.get(push.key) is push
        step = push.machine.next_step if goes_on else None
        if push.waits_for is not None:
            del (others := self._waiting_for.pop(push.waits_for))[push.key]
            if others:
                self._waiting_for[push.waits_for] = others
        if step is not None:
            self._waiting_for.setdefault(step, {})[push.key] = push
        push.waits_for = step
        if goes_on and not push.rests:
            self._awake[push.key] = push
        elif self._awake.get(push.key) is push:
            del self._awake[push.key]

    def fail_all(self, reason: str, now: float) -> None:
        """End every push: what became of its parts may have been lost. Raises nothing: it is called where an error is
        handled."""
        for push in list(self._pushes.values()):
            try:
                self._drive(push, machines.GivenUp(reason), now)
            except Exception:  # one that cannot be ended must not keep the others
                logger.exception("push of prefill %s could not be ended", push.into.prefill.name)

    def departed(self, endpoint: str, now: float) -> None:
        """The instance at this endpoint says that it ends."""
        self._links.departed(endpoint, now)

    # Orders

    def _obey(self, command: Command, now: float) -> None:
        match command:
            case BeginCommand(into):
                self._begin(into, now)
            case WriteCommand(attempt):
                if (push := self._pushes.get(attempt.hex())) is not None:  # else it has failed, and that was reported
                    push.arrived, push.tell_at = push.in_flight.arrived, now + TELL_S
                    self._drive(push, machines.Commanded(command), now)
            case CancelCommand(attempt, reason):
                if (push := self._pushes.get(attempt.hex())) is not None:
                    push.cancelled = True
                self._cancel(attempt, reason, now)

    def _cancel(self, attempt: bytes, reason: str, now: float) -> None:
        if (push := self._pushes.get(attempt.hex())) is not None:
            push.given_up = FailureKind.ABORTED
            self._drive(push, machines.GivenUp(reason), now)
        else:
            self._refuse(attempt, reason)

    def _begin(self, into: PushInto, now: float) -> None:
        home, unkeyed = into.home, self._config.allow_unauthenticated_peers
        try:
            require_known_server(home.host, home.server_key, self._keys, unkeyed, "decode instance")
        except UnauthenticatedPeer as error:
            self._stats.fail(FailureKind.NOT_TRUSTED, "failed_pushes")
            self._refuse(into.attempt, str(error))
            return
        key = PeerKey(home.host, home.port, home.incarnation, home.server_key)
        link = self._links.get(key, home.engine_id, now)
        push = ActivePush(into, link, machines.Push(self._config.transfer_timeout), into.start)
        push.in_flight = InFlight(push, self._links, link, self._transport, self._stager, writes=True)
        self._pushes[push.key] = push
        self._links.drive(link, peers.Wanted(push.key), now)

    def _try(self, command: Command, now: float) -> None:
        try:
            self._obey(command, now)
        except Exception as error:  # one order must not cost the others, which are not handed out again
            logger.exception("an order of the scheduler half failed")
            reason = f"unexpected {type(error).__name__}: {error}"[:MAX_TEXT]
            if isinstance(command, BeginCommand):
                self._cancel(command.into.attempt, reason, now)
            elif command.attempt.hex() in self._pushes:  # else it was forgotten, may still write, and is not refused
                self._cancel(command.attempt, reason, now)

    # What becomes of links (`peers.user.User`)

    def ready(self, request_id: str, now: float) -> None:
        """The decode instance is connected."""
        if (push := self._pushes.get(request_id)) is not None:  # else it has failed since
            self._handle(push, machines.Linked(), now)

    def refused(self, request_id: str, reason: str, kind: FailureKind, now: float) -> None:
        """The decode instance cannot be written into."""
        if (push := self._pushes.get(request_id)) is not None:
            push.given_up = kind
            self._handle(push, machines.GivenUp(reason), now)

    def lost(self, link: PeerLink, reason: str, now: float) -> None:
        """The decode instance is lost."""
        for push in [push for push in self._pushes.values() if push.link is link]:
            self._handle(push, machines.LinkLost(reason), now)

    def stalled(self, link: PeerLink, reason: str, now: float) -> None:
        """What is written on this link stands still: it fails now, and its blocks come back when it has ended. What
        waits for the end of a step waits for the new connection besides."""
        self._stats.count("relinked")
        for push in [push for push in self._pushes.values() if push.link is link]:
            self._handle(push, machines.LinkStalled(reason), now)

    def uses(self, link: PeerLink) -> bool:
        return any(push.link is link for push in self._pushes.values())

    # One push

    def _drive(self, push: ActivePush, event: machines.Event, now: float) -> None:
        """Give a push's machine an event, in its turn."""
        self._events.put(lambda: self._handle(push, event, now))

    def _handle(self, push: ActivePush, event: machines.Event, now: float) -> None:
        """Carry out what a push's machine asks for."""
        try:
            self._carry_out(push, event, now)
        finally:
            self._file(push)

    def _carry_out(self, push: ActivePush, event: machines.Event, now: float) -> None:
        events: deque[machines.Event] = deque([event])
        while events:
            event = events.popleft()
            for action in push.machine.handle(event, now):
                match action:
                    case machines.Bind(command):
                        events.append(self._bind(push, command))
                    case machines.BindWaves(command, first, stop):
                        events.append(self._bind(push, command, (first, stop)))
                    case machines.StartWrites():
                        self._start(push)
                    case machines.WantLink():
                        self._links.drive(push.link, peers.Wanted(push.key), now)
                    case machines.Stop(reason):  # once, when it fails
                        self._stats.fail(push.kind_of(event), "failed_pushes")
                        events.append(self._stop(push, reason, now))
                    case machines.Report(ok, reason, terminal):
                        self._report(push, ok, reason, terminal)

    def _bind(self, push: ActivePush, command: WriteCommand, waves: tuple[int, int] | None = None) -> machines.Event:
        bound = bind_push(push, command, waves)
        follows_steps = waves is None and not command.final and isinstance(bound, machines.Bound) and bound.transfers
        # Where some did, one without is a single token's: such steps are whole graphs by vLLM's default.
        if follows_steps and self._waves and self._clock.ahead() == (0, 0):
            say_that_a_step_announced_none()
        return bound

    def _start(self, push: ActivePush) -> None:
        peer = push.link.ranks[push.into.rank]
        for work in push.work:
            index, push.begun = push.begun, push.begun + 1
            push.in_flight.start(index, peer, work)
        push.work = ()

    def _stop(self, push: ActivePush, reason: str, now: float) -> machines.Stopped:
        account = f" ({found})" if (found := self._stager.account(push)) else ""
        logger.error("push of prefill %s into %s: %s%s", push.into.prefill.name, push.link.machine.key, reason, account)
        self._links.drive(push.link, peers.Unwanted(push.key), now)
        push.in_flight.cancel()
        push.in_flight.give_up(now)
        return machines.Stopped(push.machine.writing - push.in_flight.may_write)

    def staged(self, push: ActivePush, stream: Stream, failure: TransferError | None, now: float) -> None:
        """A transfer by way of the staging buffer has ended, or a part of it failed."""
        self._ended(push, push.in_flight.staged_ended(stream, failure), failure, now)

    def _ended(self, push: ActivePush, end: TransferEnd, error: TransferError | None, now: float) -> None:
        self._drive(push, end, now)
        if error is not None:
            push.in_flight.blame(error, now)

    def _look(self, push: ActivePush, now: float, until: float) -> None:
        """Look at one push. A defect in that is its alone, and what drains is looked at again."""
        try:
            self._look_at(push, now, until)
        except Exception as error:
            logger.exception("push of prefill %s: its transfers cannot be looked at", push.into.prefill.name)
            push.look_at = now + LOOK_S
            self._drive(push, machines.GivenUp(f"{type(error).__name__}: {error}"), now)

    def _look_at(self, push: ActivePush, now: float, until: float) -> None:
        for end, error in push.in_flight.poll(now, until):
            self._ended(push, end, error, now)
        if push.in_flight.unheard:
            self._file(push)
        if (due := push.machine.next_deadline()) is None:
            return
        arrived = push.in_flight.arrived
        if arrived != push.told and push.tell_at <= now:
            push.told, push.tell_at = arrived, now + TELL_S
            moved = Moved(descriptors=arrived)
            self._reports.tell(
                PushEnded(self._token, self._worker, push.into.attempt, True, "", terminal=False, moved=moved)
            )
        if due > now:
            return
        if arrived != push.arrived:
            push.arrived = arrived
            self._drive(push, machines.PushTick(moved=True), now)
            return
        self._drive(push, machines.PushTick(missing=push.missing), now)
        if push.in_flight.moves:  # else it waited for room or for our own copies
            push.link.stalled = "a write took too long"
        self._links.drive(push.link, peers.Suspected("a push exceeded its deadline"), now)

    def _report(self, push: ActivePush, ok: bool, reason: str, terminal: bool) -> None:
        if terminal:
            del self._pushes[push.key]
        late, moved = (push.first_valid_tokens, push.in_flight.moved) if terminal else ({}, Moved())
        attempt, reason = push.into.attempt, reason[:MAX_TEXT]
        self._reports.send(PushEnded(self._token, self._worker, attempt, ok, reason, terminal, late, moved))

    def _refuse(self, attempt: bytes, reason: str) -> None:
        """Report a push that was not begun, or is over."""
        self._reports.send(PushEnded(self._token, self._worker, attempt, False, reason[:MAX_TEXT], True))
