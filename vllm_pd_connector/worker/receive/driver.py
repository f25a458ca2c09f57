"""A decode worker's receives: from the request to the one report, in the transfer thread.

Everything that decides is a state machine without I/O (`protocol.receive`); `Receives` brings it events and carries out
its actions. What needs questions and answers of its own stands beside it: `push_request` (the prefill side is to
write), `compare` (its sums are to equal ours), `confirm` (it still vouches for what was read).
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.metadata import BadParameters, Either, PushFrom, ReadFrom
from vllm_pd_connector.observability import tracing
from vllm_pd_connector.observability.stats import FailureKind, Phase
from vllm_pd_connector.protocol import peer as peers
from vllm_pd_connector.protocol import receive as receives
from vllm_pd_connector.protocol.push.table import ANSWER_S
from vllm_pd_connector.protocol.receive import Receive
from vllm_pd_connector.protocol.transfers import TransferDone
from vllm_pd_connector.worker.checksums import is_chosen
from vllm_pd_connector.worker.in_flight import InFlight
from vllm_pd_connector.worker.peers.earliest import Agenda, Earliest
from vllm_pd_connector.worker.peers.pool import FETCH_ATTEMPTS, Links
from vllm_pd_connector.worker.peers.process_watch import LOOK_S
from vllm_pd_connector.worker.receive import ending
from vllm_pd_connector.worker.receive.active import ActiveReceive, bind_receive, enter
from vllm_pd_connector.worker.receive.confirm import Confirmer
from vllm_pd_connector.worker.receive.push_link import AskLink
from vllm_pd_connector.worker.receive.push_request import PushRequester
from vllm_pd_connector.worker.receive.read_link import ReadLink
from vllm_pd_connector.worker.receive.recorded import record

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_pd_connector.config import Config
    from vllm_pd_connector.errors import TransferError
    from vllm_pd_connector.geometry.manifest import Manifest
    from vllm_pd_connector.metadata import ReceiveRequest
    from vllm_pd_connector.protocol.transfers import TransferEnd
    from vllm_pd_connector.transport.base import Transport
    from vllm_pd_connector.worker.outbox import Outbox
    from vllm_pd_connector.worker.peers.event_queue import EventQueue
    from vllm_pd_connector.worker.peers.link import PeerLink
    from vllm_pd_connector.worker.peers.process_watch import ProcessWatches
    from vllm_pd_connector.worker.receive.compare import ChecksumComparison
    from vllm_pd_connector.worker.rpc import PendingCalls
    from vllm_pd_connector.worker.staging.stager import Stager
    from vllm_pd_connector.worker.staging.stream import Stream

logger = init_logger(__name__)


class Receives:
    """See the module. Lives in the transfer thread; it is the `peers.user.User` of the links to prefill instances.

    Args:
        manifest: this worker's, without the endpoint.
        stager: carries out what goes by way of the staging buffer; whoever polls it brings its results to `staged`.
        reader: this worker's number among the `readers` workers of its instance.
        stats: what is counted now.
        connected: called with every link to a prefill instance that is read from, before it is used, or None.
        received: called before a good receive is reported, or None; see `TransferLoop`.

    `waited`: binding has left the last turn to other work; `bound_long`: it has taken all of that.
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
        comparison: ChecksumComparison,
        outbox: Outbox,
        reader: int,
        readers: int,
        connected: Callable[[ReadLink], None] | None,
        received: ending.Received | None,
    ) -> None:
        self._config, self._manifest, self._transport = config, manifest, transport
        self._stager, self._calls, self._comparison, self._outbox = stager, calls, comparison, outbox
        self._reader, self._readers, self._stats, self._received = reader, readers, outbox.counting, received
        silent = config.handshake_timeout + ANSWER_S
        self._limits = receives.PhaseLimits(
            config.handshake_timeout, config.transfer_timeout, config.confirm_timeout, silent
        )
        self._events = events
        observe = self._stats.observe_phase
        shared = (config, manifest, transport, stager.chunk_bytes, calls, processes, events, self, observe)
        self._links = Links(*shared, ReadLink, connected=connected)
        self._asked = Links(*shared, AskLink)
        per_question = ANSWER_S + config.handshake_timeout / FETCH_ATTEMPTS
        reader_rank = (*manifest.parallel.rank, reader, readers)
        self._due = Earliest()
        asking = calls, reader_rank, per_question, config.transfer_timeout, self._drive
        self._push_requester = PushRequester(*asking, manifest.groups, self._due, processes)
        self._confirmer = Confirmer(calls, config.confirm_timeout, reader, readers, self._drive, self._due)
        self._active: dict[str, ActiveReceive] = {}
        self._looks: Agenda[ActiveReceive] = Agenda()  # at what was begun
        self._linked: dict[str, ActiveReceive] = {}  # their peers are ready, and they are to be bound
        self.bound_long = self.waited = False

    def begin(self, request: ReceiveRequest, now: float) -> None:
        """Begin a receive: its peer is wanted."""
        links: Links[ReadLink] | Links[AskLink]
        link: ReadLink | AskLink
        match request.source:
            case BadParameters(reason, kind):
                logger.debug("request %s: receive failed: %s", request.request_id, reason)  # the scheduler half said it
                self._refuse(request, FailureKind(kind.value))
                return
            case PushFrom() as push:
                links, prefill = self._asked, push.prefill.name
                link = links.get(push.peer, push.engine_id, now)
            case (ReadFrom() as read) | Either(read=read):
                links, prefill = self._links, read.lease.request_id
                link = links.get(read.peer, read.engine_id, now, same_weights=request.same_weights)
        verify = is_chosen(request, self._config.verify)
        machine, attempt = Receive(self._limits, now, verify), secrets.token_bytes(16)
        active = ActiveReceive(request, links, link, machine, attempt, prefill, self._manifest.engine_id, now, now)
        name, arrived = request.request_id, now - request.waited_s
        active.span = tracing.begin("pd.receive", request.trace, arrived, request=name, rank=self._reader)
        active.in_flight = InFlight(active, links, link, self._transport, self._stager, writes=False)
        enter(active, self._active)
        self._due.lower(machine.next_deadline())
        active.links.drive(link, peers.Wanted(request.request_id), now)

    def abort(self, request_id: str, now: float) -> None:
        """Give up a receive, if it is not over."""
        active = self._active.get(request_id)
        if active is not None and not active.reported:
            active.links.drive(active.link, peers.Unwanted(request_id), now)
            self._drive(active, receives.Abort(), now, FailureKind.ABORTED)

    def departed(self, endpoint: str, now: float) -> None:
        """The instance at this endpoint says that it ends."""
        self._links.departed(endpoint, now)
        self._asked.departed(endpoint, now)

    def poll(self, now: float, until: float) -> None:
        """Bind what is to be bound, look at transfers that run and at those that may still write, and begin more, until
        the monotonic clock says `until`; what is left then goes first the next time. After a long prompt's binding, or
        a piece of it, nothing is moved, and the next time nothing is bound; where other things have taken all of the
        time before, binding waits once."""
        waits = bool(self._linked) and (self.bound_long or (not self.waited and time.monotonic() >= until))
        self.bound_long, self.waited = False, waits
        while self._linked and not waits:
            active = self._linked.pop(next(iter(self._linked)))
            self.bound_long |= active.binding is not None
            self._bind(active, now, until)
            if time.monotonic() >= until:
                self.bound_long = True
                break
        if self.bound_long:
            return
        later: list[tuple[ActiveReceive, float]] = []
        try:
            while (one := self._looks.take(now)) is not None:
                self._look(one, now, until, later)
                if time.monotonic() >= until:
                    break
        finally:  # after a defect, too: what drains would stay in quarantine for good
            for one, moment in later:
                self._looks.set(one, moment)

    def _look(self, active: ActiveReceive, now: float, until: float, later: list[tuple[ActiveReceive, float]]) -> None:
        """Look at what a receive has begun; `later` learns when that is due again. A defect in that is its alone."""
        try:
            for end, error in active.in_flight.poll(now, until):
                self._transfer_ended(active, end, error, now)
            moments = active.in_flight.next_look(now, draining=active.reported)
        except Exception as error:
            logger.exception("request %s: its transfers cannot be looked at", active.request.request_id)
            later.append((active, now + LOOK_S))
            self._drive(active, receives.PeerFailed(f"{type(error).__name__}: {error}"), now, FailureKind.INTERNAL)
            return
        later += [(active, min(moments))] if moments else []
        if active.posting and not active.in_flight.posts:
            active.posting = False
            self._stats.observe_phase(Phase.POST, active.in_flight.posting_s)

    def staged(self, active: ActiveReceive, stream: Stream, failure: TransferError | None, now: float) -> None:
        """A transfer by way of the staging buffer has ended."""
        self._transfer_ended(active, active.in_flight.staged_ended(stream, failure), failure, now)

    def tick(self, now: float) -> None:
        """What is due: deadlines, questions to be asked again, what the links have to do."""
        if self._due.over(now):
            for active in list(self._active.values()):
                self._tick(active, now)
            moments = ((active.machine.next_deadline(), active.retry_at) for active in self._active.values())
            self._due.renew(moment for both in moments for moment in both)
        self._push_requester.tick(now)
        self._links.tick(now)
        self._asked.tick(now)

    def _tick(self, active: ActiveReceive, now: float) -> None:
        if (due := active.machine.next_deadline()) is not None and due <= now:
            waited, busy = active.machine.state is receives.ReceiveState.WAITING, active.busy
            if self._goes_on(active, now):
                return
            active.links.drive(active.link, peers.Unwanted(active.request.request_id), now)
            if waited:
                reason = ending.in_vain(active, self._limits.wait_s)
                self._drive(active, receives.PeerFailed(reason), now, FailureKind.PEER_UNREACHABLE)
            else:
                self._drive(active, receives.ReceiveTick(missing=ending.missing(active)), now, FailureKind.DEADLINE)
            if active.in_flight.moves:  # else it waited for room or for our own copies, or did not read
                active.link.stalled = "a read took too long"
            if not waited and not busy:  # else the peer may well be there
                active.links.drive(active.link, peers.Suspected("a receive exceeded its deadline"), now)
        if active.retry_at is not None and active.retry_at <= now:
            active.retry_at, confirms = None, active.machine.state is receives.ReceiveState.CONFIRMING
            self._drive(active, receives.VerdictTimeout() if confirms else receives.PushSilent(), now)

    def next_deadline(self, now: float) -> float | None:
        """When a `poll` or a `tick` is due, None if none is."""
        links = self._links.next_deadline(), self._asked.next_deadline()
        own = now if self._linked else None, self._due.at, self._looks.at, self._push_requester.next_look()
        return min((moment for moment in (*own, *links) if moment is not None), default=None)

    def fail(self, request: ReceiveRequest, reason: str, now: float) -> None:
        """End a receive that could not begin."""
        active = self._active.get(request.request_id)
        if active is None or active.request is not request:  # an older one of its name
            self._refuse(request, FailureKind.INTERNAL)
        elif not active.reported:
            self._drive(active, receives.PeerFailed(reason), now, FailureKind.INTERNAL)

    def _refuse(self, request: ReceiveRequest, kind: FailureKind) -> None:
        self._stats.fail(kind)
        self._outbox.finished(request.request_id, ok=False, quarantined=False, spare=request.spare)

    def fail_all(self, reason: str, now: float) -> None:
        """End every receive that was not reported. Raises nothing: it is called where an error is handled."""
        for active in list(self._active.values()):
            try:
                if not active.reported:
                    self._drive(active, receives.PeerFailed(reason), now, FailureKind.INTERNAL)
                    active.links.drive(active.link, peers.Unwanted(active.request.request_id), now)
            except Exception:  # one that cannot be ended must not keep the others
                logger.exception("request %s: its receive could not be ended", active.request.request_id)

    def ended(self) -> None:
        """The transport has ended, and all reads with it. What the prefill side was asked to write it may write on."""
        for active in self._active.values():
            if active.machine.state is receives.ReceiveState.DRAINING and not active.question:
                self._outbox.drained(active.request.request_id)
        self._active.clear()

    # What becomes of links (`peers.user.User`)

    def ready(self, request_id: str, now: float) -> None:
        """Its peer is ready: it is bound in its turn."""
        if (active := self._active.get(request_id)) is not None and not active.reported:  # else it has failed since
            self._linked[request_id] = active

    def _bind(self, active: ActiveReceive, now: float, until: float) -> None:
        """Bind a request whose peer is ready and start its reads, or ask for it to be written."""
        if active.reported:  # it has failed since
            return
        if active.link.machine.state is not peers.PeerState.READY:  # its peer has been in doubt since
            active.binding = None
            active.links.drive(active.link, peers.Wanted(active.request.request_id), now)
            return
        if (outcome := bind_receive(active, self._manifest.groups, until)) is None:  # it goes on first
            self._linked = {active.request.request_id: active, **self._linked}
            return
        event, kind = outcome
        if kind is None:
            self._phase(active, Phase.QUEUE, time.monotonic())
        self._drive(active, event, now, kind)

    def refused(self, request_id: str, reason: str, kind: FailureKind, now: float) -> None:
        """Its peer cannot be had."""
        if (active := self._active.get(request_id)) is not None:
            self._handle(active, receives.PeerFailed(reason), now, kind)

    def lost(self, link: PeerLink, reason: str, now: float) -> None:
        """A peer is lost: what was read from it fails, what it was asked to write, and what was to be bound."""
        for active in [active for active in self._active.values() if active.link is link]:
            if self._linked.get(active.request.request_id) is active:  # and not one that had its name before
                del self._linked[active.request.request_id]
            elif active.machine.state is receives.ReceiveState.WAITING:
                continue
            self._handle(active, receives.PeerFailed(reason), now, FailureKind.PEER_UNREACHABLE)

    def stalled(self, link: PeerLink, reason: str, now: float) -> None:
        """What is read on this link stands still: it fails now, and its blocks come back when it has ended. What the
        prefill side was asked to write does not go this way."""
        self._stats.count("relinked")
        for active in [a for a in self._active.values() if a.link is link and a.machine.writing and not a.question]:
            self._handle(active, receives.PeerFailed(reason), now, FailureKind.TRANSFER_FAILED)

    def uses(self, link: PeerLink) -> bool:
        """Whether a receive holds this link, or one that was given up still holds slots."""
        return any(active.link is link for active in self._active.values()) or self._stager.involves(link)

    # One receive

    def _drive(self, active: ActiveReceive, event: receives.Event, now: float, kind: FailureKind | None = None) -> None:
        """Give a receive's machine an event, in its turn. `kind` labels a failure it may lead to."""
        self._events.put(lambda: self._handle(active, event, now, kind))

    def _handle(
        self, active: ActiveReceive, event: receives.Event, now: float, kind: FailureKind | None = None
    ) -> None:
        """Carry out what a receive's machine asks for."""
        if kind is not None:
            active.kind = kind
        if isinstance(event, receives.PushDone) and not active.reported:
            self._phase(active, Phase.TRANSFER, now)
        for action in active.machine.handle(event, now):
            match action:
                case receives.StartReads():
                    self._read(active)
                case receives.Compare():
                    self._comparison.begin(active, self._stager.copier, self._calls, self._drive, now)
                case receives.Confirm():
                    self._confirmer.ask(active, now)
                case receives.AskPush():
                    self._push_requester.ask(active, now)
                case receives.Withdraw():
                    self._push_requester.withdraw(active, now)
                case receives.Report(ok, reason, quarantined):
                    self._report(active, ok, reason, quarantined, now)
                case receives.Drained():
                    self._outbox.drained(active.request.request_id)
        self._due.lower(active.machine.next_deadline())
        if active.reported and not active.machine.writing and self._active.get(active.key) is active:
            del self._active[active.key]

    def _read(self, active: ActiveReceive) -> None:
        for index, (peer, work) in enumerate(active.reads):
            active.in_flight.start(index, peer, work)
        active.arrived, active.posting = active.in_flight.arrived, True
        active.reads = []
        self._looks.set(active, active.began)

    def _transfer_ended(self, active: ActiveReceive, end: TransferEnd, error: TransferError | None, now: float) -> None:
        if isinstance(end, TransferDone) and active.machine.writing == {end.index} and not active.reported:
            self._phase(active, Phase.TRANSFER, time.monotonic())
        self._drive(active, end, now, None if error is None else FailureKind.TRANSFER_FAILED)
        if error is not None:
            active.in_flight.blame(error, now)

    def _report(self, active: ActiveReceive, ok: bool, reason: str, quarantined: bool, now: float) -> None:
        request = active.request
        active.reported = True
        active.binding, active.reads = None, []
        account = self._stager.account(active)
        active.in_flight.cancel()
        if not active.in_flight.ended:
            self._looks.set(active, now)
        if ok and (reason := ending.settle(active, self._stager.copier)):
            ok, active.kind = False, FailureKind.INTERNAL
        if ok:
            self._phase(active, Phase.CONFIRM, now)
            ending.count_good(active, self._stats, now)
            ending.trace(active, self._received)
        else:
            ending.count_failed(active, self._stats)
            ending.read_from_now_on(active, self._stats)
            ending.log_failure(active, reason, account, quarantined)
            ending.give_back(active, self._calls)
            active.in_flight.give_up(now)
        groups = self._manifest.groups
        late = {group: token // groups[group].block_tokens for group, token in active.first_valid_tokens.items()}
        ending.end_span(active, now, "" if ok else reason)
        record(active, self._manifest, self._stager.chunk_bytes, "" if ok else reason, quarantined, now)
        name, attempt = request.request_id, request.attempt
        self._outbox.finished(
            name, ok=ok, quarantined=quarantined, unshareable=late, spare=request.spare, attempt=attempt
        )

    def _goes_on(self, active: ActiveReceive, now: float) -> bool:
        """Give a receive more time whose reading takes long, if part of it has ended since it got the last; or whose
        peer has answered, and that waits for this worker."""
        match active.machine.state:
            case receives.ReceiveState.READING:
                goes_on = active.moved_since()
            case receives.ReceiveState.WAITING:
                goes_on = self._linked.get(active.request.request_id) is active or active.links.connects(active.link)
            case receives.ReceiveState.VERIFYING:
                goes_on = active.comparing or (active.summing is not None and not active.summing.done())
            case _:
                return False
        if goes_on:
            self._drive(active, receives.ReceiveTick(moved=True), now)
        return goes_on

    def _phase(self, active: ActiveReceive, phase: Phase, now: float) -> None:
        self._stats.observe_phase(phase, active.passed(phase, now))
