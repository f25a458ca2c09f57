"""One request's receive on one decode worker, from waiting for its peer to the report that vLLM needs.

    WAITING --peer ready--> READING --all transfers done--> CONFIRMING --verdict: held--> DONE
       |                       |                                |
       +---- peer failed, abort, deadline, a transfer failed, verdict: not held ----> FAILED
                                                     (DRAINING first, while a transfer may still write)

    WAITING --push ready--> PUSHING --push done--> DONE          when the prefill side writes
                               |         (or VERIFYING, CONFIRMING, DONE)
                               +---- push failed, silence, abort, deadline ----> FAILED (DRAINING first)

vLLM keeps a request's blocks until the worker has reported it, also when it was aborted: exactly one `Report` leaves
this machine. It is a success only if the prefill side, asked after the last byte had arrived, said that the blocks
were held all the time. A push needs no such question: the prefill side says "done" of its own blocks, after the last
byte. No transfer can be cancelled, so a failure is reported at once but with `quarantined=True`
while transfers may still write into the blocks; `Drained` follows when the last of them is terminal. For a push only
the prefill side can say so: it is asked until it does, or is known dead.

With verification VERIFYING comes between READING and CONFIRMING, while the blocks are still held. A push that is
verified is confirmed, too: the prefill side holds its blocks until then.

See docs/design/protocol.md, and docs/design/contract.md for what crashes vLLM's scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vllm_pd_connector.protocol.transfers import TransferDone, TransferFailed


class ReceiveState(Enum):
    WAITING = "waiting for the peer"
    READING = "reading"
    PUSHING = "waiting for the prefill side to write"
    VERIFYING = "comparing what was received"
    CONFIRMING = "confirming the read"
    DONE = "done"
    DRAINING = "failed, transfers may still write"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PhaseLimits:
    """Seconds that each phase may take: reading and being written into, without that anything moves."""

    wait_s: float
    read_s: float
    confirm_s: float
    silent_s: float = 15.0


# Events


@dataclass(frozen=True, slots=True)
class PeerReady:
    """The peer is connected and the request is bound; it will take `transfers` transfers (0: nothing is missing).

    `staged` are the indices of those that are written to their destination by this process alone: when the receive
    fails they stop at once and need no quarantine.
    """

    transfers: int
    staged: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """The receive cannot go on: the peer is refused or lost, or the request does not bind. Says nothing about
    transfers that were started; each of those ends by an event of its own."""

    reason: str


@dataclass(frozen=True, slots=True)
class Compared:
    """Answers `Compare`: what differs between the two sides, empty if nothing does."""

    problem: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The prefill side's answer to `Confirm`."""

    held: bool
    reason: str


@dataclass(frozen=True, slots=True)
class VerdictTimeout:
    """No answer to `Confirm` came in time, or one that can be asked for again."""


@dataclass(frozen=True, slots=True)
class PushReady:
    """The peer is known and fits: it can be asked to write."""


@dataclass(frozen=True, slots=True)
class PushAlive:
    """The prefill side answered that it is not done. `arrived`: once nothing but writing is left, how far that is; it
    grows as long as bytes move."""

    arrived: int | None


@dataclass(frozen=True, slots=True)
class PushSilent:
    """No answer to `AskPush` or `Withdraw` came in time, or one that can be asked for again."""


@dataclass(frozen=True, slots=True)
class PushDone:
    """The prefill side says that every byte is in place. `comparable`: it keeps its blocks until they were compared,
    which it can and does if it was asked for it."""

    comparable: bool = False


@dataclass(frozen=True, slots=True)
class PushFailed:
    """The prefill side, or its death, says that the push failed; if not `terminal`, it may still write."""

    reason: str
    terminal: bool


@dataclass(frozen=True, slots=True)
class Abort:
    """The request was aborted on this side."""


@dataclass(frozen=True, slots=True)
class ReceiveTick:
    """Time has passed; see `next_deadline`. `moved`: bytes of this receive have moved since the deadline was set, or
    what it waits for is this process's own work, which goes on; `missing`: what has not come, in words."""

    moved: bool = False
    missing: str = ""


