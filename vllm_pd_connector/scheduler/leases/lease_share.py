"""How much of the block pool prefills for decode instances may take, so that an engine's other requests find room.

A lease cannot be refused when its prefill has ended: the work would be lost. So a prefill is held back before it begins
while the blocks that are leased, those that prefills which have begun will still take, and its own are more than
`kv_lease_share` of the pool. It waits in vLLM's queue, where requests of other kinds pass it. Leases end by themselves,
so it begins one day; a prompt above the share begins when nothing else is leased or under way.

vLLM computes a prefill whose prompt's log-probabilities are wanted whatever is answered: it begins, and counts.

Prefills begin in the order in which vLLM asks for them, which is that of arrival or of priority: behind one that is
held back no other begins in that step, or small ones would keep a large one waiting for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_pd_connector.compat.blocks import HeldBlocks


class LeaseShare:
    """The prefills that wait or run, for the scheduler's thread.

    Args:
        part: of the pool's blocks, above 0 and at most 1.
        blocks_of: blocks that the lease of a prompt of so many tokens takes at most.
    """

    def __init__(self, part: float, blocks_of: Callable[[int], int]) -> None:
        self.limit = 0
        self._part = part
        self._blocks: HeldBlocks | None = None
        self._blocks_of = blocks_of
        self._needs: dict[str, int] = {}
        self._begun: set[str] = set()
        self._held_back: set[str] = set()
        self.num_held_back = 0

    def bind(self, blocks: HeldBlocks) -> None:
        self._blocks = blocks
        self.limit = int(self._part * blocks.num_in_pool)

    @property
    def num_leased(self) -> int:
        """Blocks that are held, each counted once."""
        return self._blocks.num_blocks if self._blocks is not None else 0

    def add(self, request_id: str, num_tokens: int) -> None:
        """A prefill of which `num_tokens` will be leased arrived."""
        self._needs[request_id] = self._blocks_of(num_tokens)

    def admits(self, request_id: str, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Whether a request may begin; yes for what is no prefill for a decode instance. Before it is held back,
        `give_up` is called until it returns False: it gives back one thing that need not be leased."""
        need, blocks = self._needs.get(request_id), self._blocks
        if need is None or blocks is None or request_id in self._begun:
            return True
        if not self._held_back:
            fits = self._fits(need, blocks)
            while not fits and give_up():
                fits = self._fits(need, blocks)
            if fits:
                return True
        self._held_back.add(request_id)
        return False

    def holds_back(self, request_id: str) -> bool:
        """Whether a request is behind one that was held back in this step, so that `admits` says no."""
        return bool(self._held_back) and request_id in self._needs and request_id not in self._begun

    def _fits(self, need: int, blocks: HeldBlocks) -> bool:
        # Of a prefill that is written out while it runs, blocks are held already.
        taken = blocks.num_blocks + sum(max(self._needs[name] - blocks.num_held_for(name), 0) for name in self._begun)
        return taken == 0 or taken + need <= self.limit

    def begin(self, request_id: str) -> None:
        """vLLM gave a request blocks."""
        if request_id in self._needs:
            self._begun.add(request_id)

    def end(self, request_id: str) -> None:
        """A request ended: what it leased is leased."""
        self._needs.pop(request_id, None)
        self._begun.discard(request_id)

    def step(self) -> set[str]:
        """vLLM has asked for all that it would begin in this step; which were held back."""
        held_back, self._held_back = self._held_back, set()
        self.num_held_back = len(held_back)
        return held_back
