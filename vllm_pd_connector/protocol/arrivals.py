"""Where a prefill and the wants for it meet: which prefills are here, which are waited for, and which are over.

The two name each other and come in any order, or one of them never does. A want that comes before its prefill waits
for `patience_s`. What a decode instance declines before it came is declined when it comes, and why a prefill failed is
told who asks for it later, each for as long.

A want names a prefill as its router does, or, when that has finished, by its request id and its lease's nonce.
"""

from __future__ import annotations

from math import inf

from vllm_pd_connector.bounded import Bounded
from vllm_pd_connector.protocol.push_messages import PrefillRef
from vllm_pd_connector.protocol.wants import Prefill, Want

MAX_DECLINED = 4096
MAX_OVER = 4096


class Arrivals:
    """See the module.

    Args:
        patience_s: how long a want waits for its prefill to arrive.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._prefills: dict[str, Prefill] = {}
        self._names: dict[str, Prefill] = {}
        self._waiting: dict[str, list[Want]] = {}  # by name, for prefills that have not come
        self._declined: Bounded[str, float] = Bounded(MAX_DECLINED)  # until when
        self._over: Bounded[str, tuple[str, float]] = Bounded(MAX_OVER)  # why prefills failed, by name and request id

    def __len__(self) -> int:
        """Prefills that are here and names that are waited for."""
        return len(self._prefills) + len(self._waiting)

    def get(self, request_id: str) -> Prefill | None:
        """The prefill with this request id, if it is here."""
        return self._prefills.get(request_id)

    def find(self, ref: PrefillRef) -> Prefill | None:
        """The prefill that a decode instance names, if it is here."""
        if ref.nonce is None:
            return self._names.get(ref.name)
        prefill = self._prefills.get(ref.name)
        return prefill if prefill is not None and prefill.nonce == ref.nonce else None

    def add(self, prefill: Prefill, now: float) -> list[Want]:
        """A prefill has come, with a request id that none has that is here. Returns the wants that waited for it."""
        self._over.pop(prefill.name, None)
        self._prefills[prefill.request_id] = self._names[prefill.name] = prefill
        prefill.declined = self._declined.pop(prefill.name, -inf) > now
        return self._waiting.pop(prefill.name, [])

    def remove(self, prefill: Prefill) -> bool:
        """A prefill is forgotten; returns whether it was here."""
        if self._prefills.get(prefill.request_id) is not prefill:
            return False
        del self._prefills[prefill.request_id]
        if self._names.get(prefill.name) is prefill:
            del self._names[prefill.name]
        return True

    def await_prefill(self, want: Want, now: float) -> str:
        """A want whose prefill is not here waits for it. Returns why it would do so in vain, empty if it waits now."""
        ref = want.into.prefill
        if ref.nonce is not None:
            why = self._over.get(ref.name, ("no lease with that nonce is known", 0.0))[0]
            return f"prefill {ref.name} is not held here: {why}"
        if ref.name in self._over:
            return f"prefill {ref.name}: {self._over[ref.name][0]}"
        want.deadline = now + self._patience_s
        self._declined.pop(ref.name, None)  # a router's second attempt, on another decode instance
        self._waiting.setdefault(ref.name, []).append(want)
        return ""

    def leave(self, want: Want) -> None:
        """A want waits for its prefill no longer."""
        name = want.into.prefill.name
        waiting = [w for w in self._waiting.get(name, []) if w is not want]
        if waiting:
            self._waiting[name] = waiting
        else:
            self._waiting.pop(name, None)

    def decline(self, name: str, now: float) -> None:
        """A decode instance needs nothing of the prefill of this name, which has not come."""
        self._declined[name] = now + self._patience_s

    def failed(self, prefill: Prefill, now: float) -> None:
        """Who asks for this prefill from now on is told why it failed."""
        for key in (prefill.name, prefill.request_id):
            self._over[key] = (prefill.failure, now + self._patience_s)

    def tick(self, now: float) -> list[tuple[Want, str]]:
        """Forget what was remembered long enough; returns wants that have waited long enough, and what to tell them."""
        while self._declined and next(iter(self._declined.values())) <= now:
            self._declined.popitem(last=False)
        while self._over and next(iter(self._over.values()))[1] <= now:
            self._over.popitem(last=False)
        late = [want for wants in self._waiting.values() for want in wants if want.deadline <= now]
        return [(want, self._absence(want.into.prefill.name)) for want in late]

    def moments(self) -> list[float]:
        """When a `tick` is due for each want that waits."""
        return [want.deadline for wants in self._waiting.values() for want in wants]

    def _absence(self, name: str) -> str:
        return (
            f"no prefill request named {name} came within {self._patience_s:g} s: send both legs of a request with one "
            "transfer_id, or one X-Request-Id"
        )
