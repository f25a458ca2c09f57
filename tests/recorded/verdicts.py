"""What a pair of recorded instances may do: the check, the plan of every decode rank, and the runs of a short request.

`runs_of` is also the proof that every byte of the request has one writer: the runs into one rank, over all edges, do
not touch each other, and add up to what that rank holds of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod

import numpy as np

from tests.recorded import read
from tests.recorded.read import Fixture
from vllm_pd_connector.errors import UnsupportedCache
from vllm_pd_connector.geometry.bind import pair
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.manifest import Group, GroupKind, Manifest
from vllm_pd_connector.geometry.plan import Edge, PagePairing, make_plan
from vllm_pd_connector.geometry.runs import Runs, concatenate, join
from vllm_pd_connector.geometry.spans import Spans
from vllm_pd_connector.geometry.spans import runs_of as bound
from vllm_pd_connector.geometry.topology import TopologyStatus, check_pd_topology


@dataclass(frozen=True, slots=True)
class Verdict:
    """`fields` name what differs where a pair is refused; `runs` and `bytes` are those of the first decode rank."""

    status: TopologyStatus
    fields: tuple[str, ...] = ()
    runs: int = 0
    bytes: int = 0

    @property
    def allowed(self) -> bool:
        return not self.fields


@cache
def manifests_of(fixture: Fixture) -> tuple[Manifest, ...] | str:
    """The manifests, or why this version refuses the instance at its start."""
    try:
        return read.manifests(fixture)
    except UnsupportedCache as error:
        return str(error)


def judge(prefill: Sequence[Manifest], decode: Sequence[Manifest]) -> Verdict:
    check = check_pd_topology(decode, prefill)
    if not check.allowed:
        fields = tuple(sorted({difference.field.split(" of ")[0] for difference in check.differences}))
        return Verdict(check.status, fields or (check.reason,))
    plans = [make_plan(one, prefill) for one in decode]
    runs, size = runs_of(plans[0].edges, prefill, decode[0])
    return Verdict(check.status, runs=runs, bytes=size)


def runs_of(edges: Sequence[Edge], prefill: Sequence[Manifest], decode: Manifest) -> tuple[int, int]:
    """Runs and bytes of a request into one decode rank, once it is proven that each byte has one writer."""
    tokens = min(group.block_tokens * 2 for m in (prefill[0], decode) for group in m.groups if group.block_tokens)
    parts: dict[int, list[Runs]] = {}
    for edge in edges:
        source = [_table(group, tokens, first=1) for group in edge.source_groups]
        destination = [_table(group, tokens, first=2) for group in edge.destination_groups]
        of_edge: dict[int, list[tuple[PagePairing, Spans]]] = {}
        for pairing, spans in pair(edge, source, destination, 0, tokens):
            of_edge.setdefault(pairing.destination.group, []).append((pairing, spans))
        for group, paired in of_edge.items():  # groups lie over each other: a block belongs to one of them at a time
            parts.setdefault(group, []).append(join([bound(paired)]))
    runs = size = 0
    for of_group in parts.values():
        together = concatenate(of_group)
        order = np.argsort(together.destination)
        start, length = together.destination[order], together.length[order]
        assert (start[1:] >= start[:-1] + length[:-1]).all(), "two runs write one byte"
        runs += len(together)
        size += together.total_bytes
    wanted = _held(decode, tokens)
    assert size == wanted, f"{size} bytes are written of {wanted}"
    return runs, size


def _table(group: Group, tokens: int, first: int) -> BlockTable:
    if group.kind is GroupKind.STATE:
        return BlockTable.of(0, [first])
    blocks = -(-tokens // group.block_tokens)
    return BlockTable.of(0, [(first + i - 1) % (group.num_blocks - 1) + 1 for i in range(blocks)])


def _held(manifest: Manifest, tokens: int) -> int:
    size = 0
    for tensor in manifest.tensors:
        group = manifest.groups[tensor.group]
        a_page = prod(axis.size for axis in tensor.axes) * tensor.itemsize
        if group.kind is GroupKind.STATE:
            size += a_page
        elif tensor.opaque:
            size += a_page * -(-tokens // tensor.page_tokens)
        else:
            size += a_page // tensor.page_tokens * tokens
    return size


@cache
def pairs(fixtures: tuple[Fixture, ...]) -> list[tuple[Fixture, Fixture, Verdict]]:
    """The verdict on every pair of fixtures that this version describes; geometry that is equal is judged once."""
    found: dict[object, Verdict] = {}
    out = []
    for prefill, decode in product(fixtures, repeat=2):
        one, other = manifests_of(prefill), manifests_of(decode)
        if isinstance(one, str) or isinstance(other, str):
            continue
        key = shape_of(prefill), shape_of(decode)
        if key not in found:
            found[key] = judge(one, other)
        out.append((prefill, decode, found[key]))
    return out


@cache
def shape_of(fixture: Fixture) -> int:
    """Equal for fixtures whose manifests differ in names and addresses alone."""
    given = manifests_of(fixture)
    assert not isinstance(given, str)
    return hash(tuple((m.model, m.parallel, m.groups, m.tensors) for m in given))
