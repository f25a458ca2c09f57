"""Pushes on the prefill side: who wants which prefill, what its workers must write, what the decode side is told.

Two things meet here, in any order. A *prefill* is a request that this instance computes for a decode instance:

    RUNNING --finished--> FINISHED        either --aborted, lease ended, a push failed--> FAILED

A *registration* is one decode worker's, of its blocks, named by its attempt:

    EXPECTED --prefill known--> COMPUTING --first command--> WRITING --all workers done--> DONE
        +------------ no prefill came, prefill failed, withdrawn, a worker failed ----------> FAILED

How they find each other is in `rendezvous`; a prefill that nobody wants is kept by its lease, which is not known here.
What is computed is ordered of all workers of this instance; each reports the end of every attempt that it knows. Of a
failure only those hear that may have begun. It is answered at once: as the end where there are none; else they drain
(`draining`), and until all have said that nothing is written any more the decode side's blocks are in quarantine.
So nobody sees what is written there, and the blocks of the prefill, the source of those writes, may be others' at once.

A decode side that compares what was written (`PushInto.compare_s`) says itself when it has: its reader is not served
with DONE, and the lease, which the answer names, is kept for it (`kept`). A prefill that was preempted after a part was
written computed that part again into other blocks, to the same within rounding only: it cannot be compared, and the
answer names no lease.

The decode side repeats its messages until it has an answer, so answers are remembered by attempt. No clock, thread or
socket in here; a `ticket` is a client's identity and sequence number. See docs/design/push.md.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from vllm_pd_connector.bounded import Bounded
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.bind import latest
from vllm_pd_connector.protocol.push.command_queue import CommandQueue, Ticket, among_latest
from vllm_pd_connector.protocol.push.draining import Draining
from vllm_pd_connector.protocol.push.registrations import (
    GIVEN_UP,
    Prefill,
    PushRegistration,
    Registrations,
    contradiction,
    failed,
    orders_of,
    standstill,
)
from vllm_pd_connector.protocol.push.rendezvous import Rendezvous
from vllm_pd_connector.protocol.push.results import Gathered
from vllm_pd_connector.protocol.weights import unlike
from vllm_pd_connector.protocol.wire import push_messages as pm
from vllm_pd_connector.protocol.wire.fields import MAX_TEXT, LeaseRef, Weights
from vllm_pd_connector.protocol.wire.messages import ReadDone

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_pd_connector.geometry.blocks import BlockTable
    from vllm_pd_connector.protocol.wire.messages import Reply

REMEMBER = 1 << 14
ANSWER_S = 5.0


class PushTable:
    """All pushes of one prefill instance.

    What has come of them gathers until it is taken: `replies` are answers that are due, `served` readers that have all
    their bytes, as if they had read them themselves, `kept` leases that readers compare with from now on, with the
    seconds for which each must not expire, `unneeded` and `failed` request ids of finished prefills whose lease need
    not be kept, because nothing is needed of them or they cannot be pushed any more, and `freed` those that `close` was
    called for, each once.

    Args:
        workers: of this instance; each must report the end of every push.
        wait_timeout_s: see `Rendezvous`.
        step_s: how long a registration waits for the engine to begin another step; this instance answers for an engine
            that may hang, and who asks cannot tell.
    """

    def __init__(self, workers: int, wait_timeout_s: float, step_s: float = inf) -> None:
        self._replies: Gathered[tuple[Ticket, Reply]] = Gathered()
        self.served: Gathered[ReadDone] = Gathered()
        self.kept: Gathered[tuple[LeaseRef, float]] = Gathered()
        self.unneeded: Gathered[str] = Gathered()
        self.failed: Gathered[str] = Gathered()
        self.freed: Gathered[str] = Gathered()
        self._everyone, self._step_s = frozenset(range(workers)), step_s
        self._now = self._stepped = -inf  # the latest time that was told
        self._look_at = inf  # no ticket is due before
        self._rendezvous, self._registrations = Rendezvous(wait_timeout_s), Registrations()
        self._draining = Draining(self._replies)
        self._answers: Bounded[bytes, pm.Pushed] = Bounded(REMEMBER)
        self._withdrawn: Bounded[bytes, pm.Pushed] = Bounded(REMEMBER)  # unknown then, which anybody can say of any
        self._commands = CommandQueue(workers)
        self._weights = Weights()
        self._ahead: Gathered[Prefill] = Gathered()  # that have got further than was ordered
        self.given_up: set[str] = set()

    @property
    def replies(self) -> Gathered[tuple[Ticket, Reply]]:
        """Answers that are due; to each worker that waits one, with all that is ordered of it by now."""
        self._replies += self._commands.hand_out()
        return self._replies

    # From decode instances

    def register(self, into: pm.PushInto, ticket: Ticket, now: float) -> LeaseRef | None:
        """A decode worker wants a push, or asks again how far it is. Returns the lease that is to be renewed."""
        self._now, self._look_at = now, min(self._look_at, now + ANSWER_S)
        known = self._answers, self._withdrawn, self._registrations.refused, self._draining
        if answer := next((answer for some in known if (answer := some.get(into.attempt)) is not None), None):
            self._replies.append((ticket, answer))
            return None
        registration = self._registrations.get(into.attempt)
        if registration is None:
            if (refusal := self._registrations.refusal(into, self._weights)) is not None:
                self._replies.append((ticket, refusal))
                return None
            registration = self._registrations[into.attempt] = PushRegistration(into, now - into.waited_s)
            registration.tickets[ticket] = now + ANSWER_S
            if (prefill := self._rendezvous.find(into.prefill, registration.began, into.reading)) is not None:
                self._attach(registration, prefill)
            elif reason := self._rendezvous.await_prefill(registration, now):
                self._fail(registration, reason)
        else:
            among_latest(registration.tickets, ticket, now + ANSWER_S)
        return registration.prefill.lease if registration.prefill is not None else None

    def withdraw(self, message: pm.WithdrawPush, ticket: Ticket, now: float) -> None:
        """A decode worker has given up; the answer waits until nothing of this attempt can land.

        Its instance cannot use the other ranks' parts either, so the whole prefill is given up with it.
        """
        self._now = now
        if (answer := self._answers.get(message.attempt)) is not None:
            held = answer.lease
            prefill = self._rendezvous.find(pm.PrefillRef(held.request_id, held.nonce)) if held is not None else None
            if prefill is not None:  # it will not be compared
                self._fail_prefill(prefill, GIVEN_UP)
            self._replies.append((ticket, answer))
            return
        if self._draining.wait(message.attempt, ticket, now + ANSWER_S):
            return
        registration = self._registrations.get(message.attempt)
        if registration is None:  # it was never registered, and what is still on its way is refused
            self._withdrawn[message.attempt] = failed(GIVEN_UP)
            self._replies.append((ticket, self._withdrawn[message.attempt]))
            self._decline(message.prefill, -inf, now)
            return
        # Whoever waits here wants to know when it is over, not how far it is.
        registration.tickets.clear()
        if registration.prefill is not None:
            self._fail_prefill(registration.prefill, GIVEN_UP)
        else:
            self._fail(registration, GIVEN_UP)
            self._rendezvous.decline(registration.into.prefill.name, registration.began, now)
        if not self._draining.wait(message.attempt, ticket, now + ANSWER_S):
            self._replies.append((ticket, self._answers[message.attempt]))

    def decline(self, message: pm.DeclinePush, now: float) -> None:
        """A decode instance needs nothing of a prefill."""
        self._decline(message.prefill, now - message.waited_s, now)

    def keep(self, ref: pm.PrefillRef) -> LeaseRef | None:
        """A decode instance will ask for a prefill. Returns its lease, if it is known and has finished."""
        self._rendezvous.keep(ref.name)
        if (prefill := self._rendezvous.find(ref)) is not None:
            prefill.declined = False
        return prefill.lease if prefill is not None else None

    # From the scheduler half of this instance

    def started(self, request_id: str, name: str, num_tokens: int, prompt_digest: str, now: float) -> bool:
        """A prefill for a decode instance was accepted; `num_tokens` of its prompt will be handed over.

        Returns whether it is known from now on; false if its request id is that of an older one not yet freed.
        """
        if self._rendezvous.get(request_id) is not None:
            return False
        self._now = now
        prefill = Prefill(request_id, name, num_tokens, prompt_digest, now)
        for registration in self._rendezvous.add(prefill, now):
            self._attach(registration, prefill)
        return True

    def compute_with(self, weights: Weights, reason: str, now: float) -> None:
        """These are this instance's weights from now on. With a `reason` they are others, or unknown: what was begun
        with the former ones fails. What is for a decode side with other weights fails in any case."""
        self._now, self._weights = now, weights
        for registration in list(self._registrations.values()):
            other = unlike(weights, registration.into.weights)
            if registration.prefill is None and other:
                self._fail(registration, other)
            elif registration.prefill is not None and (why := reason or other):
                self._fail_prefill(registration.prefill, why)

    def stepped(self, now: float) -> None:
        """The engine begins a step, so it has not come to a standstill in an earlier one."""
        self._stepped = now

    def running(self, request_ids: Iterable[str]) -> list[Prefill]:
        """Those of these prefills that are known. Blocks are held and `progressed` is called for what is `needed`."""
        return [prefill for name in request_ids if (prefill := self._rendezvous.get(name)) is not None]

    def take_given_up(self) -> list[str]:
        """Request ids of running prefills that were given up since the last call."""
        noted, self.given_up = self.given_up, set()
        return [prefill.request_id for prefill in self.running(noted) if prefill.given_up]

    def progressed(
        self, request_id: str, source: Iterable[BlockTable], ready: int, step: int, whole: bool = False
    ) -> bool:
        """Tokens below `ready` are in the blocks of `source` when the forward of `step` is done; `whole` as in
        `WriteCommand`. They may be read from now on: who asks in the midst of the step is written to in its course.
        Returns whether `tick` must order it."""
        prefill = self._rendezvous.get(request_id)
        if prefill is None or prefill.finished or prefill.failure or ready <= prefill.ready:
            return False  # a preempted prefill computes again what was written, into other blocks
        prefill.offers(tuple(source), ready, step, whole)
        self._ahead += [prefill] if prefill.registrations else []
        return bool(prefill.registrations)

    def finished(self, request_id: str, nonce: bytes, source: Iterable[BlockTable], step: int) -> bool:
        """The whole prompt is in `source`, under a lease with `nonce`. Returns whether the lease has a use."""
        prefill = self._rendezvous.get(request_id)
        if prefill is None:
            return True
        if prefill.failure or (prefill.declined and not prefill.registrations):
            return False
        prefill.nonce, prefill.finished = nonce, True
        prefill.offers(tuple(source), prefill.num_tokens, step)
        self._ahead.append(prefill)
        return True

    def fail(self, request_id: str, reason: str) -> None:
        """What was written of a prefill is wrong; the prefill goes on, for nobody."""
        if (prefill := self._rendezvous.get(request_id)) is not None:
            self._fail_prefill(prefill, reason)

    def close(self, request_id: str, reason: str, now: float) -> None:
        """A prefill was aborted, or its lease has ended: its blocks are wanted back, and what is pushed fails."""
        prefill = self._rendezvous.get(request_id)
        self.freed.append(request_id)
        if prefill is None:
            return
        self._now, prefill.closed = now, True
        self._fail_prefill(prefill, reason)
        self._rendezvous.remove(prefill)
        self._rendezvous.failed(prefill, now)

    # From the workers of this instance

    def await_commands(self, message: pm.AwaitCommands, ticket: Ticket, now: float) -> None:
        """A worker is ready for commands after number `seen`."""
        self._commands.await_commands(message, ticket, now)

    def ended(self, message: pm.PushEnded) -> None:
        """A worker's part of a push is written, has failed, or goes on."""
        registration = self._registrations.get(message.attempt)
        if registration is None or message.worker not in registration.ordered:
            pass
        elif not message.ok:
            assert registration.prefill is not None
            self._fail_prefill(registration.prefill, message.reason)  # it drains
        elif not message.terminal:
            registration.arrived[message.worker] = message.moved.descriptors
        else:
            registration.first_valid_tokens = latest((registration.first_valid_tokens, message.late_starts))
            registration.moved += message.moved
            registration.ordered.discard(message.worker)
            if not registration.ordered:
                self._settle(registration)
        if (last := self._draining.ended(message)) is not None:
            self._answers[message.attempt] = last

    # Time and results

    def tick(self, now: float) -> None:
        """Order what was computed, answer who has waited long enough, fail whose prefill does not come or go on."""
        self._now = now
        for registration, ahead in [(r, p) for p in self._ahead.take() for r in p.registrations.values()]:
            self._command(registration, ahead)
        for registration, reason in self._rendezvous.tick(now):
            self._fail(registration, reason)
        self._draining.tick(now)
        self.replies.extend(self._commands.tick(now))  # who may be given something is not told that there is nothing
        if now < self._look_at:
            return
        for registration in list(self._registrations.values()):
            late = [t for t, due in registration.tickets.items() if due <= now]
            prefill = registration.prefill
            if late and prefill is not None and (reason := standstill(prefill, self._stepped, self._step_s, now)):
                self._fail_prefill(prefill, reason)
                continue
            for ticket in late:
                del registration.tickets[ticket]
                self._replies.append((ticket, registration.answer()))
        self._look_at = min((due for r in self._registrations.values() for due in r.tickets.values()), default=inf)

    def next_deadline(self) -> float | None:
        """When `tick` is due, None if nothing waits."""
        look_at = self._look_at if self._registrations else inf
        moments = (*self._rendezvous.moments(), *self._commands.moments(), self._draining.due, look_at)
        return min((moment for moment in moments if moment < inf), default=None)

    # Inside

    def _attach(self, registration: PushRegistration, prefill: Prefill) -> None:
        into = registration.into
        registration.prefill, registration.deadline, registration.state = prefill, inf, pm.PushState.COMPUTING
        prefill.attach(registration)
        if prefill.failure:
            self._fail(registration, prefill.failure)
            return
        if not (reason := contradiction(registration, prefill)):
            self._command(registration, prefill)
            return
        del prefill.registrations[into.attempt]
        registration.prefill = None
        self._fail(registration, reason)

    def _command(self, registration: PushRegistration, prefill: Prefill) -> None:
        reached = (prefill.ready, prefill.finished)
        if reached == registration.last or prefill.ready == 0 or prefill.failure:
            return
        try:
            self._commands.add(*orders_of(registration, prefill))
        except Exception as error:  # also a defect that one meets: the others of its step get their orders
            known = isinstance(error, ProtocolError)
            return self._fail_prefill(prefill, str(error) if known else f"unexpected {type(error).__name__}: {error}")
        registration.last, registration.state = reached, pm.PushState.WRITING
        registration.ordered.update(self._everyone)

    def _decline(self, ref: pm.PrefillRef, began: float, now: float) -> None:
        prefill = self._rendezvous.find(ref)
        if prefill is None:
            if ref.nonce is None:
                self._rendezvous.decline(ref.name, began, now)
        elif not prefill.registrations and (ref.nonce is not None or began >= prefill.follows_at):
            # Else another decode request asks for it, or the one before it under this name is meant.
            prefill.declined = True
            if prefill.finished:
                self.unneeded.append(prefill.request_id)

    def _fail_prefill(self, prefill: Prefill, reason: str) -> None:
        """All ranks of the decode instance fail together: none of them can use its part alone."""
        if not prefill.failure:
            prefill.failure, prefill.failed_at = reason, self._now
            if prefill.finished and not prefill.closed:
                self.failed.append(prefill.request_id)
        for registration in list(prefill.registrations.values()):
            self._fail(registration, reason)
        if prefill.given_up:
            self.given_up.add(prefill.request_id)

    def _fail(self, registration: PushRegistration, reason: str) -> None:
        if registration.state in (pm.PushState.DONE, pm.PushState.FAILED):
            return
        # A client's words may stand in it, and a command that cannot be encoded would be in the way of all others.
        reason = registration.reason = reason.encode(errors="replace").decode()[:MAX_TEXT]
        registration.state = pm.PushState.FAILED
        registration.ordered = self._commands.cancel(registration.into.attempt, reason, registration.ordered)
        if registration.ordered:
            self._answer(registration, pm.Pushed(registration.state, registration.reason, False))
            self._draining.add(registration)
            self._forget(registration)
        else:
            self._settle(registration)

    def _settle(self, registration: PushRegistration) -> None:
        """No worker writes for this registration: it is done, or failed for good, or between two commands."""
        prefill = registration.prefill
        if registration.state is not pm.PushState.FAILED:
            if not registration.last[1]:
                return
            registration.state = pm.PushState.DONE
        answer = self._answers[registration.into.attempt] = registration.last_answer()
        self._answer(registration, answer)
        self._forget(registration)
        if prefill is not None and registration.state is pm.PushState.DONE:
            into = registration.into
            assert prefill.lease is not None
            prefill.served.add(into.reader)
            if answer.lease is not None:
                self.kept.append((answer.lease, into.compare_s))
            else:
                taken = pm.Taken(into.home.engine_id, registration.moved, into.trace)
                self.served.append(ReadDone(prefill.lease, into.reader, into.readers, into.reading, taken=taken))

    def _forget(self, registration: PushRegistration) -> None:
        """It is over, or drains."""
        del self._registrations[registration.into.attempt]
        if registration.prefill is None:
            self._rendezvous.leave(registration)
        else:
            registration.prefill.registrations.pop(registration.into.attempt, None)

    def _answer(self, registration: PushRegistration, answer: pm.Pushed) -> None:
        self._replies += [(ticket, answer) for ticket in registration.tickets]
        registration.tickets.clear()
