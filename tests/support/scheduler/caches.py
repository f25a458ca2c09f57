"""KV caches that hold digests: in the place of a token's keys and values stands a digest of all tokens up to it, and in
that of a state one of all tokens that it has taken in.

What a request computes depends on all of its tokens, so a digest is right or wrong as the real bytes would be: blocks
that were given away too early, were not filled, or hold another prompt are seen when a step looks at them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.metadata import ReceiveRequest

SPOILT = -1


def digests(tokens: Sequence[int]) -> list[int]:
    """One per token, of all tokens up to it."""
    found, so_far = [], 0
    for token in tokens:
        so_far = hash((so_far, token))
        found.append(so_far)
    return found


@dataclass(frozen=True)
class Computed:
    """A request's part of a step: tokens [begin, stop), all digests up to `stop`, and its block tables, one per
    group."""

    name: str
    begin: int
    stop: int
    digests: list[int]
    tables: list[list[int]]


class Group:
    """The cache of one KV-cache group, by block and slot; a state or a ring has one slot in each block."""

    def __init__(self, spec: KVCacheSpec) -> None:
        self.spec = spec
        self.held: dict[tuple[int, int], int | None] = {}
        self.per_token = isinstance(spec, FullAttentionSpec | SlidingWindowSpec)
        self._block = int(spec.block_size)

    def compute(self, step: Computed, table: Sequence[int]) -> Iterator[str]:
        """What a step does; what is wrong with what it finds."""
        match self.spec:
            case FullAttentionSpec():
                yield from self._attend(step, table, 0)
            case SlidingWindowSpec(sliding_window=window):
                yield from self._attend(step, table, max(0, step.begin - window + 1))
            case MambaSpec():
                yield from self._go_on(step, table, self._block)
            case CircularBufferSpec():
                # It holds what is not a whole ring yet: a step that begins with a ring looks at nothing.
                yield from self._go_on(step, table, 0)

    def _attend(self, step: Computed, table: Sequence[int], first: int) -> Iterator[str]:
        for token in range(first, step.begin):
            block, slot = table[token // self._block], token % self._block
            if not block or self.held.get((block, slot)) != step.digests[token]:
                yield f"block {block} does not hold token {token}"
                break
        for token in range(step.begin, step.stop):
            if block := table[token // self._block]:
                self.held[block, token % self._block] = step.digests[token]
            elif isinstance(self.spec, FullAttentionSpec):
                yield f"no block for token {token}"

    def _go_on(self, step: Computed, table: Sequence[int], advances: int) -> Iterator[str]:
        """A state of the tokens so far, in the block of the last, or always in the first block if it `advances` by
        none."""
        before = table[(step.begin - 1) // advances if advances and step.begin else 0]
        looks = step.begin if advances else step.begin % self._block
        if looks and (not before or self.held.get((before, 0)) != step.digests[step.begin - 1]):
            yield f"block {before} does not hold the state after token {step.begin - 1}"
        after = table[(step.stop - 1) // advances if advances else 0]
        if not after:
            yield f"no block for the state after token {step.stop - 1}"
        self.held[after, 0] = step.digests[step.stop - 1]

    def receive(self, ours: BlockTable, source: Group, theirs: BlockTable, stop: int) -> int | None:
        """Get the tokens before `stop`. The first block of a window may begin with tokens that the source has let go
        of and that nobody looks at, if it is no block of the source's: its number; it is then none to share."""
        there, here = theirs.ids.tolist(), ours.ids.tolist()
        if not self.per_token:
            self.held[here[0], 0] = source.held.get((there[0], 0))
            return None
        late = None
        for number, block in enumerate(here, ours.first_block):
            for token in range(number * self._block, min((number + 1) * self._block, stop) if block else 0):
                entry = token // source._block - theirs.first_block
                if not 0 <= entry < len(there):
                    assert isinstance(self.spec, SlidingWindowSpec) and number == ours.first_block, f"{ours}, {theirs}"
                    held = theirs.first_block * source._block
                    assert token < held < (number + 1) * self._block, f"a whole block of {ours} is not in {theirs}"
                    assert token + self.spec.sliding_window <= stop, f"{ours}: token {token} is inside the window"
                    late = number
                key = there[entry] if 0 <= entry < len(there) else 0, token % source._block
                self.held[block, token % self._block] = source.held.get(key)
        return late

    def spoil(self, ours: BlockTable) -> None:
        """A receive that failed may have written anything."""
        for block in filter(None, ours.ids.tolist()):
            self.held |= {(block, slot): SPOILT for slot in range(self._block if self.per_token else 1)}


class Caches:
    """Of one engine, whose groups these are."""

    def __init__(self, specs: Sequence[KVCacheSpec]) -> None:
        self.groups = [Group(spec) for spec in specs]

    def compute(self, step: Computed) -> list[str]:
        """What is wrong with what a request's part of a step finds."""
        return [
            f"{step.name} computes [{step.begin}, {step.stop}), {type(group.spec).__name__}: {wrong}"
            for group, table in zip(self.groups, step.tables, strict=True)
            for wrong in group.compute(step, table)
        ]

    def receive(self, order: ReceiveRequest, source: Caches) -> dict[int, int]:
        """Read all that was ordered; per group the block that is not to be shared."""
        assert order.read is not None, order.source
        found = {}
        for i, (group, table) in enumerate(zip(self.groups, order.blocks, strict=True)):
            late = group.receive(table, source.groups[i], order.read.blocks[i], order.stop)
            if late is not None:
                found[i] = late
        return found

    def spoil(self, order: ReceiveRequest) -> None:
        """Write nonsense into all that was ordered."""
        for group, table in zip(self.groups, order.blocks, strict=True):
            group.spoil(table)
