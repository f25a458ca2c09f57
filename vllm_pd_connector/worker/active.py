"""One receive under way, as the transfer thread knows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from vllm_pd_connector.geometry.runs import Runs
from vllm_pd_connector.geometry.stage import Chunk
from vllm_pd_connector.observability.stats import FailureKind
from vllm_pd_connector.protocol import receive as receives
from vllm_pd_connector.protocol.fields import LeaseRef
from vllm_pd_connector.protocol.push_messages import Moved
from vllm_pd_connector.protocol.receive import Receive
from vllm_pd_connector.steps import ReceiveOrder
from vllm_pd_connector.transport.base import Peer as TransportPeer
from vllm_pd_connector.transport.base import Transfer
from vllm_pd_connector.worker.link import Link
from vllm_pd_connector.worker.links import Links


@dataclass(eq=False, slots=True)
class Active:
    """What was ordered, its machine, and the transport's handles by transfer index.

    `prefill` names the request there; a push learns its id in the end, and in `compared` the lease of the blocks with
    which what was written is compared, if it is to be and can be. `connection` is the link's when the reads began;
    `stuck` are indices whose transfers failed but may still write. `question` numbers what a prefill side that writes
    was asked, `retry_at` is when it is asked again.
    """

    order: ReceiveOrder
    links: Links
    link: Link
    machine: Receive
    attempt: bytes
    prefill: str
    began: float
    phase_began: float
    reads: list[tuple[TransportPeer, Runs | Iterator[Chunk]]] = field(default_factory=list)
    late_starts: dict[int, int] = field(default_factory=dict)
    connection: object = None
    transfers: dict[int, Transfer] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)
    moved: Moved = Moved()
    kind: FailureKind = FailureKind.INTERNAL
    reported: bool = False
    verified: bool = False
    compared: LeaseRef | None = None
    question: int = 0
    retry_at: float | None = None

    @property
    def lease(self) -> LeaseRef | None:
        """What is compared with, confirmed or given back; None if the prefill side sees to its lease itself."""
        if self.question:
            return self.compared
        return self.order.remote.lease if self.order.remote is not None else None

    @property
    def asks(self) -> bool:
        """Whether the prefill side is asked to write; known once the link is ready."""
        if self.order.either:
            return self.link.figures is not None and self.link.figures.prefers_push
        return self.order.push is not None


class Drive(Protocol):
    """Gives a receive's machine an event; `kind` labels a failure that it may lead to."""

    def __call__(self, active: Active, event: receives.Event, now: float, kind: FailureKind | None = None) -> None: ...
