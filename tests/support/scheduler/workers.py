"""The one worker of an engine without workers: takes the orders of `Engine.told`, and ends them when it is told to."""

from __future__ import annotations

from typing import Any

from tests.support.scheduler.engines import Engine
from tests.support.scheduler.halves import until
from vllm_pd_connector.metadata import BadParameters, ReceiveRequest
from vllm_pd_connector.protocol.wire.fields import Reading
from vllm_pd_connector.protocol.wire.messages import ReadDone, ReadVerdict, Release
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.net.sockets import endpoint


class SimulatedWorker:
    """`orders` are the receives that have not ended, by request. What ended is to be reported with the engine's next
    step: as received if `read` said that it was held, else as failed. `aborted`: those of them that are not wanted."""

    def __init__(self, engine: Engine) -> None:
        self.orders: dict[str, ReceiveRequest] = {}
        self._engine = engine
        self._seen = 0
        self.aborted: set[str] = set()
        self._ended: set[str] = set()
        self._client = SideChannelClient()

    def listen(self) -> None:
        """Take the orders of the steps since the last call."""
        for told in self._engine.told[self._seen :]:
            self.orders |= {receive.request_id: receive for receive in told.receives}
            self.aborted |= set(told.aborts) & self.orders.keys()
        self._seen = len(self._engine.told)

    def read(self, name: str) -> bool:
        """Say that all of a request was read; whether it was held. An aborted one is given up."""
        if name in self.aborted:
            return self.fail(name)
        verdict = self._ask(name, lambda order, lease: ReadDone(lease, 0, 1, order.attempt, order.shared))
        assert isinstance(verdict, ReadVerdict), verdict
        return verdict.held

    def fail(self, name: str) -> bool:
        """Give up a read, or an order whose parameters were refused; never held."""
        if isinstance(self.orders[name].source, BadParameters):
            self._end(name)
            return False
        self._ask(
            name, lambda order, lease: Release((Reading(lease.request_id, lease.nonce, order.attempt, order.shared),))
        )
        return False

    def take_ended(self) -> set[str]:
        """What has ended since the last call."""
        ended, self._ended = self._ended, set()
        return ended

    def _ask(self, name: str, question: Any) -> Any:
        order = self._end(name)
        assert order.read is not None, order.source
        answers: list[Any] = []

        def heard() -> list[Any]:
            answers.extend(said for _, said in self._client.receive())
            return answers

        where = endpoint(order.read.peer.host, order.read.peer.port)
        self._client.send(where, question(order, order.read.lease), 20.0)
        until(lambda: bool(heard()), "an answer")
        return answers[0]

    def _end(self, name: str) -> ReceiveRequest:
        self.aborted.discard(name)
        self._ended.add(name)
        return self.orders.pop(name)

    def close(self) -> None:
        self._client.close()
