"""A prefill worker's question for orders, which it keeps open at its own instance's side channel.

The first orders come with nothing of the instance's other ranks known here: their manifests are fetched then, and the
orders are handed out again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.protocol.push.command_queue import IDLE_ANSWER_S
from vllm_pd_connector.protocol.wire.messages import Describe, Manifests
from vllm_pd_connector.protocol.wire.push_messages import AwaitCommands, Commands
from vllm_pd_connector.worker.push.completion import HOME_TIMEOUT_S, RETRY_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_pd_connector.protocol.wire.push_messages import Command
    from vllm_pd_connector.sidechannel.client import Outcome
    from vllm_pd_connector.worker.rpc import PendingCalls

logger = init_logger(__name__)


class Orders:
    """See the module. Lives in the transfer thread.

    Args:
        home: the endpoint of this instance's side channel.
        worker, token: this worker's number there, and its secret.
        obey: carries out one order, and raises nothing.

    `own` are the encoded manifests of all ranks of this instance, once there was an order.
    """

    def __init__(
        self, calls: PendingCalls, home: str, worker: int, token: bytes, obey: Callable[[Command, float], None]
    ) -> None:
        self._calls, self._home = calls, home
        self._worker, self._token = worker, token
        self._obey = obey
        self.own: tuple[bytes, ...] = ()
        self._seen, self._asking, self._ask_at = 0, False, 0.0

    def turn(self, now: float) -> None:
        """Ask, if nothing was asked that has not been answered."""
        if self._asking or self._ask_at > now:
            return
        message = AwaitCommands(self._token, self._worker, self._seen)
        try:
            self._calls.ask(self._home, message, IDLE_ANSWER_S + HOME_TIMEOUT_S, self._ordered)
            self._asking = True
        except ProtocolError as error:
            logger.error("orders of the scheduler half: %s", error)
            self._ask_at = now + RETRY_S

    def next_deadline(self) -> float | None:
        """When a `turn` is due, None if none is."""
        return None if self._asking else self._ask_at

    def _ordered(self, outcome: Outcome, now: float) -> None:
        self._asking = False
        match outcome:
            case Commands(last=last, orders=commands):
                if commands and not self.own:
                    self._learn_own(now)
                    return
                self._seen = max(self._seen, last)
                for command in commands:
                    self._obey(command, now)
            case _:
                logger.debug("orders of the scheduler half: %s", outcome)
                self._ask_at = now + RETRY_S

    def _learn_own(self, now: float) -> None:
        """Fetch the manifests of this instance's ranks; the commands are handed out again afterwards."""
        self._asking = True
        try:
            self._calls.ask(self._home, Describe(), HOME_TIMEOUT_S, self._learned)
        except ProtocolError as error:
            self._learned(error, now)

    def _learned(self, outcome: Outcome, now: float) -> None:
        self._asking = False
        if isinstance(outcome, Manifests):
            self.own = outcome.manifests
        else:
            logger.warning("manifests of this instance: %s", outcome)
            self._ask_at = now + RETRY_S
