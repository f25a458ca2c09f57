"""Cutting runs at segment ends and into batches: every byte goes where its run says, once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.transport.ends import runs
from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.transport.ranges import Batches, Descriptors, Ranges, batches, cut

SPACE = 64


def segment(address: int, length: int, device: str = "cpu") -> Segment:
    return Segment(address=address, length=length, device=device, device_id=0)


def ranges(cuts: set[int], base: int, device: str = "cpu") -> Ranges:
    """Adjacent segments that cover [base, base + SPACE)."""
    edges = sorted({0, SPACE} | cuts)
    return Ranges.of([segment(base + a, b - a, device) for a, b in itertools.pairwise(edges)], "this worker")


def pairs(work: Descriptors) -> list[tuple[int, int]]:
    """Every (source byte, destination byte), sorted."""
    triples = zip(work.runs.source, work.runs.destination, work.runs.length, strict=True)
    return sorted((int(s) + i, int(d) + i) for s, d, n in triples for i in range(int(n)))


edges = st.sets(st.integers(1, SPACE - 1), max_size=6)
rows = st.lists(
    st.tuples(st.integers(0, SPACE), st.integers(0, SPACE), st.integers(0, SPACE)).map(
        lambda row: (row[0], row[1], min(row[2], SPACE - max(row[0], row[1])))
    ),
    max_size=8,
)


@settings(deadline=None)
@given(edges, edges, rows, st.integers(1, SPACE))
def test_every_byte_is_copied_as_its_run_says_and_each_descriptor_fits_its_segments(
    source_cuts: set[int], destination_cuts: set[int], wanted: list[tuple[int, int, int]], limit: int
) -> None:
    source, destination = ranges(source_cuts, 1000), ranges(destination_cuts, 5000)
    wanted = [(1000 + s, 5000 + d, n) for s, d, n in wanted]
    work = cut(runs(wanted), source, destination, limit)
    assert pairs(work) == sorted((s + i, d + i) for s, d, n in wanted for i in range(n))
    assert (work.runs.length > 0).all() and (work.runs.length <= limit).all()
    assert (work.runs.source >= source.start[work.source_range]).all()
    assert (work.runs.source + work.runs.length <= source.stop[work.source_range]).all()
    assert (work.runs.destination >= destination.start[work.destination_range]).all()
    assert (work.runs.destination + work.runs.length <= destination.stop[work.destination_range]).all()

    groups = taken(batches(work, source, destination, per_descriptor=3), 2 * limit)
    assert sorted(pair for group, _ in groups for pair in pairs(group)) == pairs(work)
    for group, cost in groups:
        assert cost == group.runs.total_bytes + 3 * len(group.runs)
        assert cost <= 2 * limit or len(group.runs) == 1


def taken(groups: list[Batches], limit: int) -> list[tuple[Descriptors, int]]:
    """All batches of all kinds."""
    found = []
    for group in groups:
        while left := group.left:
            found.append(group.take(limit))
            assert group.left == left - len(found[-1][0].runs)
    return found


def test_a_batch_holds_one_kind_of_memory_per_side() -> None:
    mixed = Ranges.of([segment(1000, 50), segment(1050, 50, "cuda")], "this worker")
    plain = Ranges.of([segment(5000, 100)], "the peer")
    work = cut(runs([(1000, 5000, 100), (1010, 5010, 10)]), mixed, plain, 1 << 20)
    groups = taken(batches(work, mixed, plain, 1), 1 << 20)
    assert [set(mixed.cuda[group.source_range].tolist()) for group, _ in groups] == [{False}, {True}]


def test_no_runs_give_no_batches() -> None:
    memory = ranges(set(), 1000)
    assert batches(cut(runs([]), memory, memory, 10), memory, memory, 1) == []


def test_no_registered_memory_refuses_every_run() -> None:
    nothing = Ranges.of([], "the peer")
    with pytest.raises(TransferError, match="outside the 0 registered segments of the peer"):
        cut(runs([(1000, 1000, 1)]), nothing, ranges(set(), 1000), 10)


def test_a_hole_between_segments_is_not_crossed() -> None:
    holed = Ranges.of([segment(1000, 10), segment(1011, 10)], "the peer")
    with pytest.raises(TransferError, match="address 0x3f2"):
        cut(runs([(1005, 1000, 10)]), holed, ranges(set(), 1000), 100)


def test_a_negative_length_is_refused() -> None:
    memory = ranges(set(), 1000)
    with pytest.raises(TransferError, match="negative length -1"):
        cut(runs([(1000, 1000, -1)]), memory, memory, 10)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([segment(0, 10)], "is not memory"),
        ([segment(1000, 0)], "is not memory"),
        ([segment(2**63 - 5, 10)], "is not memory"),
        ([segment(1000, 10, "tpu")], "'tpu'"),
        ([segment(1000, 10), segment(1009, 10)], "overlaps"),
        ([segment(1000, 10), segment(1000, 10)], "overlaps"),
    ],
)
def test_segments_that_are_no_memory_are_refused(segments: list[Segment], message: str) -> None:
    with pytest.raises(TransferError, match=message):
        Ranges.of(segments, "the peer")


def test_segments_may_come_in_any_order() -> None:
    assert np.array_equal(Ranges.of([segment(2000, 5), segment(1000, 5)], "the peer").start, [1000, 2000])
