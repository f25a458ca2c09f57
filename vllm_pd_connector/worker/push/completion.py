"""A prefill worker's reports of pushes, to its own scheduler half: that of an end is sent until it was noted.

Without one both sides would keep the blocks for ever. Repeating is harmless, since the scheduler half forgets a push
with its end. How far a push is is told once; the next time brings more.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.protocol.wire.messages import Ack

if TYPE_CHECKING:
    from vllm_pd_connector.protocol.wire.push_messages import PushEnded
    from vllm_pd_connector.sidechannel.client import Outcome
    from vllm_pd_connector.worker.rpc import PendingCalls

logger = init_logger(__name__)

RETRY_S = 0.5
HOME_TIMEOUT_S = 10.0


class CompletionReports:
    """See the module. Lives in the transfer thread; `home` is the scheduler half's endpoint."""

    def __init__(self, calls: PendingCalls, home: str) -> None:
        self._calls = calls
        self._home = home
        self._again: list[PushEnded] = []
        self._again_at = 0.0

    def send(self, report: PushEnded) -> None:
        """Send it, now or when that is possible."""
        try:
            self._calls.ask(self._home, report, HOME_TIMEOUT_S, functools.partial(self._sent, report))
        except ProtocolError as error:
            logger.error("report to the scheduler half: %s", error)
            self._keep(report)

    def tell(self, report: PushEnded) -> None:
        """Send it once."""
        try:
            self._calls.ask(self._home, report, HOME_TIMEOUT_S)
        except ProtocolError as error:
            logger.debug("report to the scheduler half: %s", error)

    def turn(self, now: float) -> None:
        """Send again what was not noted, after a pause."""
        if self._again and self._again_at <= now:
            reports, self._again = self._again, []
            for report in reports:
                self.send(report)

    def next_deadline(self) -> float | None:
        """When a `turn` is due, None if none is."""
        return self._again_at if self._again else None

    def _sent(self, report: PushEnded, outcome: Outcome, now: float) -> None:
        if not isinstance(outcome, Ack):
            self._keep(report)

    def _keep(self, report: PushEnded) -> None:
        if not self._again:
            self._again_at = time.monotonic() + RETRY_S
        self._again.append(report)
