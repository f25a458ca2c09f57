"""How a decode worker asks a prefill instance to write, and takes it back.

Both messages are repeated until they are answered: `PushInto` until the push is done or has failed, `WithdrawPush`
until nothing of it can land, and the more seldom the longer a worker there is out of sight: who could say so may be
gone for ever, and another instance have its address. The receive's machine decides; this module sends, and reads what
is answered.

Only two things prove that nothing lands any more: the word of the life that was asked, and the end of the processes of
all its workers (`peers.process_watch`), each of which may write. So nothing is asked before all of them are watched,
each message says which incarnation it is for, and nobody else's answer counts: the core of an instance may end, be
replaced or be out of reach while its workers write on.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.errors import Busy, DeadlineExceeded, ProtocolError
from vllm_pd_connector.geometry.bind import window_start
from vllm_pd_connector.observability.stats import FailureKind
from vllm_pd_connector.protocol import peer as peers
from vllm_pd_connector.protocol import receive as receives
from vllm_pd_connector.protocol.wire.fields import MAX_COMPARE_S
from vllm_pd_connector.protocol.wire.messages import Failure, FailureCode
from vllm_pd_connector.protocol.wire.push_messages import Pushed, PushInto, PushState, WithdrawPush
from vllm_pd_connector.sidechannel.client import busy_of
from vllm_pd_connector.worker.peers.process_watch import LOOK_S
from vllm_pd_connector.worker.receive.ending import kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from vllm_pd_connector.geometry.manifest import Group
    from vllm_pd_connector.metadata import PushFrom
    from vllm_pd_connector.sidechannel.client import Outcome
    from vllm_pd_connector.worker.peers.earliest import Earliest
    from vllm_pd_connector.worker.peers.process_watch import ProcessWatch, ProcessWatches
    from vllm_pd_connector.worker.receive.active import ActiveReceive, Drive
    from vllm_pd_connector.worker.rpc import PendingCalls

logger = init_logger(__name__)

RETRY_S, SELDOM_S = 0.5, 30.0
OPENING_S = 0.005
STILL_S = 60.0

ReaderRank = tuple[int, int, int, int, int]
"""Pipeline, prefill-context and tensor rank, number among the readers, how many readers there are."""


class PushRequester:
    """See the module. `timeout_s` is for one message and its answer, `compare_s` for the comparison of what was written
    with what the prefill side holds, in receives that are verified; `groups` are this side's. `due` learns when
    somebody is to be asked again."""

    def __init__(
        self,
        calls: PendingCalls,
        reader_rank: ReaderRank,
        timeout_s: float,
        compare_s: float,
        drive: Drive,
        groups: Sequence[Group],
        due: Earliest,
        processes: ProcessWatches,
    ) -> None:
        self._calls = calls
        self._reader_rank = reader_rank
        self._timeout_s = timeout_s
        self._compare_s = min(compare_s, MAX_COMPARE_S)
        self._drive = drive
        self._groups = groups
        self._due = due
        self._processes, self._looked_at, self._losses = processes, -inf, 0
        self._asked_for: dict[ActiveReceive, None] = {}  # what somebody may write
        self._drains = False
        self._windowed = frozenset(i for i, group in enumerate(groups) if group.window)

    def ask(self, active: ActiveReceive, now: float) -> None:
        """Ask for the push, or how far it is. Nothing is asked before every worker that may write is watched."""
        if not active.question:
            if not self._all_here(active, now):
                return
            active.life = active.link.machine.key.incarnation
        request, terms = active.request, _terms(active)
        message = PushInto(
            terms.prefill,
            terms.home,
            *self._reader_rank,
            active.attempt,
            request.blocks,
            request.start,
            request.stop,
            terms.prompt_digest,
            self._compare_s if active.machine.verifies else 0.0,
            reading=request.attempt,
            waited_s=max(request.waited_s + now - active.began, 0.0),
            incarnation=active.life,
            weights=request.weights,
            trace=active.taken.trace,
        )
        try:
            self._send(active, message, self._asked)
        except Busy as error:  # it only has to wait
            self._asked(active, error, now)
        except ProtocolError as error:
            never = not active.question  # what was asked before goes on
            self._drive(active, receives.PushFailed(str(error), terminal=never), now, FailureKind.INTERNAL)

    def withdraw(self, active: ActiveReceive, now: float) -> None:
        """Ask for the end of the push."""
        if not active.question:
            self._drive(active, receives.PushFailed("it was not asked for", terminal=True), now)
            return
        self._drains = True
        active.withdrawn_at = active.withdrawn_at or now
        message = WithdrawPush(_terms(active).prefill, active.attempt, active.life)
        try:
            self._send(active, message, self._withdrawn)
        except ProtocolError:
            self._again_at(active, now + _patience(active, now))

    def tick(self, now: float) -> None:
        """Fail or end pushes by what is known of the processes that may write."""
        losses = self._processes.losses
        if not self._asked_for or (losses == self._losses and now < self._looked_at + LOOK_S):
            return
        self._looked_at, self._losses = now, losses
        watches = {watch for active in self._asked_for for watch in active.watches}  # most are many pushes'
        for watch in watches:
            watch.look(now)
        closed = {watch for watch in watches if watch.closed}
        for active in list(self._asked_for):
            if active.machine.writing:
                self._look(active, closed, now)
            else:
                del self._asked_for[active]
        self._drains = any(active.reported for active in self._asked_for)

    def next_look(self) -> float | None:
        """When a `tick` is due, if no process ends before: nobody else says when a quarantine is over."""
        return self._looked_at + LOOK_S if self._drains else None

    def _look(self, active: ActiveReceive, closed: AbstractSet[ProcessWatch], now: float) -> None:
        if all(watch.over for watch in active.watches):
            reason = f"all workers of the prefill instance at {active.link.machine.key} have ended"
            self._drive(active, receives.PushFailed(reason, terminal=True), now, FailureKind.PEER_UNREACHABLE)
        elif active.reported:
            self._tell(active, now)
        elif closed and (ended := next((watch for watch in active.watches if watch in closed), None)) is not None:
            failed = receives.PushFailed(f"a {ended}", terminal=False)
            self._drive(active, failed, now, FailureKind.PEER_UNREACHABLE)

    def _tell(self, active: ActiveReceive, now: float) -> None:
        """Say now and then whose word a quarantine waits for."""
        if now < active.tell_at:
            return
        if active.tell_at:
            logger.warning(
                "request %s: its blocks stay in quarantine until the prefill instance at %s says that nothing is "
                "written into them any more, or all its workers have ended: %s",
                active.request.request_id,
                active.link.machine.key,
                "; ".join(map(str, active.watches)),
            )
        active.tell_at = now + max(STILL_S, now - active.began)

    def _all_here(self, active: ActiveReceive, now: float) -> bool:
        """Whether all workers there are watched; else it is looked again soon, or the push fails."""
        watches = active.link.watches.values()
        active.watches = tuple(watch for watch in watches if watch is not None)
        for watch in active.watches:
            watch.look(now)
        if len(active.watches) < len(watches):
            self._unwatched(active, "one does not say where it listens; run the same release on both sides", now)
        elif (bad := next((watch for watch in active.watches if watch.lost), None)) is not None:
            self._unwatched(active, f"{bad}; let decode workers reach the ports of prefill workers", now)
        elif all(watch.here for watch in active.watches):
            return True
        else:
            self._again_at(active, now + OPENING_S)
        return False

    def _unwatched(self, active: ActiveReceive, why: str, now: float) -> None:
        reason = f"the end of its writes could not be noticed, because a worker there cannot be watched: {why}"
        self._drive(active, receives.PushFailed(reason, terminal=True), now, FailureKind.PEER_UNREACHABLE)

    def _again_at(self, active: ActiveReceive, moment: float) -> None:
        active.retry_at = moment
        self._due.lower(moment)

    def _send(
        self,
        active: ActiveReceive,
        message: PushInto | WithdrawPush,
        handler: Callable[[ActiveReceive, Outcome, float], None],
    ) -> None:
        active.question += 1
        self._asked_for[active] = None
        question, active.retry_at, active.busy = active.question, None, ""

        def answered(outcome: Outcome, now: float) -> None:
            if active.question == question:  # else another was sent since
                handler(active, outcome, now)

        try:
            self._calls.ask(active.link.endpoint, message, self._timeout_s, answered)
        except ProtocolError:  # nothing was sent; behind any other error somebody may write
            active.question -= 1
            raise

    def _asked(self, active: ActiveReceive, outcome: Outcome, now: float) -> None:
        if busy := busy_of(outcome):
            active.busy = busy
            self._again_at(active, now + RETRY_S)
            return
        match outcome:
            case Pushed(state=PushState.DONE, late_starts=late) if unknown := late.keys() - self._windowed:
                reason = (
                    f"late_starts names group {min(unknown)}, groups with a window are {sorted(self._windowed)} here: "
                    "what was written cannot be told; run the same release on both sides"
                )
                self._drive(active, receives.PushFailed(reason, terminal=True), now, FailureKind.TRANSFER_FAILED)
            case Pushed(state=PushState.DONE, late_starts=late) if beyond := self._beyond_windows(active, late):
                self._drive(active, receives.PushFailed(beyond, terminal=True), now, FailureKind.TRANSFER_FAILED)
            case Pushed(state=PushState.DONE) as done:
                active.first_valid_tokens, active.moved = done.late_starts, done.moved
                active.prefill, active.compared = done.request_id, done.lease
                self._drive(active, receives.PushDone(comparable=done.lease is not None), now)
            case Pushed(state=PushState.FAILED, reason=reason, terminal=terminal):
                kind = kind_of(reason, FailureKind.TRANSFER_FAILED)
                self._drive(active, receives.PushFailed(reason, terminal), now, kind)
            case Pushed(state=PushState.WRITING, moved=moved):
                self._drive(active, receives.PushAlive(moved.descriptors), now, FailureKind.DEADLINE)
            case Pushed():
                self._drive(active, receives.PushAlive(None), now)
            case Failure(code=FailureCode.FOREIGN_ENGINE, message=message):
                # Whoever it is has not taken this in. Who did may still write: what was sent is sent again when a
                # connection is lost, so also the first question may have reached another before.
                failed = receives.PushFailed(message, terminal=False)
                self._drive(active, failed, now, FailureKind.PEER_UNREACHABLE)
                active.links.drive(active.link, peers.Suspected(message), now)
            case Failure(message=message):  # nor does it know of whoever was asked before
                self._drive(active, receives.PushFailed(message, terminal=False), now, FailureKind.TRANSFER_FAILED)
            case _:
                self._unheard(active, outcome, now)

    def _beyond_windows(self, active: ActiveReceive, first_valid_tokens: Mapping[int, int]) -> str:
        """What tokens were not written that the next position looks at, in words; empty if none."""
        for group, late in first_valid_tokens.items():
            if late > (needed := window_start(self._groups[group], active.request.stop)):
                return (
                    f"late_starts: group {group} was written from token {late} on, but position {active.request.stop} "
                    f"looks at those from {needed} on; run the same release on both sides"
                )
        return ""

    def _withdrawn(self, active: ActiveReceive, outcome: Outcome, now: float) -> None:
        match outcome:
            case Pushed(terminal=True, reason=reason):
                self._drive(active, receives.PushFailed(reason, terminal=True), now)
            case Pushed() | Failure() | Busy():  # also of a life that was not asked: it knows nothing of who was
                self._again_at(active, now + _patience(active, now))
            case _:
                self._unheard(active, outcome, now, _patience(active, now))

    def _unheard(self, active: ActiveReceive, outcome: Outcome, now: float, pause: float = RETRY_S) -> None:
        active.links.drive(active.link, peers.Suspected(str(outcome)), now)
        # A timeout already cost its wait. A wrong answer may repeat at once: pause first.
        waited = self._timeout_s if isinstance(outcome, DeadlineExceeded) else 0.0
        self._again_at(active, now + max(pause - waited, 0.0))


def _patience(active: ActiveReceive, now: float) -> float:
    """How soon the end of a push is asked for again: soon while all workers there are seen to live, whose push drains;
    else after as long again as it has been asked for, so that it is heard of at most twice as late as it could be."""
    if active.watches and all(watch.here for watch in active.watches):
        return RETRY_S
    return min(max(RETRY_S, now - active.withdrawn_at), SELDOM_S)


def _terms(active: ActiveReceive) -> PushFrom:
    assert active.request.push is not None
    return active.request.push
