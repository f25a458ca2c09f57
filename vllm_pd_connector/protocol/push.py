"""Pushes on the prefill side: who wants which prefill, what its workers must write, what the decode side is told.

Two things meet here, in any order. A *prefill* is a request that this instance computes for a decode instance:

    RUNNING --finished--> FINISHED        either --aborted, lease ended, a push failed--> FAILED

A *want* is one decode worker's registration of its blocks, named by its attempt:

    EXPECTED --prefill known--> COMPUTING --first order--> WRITING --all workers done--> DONE
        +------------ no prefill came, prefill failed, withdrawn, a worker failed ----------> FAILED

How they find each other is in `arrivals`; a prefill that nobody wants is kept by its lease, which is not known here.
Every change gives orders to all workers of this instance; each of them reports the end of every attempt that it was
ordered to write. A failure is answered at once, but the blocks of its prefill, the source of the writes, stay out of
`take_freed` until all workers have said that nothing is written any more.

A decode side that compares what was written (`PushInto.compare_s`) says itself when it has: its reader is not served
with DONE, and the lease, which the answer names, is kept for it (`take_kept`). A prefill that was preempted after a
part was written computed that part again into other blocks, to the same within rounding only: it cannot be compared,
and the answer names no lease.

The decode side repeats its messages until it has an answer, so answers are remembered by attempt. No clock, thread or
socket in here; a `ticket` is a client's identity and sequence number, and never looked into.

Source: architecture.md, "Push"; xllm-pd-semantics.md §1.12 (failures that never reached the other side).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from vllm_pd_connector.bounded import Bounded
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.bind import latest
from vllm_pd_connector.protocol.arrivals import Arrivals
from vllm_pd_connector.protocol.fields import MAX_TEXT, LeaseRef, Table
from vllm_pd_connector.protocol.messages import ReadDone, Reply
from vllm_pd_connector.protocol.orders import OrderBook, Ticket
from vllm_pd_connector.protocol.push_messages import (
    AwaitOrders,
    DeclinePush,
    GiveUp,
    PrefillRef,
    Pushed,
    PushEnded,
    PushInto,
    PushState,
    WithdrawPush,
    Write,
)
from vllm_pd_connector.protocol.wants import Prefill, Want, contradiction, progress

MAX_WAITING = 4096
REMEMBER = 4096
ANSWER_S = 5.0


class PushTable:
    """All pushes of one prefill instance.

    Args:
        workers: of this instance; each must report the end of every push.
        patience_s: see `Arrivals`.
        step_s: how long a want waits for the engine to begin another step; this instance answers for an engine that
            may hang, and who asks cannot tell.
    """

    def __init__(self, workers: int, patience_s: float, step_s: float = inf) -> None:
        self._workers = workers
        self._step_s = step_s
        self._stepped = -inf
        self._arrivals = Arrivals(patience_s)
        self._wants: dict[bytes, Want] = {}
        self._answers: Bounded[bytes, Pushed] = Bounded(REMEMBER)
        self._orders = OrderBook(workers)
        self._replies: list[tuple[Ticket, Reply]] = []
        self._served: list[ReadDone] = []
        self._kept: list[tuple[LeaseRef, float]] = []
        self._unneeded: list[str] = []
        self._failed: list[str] = []
        self._freed: list[str] = []

    # From decode instances

    def register(self, into: PushInto, ticket: Ticket, now: float) -> LeaseRef | None:
        """A decode worker wants a push, or asks again how far it is. Returns the lease that is to be renewed."""
        if (answer := self._answers.get(into.attempt)) is not None:
            self._replies.append((ticket, answer))
            return None
        want = self._wants.get(into.attempt)
        if want is None and len(self._wants) >= MAX_WAITING:
            self._replies.append((ticket, _failed(f"{len(self._wants)} pushes are under way, the limit here")))
            return None
        if want is None:
            want = self._wants[into.attempt] = Want(into)
            want.tickets[ticket] = now + ANSWER_S
            if (prefill := self._arrivals.find(into.prefill)) is not None:
                self._attach(want, prefill)
            elif reason := self._arrivals.await_prefill(want, now):
                self._fail(want, reason)
        elif want.state is PushState.FAILED:
            self._replies.append((ticket, Pushed(want.state, want.reason, False)))
        else:
            want.tickets = {ticket: now + ANSWER_S}
        return _lease(want.prefill)

    def withdraw(self, message: WithdrawPush, ticket: Ticket, now: float) -> None:
        """A decode worker has given up; the answer waits until nothing of this attempt can land.

        Its instance cannot use the other ranks' parts either, so the whole prefill is given up with it.
        """
        if (answer := self._answers.get(message.attempt)) is not None:
            held = answer.lease
            prefill = self._arrivals.find(PrefillRef(held.request_id, held.nonce)) if held is not None else None
            if prefill is not None:  # it will not be compared
                self._fail_prefill(prefill, "withdrawn by the decode side")
            self._replies.append((ticket, answer))
            return
        want = self._wants.get(message.attempt)
        if want is None:  # it was never registered, and what is still on its way is refused
            self._answers[message.attempt] = _failed("withdrawn by the decode side")
            self._replies.append((ticket, self._answers[message.attempt]))
            self._decline(message.prefill, now)
            return
        # Whoever waits here wants to know when it is over, not how far it is.
        want.tickets.clear()
        if want.prefill is not None:
            self._fail_prefill(want.prefill, "withdrawn by the decode side")
        else:
            self._fail(want, "withdrawn by the decode side")
            self._arrivals.decline(want.into.prefill.name, now)
        if (answer := self._answers.get(message.attempt)) is not None:
            self._replies.append((ticket, answer))
        else:
            want.tickets[ticket] = inf

    def decline(self, message: DeclinePush, now: float) -> None:
        """A decode instance needs nothing of a prefill."""
        self._decline(message.prefill, now)

    def lease_of(self, ref: PrefillRef) -> LeaseRef | None:
        """The lease of a prefill, if it is known and has finished."""
        return _lease(self._arrivals.find(ref))

    # From the scheduler half of this instance

    def started(self, request_id: str, name: str, num_tokens: int, prompt_digest: str, now: float) -> bool:
        """A prefill for a decode instance was accepted; `num_tokens` of its prompt will be handed over.

        Returns whether it is known from now on; false if its request id is that of an older one not yet freed.
        """
        if self._arrivals.get(request_id) is not None:
            return False
        prefill = Prefill(request_id, name, num_tokens, prompt_digest, now)
        for want in self._arrivals.add(prefill, now):
            self._attach(want, prefill)
        return True

    def stepped(self, now: float) -> None:
        """The engine begins a step, so it has not come to a standstill in an earlier one."""
        self._stepped = now

    def wanted(self, request_id: str) -> bool:
        """Whether somebody waits for more of a prefill. Only then is `progressed` called, and its blocks held."""
        prefill = self._arrivals.get(request_id)
        return prefill is not None and bool(prefill.wants) and not prefill.failure

    def given_up(self, request_id: str) -> bool:
        """Whether a running prefill has failed, and nothing reads its blocks now or later."""
        prefill = self._arrivals.get(request_id)
        return prefill is not None and bool(prefill.failure) and not prefill.finished and not prefill.wants

    def progressed(self, request_id: str, source: Iterable[Table], ready: int, step: int) -> None:
        """Tokens below `ready` are in the blocks of `source` when the forward of `step` is done."""
        prefill = self._arrivals.get(request_id)
        if prefill is None or prefill.finished or prefill.failure or ready <= prefill.ready:
            return  # a preempted prefill computes again what was written, into other blocks
        prefill.source, prefill.ready, prefill.step = tuple(source), ready, step
        for want in list(prefill.wants.values()):
            self._order(want, prefill)

    def finished(self, request_id: str, nonce: bytes, source: Iterable[Table], step: int) -> bool:
        """The whole prompt is in `source`, under a lease with `nonce`. Returns whether the lease has a use."""
        prefill = self._arrivals.get(request_id)
        if prefill is None:
            return True
        if prefill.failure or (prefill.declined and not prefill.wants):
            return False
        prefill.nonce, prefill.source, prefill.step = nonce, tuple(source), step
        prefill.ready, prefill.finished = prefill.num_tokens, True
        for want in list(prefill.wants.values()):
            self._order(want, prefill)
        return True

    def close(self, request_id: str, reason: str, now: float) -> None:
        """A prefill was aborted, or its lease has ended: its blocks are wanted back as soon as nothing reads them."""
        prefill = self._arrivals.get(request_id)
        if prefill is None:
            self._freed.append(request_id)
            return
        prefill.closed = True
        self._fail_prefill(prefill, reason)
        self._free(prefill)
        self._arrivals.failed(prefill, now)

    # From the workers of this instance

    def await_orders(self, message: AwaitOrders, ticket: Ticket, now: float) -> None:
        """A worker is ready for orders after number `seen`."""
        self._replies += self._orders.await_orders(message, ticket, now)

    def ended(self, message: PushEnded) -> None:
        """A worker's part of a push is written, or has failed."""
        want = self._wants.get(message.attempt)
        if want is None or message.worker not in want.ordered:
            return
        if not message.ok:
            if want.prefill is not None:
                self._fail_prefill(want.prefill, message.reason)
            else:
                self._fail(want, message.reason)
        if not message.terminal:
            return
        want.late_starts = latest((want.late_starts, message.late_starts))
        want.moved += message.moved
        want.ordered.discard(message.worker)
        if want.ordered:
            return
        self._settle(want)

    # Time and results

    def tick(self, now: float) -> None:
        """Answer who has waited long enough, and fail wants whose prefill did not come or does not go on."""
        for want, reason in self._arrivals.tick(now):
            self._fail(want, reason)
        for want in list(self._wants.values()):
            late = [t for t, due in want.tickets.items() if due <= now]
            if late and want.prefill is not None and self._stands(want.prefill, now):
                self._fail_prefill(
                    want.prefill,
                    f"the prefill instance has begun no engine step for {self._step_s:g} s: one of its workers hangs, "
                    "a step takes longer than its step_timeout, or it has too few blocks for its prefills",
                )
                continue
            for ticket in late:
                del want.tickets[ticket]
                self._replies.append((ticket, Pushed(progress(want), want.reason, False)))
        self._replies += self._orders.tick(now)

    def next_deadline(self) -> float | None:
        """When `tick` is due, None if nothing waits."""
        moments = self._arrivals.moments() + self._orders.moments()
        moments += [due for want in self._wants.values() for due in want.tickets.values()]
        return min((moment for moment in moments if moment < inf), default=None)

    def take_replies(self) -> list[tuple[Ticket, Reply]]:
        """Answers that are due, in order."""
        replies, self._replies = self._replies, []
        return replies

    def take_served(self) -> list[ReadDone]:
        """Readers that have all their bytes since the last call, as if they had read them themselves."""
        served, self._served = self._served, []
        return served

    def take_kept(self) -> list[tuple[LeaseRef, float]]:
        """Leases that readers compare with from now on, and the seconds for which each must not expire."""
        kept, self._kept = self._kept, []
        return kept

    def take_unneeded(self) -> list[str]:
        """Request ids of finished prefills of which nothing is needed: their lease need not be kept."""
        unneeded, self._unneeded = self._unneeded, []
        return unneeded

    def take_failed(self) -> list[str]:
        """Request ids of finished prefills that cannot be pushed any more: their lease need not be kept."""
        failed, self._failed = self._failed, []
        return failed

    def take_freed(self) -> list[str]:
        """Request ids that `close` was called for and whose blocks nothing reads any more, each once."""
        freed, self._freed = self._freed, []
        return freed

    # Inside

    def _attach(self, want: Want, prefill: Prefill) -> None:
        into = want.into
        want.prefill, want.deadline, want.state = prefill, inf, PushState.COMPUTING
        prefill.wants[into.attempt] = want
        if prefill.failure:
            self._fail(want, prefill.failure)
            return
        if not (reason := contradiction(want, prefill)):
            self._order(want, prefill)
            return
        del prefill.wants[into.attempt]
        want.prefill = None
        self._fail(want, reason)

    def _order(self, want: Want, prefill: Prefill) -> None:
        reached = (prefill.ready, prefill.finished)
        if reached == want.last or prefill.ready == 0 or prefill.failure:
            return
        order = Write(want.into, prefill.source, prefill.ready, prefill.step, prefill.finished)
        try:
            self._replies += self._orders.add(order)
        except ProtocolError as error:
            self._fail_prefill(prefill, str(error))
            return
        want.last, want.state = reached, PushState.WRITING
        want.write_from(prefill.source)
        want.ordered = set(range(self._workers))

    def _decline(self, ref: PrefillRef, now: float) -> None:
        prefill = self._arrivals.find(ref)
        if prefill is not None and prefill.wants:
            return  # by another decode request of that name than the one that asks for it
        if prefill is not None:
            prefill.declined = True
            if prefill.finished:
                self._unneeded.append(prefill.request_id)
        elif ref.nonce is None:
            self._arrivals.decline(ref.name, now)

    def _stands(self, prefill: Prefill, now: float) -> bool:
        on = not prefill.finished and not prefill.failure
        return on and now - max(self._stepped, prefill.began) > self._step_s

    def _fail_prefill(self, prefill: Prefill, reason: str) -> None:
        """All ranks of the decode instance fail together: none of them can use its part alone."""
        if not prefill.failure:
            prefill.failure = reason
            if prefill.finished:
                self._failed.append(prefill.request_id)
        for want in list(prefill.wants.values()):
            self._fail(want, reason)

    def _fail(self, want: Want, reason: str) -> None:
        if want.state in (PushState.DONE, PushState.FAILED):
            return
        # A client's words may stand in it, and an order that cannot be encoded would be in the way of all others.
        want.state, want.reason = PushState.FAILED, reason.encode(errors="replace").decode()[:MAX_TEXT]
        if want.ordered:
            self._replies += self._orders.add(GiveUp(want.into.attempt, want.reason))
            self._answer(want, Pushed(want.state, want.reason, False))
        else:
            self._settle(want)

    def _settle(self, want: Want) -> None:
        """No worker writes for this want: it is done, or failed for good, or between two orders."""
        prefill = want.prefill
        if want.state is not PushState.FAILED:
            if not want.last[1]:
                return
            want.state = PushState.DONE
        request_id = prefill.request_id if prefill is not None else ""
        lease = want.compared_with()
        answer = Pushed(want.state, want.reason, True, want.late_starts, want.moved, request_id, lease)
        self._answers[want.into.attempt] = answer
        self._answer(want, answer)
        self._forget(want)
        if prefill is None:
            return
        if want.state is PushState.DONE:
            assert prefill.nonce is not None
            into = want.into
            prefill.served.add(into.reader)
            if lease is not None:
                self._kept.append((lease, into.compare_s))
            else:
                held = LeaseRef(prefill.request_id, prefill.nonce)
                self._served.append(ReadDone(held, into.reader, into.readers, into.attempt))
        self._free(prefill)

    def _answer(self, want: Want, answer: Pushed) -> None:
        self._replies += [(ticket, answer) for ticket in want.tickets]
        want.tickets.clear()

    def _forget(self, want: Want) -> None:
        del self._wants[want.into.attempt]
        if want.prefill is not None:
            want.prefill.wants.pop(want.into.attempt, None)
        else:
            self._arrivals.leave(want)

    def _free(self, prefill: Prefill) -> None:
        if not prefill.closed or prefill.wants or not self._arrivals.remove(prefill):
            return
        self._freed.append(prefill.request_id)


def _lease(prefill: Prefill | None) -> LeaseRef | None:
    return LeaseRef(prefill.request_id, prefill.nonce) if prefill is not None and prefill.nonce else None


def _failed(reason: str) -> Pushed:
    return Pushed(PushState.FAILED, reason[:MAX_TEXT], True)
