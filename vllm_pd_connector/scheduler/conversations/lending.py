"""What a decode instance keeps of finished requests, for the next turn of their conversations.

A conversation may never come back, so what is kept is only ever what nobody else needs: at most a share of the pool,
and the oldest is given back when a request waits for blocks or the running ones may want them in their next step.

Prefixes of what is held are named by length and digest (`protocol.params.conversation`). Full attention serves any of
them. A window has let go of what lies before it, so a prefix must end late enough; a recurrent state serves the prefix
at whose end it stands.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.compat.blocks import media_names
from vllm_pd_connector.compat.conversations import is_text, known_tokens, prefix_digests, steps_beyond
from vllm_pd_connector.compat.model import facts
from vllm_pd_connector.compat.model.caches import group_block_tokens, group_kinds, group_windows
from vllm_pd_connector.compat.model.recurrent import advanced_by_drafts, state_groups
from vllm_pd_connector.geometry.bind import prefix_behind
from vllm_pd_connector.protocol.lease import End
from vllm_pd_connector.protocol.params.conversation import Prefix, prefix_lengths
from vllm_pd_connector.protocol.params.parse import choice_of

if TYPE_CHECKING:
    from vllm_pd_connector.compat.model.adapters import Adapters
    from vllm_pd_connector.compat.types import KVCacheConfig, Request, VllmConfig
    from vllm_pd_connector.config import Config
    from vllm_pd_connector.geometry.blocks import BlockTables

logger = init_logger(__name__)

_NUMBER = re.compile(r"\d+")
NO_PREFIX = (
    "no prefix of it can be read: its window has moved on with drafts that the answer did not take, or the first block "
    "of the window has come in part"
)


class Lending:
    """Which conversations are kept, oldest first, and what of them can be read.

    `counted`: by the names of `observability.stats`.
    """

    def __init__(self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, adapters: Adapters):
        transfer = vllm_config.kv_transfer_config
        self.enabled = config.conversations and transfer.is_kv_consumer
        self.counted: Counter[str] = Counter()
        self._said: set[str] = set()
        self._share = config.conversation_share
        self._names = adapters.name_of, media_names(vllm_config)
        self._states = state_groups(kv_cache_config)
        self._block_tokens = group_block_tokens(
            kv_cache_config, vllm_config.parallel_config.decode_context_parallel_size
        )
        self._held: dict[str, tuple[int, ...]] = {}  # their blocks, oldest first
        self._holders: Counter[int] = Counter()  # of each block: chats that begin alike share some
        if not self.enabled:
            return
        self._kinds = group_kinds(kv_cache_config)
        self._windows = group_windows(kv_cache_config)
        self._drafts = facts.drafts_with_caches(vllm_config)
        self._advanced = advanced_by_drafts(vllm_config, kv_cache_config)

    def why_not(self, request: Request) -> str:
        """Why a finished request's caches cannot be kept for a next turn; empty if they can."""
        if known_tokens(request) < 1:
            return "nothing of it was computed"
        if self._drafts:
            return "the drafter's caches may end before the last token"
        if not is_text(request):
            return "its prompt has embeddings, which no next prompt can be compared with"
        if choice_of(request.request_id):
            return "it is one of several answers (n > 1), of which nobody can say which goes on"
        if self._states and steps_beyond(request, known_tokens(request)):
            return (
                "its recurrent state goes on behind the last known token: a step was under way when it ended. Without "
                "overlapping steps (vllm serve --no-async-scheduling) such turns are kept"
            )
        if self._advanced:
            return "its recurrent state may be that of drafts which the answer did not take"
        return ""

    def not_kept(self, request_id: str, why: str) -> None:
        """Say it in the log: once for each reason, since all turns of an instance may have it, then at level debug."""
        kind = _NUMBER.sub("", why)  # an epoch's: every change of the weights has another
        level = logging.DEBUG if kind in self._said else logging.INFO
        self._said.add(kind)
        logger.log(level, "request %s: its caches are not kept for a next turn: %s", request_id, why)

    def prefixes(self, request: Request, tables: BlockTables, num_tokens: int) -> tuple[Prefix, ...]:
        """What can be read of `num_tokens` tokens in these blocks: each prefix's length and digest. Nothing where the
        tables lack what position `num_tokens` looks at. vLLM lets a window go by all that was computed, drafts too that
        the answer did not take, since it had ended before them; and the first block may have come in part.

        Raises:
            ProtocolError: a medium of the request cannot be told from others.
        """
        least = num_tokens if self._states else 1
        for kind, window, tokens, table in zip(self._kinds, self._windows, self._block_tokens, tables, strict=True):
            least = max(least, prefix_behind(kind, window, table.begin * tokens))
        lengths = prefix_lengths(least, num_tokens, also=request.num_prompt_tokens)
        return tuple(zip(lengths, prefix_digests(request, lengths, *self._names), strict=True))

    def blocks_for(self, request: Request) -> int:
        """Blocks that a new request's prompt takes, at most; 0 where nothing is kept that could be given for it."""
        if not self._held:
            return 0
        # A state has its own block, the one before, and with prefix caching a checkpoint, however long the prompt is.
        return sum(
            state.scratch + (3 if state.block_tokens else 2)
            if (state := self._states.get(group)) is not None
            else -(-request.num_tokens // tokens) + 1
            for group, tokens in enumerate(self._block_tokens)
        )

    def add(self, request_id: str, blocks: tuple[int, ...]) -> None:
        self._held[request_id] = blocks
        self._holders.update(blocks)
        self.counted["conversations_kept"] += 1

    def ended(self, request_id: str, reason: End) -> bool:
        """A lease has ended; whether it was that of a conversation."""
        if (blocks := self._held.pop(request_id, None)) is None:
            return False
        self._holders.subtract(blocks)
        for block in blocks:
            if not self._holders[block]:
                del self._holders[block]
        self.counted["conversations_read"] += reason is End.READ
        self.counted["conversations_dropped"] += reason is End.DROPPED
        return True

    def crowded(self, pool_blocks: int, free_blocks: int, needed: int) -> bool:
        """Whether one must be given back: there are more of them than may be, or of `needed` blocks fewer are free."""
        return bool(self._held) and (len(self._holders) > self._share * pool_blocks or free_blocks < needed)

    @property
    def oldest(self) -> str | None:
        """The conversation that goes first."""
        return next(iter(self._held), None)

    @property
    def num_held(self) -> int:
        """How many conversations are kept."""
        return len(self._held)

    def holds(self, request_id: str) -> bool:
        return request_id in self._held

    @property
    def groups(self) -> int:
        return len(self._block_tokens)
