"""Which caches of this engine were computed with the weights that it has now (`protocol.weights`).

A prefill is handed over under one name, so all of it must be of one epoch: the one in which it began, or began anew
after a preemption. Several calls make one change that peers are told of; an engine may step between two of them, so
here each call ends an epoch. What vLLM's prefix cache holds when weights change is of the former ones until vLLM resets
it; a prefill that begins with a hit of it is of no epoch. Trainers have vLLM reset its caches while it is paused (`POST
/pause` does), before they change anything, so that nothing is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vllm_pd_connector.compat.blocks import begun_in, is_empty
from vllm_pd_connector.protocol.weights import HOW_TO_NAME, OwnWeights

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm_pd_connector.compat.types import BlockPool, SchedulerOutput

NO_EPOCH: Final = -1


class Epochs:
    """See the module. One per engine, in the scheduler's thread."""

    def __init__(self) -> None:
        self.own = OwnWeights()
        self.pool: BlockPool | None = None
        self._outdated = False  # the prefix cache may hold what other weights computed
        self._epoch = 0
        self._begun: dict[str, int] = {}  # of running prefills: the epoch of their caches

    def moved(self) -> None:
        """An epoch has ended. Leases must have been given back."""
        self._epoch += 1
        self._outdated = self.pool is None or not is_empty(self.pool)

    def was_reset(self) -> None:
        """The prefix cache has forgotten everything."""
        self._outdated = False

    def advance(self, output: SchedulerOutput, *wanted: Collection[str]) -> None:
        """A step begins: of the requests whose caches may be handed over (those in `wanted`), remember the epochs of
        those that begin with it."""
        for request_id, hit in begun_in(output) if any(wanted) else ():
            if any(request_id in some for some in wanted):
                self._begun[request_id] = NO_EPOCH if hit and self._outdated else self._epoch

    def forget(self, request_id: str) -> None:
        """A prefill has ended."""
        self._begun.pop(request_id, None)

    def mixed(self, request_id: str) -> str:
        """Why a finished prefill is not to be handed over; empty if it is."""
        if self.own.nameless:
            return f"weights: changed in place and not named yet; {HOW_TO_NAME}"
        begun = self._begun.get(request_id, self._epoch)
        if begun == NO_EPOCH:
            return (
                "weights: changed in place, and it began with a prefix that may be of the former ones: "
                "have the prefix cache reset when weights change (POST /pause does it, or POST /reset_prefix_cache)"
            )
        if begun != self._epoch:
            return f"weights: changed in place while it was computed (epoch {begun} then, {self._epoch} now)"
        return ""
