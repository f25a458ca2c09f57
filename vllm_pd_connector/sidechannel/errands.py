"""Messages that end something on another instance, and for whose answer nobody waits: `Release`, `DeclinePush`.

One that is lost keeps blocks there until they are given back by time. So one for which there is no room, here or there,
or whose server refuses to be connected, is sent again, each time after twice as long, for LASTS_S; a second one does no
harm. One that is met by silence is not: that has taken as long as it may.
Each is made anew, since it may tell how old it is. Used in the thread that owns the client.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_pd_connector.errors import Busy, Unreachable
from vllm_pd_connector.sidechannel.client import busy_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_pd_connector.protocol.wire.messages import Request
    from vllm_pd_connector.sidechannel.client import Outcome, SideChannelClient

logger = logging.getLogger(__name__)

AGAIN_S = 0.5
LASTS_S = 30.0
"""For so long a lease lives by default that nobody renews."""
MOST = 1024
"""That wait to be sent again; what comes then is sent once."""
AT_ONCE = 32
"""In one turn: each takes 20 us, and a server that has gone may have left a thousand."""


@dataclass(slots=True, order=True)
class _Errand:
    """By when it is due, and then by when it came."""

    at: float
    number: int
    endpoint: str = field(compare=False)
    make: Callable[[], Request] = field(compare=False)
    timeout_s: float = field(compare=False)
    until: float = field(compare=False)
    pause_s: float = field(default=AGAIN_S, compare=False)


class Errands:
    """See the module. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._ends = False
        self._numbers = itertools.count()
        self._under_way: dict[int, _Errand] = {}  # by the client's tokens
        self._later: list[_Errand] = []  # a heap
        self._lost_at = ""  # what was for this server is lost, as was said

    def end(self) -> None:
        """Whoever sends these ends: a server that is not reached is not waited for any more. What waits is sent once
        more in the next turns."""
        self._ends = True
        for errand in self._later:
            errand.at = 0.0
        heapq.heapify(self._later)

    def send(
        self, client: SideChannelClient, endpoint: str, make: Callable[[], Request], timeout_s: float, now: float
    ) -> None:
        """Send what `make` gives, now or when that is possible; `timeout_s` is for each answer.

        Raises:
            ProtocolError: it can never be sent; see `SideChannelClient.send`.
        """
        self._try(client, _Errand(now, next(self._numbers), endpoint, make, timeout_s, now + LASTS_S), now)

    def take(self, token: int, outcome: Outcome, now: float) -> bool:
        """Whether this has come back of one of these; if it was not heard, it goes again."""
        if (errand := self._under_way.pop(token, None)) is None:
            return False
        if busy_of(outcome) or (isinstance(outcome, Unreachable) and not self._ends):
            self._put_off(errand, outcome, now)
        elif isinstance(outcome, Exception):
            self._lost(errand, outcome)
        elif errand.endpoint == self._lost_at:
            self._lost_at = ""
        return True

    def turn(self, client: SideChannelClient, now: float) -> None:
        """Send again what is due, some of it: `next_deadline` tells of the rest."""
        for _ in range(AT_ONCE):
            if not self._later or self._later[0].at > now:
                return
            errand = heapq.heappop(self._later)
            try:
                self._try(client, errand, now)
            except Exception:  # it is lost, and the others are not to be
                logger.exception("giving back at %s", errand.endpoint)

    def next_deadline(self) -> float | None:
        """When a `turn` is due; None if nothing is to be sent again."""
        return self._later[0].at if self._later else None

    def _try(self, client: SideChannelClient, errand: _Errand, now: float) -> None:
        try:
            token = client.send(errand.endpoint, errand.make(), errand.timeout_s)
        except Busy as error:
            self._put_off(errand, error, now)
        else:
            self._under_way[token] = errand

    def _put_off(self, errand: _Errand, why: object, now: float) -> None:
        errand.at = now + errand.pause_s
        errand.pause_s *= 2
        if errand.at <= errand.until and len(self._later) < MOST:
            heapq.heappush(self._later, errand)
        else:
            self._lost(errand, why)

    def _lost(self, errand: _Errand, why: object) -> None:
        """Of what is lost for one server the first is told: there may be a thousand."""
        if errand.endpoint != self._lost_at:
            self._lost_at = errand.endpoint
            logger.warning("giving back at %s, in vain: %s", errand.endpoint, why)
