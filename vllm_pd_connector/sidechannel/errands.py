"""Messages that end something on another instance, and for whose answer nobody waits: `Release`, `DeclinePush`.

One that is lost keeps blocks there until they are given back by time. So one for which there is no room, here or there,
or whose server is not reached, is sent again, each time after twice as long, for LASTS_S; a second one does no harm.
Each is made anew, since it may tell how old it is. Used in the thread that owns the client.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
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


@dataclass(slots=True)
class _Errand:
    endpoint: str
    make: Callable[[], Request]
    timeout_s: float
    until: float
    pause_s: float = AGAIN_S
    at: float = 0.0


class Errands:
    """See the module. Times are seconds of the caller's clock. While it `ends`, a server that is not reached is not
    waited for."""

    def __init__(self) -> None:
        self.ends = False
        self._under_way: dict[int, _Errand] = {}  # by the client's tokens
        self._later: list[_Errand] = []

    def send(
        self, client: SideChannelClient, endpoint: str, make: Callable[[], Request], timeout_s: float, now: float
    ) -> None:
        """Send what `make` gives, now or when that is possible; `timeout_s` is for each answer.

        Raises:
            ProtocolError: it can never be sent; see `SideChannelClient.send`.
        """
        self._try(client, _Errand(endpoint, make, timeout_s, now + LASTS_S), now)

    def take(self, token: int, outcome: Outcome, now: float) -> bool:
        """Whether this has come back of one of these; if it was not heard, it goes again."""
        if (errand := self._under_way.pop(token, None)) is None:
            return False
        if busy_of(outcome) or (isinstance(outcome, Unreachable) and not self.ends):
            self._put_off(errand, outcome, now)
        elif isinstance(outcome, Exception):
            logger.warning("giving back at %s: %s", errand.endpoint, outcome)
        return True

    def turn(self, client: SideChannelClient, now: float) -> None:
        """Send again what is due."""
        if self._later and (due := [errand for errand in self._later if errand.at <= now]):
            self._later = [errand for errand in self._later if errand.at > now]
            for errand in due:
                try:
                    self._try(client, errand, now)
                except Exception:  # it is lost, and the others are not to be
                    logger.exception("giving back at %s", errand.endpoint)

    def next_deadline(self) -> float | None:
        """When a `turn` is due; None if nothing is to be sent again."""
        return min((errand.at for errand in self._later), default=None)

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
            self._later.append(errand)
        else:
            logger.warning("giving back at %s, in vain: %s", errand.endpoint, why)
