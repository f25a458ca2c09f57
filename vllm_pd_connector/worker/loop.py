"""The transfer thread of one worker: it owns the transport, the side-channel client, all links and all receives.

Other threads only put orders in (`submit`) and take results out of the outbox. Everything that decides is a state
machine without I/O (`protocol.peer`, `protocol.receive`); `links` and this loop bring them events and carry out their
actions.
It sleeps until the side channel has input, an order came or a deadline is due; only while a transfer runs does it
look every few milliseconds, because transports are polled.

A request's way: order -> its peer is wanted -> (handshake, once per incarnation) -> bind -> reads -> the prefill side
confirms that it held the blocks -> report. Whatever goes wrong on the way ends in one failed report with the reason.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.config import Config
from vllm_pd_connector.errors import BindError, PeerLost, ProtocolError, TransferError
from vllm_pd_connector.geometry.manifest import Manifest, Segment
from vllm_pd_connector.geometry.runs import Runs
from vllm_pd_connector.geometry.sums import difference
from vllm_pd_connector.observability.stats import FailureKind, PDStats, Phase
from vllm_pd_connector.protocol import peer as peers
from vllm_pd_connector.protocol import receive as receives
from vllm_pd_connector.protocol.messages import (
    DeclinePush,
    Failure,
    FailureCode,
    Moved,
    ReadDone,
    ReadVerdict,
    Release,
    Verified,
    Verify,
)
from vllm_pd_connector.protocol.push import ANSWER_S
from vllm_pd_connector.protocol.receive import Receive
from vllm_pd_connector.sidechannel.client import Outcome
from vllm_pd_connector.sidechannel.keys import keys_of
from vllm_pd_connector.sidechannel.waiting import Wake
from vllm_pd_connector.steps import ReceiveOrder
from vllm_pd_connector.transport.base import Peer as TransportPeer
from vllm_pd_connector.transport.base import Status, Transport
from vllm_pd_connector.worker.active import Active
from vllm_pd_connector.worker.asking import Asking
from vllm_pd_connector.worker.calls import Calls
from vllm_pd_connector.worker.convert import Stager
from vllm_pd_connector.worker.copies import Memory, copier_for
from vllm_pd_connector.worker.link import Link
from vllm_pd_connector.worker.links import FETCH_ATTEMPTS, Links
from vllm_pd_connector.worker.outbox import Outbox
from vllm_pd_connector.worker.pace import pause
from vllm_pd_connector.worker.push_link import AskLink
from vllm_pd_connector.worker.pushing import Pushes, PushSetup
from vllm_pd_connector.worker.selftest import SCRATCH_BYTES, self_test
from vllm_pd_connector.worker.verify import is_chosen, memory_of, of_pieces, received_sums, starts_of

logger = init_logger(__name__)

POLL_S = 0.001
POLL_DRAINING_S = 0.05
CONFIRM_ATTEMPTS = 3
RELEASE_TIMEOUT_S = 5.0
SHUTDOWN_S = 10.0
GOODBYE_S = 0.5


class TransferLoop:
    """See the module.

    Args:
        manifest: this worker's, without the endpoint, which the transport gives when the thread has started.
        reader: this worker's number among the `readers` workers of its instance.
        push: for a worker of a prefill instance that writes; else None.
        received: called in the thread before a good receive is reported (the digest trace), or None; its other
            arguments are the prefill's request id and `Bound.late_starts`.
    """

    def __init__(
        self,
        config: Config,
        manifest: Manifest,
        make_transport: Callable[[], Transport],
        outbox: Outbox,
        reader: int,
        readers: int,
        push: PushSetup | None = None,
        received: Callable[[ReceiveOrder, str, Mapping[int, int]], None] | None = None,
    ) -> None:
        self._config = config
        self._manifest = manifest
        self._make_transport = make_transport
        self._outbox = outbox
        self._reader, self._readers = reader, readers
        self._received = received
        self._keys = keys_of(config)
        self._push = push
        self._pushes: Pushes | None = None
        self._scratch: Memory | None = None
        silent = config.handshake_timeout + ANSWER_S
        self._limits = receives.Limits(
            config.handshake_timeout, config.transfer_timeout, config.confirm_timeout, silent
        )
        self._inbox: deque[tuple[Sequence[ReceiveOrder], Sequence[str]]] = deque()
        self._results: deque[Callable[[float], None]] = deque()
        self._memory = memory_of(manifest.segments) if config.verify != "off" else []
        self._summing = ThreadPoolExecutor(1, "pd-sums")
        self._wake = Wake()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="pd-transfer", daemon=True)
        self._started: Future[bytes] = Future()
        self._active: dict[str, Active] = {}
        self._stats = PDStats()

    def start(self) -> bytes:
        """Start the thread, create the transport in it and register the memory; returns the transport's endpoint.

        Raises:
            PDConnectorError: the transport cannot be created, or refuses the memory.
        """
        self._thread.start()
        return self._started.result()

    @property
    def scratch(self) -> Segment | None:
        """Memory for self-tests, once the thread has started."""
        return self._scratch.segment if self._scratch is not None else None

    def submit(self, orders: Sequence[ReceiveOrder], aborts: Sequence[str]) -> None:
        """Begin and give up receives; callable from any thread, returns at once."""
        self._inbox.append((orders, aborts))
        self._wake.set()

    def step_launched(self, step: int, is_done: Callable[[], bool]) -> None:
        """A forward was launched in the calling thread; see `StepClock`. Returns at once."""
        assert self._push is not None
        self._push.clock.launched(step, is_done)
        if self._pushes is not None and self._pushes.waiting:
            self._wake.set()

    def close(self) -> None:
        """End the thread: receives under way fail and their leases are given back, but nobody takes their reports any
        more. Nothing is written to memory after this returns."""
        self._stop = True
        self._wake.set()
        self._thread.join(timeout=SHUTDOWN_S)
        self._summing.shutdown(cancel_futures=True)

    # Everything below runs in the thread.

    def _run(self) -> None:
        try:
            self._transport = self._make_transport()
            self._stager: Stager[Active] = Stager(self._transport, self._manifest.segments, self._config.staging_bytes)
            if self._config.mode == "auto" or self._push is not None:
                self._scratch = copier_for(self._manifest.segments).allocate(SCRATCH_BYTES)
            scratch = () if self.scratch is None else (self.scratch,)
            self._transport.register((*self._manifest.segments, *self._stager.segments, *scratch))
            self._started.set_result(self._transport.describe())
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._calls = Calls(self._keys)
        shared = (self._config, self._manifest, self._transport, self._stager.chunk_bytes, self._calls)
        test = self._self_test if self._config.mode == "auto" else None
        self._links = Links(*shared, self, self._observe, connected=test)
        self._asked = Links(*shared, self, self._observe, AskLink)
        place = self._manifest.parallel
        seat = (place.pp_rank, place.tp_rank, self._reader, self._readers)
        per_question = ANSWER_S + self._config.handshake_timeout / FETCH_ATTEMPTS
        self._asking = Asking(self._calls, seat, per_question, self._drive)
        if self._push is not None:
            self._pushes = Pushes(*shared, self._push, self._reader, lambda: self._stats)
        try:
            while not self._stop:
                self._calls.wait(self._wake, self._next_deadline())
                self._turn(time.monotonic())
            self._fail_all("this instance is shutting down", time.monotonic())
        finally:
            self._calls.close(linger_s=GOODBYE_S)
            self._transport.close()

    def _turn(self, now: float) -> None:
        """One round: orders, replies, transfers, deadlines. An unexpected error fails the receives, not the thread."""
        try:
            while self._inbox:
                orders, aborts = self._inbox.popleft()
                for order in orders:
                    self._begin(order, now)
                for request_id in aborts:
                    self._abort(request_id, now)
            while self._results:
                self._results.popleft()(now)
            for endpoint in self._calls.deliver(now):
                self._links.departed(endpoint, now)
                self._asked.departed(endpoint, now)
                if self._pushes is not None:
                    self._pushes.departed(endpoint, now)
            self._poll(now)
            self._tick(now)
            if self._pushes is not None:
                self._pushes.turn(now)
        except Exception as error:
            logger.exception("the transfer thread met an unexpected error")
            self._fail_all(f"unexpected {type(error).__name__}: {error}", now)
        if not self._stats.is_empty():
            self._outbox.count(self._stats)
            self._stats = PDStats()

    def _next_deadline(self) -> float | None:
        moments = [m for active in self._active.values() if (m := active.machine.next_deadline()) is not None]
        moments += [active.retry_at for active in self._active.values() if active.retry_at is not None]
        now = time.monotonic()
        due = [self._links.next_deadline(), self._asked.next_deadline()]
        due += [self._pushes.next_deadline(now)] if self._pushes is not None else []
        moments += [moment for moment in due if moment is not None]
        for active in self._active.values():
            if active.transfers:
                moments.append(now + (POLL_DRAINING_S if active.reported else pause(now - active.phase_began)))
        if self._stager.active:
            moments.append(now if self._stager.converting else now + POLL_S)
        elif self._stager.draining:
            moments.append(now + POLL_DRAINING_S)
        return min(moments, default=None)

    # Orders

    def _begin(self, order: ReceiveOrder, now: float) -> None:
        remote, push = order.remote, order.push
        if remote is None and push is None:
            logger.error("request %s: receive failed: %s", order.request_id, order.error)
            self._stats.fail(FailureKind.BAD_PARAMETERS)
            self._outbox.finished(order.request_id, ok=False, quarantined=False)
            return
        if push is not None and not order.either:
            links, key, engine_id, prefill = self._asked, push.peer, push.engine_id, push.prefill.name
        else:
            assert remote is not None
            links, key, engine_id, prefill = self._links, remote.peer, remote.remote_engine_id, remote.remote_request_id
        link = links.get(key, engine_id, now)
        verify = remote is not None and is_chosen(remote.lease, self._config.verify)
        machine, attempt = Receive(self._limits, now, verify), secrets.token_bytes(16)
        self._active[order.request_id] = Active(order, links, link, machine, attempt, prefill, now, now)
        links.drive(link, peers.Wanted(order.request_id), now)

    def _abort(self, request_id: str, now: float) -> None:
        active = self._active.get(request_id)
        if active is not None and not active.reported:
            active.links.drive(active.link, peers.Unwanted(request_id), now)
            self._drive(active, receives.Abort(), now, FailureKind.ABORTED)

    # What becomes of links (`links.User`)

    def ready(self, request_id: str, now: float) -> None:
        """Its peer is ready: bind the request and start its reads."""
        active = self._active[request_id]
        if active.asks:
            self._phase(active, Phase.QUEUE, now)
            self._drive(active, receives.PushReady(), now)
            return
        try:
            bound = active.link.bind(active.order)
        except BindError as error:
            self._drive(active, receives.PeerFailed(str(error)), now, FailureKind.BAD_PARAMETERS)
            return
        except Exception as error:  # a defect of ours that one request met must not reach the others
            logger.exception("request %s: binding failed", active.order.request_id)
            self._drive(active, receives.PeerFailed(f"{type(error).__name__}: {error}"), now, FailureKind.INTERNAL)
            return
        active.reads, active.late_starts = bound.reads, bound.late_starts
        self._phase(active, Phase.QUEUE, now)
        staged = frozenset(i for i, (_, work) in enumerate(active.reads) if not isinstance(work, Runs))
        self._drive(active, receives.PeerReady(len(active.reads), staged), now)

    def refused(self, request_id: str, reason: str, kind: FailureKind, now: float) -> None:
        """Its peer cannot be had."""
        self._drive(self._active[request_id], receives.PeerFailed(reason), now, kind)

    def lost(self, link: Link, ranks: Sequence[TransportPeer], reason: str, now: float) -> None:
        """A peer is gone: what was read from it fails, and what may still have been written cannot be any more."""
        waiting = receives.State.WAITING
        for peer in ranks:
            self._stager.peer_gone(peer)
        for active in [a for a in self._active.values() if a.link is link and a.machine.state is not waiting]:
            self._drive(active, receives.PeerFailed(reason), now, FailureKind.PEER_UNREACHABLE)
            for index in sorted(active.stuck):
                self._drive(active, receives.TransferFailed(index, reason, terminal=True), now)
            if link.machine.over:
                self._drive(active, receives.PushFailed(reason, terminal=True), now, FailureKind.PEER_UNREACHABLE)

    def uses(self, link: Link) -> bool:
        """Whether a receive holds this link."""
        return any(active.link is link for active in self._active.values())

    # Receives

    def _drive(self, active: Active, event: receives.Event, now: float, kind: FailureKind | None = None) -> None:
        """Give a receive's machine an event and carry out what it asks for. `kind` labels a failure it may lead to."""
        if kind is not None:
            active.kind = kind
        for action in active.machine.handle(event, now):
            match action:
                case receives.StartReads():
                    self._read(active, now)
                case receives.Verify():
                    self._verify(active, now)
                case receives.Confirm():
                    self._confirm(active, now)
                case receives.AskPush():
                    self._asking.ask(active, now)
                case receives.Withdraw():
                    self._asking.withdraw(active, now)
                case receives.Report(ok, reason, quarantined):
                    self._report(active, ok, reason, quarantined, now)
                case receives.Drained():
                    self._outbox.drained(active.order.request_id)
        if active.reported and not active.machine.writing:
            self._active.pop(active.order.request_id, None)

    def _read(self, active: Active, now: float) -> None:
        began = time.monotonic()
        failed: list[tuple[int, TransferError]] = []
        for index, (peer, runs) in enumerate(active.reads):
            if not isinstance(runs, Runs):
                self._stager.start(active, index, active.link, peer, runs)
                continue
            try:
                transfer = self._transport.read(peer, runs)
            except TransferError as error:
                failed.append((index, error))
                continue
            active.transfers[index] = transfer
            active.moved += Moved(runs.total_bytes, len(runs), transfer.descriptors)
        self._stats.observe_phase(Phase.POST, time.monotonic() - began)
        active.reads = []
        for index, failure in failed:
            self._transfer_failed(active, index, failure, now)

    def _poll(self, now: float) -> None:
        for active in list(self._active.values()):
            for index, transfer in list(active.transfers.items()):
                try:
                    if self._transport.poll(transfer) is Status.RUNNING:
                        continue
                except TransferError as error:
                    del active.transfers[index]
                    self._transfer_failed(active, index, error, now)
                else:
                    del active.transfers[index]
                    self._transfer_done(active, index, now)
        for stream, failure in self._stager.poll():
            active = stream.owner
            active.moved += Moved(stream.bytes, stream.runs, stream.descriptors)
            if failure is not None:
                self._transfer_failed(active, stream.index, failure, now)
            else:
                self._transfer_done(active, stream.index, now)

    def _transfer_done(self, active: Active, index: int, now: float) -> None:
        if active.machine.writing == {index} and not active.reported:
            self._phase(active, Phase.TRANSFER, time.monotonic())
        self._drive(active, receives.TransferDone(index), now)

    def _transfer_failed(self, active: Active, index: int, error: TransferError, now: float) -> None:
        if not error.terminal:
            active.stuck.add(index)  # nothing more will be heard of it before the peer is known dead
        event = receives.TransferFailed(index, str(error), error.terminal)
        self._drive(active, event, now, FailureKind.TRANSFER_FAILED)
        if isinstance(error, PeerLost):
            active.links.drive(active.link, peers.Lost(str(error)), now)
        else:
            active.links.drive(active.link, peers.Suspected(str(error)), now)

    def _confirm(self, active: Active, now: float) -> None:
        assert active.order.remote is not None
        message = ReadDone(active.order.remote.lease, self._reader, self._readers, active.attempt)
        try:
            self._calls.ask(
                active.link.endpoint,
                message,
                self._config.confirm_timeout / CONFIRM_ATTEMPTS,
                lambda outcome, at: self._confirmed(active, outcome, at),
            )
        except ProtocolError as error:
            self._drive(active, receives.Verdict(False, str(error)), now, FailureKind.INTERNAL)

    def _confirmed(self, active: Active, outcome: Outcome, now: float) -> None:
        match outcome:
            case ReadVerdict(held=held, reason=reason):
                self._drive(active, receives.Verdict(held, reason), now, FailureKind.LEASE_LOST)
            case Failure(code=FailureCode.BUSY | FailureCode.NOT_READY):
                self._drive(active, receives.VerdictTimeout(), now)
            case Failure(message=message):
                self._drive(active, receives.Verdict(False, message), now, FailureKind.LEASE_LOST)
            case _:
                active.links.drive(active.link, peers.Suspected(str(outcome)), now)
                self._drive(active, receives.VerdictTimeout(), now)

    def _verify(self, active: Active, now: float) -> None:
        """Ask for the prefill side's sums and make ours; what they say comes back to this thread."""
        order = active.order
        assert order.remote is not None
        active.verified = True
        starts = starts_of(order, self._manifest, active.late_starts)
        mine = self._summing.submit(received_sums, self._manifest, self._memory, order, starts)

        def compare(outcome: Outcome) -> str:
            match outcome:
                case Verified(pieces):
                    return difference(mine.result(), of_pieces(pieces))
                case Failure(message=reason):
                    return reason
                case _:
                    return str(outcome)

        def compared(problem: Future[str]) -> None:
            if problem.cancelled():  # this instance ends
                return
            error = problem.exception()
            text = problem.result() if error is None else f"{type(error).__name__}: {error}"
            self._results.append(lambda at: self._drive(active, receives.Verified(text), at, FailureKind.VERIFICATION))
            self._wake.set()

        def answered(outcome: Outcome, _: float) -> None:
            self._summing.submit(compare, outcome).add_done_callback(compared)

        try:
            message = Verify(order.remote.lease, starts, order.stop)
            self._calls.ask(active.link.endpoint, message, self._config.transfer_timeout, answered)
        except ProtocolError as error:
            self._drive(active, receives.Verified(str(error)), now, FailureKind.VERIFICATION)

    def _report(self, active: Active, ok: bool, reason: str, quarantined: bool, now: float) -> None:
        order = active.order
        active.reported = True
        active.reads = []
        account = self._stager.account(active)
        self._stager.cancel(active)
        if ok:
            self._phase(active, Phase.CONFIRM, now)
            self._stats.observe_phase(Phase.TOTAL, now - active.began)
            self._stats.count("receives")
            self._stats.count("bytes", active.moved.bytes)
            self._stats.count("runs", active.moved.runs)
            self._stats.count("descriptors", active.moved.descriptors)
            self._stats.count("verified", int(active.verified))
            if self._received is not None:
                self._received(order, active.prefill, active.late_starts)
        else:
            self._stats.fail(active.kind)
            log = logger.info if active.kind is FailureKind.ABORTED else logger.error
            log(
                "request %s: receive of tokens [%d, %d) of prefill request %s at %s failed: %s%s%s",
                order.request_id,
                order.start,
                order.stop,
                active.prefill,
                active.link.endpoint,
                reason,
                f" ({account})" if account else "",
                "; its blocks stay in quarantine until no transfer can write into them" if quarantined else "",
            )
            self._give_back(active)
        groups = self._manifest.groups
        private = {group: token // groups[group].block_tokens for group, token in active.late_starts.items()}
        self._outbox.finished(order.request_id, ok=ok, quarantined=quarantined, private=private)

    def _give_back(self, active: Active) -> None:
        """Tell the prefill side that this lease needs no keeping; nobody waits for the answer."""
        remote, push = active.order.remote, active.order.push
        if active.question:
            return  # whom we asked to write has failed the push itself, or learns it by the withdrawal
        if remote is not None:
            message: Release | DeclinePush = Release((remote.lease,))
        else:
            assert push is not None
            message = DeclinePush(push.prefill)
        try:
            self._calls.ask(active.link.endpoint, message, RELEASE_TIMEOUT_S)
        except ProtocolError as error:
            logger.debug("giving back prefill %s: %s", active.prefill, error)

    def _self_test(self, link: Link) -> None:
        """Mode auto: find the faster way to a prefill instance that can be asked to write."""
        if link.scratch is None or self.scratch is None:
            logger.info("prefill engine %s reads only: it does not offer to write", link.engine_id)
            return
        try:
            link.figures = self_test(self._transport, link.scratch[0], self.scratch, link.scratch[1])
        except TransferError as error:
            logger.warning("self-test with prefill engine %s: %s; it is read from", link.engine_id, error)
            return
        way = "is asked to write" if link.figures.prefers_push else "is read from"
        logger.info("self-test with prefill engine %s: %s; it %s", link.engine_id, link.figures, way)
        self._stats.gauge("read bytes/s", round(link.figures.read))
        self._stats.gauge("write bytes/s", round(link.figures.write))
        self._stats.gauge("push chosen", int(link.figures.prefers_push))

    def _observe(self, phase: Phase, seconds: float) -> None:
        self._stats.observe_phase(phase, seconds)

    def _phase(self, active: Active, phase: Phase, now: float) -> None:
        self._stats.observe_phase(phase, now - active.phase_began)
        active.phase_began = now

    # Time

    def _tick(self, now: float) -> None:
        for active in list(self._active.values()):
            if (due := active.machine.next_deadline()) is not None and due <= now:
                if active.machine.state is not receives.State.WAITING:
                    active.links.drive(active.link, peers.Suspected("a receive exceeded its deadline"), now)
                active.links.drive(active.link, peers.Unwanted(active.order.request_id), now)
                self._drive(active, receives.Tick(), now, FailureKind.DEADLINE)
            if active.retry_at is not None and active.retry_at <= now:
                active.retry_at = None
                self._asking.again(active, now)
        self._links.tick(now)
        self._asked.tick(now)

    def _fail_all(self, reason: str, now: float) -> None:
        for active in list(self._active.values()):
            if not active.reported:
                active.links.drive(active.link, peers.Unwanted(active.order.request_id), now)
                self._drive(active, receives.PeerFailed(reason), now, FailureKind.INTERNAL)
