"""When the engine core takes its next step, where vLLM leaves it without a reason to; and what it knows by then.

While a decode instance has nothing to compute and only waits for caches, vLLM steps about a thousand times a second,
and in each step asks every worker whether they have come. Here the engine is held between two such steps until
something can come of the next: a worker's bell says that a receive has ended, the engine's input queue holds something,
or LONGEST_S are over. Nothing is held while a request is computed, nor before the results of an end were looked at.

Where somebody waits whose turn comes without a sign (a request that waits for blocks or a grammar, a worker on another
host) the engine is held for SHORT_S only.

A receive that went well on every worker, and of which each has rung, needs no step that fetches the workers' reports:
vLLM is told before the next one, which computes its request. What the workers report of it then is left out. Where some
have rung and others have not, the engine waits for them for PARTS_S, instead of asking all.

The other way round, an idle engine takes no step, but what has ended meanwhile (a lease, a quarantine) must be given
back and told: `ask` makes it take one. For leases of which nobody waits for the blocks that is put off for GATHER_S
(`ask_soon`): one step serves all that end meanwhile, and it does not take the processor, where that is shared, from a
decode instance that has just read and now computes.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from vllm_pd_connector.protocol.wire.fields import NONCE_BYTES
from vllm_pd_connector.sidechannel.bell import ENDED, RECEIVED, SECRET_BYTES, Bell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm_pd_connector.compat.engine import EngineLoop

LONGEST_S = 1.0
"""vLLM tells its own figures of an instance (requests waiting, cache in use) with its steps."""
SHORT_S = 0.002
PARTS_S = 0.001
GATHER_S = 0.02


class StepHold:
    """See the module. `ask` may be called from any thread, `ask_soon` from one, the rest from the engine core's.

    Args:
        loop: of the engine that steps; None: it steps as it likes.
        waiting: how many requests wait for their caches, or for leases to end.
        loads: whether a request's caches are being received, in this attempt; asked in the bell's thread.
        received: is told between two steps which of these are over on all workers.
    """

    def __init__(
        self,
        loop: EngineLoop | None,
        waiting: Callable[[], int],
        loads: Callable[[str, bytes], bool],
        received: Callable[[set[str]], None],
    ) -> None:
        self._loop = loop
        self._waiting = waiting
        self._loads = loads
        self._received = received
        self._changed = threading.Condition()
        self._asked = False
        self._waits, self._gathers_until = False, 0.0
        self._due = 0
        self._holds = False
        self._workers: frozenset[bytes] = frozenset()
        self._heard: set[bytes] = set()
        self._parts: dict[str, set[bytes]] = {}  # of receives of which some workers have rung
        self._part_came = False  # and no step was asked for since
        self._whole: set[str] = set()
        self._bell: Bell | None = None

    def listen(self, tokens: Iterable[bytes]) -> None:
        """Hang up a bell for the workers with these secrets, all that there are."""
        self._workers = frozenset(tokens)
        if self._loop is not None and self._bell is None:
            self._bell = Bell(self._rung)
            self._loop.between_steps(self._between)

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
        with self._changed:
            again, self._asked = self._asked, True
            self._changed.notify()
        if not again:
            self._loop.wake()

    def ask_soon(self) -> float:
        """As `ask`: at once where a request waited in the last step, else in the call that comes GATHER_S behind the
        first one since that step. Returns in how many seconds that is due, 0.0: it has asked. For one thread."""
        with self._changed:
            now = time.monotonic()
            until = self._gathers_until or now + GATHER_S
            if self._loop is not None and not self._waits and now < until:
                self._gathers_until = until
                return until - now
        self.ask()
        return 0.0

    def step(self, *, computes: bool, waiting: bool) -> bool:
        """A step begins. Whether the next one may be long in coming, so that workers need not be ready for it.

        Args:
            computes: tokens are scheduled in it.
            waiting: there are requests that wait for their caches, or for leases to end.
        """
        ended = False
        if waiting or self._waits or self._asked or self._gathers_until:  # else nothing is told to other threads
            with self._changed:
                # What was put off is given back in this step, too late for a request that was looked at before.
                ended, self._asked = self._asked or self._gathers_until > 0, False
                self._waits, self._gathers_until = waiting, 0.0
        if self._loop is None:
            return False
        busy = computes or self._loop.computes()
        if waiting and not busy:
            self._loop.go_on()
        if ended:
            # vLLM looks at a step's results some steps later where its batches overlap: what ended beside a request
            # that was computed may be looked at after that request's end.
            self._due = self._loop.depth
        self._holds = waiting and not busy and not self._due
        # Behind a lease that ended in an idle engine nothing follows, also where its steps are never held.
        idle = not computes and not waiting and self._loop.idles()
        follows = (busy and not idle) or bool(self._due and self._loop.has_others(0))
        self._due = max(self._due - 1, 0)
        return not follows

    def _between(self) -> None:
        """Hold the engine, if nothing can come of its next step yet, and tell what has come."""
        assert self._loop is not None
        holds, self._holds = self._holds, False
        if holds and not self._asked and not self._whole and (waiting := self._waiting()):
            if not (self._parts and self._part_came):  # else it came while nothing was held, and has woken nobody
                self._loop.wait(LONGEST_S if self._sees_all(waiting) else SHORT_S)
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._whole or not self._parts, PARTS_S)
                self._asked |= bool(self._parts)  # or its message was lost: who has not rung may have reported
                self._part_came = False
        if self._whole:
            with self._changed:
                whole, self._whole = self._whole, set()
            self._received(whole)

    def _sees_all(self, waiting: int) -> bool:
        """Whether everything that a step could take up would show itself."""
        assert self._loop is not None
        return bool(self._workers) and self._heard == self._workers and not self._loop.has_others(waiting)

    def forget(self, request_id: str) -> None:
        """All workers have reported this receive; it `loads` no more."""
        with self._changed:
            self._parts.pop(request_id, None)
            self._whole.discard(request_id)

    def _rung(self, message: bytes) -> None:
        said, token, rest = message[:1], message[1 : 1 + SECRET_BYTES], message[1 + SECRET_BYTES :]
        if token not in self._workers:
            return
        self._heard.add(token)
        if said == RECEIVED:
            self._rung_for(rest[NONCE_BYTES:].decode(), rest[:NONCE_BYTES], token)
        elif said == ENDED:
            self.ask()

    def _rung_for(self, request_id: str, attempt: bytes, token: bytes) -> None:
        assert self._loop is not None
        with self._changed:
            if not self._loads(request_id, attempt):  # its reports were faster
                return
            rung = self._parts.setdefault(request_id, set())
            first = not rung
            rung.add(token)
            whole = rung == self._workers
            self._part_came |= not whole
            if whole:
                del self._parts[request_id]
                self._whole.add(request_id)
                self._changed.notify()
        if first or whole:
            self._loop.wake()

    def close(self) -> None:
        if self._bell is not None:
            self._bell.close()
