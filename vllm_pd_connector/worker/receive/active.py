"""One receive under way, as the transfer thread knows it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.errors import BindError
from vllm_pd_connector.geometry.bind import require_filled
from vllm_pd_connector.geometry.spans import Slices
from vllm_pd_connector.geometry.staging.chunks import RUN_COST_BYTES
from vllm_pd_connector.metadata import Either
from vllm_pd_connector.observability.stats import FailureKind, Phase
from vllm_pd_connector.protocol import receive as receives
from vllm_pd_connector.protocol.wire.push_messages import Moved, Taken
from vllm_pd_connector.worker.receive.read_link import ReadLink

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from vllm_pd_connector.bounded import Pieces
    from vllm_pd_connector.geometry.manifest import Group
    from vllm_pd_connector.geometry.plan import Plan
    from vllm_pd_connector.geometry.staging.chunks import Chunk
    from vllm_pd_connector.metadata import ReceiveRequest
    from vllm_pd_connector.observability.tracing import Span
    from vllm_pd_connector.protocol.receive import Receive
    from vllm_pd_connector.protocol.wire.fields import LeaseRef
    from vllm_pd_connector.transport.base import TransportPeer
    from vllm_pd_connector.worker.in_flight import InFlight
    from vllm_pd_connector.worker.peers.pool import Links
    from vllm_pd_connector.worker.peers.process_watch import ProcessWatch
    from vllm_pd_connector.worker.receive.push_link import AskLink

logger = init_logger(__name__)

Outcome: TypeAlias = "tuple[receives.Event, FailureKind | None]"


@dataclass(eq=False, slots=True)
class ActiveReceive:
    """What was ordered, its machine, and the transport's handles by transfer index.

    `plan` is the link's when it was ready; it tells what is written here, also by the prefill side. `prefill` names the
    request there; a push learns its id in the end, and in `compared` the lease of the blocks with which what was
    written is compared, if it is to be and can be, and what was moved; `summing` are this worker's sums for that,
    `comparing`: theirs have come, too, and nothing was said yet. `engine_id` is our own engine's.
    `binding` is what is left of its binding, once that has begun and until it is over.
    `in_flight` are its reads, `arrived` is how far they were when their deadline was set, `posting` whether the
    transport has not yet got all of them. `watches` are those of all workers that may write. `question` numbers what a
    prefill side that writes was asked, `life` is whom, `retry_at` is when it is asked again, `busy` why, if there was
    no room or time for the question, `withdrawn_at` when it was first asked to end, `tell_at` when a long quarantine is
    told. `written` is whether the prefill side is to write, once it is bound; of what is read `run_cost` is the link's
    then. `span` is its span, None if it is not traced; `phases` are those that are over, with the moments at which they
    began and ended. `key` is that of `enter`.
    """

    request: ReceiveRequest
    links: Links[Any]
    link: ReadLink | AskLink
    machine: Receive
    attempt: bytes
    prefill: str
    engine_id: str
    began: float
    phase_began: float
    plan: Plan | None = None
    binding: Iterator[Outcome | None] | None = None
    reads: list[tuple[TransportPeer, Slices | Iterator[Chunk]]] = field(default_factory=list)
    first_valid_tokens: dict[int, int] = field(default_factory=dict)
    in_flight: InFlight = field(init=False)
    posting: bool = False
    arrived: int = 0
    moved: Moved = Moved()
    kind: FailureKind = FailureKind.INTERNAL
    reported: bool = False
    verified: bool = False
    compared: LeaseRef | None = None
    summing: Future[Any] | None = None
    comparing: bool = False
    question: int = 0
    written: bool | None = None
    run_cost: int = RUN_COST_BYTES
    retry_at: float | None = None
    busy: str = ""
    life: str = ""
    watches: tuple[ProcessWatch, ...] = ()
    withdrawn_at: float = 0.0
    tell_at: float = 0.0
    span: Span | None = None
    phases: list[tuple[Phase, float, float]] = field(default_factory=list)
    key: str = ""

    def passed(self, phase: Phase, now: float) -> float:
        """A phase is over; returns how many seconds it took."""
        began, self.phase_began = self.phase_began, now
        self.phases.append((phase, began, now))
        return now - began

    def moved_since(self) -> bool:
        """Whether a part of its reads has ended since this was asked last, or they began."""
        before, self.arrived = self.arrived, self.in_flight.arrived
        return self.arrived != before

    @property
    def taken(self) -> Taken:
        """What the prefill side is told of what came."""
        moved, span = self.moved + self.in_flight.moved, self.span
        return Taken(self.engine_id, moved, span.traceparent if span is not None else "")

    @property
    def lease(self) -> LeaseRef | None:
        """What is compared with, confirmed or given back; None if the prefill side sees to its lease itself."""
        if self.question:
            return self.compared
        return self.request.lease

    @property
    def asks(self) -> bool:
        """Whether the prefill side is asked to write; known once the link is ready, and certain once it is bound."""
        if self.written is not None:
            return self.written
        if isinstance(self.link, ReadLink):
            either = isinstance(self.request.source, Either)
            return either and self.link.bandwidth is not None and self.link.bandwidth.prefers_push
        return True


def enter(active: ActiveReceive, among: dict[str, ActiveReceive]) -> None:
    """Put a receive among others by its request's name, which may be used again: one that had the name, and that has
    failed and may still write, is there by another until nothing of it does."""
    name = active.key = active.request.request_id
    if (older := among.pop(name, None)) is not None:
        older.key = f"{name} {older.attempt.hex()}"
        among[older.key] = older
    among[name] = active


def bind_receive(active: ActiveReceive, groups: Sequence[Group], until: float) -> Outcome | None:
    """Bind it, its `reads` among others, or go on with that, in a worker with these `groups`. What its machine is to be
    told, and of what kind a failure is; None if there is more to be done when the monotonic clock says `until`."""
    if active.binding is None or active.plan is not active.link.plan:
        active.binding = _binding(active, groups)
    while (outcome := next(active.binding)) is None:
        if time.monotonic() >= until:
            return None
    active.binding = None
    return outcome


def _binding(active: ActiveReceive, groups: Sequence[Group]) -> Iterator[Outcome | None]:
    """Yields None where other things may be done, and the outcome at last."""
    try:
        event = yield from _bind(active, groups)
    except BindError as error:
        yield receives.PeerFailed(str(error)), FailureKind.BAD_PARAMETERS
    except Exception as error:  # a defect of ours that one request met must not reach the others
        logger.exception("request %s: binding failed", active.request.request_id)
        yield receives.PeerFailed(f"{type(error).__name__}: {error}"), FailureKind.INTERNAL
    else:
        yield event, None


def _bind(active: ActiveReceive, groups: Sequence[Group]) -> Pieces[receives.Event]:
    request, link = active.request, active.link
    active.plan, active.written = link.plan, active.asks
    require_filled(groups, request.blocks, request.start)
    if not isinstance(link, ReadLink) or active.written:
        return receives.PushReady()
    assert request.read is not None
    active.run_cost = link.run_cost
    bound = yield from link.binding(request.read.blocks, request.blocks, request.start, request.stop)
    active.reads, active.first_valid_tokens = bound.reads, bound.first_valid_tokens
    staged = frozenset(i for i, (_, work) in enumerate(active.reads) if not isinstance(work, Slices))
    return receives.PeerReady(len(active.reads), staged)


class Drive(Protocol):
    """Gives a receive's machine an event; `kind` labels a failure that it may lead to."""

    def __call__(
        self, active: ActiveReceive, event: receives.Event, now: float, kind: FailureKind | None = None
    ) -> None: ...
