"""What the transport over NIXL keeps of a connected peer, and of a transfer until its end was reported."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_pd_connector.errors import PeerLost
from vllm_pd_connector.transport.base import TransferStatus
from vllm_pd_connector.transport.nixl.window import Window

if TYPE_CHECKING:
    from vllm_pd_connector.errors import TransferError
    from vllm_pd_connector.transport.nixl.agents import Agent
    from vllm_pd_connector.transport.ranges import Batches, Ranges

SETTLE_S = 0.5
SETTLE_POLLS = 20
"""So long and so often at least is UCX polled after a disconnect, or after the end of a peer's process: meanwhile it
takes in what had come and ends the endpoint's other lanes, and what they had begun lands."""


class Settling:
    """The polls of an agent after the end of a connection; begun with the first."""

    __slots__ = ("left", "over", "until")

    def __init__(self) -> None:
        self.until, self.left, self.over = time.monotonic() + SETTLE_S, SETTLE_POLLS, False

    def poll(self, agent: Agent, errors: tuple[type[Exception], ...]) -> bool:
        """Poll the agent once, unless it is over; whether it is: nothing lands any more. An agent that has ended brings
        nothing either."""
        if self.over:
            return True
        if agent.library is not None:
            with suppress(*errors):
                agent.library.getNotifs({}, [])  # polls an agent without a thread
        self.left -= 1
        self.over = time.monotonic() >= self.until and self.left <= 0
        return self.over


@dataclass(eq=False, slots=True)
class NixlPeer:
    """`agent` is ours that posts to it, `window` bounds what of its `transfers` runs, those that have not ended.
    `settling`: since its process has ended."""

    agent: Agent
    name: str
    ranges: Ranges
    window: Window = field(default_factory=Window)
    transfers: set[NixlTransfer] = field(default_factory=set)
    leaving: bool = False
    settling: Settling | None = None


@dataclass(eq=False, slots=True)
class NixlTransfer:
    """`waiting` has no request yet, `ready` has the handles of batches with one that is not posted, `posted` those of
    batches that run; of both it has what each costs and of how many descriptors it is. `few`: untimed, so that the
    window learns nothing of it. `status` and `outcome`: see `base.Followed`. `owed`: a post that is to be done before
    another look. `copied`: the call that last posted copied, so that the rest is soon there, too. `settling`: since its
    peer is lost; when that is over, nothing of it is read any more, or sent by UCX.
    """

    peer: NixlPeer
    reads: bool
    waiting: list[Batches]
    descriptors: int
    few: bool = False
    ready: dict[int, tuple[int, int]] = field(default_factory=dict)
    posted: dict[int, tuple[int, int]] = field(default_factory=dict)
    status: TransferStatus = TransferStatus.RUNNING
    owed: bool = False
    copied: bool = False
    failure: TransferError | None = None
    settling: Settling | None = None
    outcome: TransferStatus | TransferError | None = None
    reported: bool = False

    @property
    def unposted(self) -> bool:
        return bool(self.waiting or self.ready)

    @property
    def left(self) -> int:
        given = (*self.ready.values(), *self.posted.values())
        return sum(batches.left for batches in self.waiting) + sum(count for _, count in given)

    @property
    def runs(self) -> int:
        """What the batches that run cost."""
        return sum(cost for cost, _ in self.posted.values())

    def withdraw(self) -> list[int]:
        """Post no more of it; the handles of requests that were not posted."""
        handles = list(self.ready)
        self.ready.clear()
        self.waiting.clear()
        return handles

    def let_go(self) -> list[int]:
        """Wait for nothing of it any more; the handles of all requests."""
        if self.outcome is None:  # else it was left out of the window with its failure
            self.peer.window.forget(self.runs)
        handles = [*self.posted, *self.withdraw()]
        self.posted.clear()
        return handles

    def fail(self, error: TransferError) -> None:
        """Keep the failure of a batch, the worst if there are several: one of unknown extent, then a lost peer."""
        if isinstance(error, PeerLost):
            self.peer.agent.lost.add(self.peer.name)
        before = self.failure
        if before is None or not error.terminal or (before.terminal and isinstance(error, PeerLost)):
            self.failure = error


class Ended:
    """A transfer that had ended when the call that posted it returned."""

    __slots__ = ("descriptors", "reported")
    left = 0

    def __init__(self, descriptors: int) -> None:
        self.descriptors, self.reported = descriptors, False
