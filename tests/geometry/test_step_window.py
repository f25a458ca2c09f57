"""Which block goes where when a step of a prefill ends: by block ids, as another engine's step window is written down.

What a step may send up to is decided beside the planner (`worker/push/test_cursor.py`); here is what a token range
[sent before, sent after) then moves. A partial block goes when the range reaches into it, of the decode side's prefix
only the blocks behind it, of a window only where that side still has a block.
"""

from __future__ import annotations

import pytest

from tests.support.geometry.edges import ONE, edge, offsets
from tests.support.geometry.request import bind
from tests.support.geometry.world import Model, table
from vllm_pd_connector.errors import BindError
from vllm_pd_connector.geometry.blocks import BlockTable

TOKEN_BYTES = 4
WINDOWED = Model(layers=1, heads=1, key=1, value=1, window=32)
NULL = 0


def sent(
    source: BlockTable,
    destination: BlockTable,
    start: int,
    stop: int,
    *,
    blocks: tuple[int, int] = (16, 16),
    model: Model = ONE,
) -> list[tuple[int, int]]:
    """(block there, block here) of every block that gets a token, in order; `blocks` are tokens per block."""
    here, there = ({"block_tokens": tokens, "num_blocks": 128} for tokens in blocks)
    runs = offsets(bind(edge(model, here, there), [source], [destination], start, stop))
    pairs = [
        ((from_ + byte) // (blocks[0] * TOKEN_BYTES), (to + byte) // (blocks[1] * TOKEN_BYTES))
        for from_, to, length in runs
        for byte in range(0, length, TOKEN_BYTES)
    ]
    return list(dict.fromkeys(pairs))


@pytest.mark.parametrize(
    ("source", "destination", "start", "stop", "expected"),
    [
        pytest.param(table(1, 2), table(100, 101, 102, 103, 104), 0, 32, [(1, 100), (2, 101)], id="first chunk"),
        pytest.param(table(1, 2, 3, 4), table(100, 101, 102, 103, 104), 32, 64, [(3, 102), (4, 103)], id="later chunk"),
        pytest.param(table(1, 2, 3), table(100, 101, 102), 0, 33, [(1, 100), (2, 101), (3, 102)], id="partial block"),
        pytest.param(table(1, 2, 3), table(100, 101, 102), 33, 48, [(3, 102)], id="rest of a partial block"),
        pytest.param(
            table(1, 2, 3, 4, 5),
            table(100, 101, 102, 103, 104),
            0,
            80,
            [(1, 100), (2, 101), (3, 102), (4, 103), (5, 104)],
            id="prefix that the prefill side had",
        ),
        pytest.param(
            table(1, 2, 3, 4, 5),
            table(102, 103, 104, first=2),
            32,
            80,
            [(3, 102), (4, 103), (5, 104)],
            id="prefix that the decode side has, not in its table",
        ),
        pytest.param(
            table(1, 2, 3, 4, 5),
            table(100, 101, 102, 103, 104),
            32,
            80,
            [(3, 102), (4, 103), (5, 104)],
            id="prefix that the decode side has, in its table",
        ),
        pytest.param(table(11, 12), table(21, 22), 0, 32, [(11, 21), (12, 22)], id="one entry"),
    ],
)
def test_a_range_moves_the_blocks_that_it_touches(
    source: BlockTable, destination: BlockTable, start: int, stop: int, expected: list[tuple[int, int]]
) -> None:
    assert sent(source, destination, start, stop) == expected


@pytest.mark.parametrize(
    ("source", "destination", "start"),
    [
        pytest.param(table(1, 2, 3, 4), table(NULL, NULL, 102, 103), 0, id="the decode side's window has passed"),
        pytest.param(table(NULL, NULL, 3, 4), table(100, 101, 102, 103), 32, id="the prefill side's window has passed"),
        pytest.param(table(NULL, NULL, 3, 4), table(102, 103, first=2), 0, id="both, one of them by a shorter table"),
    ],
)
def test_of_a_window_the_blocks_that_it_has_passed_are_skipped(
    source: BlockTable, destination: BlockTable, start: int
) -> None:
    assert sent(source, destination, start, 64, model=WINDOWED) == [(3, 102), (4, 103)]


@pytest.mark.parametrize(
    ("blocks", "source", "destination", "tokens", "expected"),
    [
        pytest.param(
            (32, 16),
            table(1, 2),
            table(100, 101, 102, 103),
            64,
            [(1, 100), (1, 101), (2, 102), (2, 103)],
            id="two blocks there for one here",
        ),
        pytest.param(
            (32, 16), table(1, 2), table(100, 101, 102), 48, [(1, 100), (1, 101), (2, 102)], id="last one short"
        ),
        pytest.param((4, 4), table(1, 2), table(100, 101, 102, 103), 8, [(1, 100), (2, 101)], id="small blocks"),
        pytest.param(
            (4, 4),
            table(1, 2, 3),
            table(100, 101, 102),
            10,
            [(1, 100), (2, 101), (3, 102)],
            id="eight of ten tokens cached there before",
        ),
    ],
)
def test_blocks_of_both_sides_pair_by_tokens(
    blocks: tuple[int, int],
    source: BlockTable,
    destination: BlockTable,
    tokens: int,
    expected: list[tuple[int, int]],
) -> None:
    assert sent(source, destination, 0, tokens, blocks=blocks) == expected


@pytest.mark.parametrize(
    ("blocks", "source", "destination", "tokens", "text"),
    [
        pytest.param((16, 16), table(1, 2, 3), table(100, 101), 48, "destination .* too short", id="shortage"),
        pytest.param((32, 16), table(11, 12), table(21, 22), 64, "destination .* too short", id="incomplete"),
        pytest.param((16, 16), table(11, 12), table(21, 22, 23), 48, "source .* too short", id="shortage here"),
        pytest.param((16, 16), table(11, 12), table(21, 21), 32, "block id 21 is given twice", id="twice"),
    ],
)
def test_too_few_blocks_move_nothing(
    blocks: tuple[int, int], source: BlockTable, destination: BlockTable, tokens: int, text: str
) -> None:
    with pytest.raises(BindError, match=text):
        sent(source, destination, 0, tokens, blocks=blocks)


@pytest.mark.parametrize("tables", [0, 2])
def test_every_group_has_exactly_one_table(tables: int) -> None:
    plain = edge(ONE, {}, {})
    given = [BlockTable.of(0, [1, 2])] * tables
    for source, destination in ((given, [table(1, 2)]), ([table(1, 2)], given)):
        with pytest.raises(BindError, match="group"):
            bind(plain, source, destination, 0, 8)
