"""Running prefills: which of their blocks each engine step completes, offered to whoever will ask for them.

Only groups of full attention count here. Their blocks are final when they are full, and their tables only grow; what
windows and states hold is known when the prefill has finished. Where layers are written while a step computes them
(`push_when` "layers"), what the last step of a prompt leaves in those is offered with it: nothing of the request is
computed after it, since such a prefill ends with one token.

A decode instance mostly asks while the step that computes its prompt runs, so what a step completes is offered before
anybody has asked. It may be written from as soon as it is offered, without another word: its blocks are referenced
before. What nobody has asked for is taken back where vLLM needs blocks, and offered again with the next step.

What somebody has asked for stays held of a prefill that vLLM preempts, and may be in the way of whoever is to go on
before it, or its own where vLLM finds none of it as a prefix. When nothing goes on any more for that, its push fails,
and the blocks go back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.blocks import is_preempted
from vllm_pd_connector.compat.model.caches import group_kinds
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.manifest import GroupKind

if TYPE_CHECKING:
    from vllm_pd_connector.compat.blocks import HeldBlocks
    from vllm_pd_connector.compat.types import KVCacheConfig, Request
    from vllm_pd_connector.sidechannel.push_service import Offer, PushService

TablesOf = Callable[[str], Sequence[list[int]]]
AllTablesOf = Callable[[str, Sequence[list[int]], int], tuple[BlockTable, ...]]


STUCK_S = 1.0
"""Steps in flight have ended by then, mostly; who waits has not lost patience."""

_NONE = BlockTable.of(0, ())


@dataclass(slots=True)
class _Running:
    """A prefill of which `num_tokens` will be handed over. `step` is the latest that computes some of it, `held` what
    was offered of it, whose blocks are held."""

    request: Request
    num_tokens: int
    step: int = 0
    held: tuple[BlockTable, ...] = ()

    @property
    def ends(self) -> bool:
        """Whether no step computes anything behind what will be handed over."""
        return bool(self.request.max_tokens == 1)


class PrefillProgress:
    """Numbers the steps and follows the prefills that were added.

    Args:
        enabled: whether anything is to be told before a prefill has finished.
        tables_of: as `LeasedTables.of`, if the last step of a prompt is to be told of with all groups' blocks.

    `tables` and `blocks` are there once vLLM has its pool, `pushes` while the side channel serves.
    """

    def __init__(self, enabled: bool, kv_cache_config: KVCacheConfig, tables_of: AllTablesOf | None = None) -> None:
        self.number = 0
        self.tables: TablesOf | None = None
        self.blocks: HeldBlocks | None = None
        self.pushes: PushService | None = None
        self._full = [kind is GroupKind.FULL for kind in group_kinds(kv_cache_config)]
        self._tables_of = tables_of if not all(self._full) else None
        self.enabled = enabled and (any(self._full) or self._tables_of is not None)
        self._running: dict[str, _Running] = {}
        self._offered: set[str] = set()  # of which blocks are held
        self._stuck_since = inf

    @property
    def num_offered(self) -> int:
        """Prefills of which something is held."""
        return len(self._offered)

    def add(self, request: Request, num_tokens: int) -> None:
        """Follow a prefill of which `num_tokens` will be handed over."""
        self._running[request.request_id] = _Running(request, num_tokens)

    def discard(self, request_id: str) -> bool:
        """Follow it no more, whose blocks are now held by a lease or given back with its end; whether it was
        followed."""
        self._offered.discard(request_id)
        return self._running.pop(request_id, None) is not None

    def last_step(self, request_id: str) -> int:
        """The step whose end is that of all that was computed of a prefill: later ones are others'."""
        running = self._running.get(request_id)
        return running.step if running is not None and running.step else self.number

    def next_step(self) -> int:
        """A step begins, in which nothing may be computed; returns its number."""
        self.number += 1
        return self.number

    def advance(self, computed: Mapping[str, int]) -> None:
        """Begin the next step, and offer what it will complete; `computed` has the tokens of requests after it."""
        self.next_step()
        pushes, blocks = self.pushes, self.blocks
        if not computed or pushes is None or blocks is None:
            return
        going = {name: self._running[name] for name in computed if name in self._running}
        for running in going.values():
            running.step = self.number
        if not going or not self.enabled or self.tables is None:
            return
        offers: list[Offer] = []
        needed = pushes.needed(going)
        for request_id in filter(needed.__contains__, going):
            running = going[request_id]
            tables, whole = self._tables(request_id, running, computed[request_id])
            if (added := _added(tables, running.held)) or not running.held:
                blocks.hold_ids(request_id, added)
                self._offered.add(request_id)  # whatever a defect meets from here on, it is given back
            running.held = tables
            offers.append((request_id, tables, min(computed[request_id], running.num_tokens), whole))
        if offers:
            pushes.progressed(offers, self.number)

    def _tables(self, request_id: str, running: _Running, computed: int) -> tuple[tuple[BlockTable, ...], bool]:
        """What may be written from when the step is done, and whether that is all that will be handed over."""
        assert self.tables is not None
        ids = self.tables(request_id)
        if self._tables_of is not None and running.ends and computed >= running.num_tokens:
            try:
                return self._tables_of(request_id, ids, running.num_tokens), True
            except ProtocolError:  # no block holds a state: whoever ends the request says so
                pass
        return tuple([BlockTable.of(0, ids[i]) if full else _NONE for i, full in enumerate(self._full)]), False

    def let_go(self) -> None:
        """Give back the blocks of running prefills whose push has failed: a preempted one may need them to go on."""
        if self.pushes is not None and (given_up := self._offered.intersection(self.pushes.take_given_up())):
            self._release(given_up)
            self._stuck_since = inf

    def take_back(self) -> None:
        """Give back what was offered and nobody has asked for."""
        if self._offered and self.pushes is not None:
            self._release(self.pushes.taken_back(self._offered))

    def went_on(self) -> None:
        """A request or a lease has ended."""
        self._stuck_since = inf

    def make_way(self, now: float) -> None:
        """In this engine step nothing runs though somebody wants blocks, and none will be free but what is held here.
        When it has come to that again after STUCK_S in which nothing ended, nobody gets the latest of the preempted
        prefills: who is to go on either finds no room, or gets so far as to find none again."""
        self._stuck_since = min(self._stuck_since, now)
        if now < self._stuck_since + STUCK_S or self.pushes is None or self.blocks is None:
            return
        followed = (self._running[name].request for name in self._offered)
        if not (preempted := [request for request in followed if is_preempted(request)]):
            return
        latest = max(preempted, key=lambda request: (request.priority, request.arrival_time)).request_id
        self._stuck_since = now
        self.pushes.failed(
            latest,
            f"the prefill was preempted, and the {self.blocks.num_held_for(latest)} blocks that are written of it are "
            f"in the way of all that could go on, of {self.blocks.num_in_pool}. Give the prefill instance more blocks, "
            "or let it run fewer requests at once (--max-num-seqs)",
        )
        self.let_go()

    def fail(self, reason: str, among: Collection[int] | None = None) -> None:
        """What running prefills have in their blocks, or in these alone, is not theirs any more: it is offered no
        longer, and who writes from it fails."""
        if self.pushes is None or self.blocks is None:
            return
        blocks = self.blocks
        met = {name for name in self._offered if among is None or blocks.holds_any(name, among)}
        taken = self.pushes.taken_back(met)
        self._release(taken)
        for request_id in met - taken:
            self.pushes.failed(request_id, reason)

    def _release(self, request_ids: Iterable[str]) -> None:
        assert self.blocks is not None  # of which some were held
        for request_id in request_ids:
            self._offered.discard(request_id)
            self._running[request_id].held = ()
            self.blocks.release(request_id)


def _added(tables: tuple[BlockTable, ...], before: tuple[BlockTable, ...]) -> list[int]:
    """The blocks of which tables have more than before; all if they do not go on where those end, as after a
    preemption."""
    added: list[int] = []
    for now, old in zip(tables, before or (_NONE,) * len(tables), strict=True):
        known = old.packed
        if not now.packed.startswith(known):
            return _added(tables, ())
        added += now.ids_behind(known)
    return added
