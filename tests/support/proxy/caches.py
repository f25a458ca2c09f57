"""A model of an engine's prefix cache that announces what happens in it, in the form of vLLM's events.

What it holds is a count of copies per beginning of a prompt, so it is its own oracle: no hash of it means anything to
who listens. Names of blocks are drawn by chance, as a hash with a secret seed is.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec

Tokens = tuple[int, ...]
FULL = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}


def stored(hashes: list[Any], parent: Any, tokens: list[int], block_size: int, **more: Any) -> dict[str, Any]:
    """A BlockStored as vLLM encodes it: a map with all fields that have no default, and others."""
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": block_size, "lora_id": None, "medium": "GPU", "lora_name": None, **more,
    }  # fmt: skip


def removed(hashes: list[Any], **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", **more}


CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: Any) -> bytes:
    """A batch as vLLM encodes it, with the rank that it adds."""
    return msgspec.msgpack.encode([0.5, list(events), 0])


class ModelCache:
    """One engine: its cache, and what it has published in this life, for a replay."""

    def __init__(self, block_size: int, seed: int = 0):
        self.block_size = block_size
        self.log: list[bytes] = []
        self._random = random.Random(seed)
        self._copies: Counter[Tokens] = Counter()
        self._names: dict[Tokens, bytes] = {}

    def holds(self, prompt: Tokens) -> int:
        """Tokens of a prompt, from the first on, that need not be computed."""
        length = 0
        while (length := length + self.block_size) <= len(prompt) and self._copies[prompt[:length]]:
            pass
        return length - self.block_size

    def compute(self, prompt: Tokens, twice: bool = False) -> None:
        """What a request for a prompt leaves: its full blocks; `twice` where another one computed them too."""
        begin = 0 if twice else self.holds(prompt)
        ends = range(begin + self.block_size, len(prompt) + 1, self.block_size)
        for end in ends:
            self._copies[prompt[:end]] += 1
        hashes = [self._name(prompt[:end]) for end in ends]
        parent = self._name(prompt[:begin]) if begin else None
        tokens = list(prompt[begin : begin + len(hashes) * self.block_size])
        self._publish(stored(hashes, parent, tokens, self.block_size, **FULL))

    def evict(self, number: int) -> None:
        """Lose a copy of some block."""
        held = sorted(+self._copies)
        if held:
            gone = held[number % len(held)]
            self._copies[gone] -= 1
            self._publish(removed([self._name(gone)], group_idx=0))

    def clear(self) -> None:
        self._copies.clear()
        self._publish(CLEARED)

    def restart(self) -> None:
        """Another process at the same address: an empty cache, and batches are counted from 0 again."""
        self.log.clear()
        self._copies.clear()
        self._names.clear()
        self._publish(CLEARED)

    def _publish(self, *events: Any) -> None:
        self.log.append(batch(*events))

    def _name(self, beginning: Tokens) -> bytes:
        return self._names.setdefault(beginning, self._random.randbytes(32))
