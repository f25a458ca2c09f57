"""Compares the digests of two sides that should hold the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_pd_connector.geometry.checksums.digest import Digest
from vllm_pd_connector.geometry.interleave import holds
from vllm_pd_connector.geometry.manifest import Role


def mismatches(
    destination: Mapping[tuple[str, Role], Digest], sources: Sequence[Mapping[tuple[str, Role], Digest]]
) -> list[str]:
    """Where a destination's digests disagree with those of the source ranks that hold the same; empty if nowhere.

    A part that no source digested is reported too.
    """
    found = []
    for key, mine in destination.items():
        seen = np.zeros(mine.values.shape, dtype=bool)
        wrong = np.zeros(mine.values.shape, dtype=bool)
        seen[~held(mine)] = True
        for theirs in (source[key] for source in sources if key in source):
            here, there = _common(mine, theirs)
            both = (held(mine)[here[0]] & held(theirs)[there[0]])[:, None]
            seen[here] |= both
            wrong[here] |= both & (mine.values[here] != theirs.values[there])
        if (bad := np.argwhere(wrong | ~seen)).size:
            token, index = bad[0]
            found.append(
                f"{mine.layer} {mine.role}: {len(bad)} of {wrong.size} values differ or have no source, first at "
                f"position {mine.first_token + token} index {mine.first_index + index}"
            )
    return found


def _common(a: Digest, b: Digest) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """The slices of both value arrays that stand for the same tokens and indices."""
    slices = []
    for axis, (first, other) in enumerate(((a.first_token, b.first_token), (a.first_index, b.first_index))):
        start = max(first, other)
        stop = max(start, min(first + a.values.shape[axis], other + b.values.shape[axis]))
        slices.append((slice(start - first, stop - first), slice(start - other, stop - other)))
    return (slices[0][0], slices[1][0]), (slices[0][1], slices[1][1])


def held(digest: Digest) -> NDArray[np.bool_]:
    """Which positions the worker holds: array (positions,)."""
    return holds(digest.share, np.arange(digest.first_token, digest.first_token + len(digest.values)))
