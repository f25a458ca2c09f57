"""One rank's part of a push under way, as the transfer thread knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_pd_connector.observability.stats import FailureKind
from vllm_pd_connector.protocol.push import push as machines
from vllm_pd_connector.worker.push.link import NOTHING_AHEAD, Ahead

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_pd_connector.geometry.spans import Slices
    from vllm_pd_connector.geometry.staging.chunks import Chunk
    from vllm_pd_connector.protocol.wire.push_messages import PushInto
    from vllm_pd_connector.worker.in_flight import InFlight
    from vllm_pd_connector.worker.push.link import WriteLink


@dataclass(eq=False, slots=True)
class ActivePush:
    """What is written into where, its machine, and what is in flight. `cursor` is the token up to which groups of full
    attention were bound, except some waves of layers that are `ahead` of it, and `ended` that the rest was, too;
    `work` was bound and is to be begun, `begun` says how many transfers were. `arrived` is how far they were when the
    deadline was set, `told` when the scheduler half was told last, and it is told again from `tell_at` on."""

    into: PushInto
    link: WriteLink
    machine: machines.Push
    cursor: int
    in_flight: InFlight = field(init=False)
    work: tuple[Slices | Iterator[Chunk], ...] = ()
    ahead: Ahead = NOTHING_AHEAD
    ended: bool = False
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
    def missing(self) -> str:
        """What it waits for, for whoever reads that it took too long."""
        if not self.machine.writing:
            return self.machine.phase.value
        return f"{len(self.machine.writing)} transfers have not ended, and no part of one has since"
