"""Which beginnings of prompts one engine holds, by what it announced.

vLLM has a cache for each group of layers, and announces each. A prompt can be taken up where every group with full
attention has all blocks from the first on, so the shortest of these groups counts; of windows and states vLLM keeps
the ends alone. A model with one group of another kind counts by that one as far as it holds everything.

An announced block is placed behind its parent. It is not placed, and with it nothing behind it, where that is not
certain: the parent is not known (it was announced before the router listened), or there are fewer hashes than blocks
(vLLM leaves out what a window has lost, but not which). What is not placed is not held; that costs a hit, never an
answer.

vLLM may hold a block twice (two requests computed it at once) and announces every copy and every loss, so copies are
counted. A block that is smaller than others of its group is the first part of one: it is passed over.

Source: vLLM 0.32, `vllm/v1/core/block_pool.py`, `vllm/v1/core/kv_cache_manager.py` (`take_events`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.proxy.kv_events.block_keys import ROOT, TOKEN_BYTES, block_key, extras, packed
from vllm_pd_connector.proxy.kv_events.wire import AllBlocksCleared, AnyEvent, BlockHash, BlockRemoved, BlockStored

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_pd_connector.proxy.kv_events.block_keys import PromptBlocks

FULL = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of groups that keep a whole prompt (vLLM's `KVCacheSpecKind`)."""
HERE = (None, "LOCAL")
ON_DEVICE = (None, "GPU")
"""vLLM says GPU of every device's memory. What an offloading connector stored elsewhere does not count."""
MAX_BLOCKS = 1 << 19
"""Of one engine: 8 million tokens in blocks of 16, about 150 MB here."""


@dataclass(slots=True)
class _Group:
    """One group's cache: each hash's key and number of copies, and how many hashes have a key."""

    full: bool
    block_size: int = 0
    blocks: dict[BlockHash, tuple[bytes, int]] = field(default_factory=dict)
    keys: dict[bytes, int] = field(default_factory=dict)

    def add(self, name: BlockHash, key: bytes) -> None:
        known, copies = self.blocks.get(name, (key, 0))
        if known != key:  # no honest engine does that
            self._lose(name, known)
            copies = 0
        if not copies:
            self.keys[key] = self.keys.get(key, 0) + 1
        self.blocks[name] = key, copies + 1

    def remove(self, name: BlockHash) -> None:
        key, copies = self.blocks.get(name, (ROOT, 0))
        if copies > 1:
            self.blocks[name] = key, copies - 1
        elif copies:
            self._lose(name, key)

    def _lose(self, name: BlockHash, key: bytes) -> None:
        del self.blocks[name]
        self.keys[key] -= 1
        if not self.keys[key]:
            del self.keys[key]

    def length(self, prompt: PromptBlocks, adapter: bool) -> int:
        """Tokens of the prompt from its first on."""
        number = 0
        while (key := prompt.key(number, self.block_size, adapter)) is not None and key in self.keys:
            number += 1
        return number * self.block_size


class HeldBlocks:
    """One engine's caches."""

    def __init__(self, limit: int = MAX_BLOCKS):
        self._limit = limit
        self._groups: dict[int, _Group] = {}

    def __len__(self) -> int:
        """Blocks that are known, each once, of all groups that count."""
        return sum(len(group.blocks) for group in self._groups.values())

    def clear(self) -> None:
        self._groups.clear()

    def apply(self, events: Iterable[AnyEvent]) -> None:
        """Take over what a batch says.

        Raises:
            ProtocolError: more blocks than an engine may hold here. What is held then is not what the engine holds.
        """
        for event in events:
            match event:
                case BlockStored(medium=medium, locality=locality) if medium in ON_DEVICE and locality in HERE:
                    self._store(event)
                case BlockRemoved(medium=medium, locality=locality) if medium in ON_DEVICE and locality in HERE:
                    if (group := self._groups.get(event.group_idx or 0)) is not None:
                        for name in event.block_hashes:
                            group.remove(name)
                case AllBlocksCleared():
                    self.clear()
        if len(self) > self._limit:
            raise ProtocolError(f"KV-cache events: {len(self)} blocks held there, at most {self._limit} here")

    def length(self, prompt: PromptBlocks, adapter: bool) -> int:
        """How many tokens of a prompt, from the first on, this engine need not compute."""
        groups = self._groups.values()
        if len(groups) > 1 and not all(group.full for group in groups):
            return 0  # several, and none that keeps everything
        return min((group.length(prompt, adapter) for group in groups), default=0)

    def _store(self, event: BlockStored) -> None:
        group = self._group(event)
        if group is None or event.block_size < group.block_size:
            return
        if event.block_size > group.block_size:
            group.blocks.clear()
            group.keys.clear()
            group.block_size = event.block_size
        if len(event.block_hashes) * event.block_size != len(event.token_ids):
            return
        extra_keys = event.extra_keys
        if extra_keys is None:
            extra_keys = [msgspec.Raw(extras(event.lora_name or ""))] * len(event.block_hashes)
        parent, copies = (ROOT, 1) if event.parent_block_hash is None else group.blocks.get(
            event.parent_block_hash, (ROOT, 0)
        )  # fmt: skip
        if not copies or len(extra_keys) != len(event.block_hashes):
            return
        tokens, width = packed(event.token_ids), event.block_size * TOKEN_BYTES
        for number, (name, extra) in enumerate(zip(event.block_hashes, extra_keys, strict=True)):
            parent = block_key(parent, tokens[number * width : (number + 1) * width], bytes(extra))
            group.add(name, parent)

    def _group(self, event: BlockStored) -> _Group | None:
        """The group that an event is of; None for one that does not count beside one that does."""
        index, full = event.group_idx or 0, event.kv_cache_spec_kind in FULL
        if full and not all(group.full for group in self._groups.values()):
            self._groups = {number: group for number, group in self._groups.items() if group.full}
        if not full and any(group.full for group in self._groups.values()):
            return None
        return self._groups.setdefault(index, _Group(full))
