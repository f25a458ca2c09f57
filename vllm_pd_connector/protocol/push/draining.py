"""Pushes that have failed while workers may still write for them: what the decode side is told until none does.

That may be never: of a decode host that fell silent nobody can say whether what was begun still arrives. Such a push
costs little here, and takes the room of none that is to be written: its blocks, its prefill and the lease are not kept
for it. The oldest of very many is forgotten, and would be taken for one that never was. A decode side whose blocks are
in quarantine asks at least every half minute, and who has asked is not among the oldest: it must have been silent while
REMEMBER_DRAINING others were lost, and then live.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from vllm_pd_connector.bounded import Bounded
from vllm_pd_connector.protocol.push.command_queue import Ticket, among_latest
from vllm_pd_connector.protocol.wire.push_messages import Moved, Pushed, PushState

if TYPE_CHECKING:
    from vllm_pd_connector.protocol.push.registrations import PushRegistration
    from vllm_pd_connector.protocol.wire.messages import Reply
    from vllm_pd_connector.protocol.wire.push_messages import PushEnded

REMEMBER_DRAINING = 1 << 16
"""Some 600 bytes each."""


@dataclass(eq=False, slots=True)
class _Draining:
    """A push that has failed: `writing` are the workers that have not said that they write no more, `moved` is of those
    that have, `asked` who waits for an answer, and until when."""

    reason: str
    request_id: str
    writing: set[int]
    moved: Moved
    asked: dict[Ticket, float] = field(default_factory=dict)

    @property
    def answer(self) -> Pushed:
        if self.writing:
            return Pushed(PushState.FAILED, self.reason, False)
        return Pushed(PushState.FAILED, self.reason, True, {}, self.moved, self.request_id)


class Draining:
    """See the module. Part of `PushTable`, which it answers for: `replies` takes answers that are due."""

    def __init__(self, replies: list[tuple[Ticket, Reply]]) -> None:
        self._replies = replies
        self._pushes: Bounded[bytes, _Draining] = Bounded(REMEMBER_DRAINING)
        self._asked: dict[bytes, float] = {}  # who waits for an answer, until when; the earliest first

    def __len__(self) -> int:
        return len(self._pushes)

    @property
    def due(self) -> float:
        """When somebody will have waited long enough."""
        return next(iter(self._asked.values()), inf)

    def add(self, registration: PushRegistration) -> None:
        """One has failed that workers were ordered to write."""
        request_id = registration.prefill.request_id if registration.prefill is not None else ""
        push = _Draining(registration.reason, request_id, registration.ordered, registration.moved)
        self._pushes[registration.into.attempt] = push

    def get(self, attempt: bytes) -> Pushed | None:
        """What who asks for it is told; None if it is none of these."""
        push = self._pushes.get(attempt)
        return push.answer if push is not None else None

    def wait(self, attempt: bytes, ticket: Ticket, until: float) -> bool:
        """Who asks waits for its end, and until then; no, if it is none of these. Told that it goes on it asks again;
        without a word it would take the connection to have broken."""
        if (push := self._pushes.get(attempt)) is None:
            return False
        self._pushes.move_to_end(attempt)
        among_latest(push.asked, ticket, until)
        self._asked.pop(attempt, None)
        self._asked[attempt] = until
        return True

    def ended(self, message: PushEnded) -> Pushed | None:
        """A worker says what became of its part; the last answer when that was the last one."""
        push = self._pushes.get(message.attempt)
        if push is None or message.worker not in push.writing or not message.terminal:
            return None
        push.moved += message.moved
        push.writing.discard(message.worker)
        if push.writing:
            return None
        del self._pushes[message.attempt]
        self._tell(message.attempt, push)
        return push.answer

    def tick(self, now: float) -> None:
        """Answer who has waited long enough."""
        while self.due <= now:
            attempt = next(iter(self._asked))
            self._tell(attempt, self._pushes.get(attempt))

    def _tell(self, attempt: bytes, push: _Draining | None) -> None:
        self._asked.pop(attempt, None)
        if push is not None:  # else it was the oldest of too many
            self._replies += [(ticket, push.answer) for ticket in push.asked]
            push.asked.clear()
