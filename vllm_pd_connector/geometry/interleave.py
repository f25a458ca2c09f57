"""Which tokens lie on which rank under context parallelism, and where: the axis rule of the TOKEN axis.

Of a cache that is interleaved over `size` ranks, rank `rank` holds token `i` if `i // interleave % size == rank`. It
keeps what it holds without gaps, in order: the n-th token that it holds is its *local position* n, and pages and blocks
are cut by local positions, as they are cut by token positions where nothing is interleaved (`WHOLE`, every token is its
own local position). So a logical block covers `size` times as many tokens as one rank has slots for.

`cut` finds what two sides with any two shares have in common, in parts that are contiguous on both.

Source: vLLM 0.32, `ParallelConfig.cp_kv_cache_interleave_size`, `v1/worker/block_table.py` (ComputeSlotMappingKernel).
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from vllm_pd_connector.geometry.runs import Addresses

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from vllm_pd_connector.geometry.manifest import TokenShare

Positions = TypeVar("Positions", int, Addresses)


def local_position(share: TokenShare, token: Positions) -> Positions:
    """Where in its rank's cache a token lies that the rank holds."""
    if share.size == 1:  # and without a pass over half a million tokens
        return token
    period = share.size * share.interleave
    return token // period * share.interleave + token % share.interleave


def token_at(share: TokenShare, position: Positions) -> Positions:
    """The token at a local position: the inverse of `local_position`."""
    if share.size == 1:
        return position
    stretch = position // share.interleave * share.size + share.rank
    return stretch * share.interleave + position % share.interleave


def held_before(share: TokenShare, token: int) -> int:
    """How many tokens before this one the rank holds: the local position of the first that it holds from here on."""
    stretches, rest = divmod(token, share.size * share.interleave)
    return stretches * share.interleave + min(max(rest - share.rank * share.interleave, 0), share.interleave)


def holds(share: TokenShare, tokens: Addresses) -> NDArray[np.bool_]:
    held: NDArray[np.bool_] = tokens // share.interleave % share.size == share.rank
    return held


def meet(one: TokenShare, other: TokenShare) -> bool:
    """Whether there are tokens that both hold: stretches of both periods meet where their distance is a multiple of
    what the periods have in common."""
    common = gcd(one.size * one.interleave, other.size * other.interleave)
    distance = one.rank * one.interleave - other.rank * other.interleave
    farthest = distance + one.interleave - 1
    return farthest // common * common > distance - other.interleave


def cut(
    start: int, stop: int, one: tuple[TokenShare, int], other: tuple[TokenShare, int]
) -> tuple[Addresses, Addresses]:
    """Those of the tokens [start, stop) that two sides, (share, tokens per page), both hold: in parts that each lie in
    one page of either side and follow each other in both. First tokens and numbers of tokens, in order."""
    if one[0] == other[0]:  # every position of one side is the same of the other: stretches need no looking at
        share, pages = one[0], {one[1], other[1]}
        first, tokens = cut_at(held_before(share, start), held_before(share, stop), pages)
        return token_at(share, first), tokens
    (a, a_tokens), (b, b_tokens) = (_parts(start, stop, *side) for side in (one, other))
    edges = np.unique(np.concatenate((a, a + a_tokens, b, b + b_tokens)))
    first, tokens = edges[:-1], np.diff(edges)
    common = _inside(first, a, a_tokens) & _inside(first, b, b_tokens)
    return first[common], tokens[common]


def _parts(start: int, stop: int, share: TokenShare, page: int) -> tuple[Addresses, Addresses]:
    """What a share has of the tokens [start, stop), in parts inside one page and without gaps."""
    steps = {page} if share.size == 1 else {page, share.interleave}
    first, tokens = cut_at(held_before(share, start), held_before(share, stop), steps)
    return token_at(share, first), tokens


def _inside(tokens: Addresses, first: Addresses, lengths: Addresses) -> NDArray[np.bool_]:
    if not len(first):
        return np.zeros(len(tokens), dtype=np.bool_)
    part = np.searchsorted(first, tokens, side="right") - 1
    return (part >= 0) & (tokens < first[part] + lengths[part])


def cut_at(start: int, stop: int, steps: Iterable[int]) -> tuple[Addresses, Addresses]:
    """The range [start, stop) cut at every multiple of each step: first positions and lengths of the parts. No parts of
    an empty range."""
    if start >= stop:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    distinct = sorted(set(steps))
    least = [step for i, step in enumerate(distinct) if all(step % less for less in distinct[:i])]  # they cut enough
    if len(least) > 1:
        inner = np.unique(np.concatenate([np.arange(start // step * step + step, stop, step) for step in least]))
        cuts = np.concatenate(([start], inner, [stop]))
        return cuts[:-1], np.diff(cuts)
    (step,) = least
    first = np.arange(start // step * step, stop, step, dtype=np.int64)
    lengths = np.broadcast_to(np.int64(step), first.shape)  # of one element: a long prompt's arrays are new memory
    if before := start % step:
        first[0], lengths = start, lengths.copy()
        lengths[0] -= before
    if behind := -stop % step:
        lengths = lengths.copy()
        lengths[-1] -= behind
    return first, lengths
