"""How a decode worker asks a prefill instance to write, and takes it back.

Both messages are repeated until they are answered: `PushInto` until the push is done or has failed, `WithdrawPush`
until nothing of it can land. The receive's machine decides; this module sends and reads the answers. When the prefill
side cannot be reached any more, nothing tells whether it still writes. It does not if another life answers at its
address (the link's machine finds that), or if its host refuses connections: then its process has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_pd_connector.errors import DeadlineExceeded, ProtocolError
from vllm_pd_connector.geometry.manifest import Group
from vllm_pd_connector.observability.stats import FailureKind
from vllm_pd_connector.protocol import peer as peers
from vllm_pd_connector.protocol import receive as receives
from vllm_pd_connector.protocol.fields import MAX_COMPARE_S
from vllm_pd_connector.protocol.messages import Failure, FailureCode
from vllm_pd_connector.protocol.push_messages import Pushed, PushInto, PushState, WithdrawPush
from vllm_pd_connector.sidechannel.client import Outcome
from vllm_pd_connector.steps import PushTerms, encode_tables
from vllm_pd_connector.worker.active import Active, Drive
from vllm_pd_connector.worker.calls import Calls
from vllm_pd_connector.worker.knock import Knock

RETRY_S = 0.5
_NOT_UNDERSTOOD = (FailureCode.MALFORMED, FailureCode.VERSION)

Seat = tuple[int, int, int, int]
"""Pipeline rank, tensor rank, number among the readers, how many readers there are."""


class Asking:
    """See the module. `timeout_s` is for one message and its answer, `compare_s` for the comparison of what was written
    with what the prefill side holds, in receives that are verified; `groups` are this side's."""

    def __init__(
        self, calls: Calls, seat: Seat, timeout_s: float, compare_s: float, drive: Drive, groups: Sequence[Group]
    ) -> None:
        self._calls = calls
        self._seat = seat
        self._timeout_s = timeout_s
        self._compare_s = min(compare_s, MAX_COMPARE_S)
        self._drive = drive
        self._windowed = frozenset(i for i, group in enumerate(groups) if group.window)

    def ask(self, active: Active, now: float) -> None:
        """Ask for the push, or how far it is."""
        order, terms = active.order, _terms(active)
        message = PushInto(
            terms.prefill,
            terms.home,
            *self._seat,
            active.attempt,
            encode_tables(order.blocks),
            order.start,
            order.stop,
            terms.prompt_digest,
            self._compare_s if active.machine.verifies else 0.0,
        )
        try:
            self._send(active, message, self._asked)
        except ProtocolError as error:
            never = active.question == 1  # what was asked before goes on
            self._drive(active, receives.PushFailed(str(error), terminal=never), now, FailureKind.INTERNAL)

    def withdraw(self, active: Active, now: float) -> None:
        """Ask for the end of the push."""
        message = WithdrawPush(_terms(active).prefill, active.attempt)
        try:
            self._send(active, message, self._withdrawn)
        except ProtocolError:
            active.retry_at = now + RETRY_S

    def again(self, active: Active, now: float) -> None:
        """The pause after an answer that did not help is over."""
        self._drive(active, receives.PushSilent(), now)

    def _send(
        self, active: Active, message: PushInto | WithdrawPush, handler: Callable[[Active, Outcome, float], None]
    ) -> None:
        active.question += 1
        question, active.retry_at = active.question, None

        def answered(outcome: Outcome, now: float) -> None:
            if active.question == question:  # else another was sent since
                handler(active, outcome, now)

        self._calls.ask(active.link.endpoint, message, self._timeout_s, answered)

    def _asked(self, active: Active, outcome: Outcome, now: float) -> None:
        match outcome:
            case Pushed(state=PushState.DONE, late_starts=late) if unknown := late.keys() - self._windowed:
                reason = (
                    f"late_starts names group {min(unknown)}, groups with a window are {sorted(self._windowed)} here: "
                    "what was written cannot be told; run the same release on both sides"
                )
                self._drive(active, receives.PushFailed(reason, terminal=True), now, FailureKind.TRANSFER_FAILED)
            case Pushed(state=PushState.DONE) as done:
                active.late_starts, active.moved = done.late_starts, done.moved
                active.prefill, active.compared = done.request_id, done.lease
                self._drive(active, receives.PushDone(comparable=done.lease is not None), now)
            case Pushed(state=PushState.FAILED, reason=reason, terminal=terminal):
                self._drive(active, receives.PushFailed(reason, terminal), now, FailureKind.TRANSFER_FAILED)
            case Pushed(state=state):
                self._drive(active, receives.PushAlive(state is PushState.WRITING), now)
            case Failure(code=FailureCode.BUSY | FailureCode.NOT_READY):
                active.retry_at = now + RETRY_S
            case Failure(code=code, message=message):
                # A message that was never taken in has no effect there; those before it may have been. Of all else
                # nobody knows.
                never = code in _NOT_UNDERSTOOD and active.question == 1
                self._drive(active, receives.PushFailed(message, terminal=never), now, FailureKind.TRANSFER_FAILED)
            case _:
                self._unheard(active, outcome, now)

    def _withdrawn(self, active: Active, outcome: Outcome, now: float) -> None:
        match outcome:
            case Pushed(terminal=True, reason=reason):
                self._drive(active, receives.PushFailed(reason, terminal=True), now)
            case Failure(code=code, message=message) if code in _NOT_UNDERSTOOD:
                self._drive(active, receives.PushFailed(message, terminal=True), now)
            case Pushed() | Failure():
                active.retry_at = now + RETRY_S
                self._look_for_life(active, now)
            case _:
                self._unheard(active, outcome, now)

    def _unheard(self, active: Active, outcome: Outcome, now: float) -> None:
        active.links.drive(active.link, peers.Suspected(str(outcome)), now)
        # Whoever is silent was waited for. What is there now may as well answer nonsense at once, for ever.
        active.retry_at = now if isinstance(outcome, DeadlineExceeded) else now + RETRY_S
        self._look_for_life(active, now)

    def _look_for_life(self, active: Active, now: float) -> None:
        link, key = active.link, active.link.machine.key
        if link.knock is None:
            link.knock = Knock(key.host, key.port)
        if link.machine.over or link.knock.refused():
            reason = f"the prefill instance at {key} has ended"
            active.retry_at = None
            self._drive(active, receives.PushFailed(reason, terminal=True), now, FailureKind.PEER_UNREACHABLE)


def _terms(active: Active) -> PushTerms:
    assert active.order.push is not None
    return active.order.push
