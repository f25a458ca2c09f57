"""One rank's part of a push under way, as the transfer thread knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.errors import BindError
from vllm_pd_connector.geometry.bind import latest
from vllm_pd_connector.observability.stats import FailureKind
from vllm_pd_connector.protocol.push import push as machines
from vllm_pd_connector.worker.push.link import NOTHING_AHEAD, Ahead

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_pd_connector.geometry.spans import Slices
    from vllm_pd_connector.geometry.staging.chunks import Chunk
    from vllm_pd_connector.protocol.wire.push_messages import PushInto, WriteCommand
    from vllm_pd_connector.worker.in_flight import InFlight
    from vllm_pd_connector.worker.push.link import WriteLink

logger = init_logger(__name__)

PIECE_TOKENS = 1 << 16
"""So many tokens are bound at a time, where no layers are ahead: with more at once, as of a long prompt whose decode
instance came late, nothing else of the transfer thread goes on for milliseconds."""


@dataclass(eq=False, slots=True)
class ActivePush:
    """What is written into where, its machine, and what is in flight. `cursor` is the token up to which groups of full
    attention were bound, except some waves of layers that are `ahead` of it, and `ended` that the rest was, too;
    `work` was bound and is to be begun, `begun` says how many transfers were. `arrived` is how far they were when the
    deadline was set, `told` when the scheduler half was told last, and it is told again from `tell_at` on. By the step
    that it `waits_for` it is filed; it is not looked at before `look_at`. `cancelled`: no order comes of it."""

    into: PushInto
    link: WriteLink
    machine: machines.Push
    cursor: int
    in_flight: InFlight = field(init=False)
    work: tuple[Slices | Iterator[Chunk], ...] = ()
    ahead: Ahead = NOTHING_AHEAD
    ended: bool = False
    waits_for: int | None = None
    look_at: float = 0.0
    cancelled: bool = False
    begun: int = 0
    arrived: int = 0
    told: int = 0
    tell_at: float = 0.0
    first_valid_tokens: dict[int, int] = field(default_factory=dict)
    given_up: FailureKind = FailureKind.INTERNAL  # of what kind the reason is, where it is given up

    @property
    def key(self) -> str:
        return self.into.attempt.hex()

    def kind_of(self, failure: machines.Event) -> FailureKind:
        """What the push counts as that this event has ended."""
        match failure:
            case machines.GivenUp():
                return self.given_up
            case machines.LinkLost():
                return FailureKind.PEER_UNREACHABLE
            case machines.PushTick():
                return FailureKind.DEADLINE
        return FailureKind.TRANSFER_FAILED

    @property
    def rests(self) -> bool:
        """Whether there is nothing of it to be looked at: it waits for a step, as most do while prefills run, or has
        failed and nothing more is heard of it."""
        return (self.in_flight.ended or self.in_flight.unheard) and self.machine.next_deadline() is None

    @property
    def is_lost(self) -> bool:
        """Whether nobody will ask for it, and nothing becomes known of it, though it may still write."""
        return self.cancelled and self.machine.failed and self.in_flight.unheard

    @property
    def missing(self) -> str:
        """What it waits for, for whoever reads that it took too long."""
        if not self.machine.writing:
            return self.machine.phase.value
        return f"{len(self.machine.writing)} transfers have not ended, and no part of one has since"


def bind_push(push: ActivePush, command: WriteCommand, waves: tuple[int, int] | None) -> machines.Event:
    """Bind what a command lets go, or a piece of it, or of it some waves of layers; what the machine is to be told."""
    try:
        return _bind(push, command, waves)
    except BindError as error:
        push.given_up = FailureKind.TRANSFER_FAILED
        return machines.GivenUp(str(error))
    except Exception as error:  # a defect of ours that one push met must not reach the others
        logger.exception("push of prefill %s", push.into.prefill.name)
        return machines.GivenUp(f"{type(error).__name__}: {error}")


def _bind(push: ActivePush, command: WriteCommand, waves: tuple[int, int] | None) -> machines.Bound:
    link, into, cursor = push.link, push.into, push.cursor
    reach, more = link.reach(into, command.ready, cursor, command.final), False
    if waves is None and not push.ahead.waves and reach - cursor > PIECE_TOKENS:
        piece = link.reach(into, cursor + PIECE_TOKENS, cursor, final=False)
        if more := cursor < piece < reach:
            reach = piece
    whole = (command.final or command.whole) and not (push.ended or more)
    if reach == cursor and not whole:
        return machines.Bound(0)
    if waves is not None:
        part = link.bind_waves(into, command.source, cursor, reach, whole, *waves)
        push.ahead = Ahead(waves[1], reach, whole)
    else:
        part = link.bind_push(into, command.source, cursor, reach, whole, push.ahead)
        push.cursor, push.ahead, push.ended = reach, NOTHING_AHEAD, push.ended or whole
    push.work = part.work
    push.first_valid_tokens = latest((push.first_valid_tokens, part.first_valid_tokens))
    return machines.Bound(len(part.work), more)
