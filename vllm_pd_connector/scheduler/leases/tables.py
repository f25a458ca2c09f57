"""Which of a request's blocks are handed over when it has ended: those that hold what their positions say.

A sliding window's table has null blocks where the window has passed. The first block behind them may have come in part,
if the request was received from an instance with other blocks: it begins with tokens that its reader never looks at and
that nobody has sent (`geometry.bind.first_valid_tokens`). vLLM is told to share such a block with nobody, and who reads
from here would take it for whole, too. The wire has no word for a part of a block, so the table begins behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_pd_connector.compat.model.caches import group_block_tokens, group_kinds, group_windows
from vllm_pd_connector.compat.model.recurrent import state_groups
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.bind import latest, prefix_behind
from vllm_pd_connector.geometry.blocks import NULL_BLOCK, BlockTable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from vllm_pd_connector.compat.types import KVCacheConfig


class LeasedTables:
    """See the module. Groups are transfer groups, in their order; blocks are numbered in the request."""

    def __init__(self, kv_cache_config: KVCacheConfig, dcp_size: int):
        self._states = state_groups(kv_cache_config)
        self._kinds = group_kinds(kv_cache_config)
        self._windows = group_windows(kv_cache_config)
        self._block_tokens = group_block_tokens(kv_cache_config, dcp_size)
        self._in_part: dict[str, Mapping[int, int]] = {}  # the last such block of each group
        self._spoilt: set[str] = set()

    def follow(self, request_id: str) -> None:
        """A request arrived, or is computed anew, of which something may be handed over."""
        self._in_part[request_id] = {}
        self._spoilt.discard(request_id)

    def over(self, request_id: str) -> None:
        self._in_part.pop(request_id, None)
        self._spoilt.discard(request_id)

    def missed(self, request_id: str, ids: Sequence[list[int]], num_tokens: int, failed: Collection[int]) -> bool:
        """Another connector could not load the `failed` blocks. Returns whether a request has such a one below
        `num_tokens`, and has computed what is behind it from what lay there: nothing of it is handed over."""
        computed = (table[: -(-num_tokens // tokens)] for table, tokens in zip(ids, self._block_tokens, strict=True))
        missed = any(block in failed for table in computed for block in table)
        self._spoilt |= {request_id} if missed else set()
        return missed

    def came_in_part(self, request_id: str, blocks: Mapping[int, int]) -> int:
        """The blocks of these groups up to these numbers came in part. Returns the shortest prefix of the request, in
        tokens, that can be gone on with from what is behind them; 0 of a request that is not followed."""
        if request_id not in self._in_part:  # it has ended
            return 0
        self._in_part[request_id] = latest((self._in_part[request_id], blocks))
        behind = (
            prefix_behind(self._kinds[group], self._windows[group], (block + 1) * self._block_tokens[group])
            for group, block in blocks.items()
        )
        return max(behind, default=0)

    def of(self, request_id: str, block_ids: Sequence[list[int]], num_tokens: int) -> tuple[BlockTable, ...]:
        """The tables of the first `num_tokens` tokens, of vLLM's ids in each group.

        Raises:
            ProtocolError: no block holds a recurrent state; another connector did not load what it was computed from.
        """
        if request_id in self._spoilt:
            raise ProtocolError(
                "another connector failed to load blocks from which a step in flight computed a part of it; send the "
                "request again"
            )
        in_part = self._in_part.get(request_id, {})
        return tuple(
            self._table(group, ids, num_tokens, in_part.get(group, -1) + 1) for group, ids in enumerate(block_ids)
        )

    def _table(self, group: int, ids: list[int], num_tokens: int, first: int) -> BlockTable:
        state = self._states.get(group)
        if state is None:
            begin = max(BlockTable.of(0, ids).begin, first)  # a sliding window has passed what is null
            return BlockTable.of(begin, ids[begin:])
        block = state.state_block(ids, num_tokens)
        if block == NULL_BLOCK:
            raise ProtocolError(f"group {group}: no block holds the state after {num_tokens} tokens")
        return BlockTable.of(0, (block,))
