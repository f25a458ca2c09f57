"""Pushes at a prefill instance's side channel: what its scheduler half tells, what decode instances and workers ask.

The push table (`protocol.push.table`) and the lease table know nothing of each other. Here each learns what ended in
the other, so that blocks are given back when both are done with them.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from vllm_pd_connector.protocol.lease import End, Freed, LeaseTable
from vllm_pd_connector.protocol.push.table import ANSWER_S, PushTable
from vllm_pd_connector.protocol.wire import push_messages as pm
from vllm_pd_connector.protocol.wire.fields import Reading
from vllm_pd_connector.protocol.wire.messages import Ack, Failure, FailureCode, Reply
from vllm_pd_connector.sidechannel.worker_auth import refusal

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Sequence

    from vllm_pd_connector.geometry.blocks import BlockTable
    from vllm_pd_connector.protocol.push.command_queue import Ticket
    from vllm_pd_connector.protocol.push.registrations import Prefill
    from vllm_pd_connector.protocol.wire.fields import Weights


Offer = tuple[str, "tuple[BlockTable, ...]", int, bool]
"""What a step completes of a prefill: its request id, then `source`, `ready` and `whole` of `PushTable.progressed`. No
class of its own: to make one takes ten times as long, and a step may have many."""


_DOES_NOT_WRITE: Final = (
    "mode: pull on the prefill instance (or its kv_role is kv_consumer), push or auto on this decode instance, which "
    "asks it to write: set mode push or auto there, or pull here"
)


class PushService:
    """See the module; a part of `SideChannelServer`.

    Args:
        leases, lock: the server's; the lock is around everything here.
        wake: says that something has changed, and ends the sleep of the server's thread.
        clock: seconds, monotonic.
    """

    def __init__(
        self, leases: LeaseTable, lock: threading.Lock, wake: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._leases = leases
        self._lock = lock
        self._wake = wake
        self._clock = clock
        self._table: PushTable | None = None
        self._tokens: tuple[bytes, ...] = ()
        self._ended: dict[str, End] = {}  # leases whose blocks are still being written from

    # From the scheduler half, in any thread

    def enable(self, tokens: Sequence[bytes], wait_timeout_s: float, step_s: float = inf) -> None:
        """Accept pushes from now on; `tokens` are those of this instance's workers, in rank order, and the times those
        of `PushTable`."""
        with self._lock:
            self._tokens = tuple(tokens)
            self._table = PushTable(len(tokens), wait_timeout_s, step_s)

    def started(self, request_id: str, name: str, num_tokens: int, prompt_digest: str) -> bool:
        """See `PushTable.started`; false also if this instance does not push."""
        with self._lock:
            known = self._table is not None and self._table.started(
                request_id, name, num_tokens, prompt_digest, self._clock()
            )
        self._wake()
        return known

    def compute_with(self, weights: Weights, reason: str) -> None:
        """See `PushTable.compute_with`."""
        with self._lock:
            if self._table is not None:
                self._table.compute_with(weights, reason, self._clock())
        self._wake()

    def stepped(self) -> None:
        """See `PushTable.stepped`."""
        with self._lock:
            if self._table is not None:
                self._table.stepped(self._clock())

    def needed(self, request_ids: Iterable[str]) -> set[str]:
        """Those of these running prefills of which somebody waits for more, or may still ask."""
        with self._lock:
            known = self._table.running(request_ids) if self._table is not None else ()
            return {prefill.request_id for prefill in known if prefill.needed}

    def taken_back(self, request_ids: Iterable[str]) -> set[str]:
        """Those of which nobody was told to read what they have computed; nobody will be."""
        return self._such(request_ids, lambda prefill: prefill.take_back())

    def _such(self, request_ids: Iterable[str], holds: Callable[[Prefill], bool]) -> set[str]:
        with self._lock:
            known = self._table.running(request_ids) if self._table is not None else ()
            return {prefill.request_id for prefill in known if holds(prefill)}

    def take_given_up(self) -> list[str]:
        """See `PushTable.take_given_up`."""
        with self._lock:
            return self._table.take_given_up() if self._table is not None else []

    def progressed(self, offers: Sequence[Offer], step: int) -> None:
        """See `PushTable.progressed`, for all prefills of a step."""
        with self._lock:
            assert self._table is not None
            progressed = self._table.progressed
            wanted = [progressed(request_id, source, ready, step, *rest) for request_id, source, ready, *rest in offers]
        if any(wanted):
            self._wake()

    def finished(self, request_id: str, nonce: bytes, source: Sequence[BlockTable], step: int) -> bool:
        """See `PushTable.finished`; called after `hold`."""
        with self._lock:
            useful = self._table is None or self._table.finished(request_id, nonce, source, step)
        self._wake()
        return useful

    def failed(self, request_id: str, reason: str) -> None:
        """See `PushTable.fail`."""
        with self._lock:
            if self._table is not None:
                self._table.fail(request_id, reason)
        self._wake()

    def aborted(self, request_id: str, reason: str) -> None:
        """A prefill that has no lease will not be finished; it comes out of `PushTable.freed`."""
        with self._lock:
            if self._table is not None:
                self._table.close(request_id, reason, self._clock())
        self._wake()

    # For the server, which holds the lock

    def serve(
        self,
        request: pm.PushInto | pm.WithdrawPush | pm.DeclinePush | pm.KeepPrefills | pm.AwaitCommands | pm.PushEnded,
        ticket: Ticket,
        now: float,
    ) -> Reply | None:
        """The reply, or None if it comes later, out of `take_replies`."""
        if isinstance(request, pm.AwaitCommands | pm.PushEnded):
            return self._serve_worker(request, ticket, now)
        return self._serve_push(request, ticket, now)

    def tick(self, now: float) -> None:
        """Order what was computed, and answer who has waited long enough; it looks at every registration, so it is the
        server's thread that does."""
        if self._table is not None:
            self._table.tick(now)

    def settle(self, now: float) -> list[Freed]:
        """Let leases and pushes know of each other what ended; returns what both are done with."""
        self._leases.tick(now)
        if self._table is None:
            return self._leases.take_freed()
        for report in self._table.served.take():
            self._leases.read_done(report, now)
        for lease, seconds in self._table.kept.take():
            self._leases.extend(lease, now, seconds)
        for request_id in self._table.unneeded.take():
            self._leases.drop(request_id, now, End.RELEASED)
        for request_id in self._table.failed.take():
            self._leases.drop(request_id, now)
        for request_id, reason in self._leases.take_freed():
            self._ended[request_id] = reason
            self._table.close(request_id, f"the lease {reason.value}", now)
        return [Freed(r, self._ended.pop(r, End.DROPPED)) for r in self._table.freed.take()]

    def take_replies(self) -> list[tuple[Ticket, Reply]]:
        """Answers that are due, in order."""
        return self._table.replies.take() if self._table is not None else []

    def next_deadline(self) -> float | None:
        """When `settle` is due, None if nothing waits."""
        return self._table.next_deadline() if self._table is not None else None

    def _serve_push(
        self, request: pm.PushInto | pm.WithdrawPush | pm.DeclinePush | pm.KeepPrefills, ticket: Ticket, now: float
    ) -> pm.Pushed | Ack | None:
        if self._table is None:
            if isinstance(request, pm.DeclinePush | pm.KeepPrefills):
                return Ack()
            return pm.Pushed(pm.PushState.FAILED, _DOES_NOT_WRITE, True)
        match request:
            case pm.PushInto():
                if (lease := self._table.register(request, ticket, now)) is not None:
                    if any(request.reading):  # it may have renewed nothing yet, and others give this lease back
                        self._leases.renew([Reading(lease.request_id, lease.nonce, request.reading)], now)
                    self._leases.extend(lease, now, 2 * ANSWER_S)
            case pm.WithdrawPush():
                self._table.withdraw(request, ticket, now)
            case pm.DeclinePush():
                self._table.decline(request, now)
                return Ack()
            case pm.KeepPrefills(prefills):
                for lease in map(self._table.keep, prefills):
                    if lease is not None:
                        self._leases.extend(lease, now, 0.0)
                return Ack()
        return None

    def _serve_worker(self, request: pm.AwaitCommands | pm.PushEnded, ticket: Ticket, now: float) -> Reply | None:
        if self._table is None:
            return Failure(FailureCode.NOT_READY, "this instance has no workers that push, or not yet")
        if (failure := refusal(request, self._tokens)) is not None:
            return failure
        if isinstance(request, pm.PushEnded):
            self._table.ended(request)
            return Ack()
        self._table.await_commands(request, ticket, now)
        return None
