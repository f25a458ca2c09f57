"""Requests on the side channel and what is done with their answers, in the thread that owns the client."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_pd_connector.sidechannel.client import Outcome, SideChannelClient
from vllm_pd_connector.sidechannel.errands import Errands
from vllm_pd_connector.sidechannel.waiting import wait

if TYPE_CHECKING:
    from vllm_pd_connector.protocol.wire.messages import Request
    from vllm_pd_connector.sidechannel.net.keys import Keys
    from vllm_pd_connector.wake import Wake

Handler = Callable[[Outcome, float], None]
"""Called with what became of a request and the time; once, in the thread that owns the `PendingCalls`."""


class PendingCalls:
    """A side-channel client whose requests carry their continuation."""

    def __init__(self, keys: Keys | None) -> None:
        self._client = SideChannelClient(keys=keys)
        self._handlers: dict[int, Handler] = {}
        self._errands = Errands()
        self._due: deque[tuple[Handler, Outcome]] = deque()  # queued, so one failing handler loses no other outcome
        self._receives = True  # else the last `wait` saw that nothing had come

    def ask(self, endpoint: str, request: Request, timeout_s: float, handler: Handler | None = None) -> None:
        """Send a request; `handler` gets the outcome in a later `deliver`. Without one nobody waits for it.

        Raises:
            ProtocolError: it cannot be sent, or not yet (Busy); see `SideChannelClient.send`.
        """
        token = self._client.send(endpoint, request, timeout_s)
        if handler is not None:
            self._handlers[token] = handler

    def give_back(self, endpoint: str, make: Callable[[], Request], timeout_s: float) -> None:
        """Send what ends something there, again where it is not heard; see `Errands.send`.

        Raises:
            ProtocolError: it can never be sent.
        """
        self._errands.send(self._client, endpoint, make, timeout_s, time.monotonic())

    def wait(self, wake: Wake, deadline: float | None, *, exact: bool = False) -> None:
        """Sleep until there is input, `wake` is set or the time is `deadline`; not if `deliver` was cut short; as
        `exact` as `sidechannel.waiting.sleep` can."""
        self._receives = True
        if (again := self._errands.next_deadline()) is not None:
            deadline = again if deadline is None else min(again, deadline)
        self._receives = wait(self._client, wake, time.monotonic() if self._due else deadline, exact=exact)

    def deliver(self, now: float) -> list[str]:
        """Hand every outcome that has come to its handler; returns the endpoints that have said that they end."""
        self._errands.turn(self._client, now)
        for token, outcome in self._client.receive() if self._receives else ():
            if not self._errands.take(token, outcome, now) and (handler := self._handlers.pop(token, None)) is not None:
                self._due.append((handler, outcome))
        while self._due:
            handler, outcome = self._due.popleft()
            handler(outcome, now)
        return self._client.take_departed()

    def close(self, linger_s: float = 0.0) -> None:
        """Forget all requests; see `SideChannelClient.close`."""
        self._client.close(linger_s)
