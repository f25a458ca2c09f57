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
from vllm_pd_connector.geometry.runs import Addresses, Runs, concatenate
from vllm_pd_connector.transport.ranges import Batches, Ranges, batches, cut, few

SPACE = 64


def segment(address: int, length: int, device: str = "cpu", number: int = 0) -> Segment:
    return Segment(address=address, length=length, device=device, device_id=number)


def ranges(cuts: set[int], base: int, device: str = "cpu") -> Ranges:
    """Adjacent segments that cover [base, base + SPACE)."""
    edges = sorted({0, SPACE} | cuts)
    return Ranges.of([segment(base + a, b - a, device) for a, b in itertools.pairwise(edges)], "this worker")


def pairs(work: Runs) -> list[tuple[int, int]]:
    """Every (source byte, destination byte), sorted."""
    triples = zip(work.source, work.destination, work.length, strict=True)
    return sorted((int(s) + i, int(d) + i) for s, d, n in triples for i in range(int(n)))


edges = st.sets(st.integers(1, SPACE - 1), max_size=6)
rows = st.lists(
    st.tuples(st.integers(0, SPACE), st.integers(0, SPACE), st.integers(0, SPACE)).map(
        lambda row: (row[0], row[1], min(row[2], SPACE - max(row[0], row[1])))
    ),
    max_size=8,
)


@settings(deadline=None)
@given(edges, edges, rows, st.integers(1, SPACE), st.integers(1, 5))
def test_every_byte_is_copied_as_its_run_says_and_each_descriptor_fits_its_segments(
    source_cuts: set[int], destination_cuts: set[int], wanted: list[tuple[int, int, int]], limit: int, most: int
) -> None:
    source, destination = ranges(source_cuts, 1000), ranges(destination_cuts, 5000)
    wanted = [(1000 + s, 5000 + d, n) for s, d, n in wanted]
    work = cut(runs(wanted), source, destination, limit)
    assert pairs(work) == sorted((s + i, d + i) for s, d, n in wanted for i in range(n))
    assert (work.length > 0).all() and (work.length <= limit).all()
    for side, address in ((source, work.source), (destination, work.destination)):
        held = (side.start <= address[:, None]) & (address[:, None] + work.length[:, None] <= side.stop)
        assert held.any(axis=1).all(), "a descriptor lies in no one segment"

    groups = taken(batches(work, source, destination, per_descriptor=3), 2 * limit, most)
    assert sorted(pair for group, _ in groups for pair in pairs(as_runs(group))) == pairs(work)
    for group, cost in groups:
        assert cost == as_runs(group).total_bytes + 3 * group.shape[1]
        assert cost <= 2 * limit or group.shape[1] == 1
        assert 0 < group.shape[1] <= most


numbers = st.sampled_from([("cpu", 0), ("cuda", 0), ("cuda", 3)])


@settings(deadline=None)
@given(edges, rows, numbers, numbers, st.integers(1, 2 * SPACE), st.integers(1, SPACE))
def test_few_runs_at_once_are_what_cutting_and_batching_makes_of_them(
    cuts: set[int],
    wanted: list[tuple[int, int, int]],
    here: tuple[str, int],
    there: tuple[str, int],
    limit: int,
    longest: int,
) -> None:
    source = Ranges.of([segment(1000, SPACE, *here)], "this worker")
    edges = sorted({0, SPACE} | cuts)
    destination = Ranges.of([segment(5000 + a, b - a, *there) for a, b in itertools.pairwise(edges)], "the peer")
    work = runs([(1000 + s, 5000 + d, n) for s, d, n in wanted])
    at_once = few(work, source, destination, longest, limit, 3)
    whole = batches(cut(work, source, destination, longest), source, destination, per_descriptor=3)
    if at_once is None:
        lengths = [n for _, _, n in wanted]
        fits = lengths and sum(lengths) + len(wanted) * 3 <= limit and max(lengths) <= longest
        near = wanted and max(max(s, d) for s, d, _ in wanted) + max(lengths) > SPACE
        assert not fits or min(lengths) == 0 or cuts or near, "nothing stands against it"
        return
    rows, kinds, cost = at_once
    [batch] = whole
    assert (rows == batch.rows).all() and rows.shape == batch.rows.shape and kinds == batch.cuda
    assert batch.rest == cost <= limit


def taken(groups: list[Batches], limit: int, most: int) -> list[tuple[Addresses, int]]:
    """All batches of all kinds."""
    found = []
    for group in groups:
        while left := group.left:
            assert group.rest > 0
            found.append(group.take(limit, most))
            assert group.left == left - found[-1][0].shape[1]
        assert group.rest == 0
    return found


def as_runs(rows: Addresses) -> Runs:
    (source, destination), (length, again) = rows[:, :, 0], rows[:, :, 1]
    assert all(side.flags.c_contiguous for side in rows), "NIXL takes no other"
    assert np.array_equal(length, again)
    return Runs(source, destination, length)


def test_a_batch_holds_one_kind_of_memory_per_side() -> None:
    mixed = Ranges.of([segment(1000, 50), segment(1050, 50, "cuda", 3)], "this worker")
    plain = Ranges.of([segment(5000, 100, "cuda", 7)], "the peer")
    work = cut(runs([(1000, 5000, 100), (1010, 5010, 10)]), mixed, plain, 1 << 20)
    there = batches(work, mixed, plain, 1)
    assert [group.cuda for group in there] == [(False, True), (True, True)]
    assert [set(group.rows[0, :, 2].tolist()) for group in there] == [{0}, {3}]
    assert [set(group.rows[1, :, 2].tolist()) for group in there] == [{7}, {7}]
    assert pairs(concatenate(as_runs(rows) for rows, _ in taken(there, 1 << 20, 10))) == pairs(work)


def test_the_device_of_each_side_is_told() -> None:
    here, there = (Ranges.of([segment(5000, 100, "cuda", number)], "a worker") for number in (1, 7))
    [group] = batches(cut(runs([(5000, 5010, 20), (5030, 5050, 1)]), here, there, 8), here, there, 1)
    assert group.cuda == (True, True) and group.rows[:, :, 2].tolist() == [[1] * 4, [7] * 4]


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


@pytest.mark.parametrize("outside", [-(2**63), -(2**62), -5, -1, 0, 999, 1064, 2**62, 2**63 - 1])
@pytest.mark.parametrize("length", [1, 5, 2**62, 2**63 - 1])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_no_address_outside_is_taken_for_one_inside_however_far_it_is(outside: int, length: int, side: str) -> None:
    memory = ranges(set(), 1000)
    run = (outside, 1000, length) if side == "source" else (1000, outside, length)
    with pytest.raises(TransferError, match="outside the 1 registered segments"):
        cut(runs([(1001, 1002, 3), run]), memory, memory, None)


@pytest.mark.parametrize("run", [(-1, 0, 8), (0, -1, 8), (60, 0, 8), (0, 60, 8), (0, 0, -8), (0, 0, 2**62)])
def test_few_runs_that_are_wrong_are_left_to_be_refused(run: tuple[int, int, int]) -> None:
    source, destination = ranges(set(), 1000), ranges(set(), 5000)
    assert few(runs([(1000, 5000, 8)]), source, destination, 64, 1024, 3) is not None
    wrong = runs([(1000, 5000, 8), (1000 + run[0], 5000 + run[1], run[2])])
    assert few(wrong, source, destination, 2**63, 2**64, 3) is None
    with pytest.raises(TransferError):
        cut(wrong, source, destination, None)


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
