"""When the engine core takes its next step, where vLLM leaves it without a reason to.

While a decode instance has nothing to compute and only waits for caches, vLLM steps about a thousand times a second,
and in each step asks every worker whether they have come. Here such a step is held back until something can come of
it: a worker's bell says that a receive has ended, the engine's input queue holds something, or LONGEST_S are over. A
step that schedules tokens or has something to tell the workers is never held, and none while a request is computed.

Where somebody waits whose turn comes without a sign (a request that waits for blocks or a grammar, a worker on another
host) the step is held for SHORT_S only.

The other way round, an idle engine takes no step, but what has ended meanwhile (a lease, a quarantine) must be given
back and told: `ask` makes it take one.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from vllm_pd_connector.sidechannel.bell import ENDED, Bell

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_pd_connector.compat.engine import EngineLoop

LONGEST_S = 1.0
"""vLLM tells its own figures of an instance (requests waiting, cache in use) with its steps."""
SHORT_S = 0.002


class StepHold:
    """See the module. `ask` may be called from any thread, the rest from the engine core's.

    Args:
        loop: of the engine that steps; None: it steps as it likes.
    """

    def __init__(self, loop: EngineLoop | None) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._asked = False
        self._due = 0
        self._workers: frozenset[bytes] = frozenset()
        self._heard: set[bytes] = set()
        self._bell: Bell | None = None

    def listen(self, tokens: Iterable[bytes]) -> None:
        """Hang up a bell for the workers with these secrets, all that there are."""
        self._workers = frozenset(tokens)
        if self._loop is not None and self._bell is None:
            self._bell = Bell(self._rung)

    @property
    def bell(self) -> str:
        """The bell's address; empty without one."""
        return self._bell.address if self._bell is not None else ""

    @property
    def asked(self) -> bool:
        """Whether a step was asked for that has not begun."""
        return self._asked

    def ask(self) -> None:
        """Something has ended that a step must take up: have one taken soon, also by an idle engine."""
        if self._loop is None:
            return
        with self._lock:
            again, self._asked = self._asked, True
        if not again:
            self._loop.wake()

    def step(self, *, computes: bool, tells: bool, waiting: int) -> bool:
        """Hold back the step that begins, if nothing can come of it yet, and have vLLM wait for nothing else. Returns
        whether the next one may be long in coming, so that workers need not be ready for it.

        Args:
            computes: tokens are scheduled in it.
            tells: it has something else to tell the workers.
            waiting: requests that wait for their caches, or for leases to end.
        """
        ended = self._take()
        if self._loop is None:
            return False
        busy = computes or self._loop.computes()
        if waiting and not busy:
            self._loop.go_on()
            if not tells and not ended and not self._due:
                self._loop.wait(LONGEST_S if self._sees_all(waiting) else SHORT_S)
                ended = self._take()
        if ended:
            # vLLM looks at a step's results some steps later where its batches overlap: what ended beside a request
            # that was computed may be looked at after that request's end.
            self._due = self._loop.depth
        # Behind a lease that ended in an idle engine nothing follows.
        follows = busy or bool(self._due and self._loop.has_others(0))
        self._due = max(self._due - 1, 0)
        return not follows

    def _sees_all(self, waiting: int) -> bool:
        """Whether everything that a step could take up would show itself."""
        assert self._loop is not None
        return bool(self._workers) and self._heard == self._workers and not self._loop.has_others(waiting)

    def _take(self) -> bool:
        with self._lock:
            asked, self._asked = self._asked, False
        return asked

    def _rung(self, message: bytes) -> None:
        said, token = message[:1], message[1:]
        if token in self._workers:
            self._heard.add(token)
            if said == ENDED:
                self.ask()

    def close(self) -> None:
        if self._bell is not None:
            self._bell.close()
