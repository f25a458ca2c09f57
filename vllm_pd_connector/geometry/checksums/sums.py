"""One number per layer, role and global index: what two sides compare of a whole request.

`geometry.checksums.digest` has a value per token position, which is too much to send. Here the positions of a range are
folded into one 64-bit sum, in which each value stands mixed with its position, so that lost, doubled and exchanged
tokens show. Like the values it does not depend on layout, block size or parallel sizes; it finds accidents, and resists
nobody.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_pd_connector.errors import BindError
from vllm_pd_connector.geometry.checksums.digest import Memory, Values, digests, mix
from vllm_pd_connector.geometry.manifest import GroupKind, Manifest

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from vllm_pd_connector.geometry.blocks import BlockTables
    from vllm_pd_connector.geometry.plan import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Checksum:
    """Checksums of one layer and role for the global indices (heads, channels) from `first_index` on."""

    layer: str
    role: str
    first_index: int
    values: Values


def checksums(
    manifest: Manifest, memory: Sequence[Memory], tables: BlockTables, starts: Sequence[int], stop: int
) -> list[Checksum]:
    """What one worker holds of a request: tokens [starts[group], stop) of each group, and the last state.

    Raises:
        BindError: as `digest.digests`, there is not one start per group, or the tables end before `stop`: an
            unauthenticated peer may have said it, and every position takes memory.
    """
    if len(starts) != len(manifest.groups):
        raise BindError(f"sums from {len(starts)} starts, this side has {len(manifest.groups)} groups; give one each")
    ends = [
        table.end * group.block_tokens
        for group, table in zip(manifest.groups, tables, strict=True)
        if group.kind is not GroupKind.STATE
    ]
    if stop > (reach := max(ends, default=stop)):
        raise BindError(f"sums up to token {stop}, the blocks end at token {reach}")
    first = min(starts, default=stop)
    group_of = {(tensor.layer, tensor.role): tensor.group for tensor in manifest.tensors}
    found = []
    for key, digest in digests(manifest, memory, tables, first, stop).items():
        group = group_of[key]
        if manifest.groups[group].kind is GroupKind.STATE:
            values = digest.values[0]
        else:
            positions = np.arange(starts[group], stop, dtype=np.uint64)
            values = mix(digest.values[starts[group] - first :] ^ mix(positions)[:, None]).sum(axis=0, dtype=np.uint64)
        found.append(Checksum(digest.layer, str(digest.role), digest.first_index, values))
    return found


def common_starts(starts: Sequence[int], plan: Plan, stop: int) -> tuple[list[int], list[int]]:
    """From which token on either side sums each of its groups, when a destination was to get tokens [starts[group],
    stop) of each of its own: from the latest of all that share layers, directly or by others."""
    ours, theirs = list(starts), [0] * max((len(edge.source_groups) for edge in plan.edges), default=0)
    shared = {(f.source.group, f.destination.group) for edge in plan.edges for f in edge.pairings}
    for _ in shared:  # as often as one can follow from another
        for there, here in shared:
            theirs[there] = ours[here] = max(theirs[there], ours[here])
    met = {there for there, _ in shared}
    return ours, [start if group in met else stop for group, start in enumerate(theirs)]


def difference(mine: Iterable[Checksum], theirs: Iterable[Checksum], unfilled: Container[str] = ()) -> str:
    """Where a destination's checksums are not those of every source that has them too, or of none; empty if nowhere.
    Layers that are `unfilled` no source has (`Plan.unfilled`)."""
    sources: dict[tuple[str, str], list[Checksum]] = defaultdict(list)
    for there in theirs:
        sources[there.layer, there.role].append(there)
    for here in mine:
        if here.layer in unfilled:
            continue
        seen = np.zeros(len(here.values), dtype=bool)
        wrong = np.zeros(len(here.values), dtype=bool)
        for there in sources[here.layer, here.role]:
            start = max(here.first_index, there.first_index)
            stop = min(here.first_index + len(here.values), there.first_index + len(there.values))
            if start < stop:
                ours = slice(start - here.first_index, stop - here.first_index)
                other = there.values[start - there.first_index : stop - there.first_index]
                seen[ours] = True
                wrong[ours] |= here.values[ours] != other
        if (bad := np.flatnonzero(wrong | ~seen)).size:
            what = "differs from the prefill side's" if wrong[bad[0]] else "is not known to the prefill side"
            return f"{here.layer} {here.role} index {here.first_index + bad[0]} {what} ({bad.size} of {wrong.size})"
    return ""
