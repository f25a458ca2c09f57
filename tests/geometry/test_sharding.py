"""Slices of heads over ranks, and the proof that pieces fill a box once."""

import random

import pytest

from tests.support.geometry.world import legal
from vllm_pd_connector.errors import IncompatiblePeer, InvalidTopology
from vllm_pd_connector.geometry import sharding
from vllm_pd_connector.geometry.sharding import Box, Interval, intersect, require_one_writer, shard, volume


@pytest.mark.parametrize("heads", range(1, 9))
@pytest.mark.parametrize("tp", range(1, 9))
def test_every_head_is_held_equally_often_by_neighbouring_ranks(heads: int, tp: int) -> None:
    if not legal(heads, tp):
        with pytest.raises(InvalidTopology, match=f"{heads} heads .* size {tp}"):
            shard(heads, tp, 0)
        return
    held = [shard(heads, tp, rank) for rank in range(tp)]
    assert held == sorted(held)
    owners = [sum(i.start <= head < i.stop for i in held) for head in range(heads)]
    assert owners == [max(1, tp // heads)] * heads


@pytest.mark.parametrize(("heads", "tp", "rank", "start", "stop"), [(1, 4, 3, 0, 1), (2, 4, 2, 1, 2), (6, 3, 1, 2, 4)])
def test_known_shards(heads: int, tp: int, rank: int, start: int, stop: int) -> None:
    assert shard(heads, tp, rank) == Interval(start, stop)


@pytest.mark.parametrize(("tp", "rank"), [(2, 2), (2, -1), (0, 0), (-2, 0)])
def test_a_rank_outside_its_group_is_refused(tp: int, rank: int) -> None:
    with pytest.raises(InvalidTopology):
        shard(8, tp, rank)


def test_boxes_intersect_along_every_axis() -> None:
    a, b = (Interval(0, 4), Interval(2, 6)), (Interval(3, 9), Interval(0, 3))
    assert intersect(a, b) == (Interval(3, 4), Interval(2, 3))
    assert intersect(a, (Interval(4, 5), Interval(2, 6))) is None
    assert volume(a) == 16 and volume(()) == 1


def test_pieces_that_tile_a_box_pass() -> None:
    box = (Interval(0, 4), Interval(0, 2))
    halves = [(Interval(2, 4), Interval(0, 2)), (Interval(0, 2), Interval(0, 1)), (Interval(0, 2), Interval(1, 2))]
    require_one_writer("t", box, halves)
    require_one_writer("scalar", (), [()])
    with pytest.raises(IncompatiblePeer, match="multiple writers"):
        require_one_writer("scalar", (), [(), ()])


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Box, Box]]:
    """Each two pieces that are compared."""
    pairs: list[tuple[Box, Box]] = []

    def noted(a: Box, b: Box) -> Box | None:
        pairs.append((a, b))
        return intersect(a, b)

    monkeypatch.setattr(sharding, "intersect", noted)
    return pairs


@pytest.mark.parametrize("divided", [0, 1, 2])
def test_many_pieces_are_compared_with_their_neighbours_only(divided: int, compared: list[tuple[Box, Box]]) -> None:
    """A peer may name thousands of ranks, and every pair of them would take minutes; whichever axis they divide."""
    whole = [Interval(0, 2000)] * 3
    places = random.Random(1).sample(range(2000), 2000)
    pieces = [(*whole[:divided], Interval(i, i + 1), *whole[divided + 1 :]) for i in places]
    require_one_writer("t", tuple(whole), pieces)
    assert len(compared) <= len(pieces)
    twice = (*whole[:divided], Interval(700, 702), *whole[divided + 1 :])
    with pytest.raises(IncompatiblePeer, match=r"multiple writers for .*\[700, 701\)"):
        require_one_writer("t", tuple(whole), [*pieces, twice])


def test_heads_that_are_cut_otherwise_for_each_share_of_the_tokens_are_compared_within_it(
    compared: list[tuple[Box, Box]],
) -> None:
    """Each of a thousand pieces overlaps nearly all others along the heads, and none of them in its share."""
    shares = 500
    whole = Interval(0, shares + 1), Interval(0, shares)
    pieces = [
        (part, Interval(i, i + 1)) for i in range(shares) for part in (Interval(0, i + 1), Interval(i + 1, shares + 1))
    ]
    require_one_writer("t", whole, pieces)
    assert len(compared) <= len(pieces)
    pieces[100] = Interval(0, 52), Interval(50, 51)
    with pytest.raises(IncompatiblePeer, match=r"multiple writers for \[51, 52\) x \[50, 51\)"):
        require_one_writer("t", whole, pieces)


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([(0, 2), (1, 4)], r"layers\.3 key: multiple writers for \[1, 2\)"),
        ([(0, 4), (0, 4)], "multiple writers"),
        ([(0, 1), (2, 4)], r"no source writer for a part of \[0, 4\).*\[0, 1\), \[2, 4\)"),
        ([], "no source writer .* hold nothing"),
    ],
)
def test_gaps_and_overlaps_are_named(pieces: list[tuple[int, int]], text: str) -> None:
    with pytest.raises(IncompatiblePeer, match=text):
        require_one_writer("layers.3 key", (Interval(0, 4),), [(Interval(*piece),) for piece in pieces])