Event = (
    PeerReady
    | PeerFailed
    | TransferDone
    | TransferFailed
    | Compared
    | Verdict
    | VerdictTimeout
    | PushReady
    | PushAlive
    | PushSilent
    | PushDone
    | PushFailed
    | Abort
    | ReceiveTick
)

# Actions


@dataclass(frozen=True, slots=True)
class StartReads:
    """Start the transfers; one that cannot be started is a `TransferFailed(terminal=True)`."""


@dataclass(frozen=True, slots=True)
class Compare:
    """Compare what was received with what the prefill side holds, while it still holds it."""


@dataclass(frozen=True, slots=True)
class Confirm:
    """Send `ReadDone` and bring back its verdict; repeated with the same attempt until the phase's deadline."""


@dataclass(frozen=True, slots=True)
class AskPush:
    """Send `PushInto` and bring back its answer; repeated with the same attempt."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Send `WithdrawPush` and bring back its answer, as `PushFailed(terminal=True)` or `PushSilent`."""


@dataclass(frozen=True, slots=True)
class Report:
    """Tell vLLM. `quarantined`: transfers may still write, keep the destination until `Drained`."""

    ok: bool
    reason: str
    quarantined: bool


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing writes any more; the quarantine is over."""


Action = StartReads | Compare | Confirm | AskPush | Withdraw | Report | Drained


class Receive:
    """The machine of one receive. Events after the end are late messages and have no effect.

    With `verify`, what was received is compared before it is confirmed; the limit is that of reading.
    """

    def __init__(self, limits: PhaseLimits, now: float, verify: bool = False) -> None:
        self._limits = limits
        self.verifies = verify
        self._state = ReceiveState.WAITING
        self._deadline: float | None = now + limits.wait_s
        self._writing: set[int] = set()
        self._staged: frozenset[int] = frozenset()
        self._pushed = False
        self._arrived: int | None = None  # as the prefill side said last, for the first time at `_moved_at`
        self._moved_at = now

    @property
    def state(self) -> ReceiveState:
        return self._state

    @property
    def writing(self) -> frozenset[int]:
        """Indices of the transfers that may still write."""
        return frozenset(self._writing)

    def next_deadline(self) -> float | None:
        """When a `ReceiveTick` is due, None if none is."""
        return self._deadline

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about an event; the actions are executed in order, before the next event."""
        match event:
            case TransferDone(index):
                return self._ended(index, now)
            case TransferFailed(index, reason, terminal):
                return self._transfer_failed(index, reason, terminal)
            case PeerReady(transfers, staged):
                return self._start(transfers, staged, now)
            case PeerFailed(reason):
                return self._fail(reason)
            case Abort():
                return self._fail("aborted")
            case ReceiveTick(moved, missing):
                return self._tick(moved, missing, now)
            case Compared(problem):
                return self._compared(problem, now)
            case Verdict(held, reason):
                return self._judge(held, reason)
            case VerdictTimeout():
                return [Confirm()] if self._state is ReceiveState.CONFIRMING else []
            case PushReady():
                return self._ask(now)
            case PushAlive(arrived):
                return self._push_alive(arrived, now)
            case PushSilent():
                return self._ask_again()
            case PushDone(comparable):
                return self._push_ended(None, now, comparable)
            case PushFailed(reason, terminal=True):
                return self._push_ended(reason, now)
            case PushFailed(reason):
                return self._fail(reason) if self._state is ReceiveState.PUSHING else self._ask_again()

    def _start(self, transfers: int, staged: frozenset[int], now: float) -> list[Action]:
        if self._state is not ReceiveState.WAITING:
            return []
        if transfers == 0:
            return self._confirm(now)  # nothing was read
        self._enter(ReceiveState.READING, now + self._limits.read_s)
        self._writing = set(range(transfers))
        self._staged = staged
        return [StartReads()]

    def _confirm(self, now: float) -> list[Action]:
        self._enter(ReceiveState.CONFIRMING, now + self._limits.confirm_s)
        return [Confirm()]

    def _ended(self, index: int, now: float) -> list[Action]:
        if index not in self._writing:
            return []
        self._writing.discard(index)
        if self._writing:
            return []
        if self._state is ReceiveState.DRAINING:
            self._enter(ReceiveState.FAILED)
            return [Drained()]
        if self.verifies:
            self._enter(ReceiveState.VERIFYING, now + self._limits.read_s)
            return [Compare()]
        return self._confirm(now)

    def _compared(self, problem: str, now: float) -> list[Action]:
        if self._state is not ReceiveState.VERIFYING:
            return []
        return self._fail(f"verification: {problem}") if problem else self._confirm(now)

    def _transfer_failed(self, index: int, reason: str, terminal: bool) -> list[Action]:
        if index not in self._writing:
            return []
        if terminal:
            self._writing.discard(index)
        if self._state is ReceiveState.READING:
            return self._fail(reason)
        if self._writing:
            return []
        self._enter(ReceiveState.FAILED)
        return [Drained()]

    def _judge(self, held: bool, reason: str) -> list[Action]:
        if self._state is not ReceiveState.CONFIRMING:
            return []
        if not held:
            return self._fail(f"the prefill side no longer vouches for the blocks: {reason}")
        self._enter(ReceiveState.DONE)
        return [Report(ok=True, reason="", quarantined=False)]

    def _ask(self, now: float) -> list[Action]:
        if self._state is not ReceiveState.WAITING:
            return []
        self._pushed, self._writing = True, {0}
        self._enter(ReceiveState.PUSHING, now + self._limits.silent_s)
        return [AskPush()]

    def _ask_again(self) -> list[Action]:
        if self._state is ReceiveState.PUSHING:
            return [AskPush()]
        return [Withdraw()] if self._state is ReceiveState.DRAINING and self._pushed else []

    def _push_alive(self, arrived: int | None, now: float) -> list[Action]:
        """It is judged by answers alone: what moves between two of them is known with the second."""
        if self._state is ReceiveState.PUSHING:
            self._deadline = now + self._limits.silent_s
            if arrived is None or arrived != self._arrived:
                self._arrived, self._moved_at = arrived, now
            elif now - self._moved_at >= self._limits.read_s:
                what = f"the prefill side answers, and has ended no part of its writes since it had ended {arrived}"
                return self._fail(f"deadline: {self._state.value} took longer than {self._limits.read_s:g} s: {what}")
        return self._ask_again()

    def _push_ended(self, failure: str | None, now: float, comparable: bool = False) -> list[Action]:
        if not self._pushed or not self._writing:
            return []
        self._writing.clear()
        if self._state is ReceiveState.DRAINING:
            self._enter(ReceiveState.FAILED)
            return [Drained()]
        if failure is not None:
            return self._fail(failure)
        if self.verifies and comparable:
            self._enter(ReceiveState.VERIFYING, now + self._limits.read_s)
            return [Compare()]
        self._enter(ReceiveState.DONE)
        return [Report(ok=True, reason="", quarantined=False)]

    def _tick(self, moved: bool, missing: str, now: float) -> list[Action]:
        if self._deadline is None or now < self._deadline:
            return []
        limit = {
            ReceiveState.WAITING: self._limits.wait_s,
            ReceiveState.READING: self._limits.read_s,
            ReceiveState.PUSHING: self._limits.silent_s,
            ReceiveState.VERIFYING: self._limits.read_s,
            ReceiveState.CONFIRMING: self._limits.confirm_s,
        }[self._state]
        if moved:
            self._deadline = now + limit
            return []
        return self._fail(f"deadline: {self._state.value} took longer than {limit:g} s" + (missing and f": {missing}"))

    def _fail(self, reason: str) -> list[Action]:
        if self._deadline is None:  # it has ended, or failed before
            return []
        self._writing -= self._staged
        quarantined = bool(self._writing)
        self._enter(ReceiveState.DRAINING if quarantined else ReceiveState.FAILED)
        report = Report(ok=False, reason=reason, quarantined=quarantined)
        return [report, Withdraw()] if quarantined and self._pushed else [report]

    def _enter(self, state: ReceiveState, deadline: float | None = None) -> None:
        self._state, self._deadline = state, deadline
