"""Matches prefills with push registrations; either may come first, or alone.

It knows which prefills are here, which are waited for, and which are over. A registration that comes before its prefill
waits for `wait_timeout_s`. What a decode instance declines before it came is declined when it comes, and why a prefill
failed is told who asks for it later, each for as long.

A registration names a prefill as its router does, or, when that has finished, by its request id and its lease's nonce.
A router may use a name again, for its next attempt. Nothing in the legs tells the attempts apart; their order does: a
decode request that arrived when a prefill of its name had ended belongs to a later one, and waits for it. One that
arrived before that is told why it ended, and what it declines is that prefill.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple

from vllm_pd_connector.bounded import Bounded
from vllm_pd_connector.protocol.push.registrations import NOT_HELD

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm_pd_connector.protocol.push.registrations import Prefill, PushRegistration
    from vllm_pd_connector.protocol.wire.push_messages import PrefillRef

MAX_DECLINED = 4096
MAX_OVER = 4096


class _Over(NamedTuple):
    """Why a prefill failed, when, and until when that is remembered."""

    reason: str
    at: float
    until: float
    readings: Collection[bytes]


class Rendezvous:
    """See the module.

    Args:
        wait_timeout_s: how long a registration waits for its prefill to arrive.
    """

    def __init__(self, wait_timeout_s: float) -> None:
        self._wait_timeout_s = wait_timeout_s
        self._prefills: dict[str, Prefill] = {}
        self._names: dict[str, Prefill] = {}
        self._waiting: dict[str, list[PushRegistration]] = {}  # by name, for prefills that have not come
        self._declined: Bounded[str, float] = Bounded(MAX_DECLINED)  # until when
        self._over: Bounded[str, _Over] = Bounded(MAX_OVER)  # by name and by request id

    def __len__(self) -> int:
        """Prefills that are here and names that are waited for."""
        return len(self._prefills) + len(self._waiting)

    def get(self, request_id: str) -> Prefill | None:
        """The prefill with this request id, if it is here."""
        return self._prefills.get(request_id)

    def find(self, ref: PrefillRef, began: float = -inf, reading: bytes = b"") -> Prefill | None:
        """The prefill that a decode instance names for a request that `began` there then, if it is here. One that had
        failed by then is not meant, unless another rank has asked for it with the same `reading`: its ranks learn of a
        request one after the other."""
        if ref.nonce is None:
            prefill = self._names.get(ref.name)
            if prefill is not None and reading in prefill.readings:
                return prefill
            return prefill if prefill is not None and began < prefill.failed_at else None
        prefill = self._prefills.get(ref.name)
        return prefill if prefill is not None and prefill.nonce == ref.nonce else None

    def add(self, prefill: Prefill, now: float) -> list[PushRegistration]:
        """A prefill has come, with a request id that none has that is here. Returns the registrations that waited for
        it."""
        if (before := self._over.pop(prefill.name, None)) is not None:
            prefill.follows_at = before.at
        self._prefills[prefill.request_id] = self._names[prefill.name] = prefill
        prefill.declined = self._declined.pop(prefill.name, -inf) > now
        return self._waiting.pop(prefill.name, [])

    def remove(self, prefill: Prefill) -> None:
        """A prefill that is here is forgotten."""
        del self._prefills[prefill.request_id]
        if self._names.get(prefill.name) is prefill:
            del self._names[prefill.name]

    def await_prefill(self, registration: PushRegistration, now: float) -> str:
        """A registration whose prefill is not here waits for it. Returns why it would do so in vain, empty if it waits
        now."""
        ref = registration.into.prefill
        over = self._over.get(ref.name)
        if ref.nonce is not None:
            return f"prefill {ref.name} {NOT_HELD}: {over.reason if over else 'no lease with that nonce is known'}"
        if over is not None and (registration.began < over.at or registration.into.reading in over.readings):
            return f"prefill {ref.name}: {over.reason}"
        registration.deadline = now + self._wait_timeout_s
        self._declined.pop(ref.name, None)  # a router's second attempt, on another decode instance
        self._waiting.setdefault(ref.name, []).append(registration)
        return ""

    def leave(self, registration: PushRegistration) -> None:
        """A registration waits for its prefill no longer."""
        name = registration.into.prefill.name
        waiting = [w for w in self._waiting.get(name, []) if w is not registration]
        if waiting:
            self._waiting[name] = waiting
        else:
            self._waiting.pop(name, None)

    def decline(self, name: str, began: float, now: float) -> None:
        """A decode instance needs nothing of the prefill of this name, which has not come, or has come and ended since
        the request `began` there. Others that wait for it want it all the same."""
        over = self._over.get(name)
        if name not in self._waiting and (over is None or began >= over.at):
            self._declined[name] = now + self._wait_timeout_s

    def keep(self, name: str) -> None:
        """A decode instance will need the prefill of this name."""
        self._declined.pop(name, None)

    def failed(self, prefill: Prefill, now: float) -> None:
        """Who asks for this prefill from now on is told why it failed."""
        for key in (prefill.name, prefill.request_id):
            if key == prefill.name and self._names.get(key, prefill) is not prefill:
                continue  # the next attempt is here already
            until = now + self._wait_timeout_s
            self._over[key] = _Over(prefill.failure, min(prefill.failed_at, now), until, prefill.readings)

    def tick(self, now: float) -> list[tuple[PushRegistration, str]]:
        """Forget what was remembered long enough; returns registrations that have waited long enough, and what to tell
        them."""
        while self._declined and next(iter(self._declined.values())) <= now:
            self._declined.popitem(last=False)
        while self._over and next(iter(self._over.values())).until <= now:
            self._over.popitem(last=False)
        late = [
            registration
            for registrations in self._waiting.values()
            for registration in registrations
            if registration.deadline <= now
        ]
        return [(registration, self._absence(registration.into.prefill.name)) for registration in late]

    def moments(self) -> list[float]:
        """When a `tick` is due for each want that waits."""
        return [registration.deadline for registrations in self._waiting.values() for registration in registrations]

    def _absence(self, name: str) -> str:
        over = self._over.get(name)
        return (
            f"no prefill request named {name} came within {self._wait_timeout_s:g} s: send both legs of a request with "
            f"one transfer_id, or one X-Request-Id{f' (the last one of that name: {over.reason})' if over else ''}"
        )
