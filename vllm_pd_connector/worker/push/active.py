"""One rank's part of a push under way, as the transfer thread knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_pd_connector.worker.push.link import NOTHING_AHEAD, Ahead

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_pd_connector.geometry.runs import Runs
    from vllm_pd_connector.geometry.staging.chunks import Chunk
    from vllm_pd_connector.protocol.push.push import Push
    from vllm_pd_connector.protocol.wire.push_messages import PushInto
    from vllm_pd_connector.worker.in_flight import InFlight
    from vllm_pd_connector.worker.push.link import WriteLink


@dataclass(eq=False, slots=True)
class ActivePush:
    """What is written into where, its machine, and what is in flight. `cursor` is the token up to which groups of full
    attention were bound, except some waves of layers that are `ahead` of it; `work` was bound and is to be begun,
    `begun` says how many transfers were. `arrived` is how far they were when the deadline was set, `told` when the
    scheduler half was told last, and it is told again from `tell_at` on."""

    into: PushInto
    link: WriteLink
    machine: Push
    cursor: int
    in_flight: InFlight = field(init=False)
    work: tuple[Runs | Iterator[Chunk], ...] = ()
    ahead: Ahead = NOTHING_AHEAD
    begun: int = 0
    arrived: int = 0
    told: int = 0
    tell_at: float = 0.0
    first_valid_tokens: dict[int, int] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.into.attempt.hex()
