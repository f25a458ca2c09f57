"""Orders to the workers of a prefill instance: each is kept until the worker has asked for the ones after it.

A worker's question is answered when there is something to do, and otherwise after a while with nothing, so that it is
known to be alive. An answer holds the oldest orders up to a limit in bytes; the worker's next question brings those
after them. No clock or socket in here; a `ticket` is a client's identity and sequence number, and never looked into.
Methods return the answers that have become due.
"""

from __future__ import annotations

from typing import NamedTuple

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.protocol.fields import MAX_REPLY_FRAME
from vllm_pd_connector.protocol.messages import Reply, body_size
from vllm_pd_connector.protocol.push_messages import AwaitOrders, GiveUp, Orders, Write

Ticket = tuple[bytes, int]

IDLE_ANSWER_S = 30.0
MAX_ORDERS_BYTES = MAX_REPLY_FRAME // 2  # of one answer's orders, and so of each order


class _Numbered(NamedTuple):
    number: int
    order: Write | GiveUp
    size: int


class OrderBook:
    """The orders of one instance with `workers` workers; every order is for all of them."""

    def __init__(self, workers: int) -> None:
        self._orders: list[list[_Numbered]] = [[] for _ in range(workers)]
        self._number = 0
        self._awaiting: dict[int, tuple[Ticket, int, float]] = {}

    def add(self, order: Write | GiveUp) -> list[tuple[Ticket, Reply]]:
        """A new order.

        Raises:
            ProtocolError: it is too large to be handed out.
        """
        if (size := body_size(order)) > MAX_ORDERS_BYTES:
            raise ProtocolError(f"an order of {size} bytes, the limit is {MAX_ORDERS_BYTES}: it has too many blocks")
        self._number += 1
        for orders in self._orders:
            orders.append(_Numbered(self._number, order, size))
        return [answer for worker in range(len(self._orders)) for answer in self._hand_out(worker)]

    def await_orders(self, message: AwaitOrders, ticket: Ticket, now: float) -> list[tuple[Ticket, Reply]]:
        """A worker is ready for orders after number `seen`."""
        worker = message.worker
        self._orders[worker] = [numbered for numbered in self._orders[worker] if numbered.number > message.seen]
        self._awaiting[worker] = (ticket, message.seen, now + IDLE_ANSWER_S)
        return self._hand_out(worker)

    def tick(self, now: float) -> list[tuple[Ticket, Reply]]:
        """Tell who has waited long enough that there is nothing."""
        late = {worker: (ticket, seen) for worker, (ticket, seen, due) in self._awaiting.items() if due <= now}
        for worker in late:
            del self._awaiting[worker]
        return [(ticket, Orders(seen, ())) for ticket, seen in late.values()]

    def moments(self) -> list[float]:
        """When a `tick` is due for each worker that waits."""
        return [due for _, _, due in self._awaiting.values()]

    def _hand_out(self, worker: int) -> list[tuple[Ticket, Reply]]:
        orders = self._orders[worker]
        if not orders or worker not in self._awaiting:
            return []
        ticket, _, _ = self._awaiting.pop(worker)
        given, size = 0, 0
        while given < len(orders) and size + orders[given].size <= MAX_ORDERS_BYTES:
            size += orders[given].size
            given += 1
        return [(ticket, Orders(orders[given - 1].number, tuple(numbered.order for numbered in orders[:given])))]
