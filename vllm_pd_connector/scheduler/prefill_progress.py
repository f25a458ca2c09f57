"""How far running prefills are: which of their blocks each engine step completes.

Only groups of full attention count here. Their blocks are final when they are full, and their tables only grow; what
windows and states hold is known when the prefill has finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.blocks import computed_after
from vllm_pd_connector.compat.model.caches import group_kinds
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.manifest import GroupKind

if TYPE_CHECKING:
    from vllm_pd_connector.compat.types import KVCacheConfig, SchedulerOutput

TablesOf = Callable[[str], Sequence[list[int]]]


class PrefillProgress:
    """Numbers the steps and follows the prefills that were added.

    Args:
        enabled: whether anything is to be told before a prefill has finished.
    """

    def __init__(self, enabled: bool, kv_cache_config: KVCacheConfig) -> None:
        self.number = 0
        self.tables: TablesOf | None = None
        self._full = [kind is GroupKind.FULL for kind in group_kinds(kv_cache_config)]
        self._enabled = enabled and any(self._full)
        self._running: dict[str, int] = {}

    def add(self, request_id: str, num_tokens: int) -> None:
        """Follow a prefill of which `num_tokens` will be handed over."""
        self._running[request_id] = num_tokens

    def discard(self, request_id: str) -> bool:
        """Follow it no more; whether it was followed."""
        return self._running.pop(request_id, None) is not None

    def advance(
        self, output: SchedulerOutput, wanted: Callable[[Iterable[str]], set[str]]
    ) -> Iterator[tuple[str, tuple[BlockTable, ...], int]]:
        """Begin the next step. For each prefill in it that is wanted: its id, its tables (empty for other groups than
        those of full attention), and how many tokens they hold when the step is done."""
        self.number += 1
        if not self._enabled or not self._running or self.tables is None:
            return
        scheduled = output.num_scheduled_tokens
        told = wanted([request_id for request_id in self._running if request_id in scheduled])
        for request_id, computed in computed_after(output, told):
            ids = self.tables(request_id)
            tables = tuple(BlockTable.of(0, ids[i] if full else ()) for i, full in enumerate(self._full))
            yield request_id, tables, min(computed, self._running[request_id])
