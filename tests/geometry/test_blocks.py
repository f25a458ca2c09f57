"""A block table is its own wire form, and holds nothing that is no table."""

from __future__ import annotations

import pickle
import struct

import msgspec
import numpy as np
import pytest

from vllm_pd_connector.geometry.blocks import MAX_TABLE_BYTES, BlockTable, agree

TABLE = BlockTable.of(3, [0, 0, 7, 0, 2**31 - 1])
WIRE = {"first_block": 3, "ids": b"\0\0\0\0\0\0\0\0\7\0\0\0\0\0\0\0\xff\xff\xff\x7f"}


def decoded(**changes: object) -> BlockTable:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(WIRE | changes), type=BlockTable)


def test_a_table_travels_as_it_is() -> None:
    assert msgspec.msgpack.encode(TABLE) == msgspec.msgpack.encode(WIRE)
    assert decoded() == TABLE == pickle.loads(pickle.dumps(TABLE))


def test_ids_are_wide_enough_for_addresses() -> None:
    assert TABLE.ids.dtype == np.int64
    assert (TABLE.ids * 2**20).tolist() == [0, 0, 7 * 2**20, 0, (2**31 - 1) * 2**20]


@pytest.mark.parametrize(("ids", "begin", "end"), [([0, 0, 7, 0, 9], 5, 8), ([7, 9], 3, 5), ([0, 0], 5, 5), ([], 3, 3)])
def test_begin_and_end_are_logical_blocks(ids: list[int], begin: int, end: int) -> None:
    table = BlockTable.of(3, ids)
    assert (table.begin, table.end) == (begin, end)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ids": bytes(7)}, "7 bytes of ids"),
        ({"ids": bytes(MAX_TABLE_BYTES + 4)}, "ids"),
        ({"ids": [1, 2]}, "ids"),
        ({"first_block": -1}, "first_block"),
        ({"first_block": 2**31}, "first_block"),
        ({"packed": b""}, "packed"),
    ],
)
def test_what_is_no_table_is_refused_when_it_is_decoded(changes: dict[str, object], named: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=named):
        decoded(**changes)


def test_a_table_of_our_own_is_one_too() -> None:
    with pytest.raises(ValueError, match="first_block -1"):
        BlockTable.of(-1, [1])
    with pytest.raises(struct.error):
        BlockTable.of(0, [2**31])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((0, [4, 5]), (0, [4, 5, 6]), True),
        ((0, [4, 5, 6]), (0, [4, 5]), True),
        ((2, [4, 5]), (3, [5, 6]), True),
        ((0, [0, 0, 4, 5]), (3, [5, 6]), True),
        ((0, [4]), (3, [5]), True),
        ((0, []), (0, [5]), True),
        ((0, [4, 5]), (0, [4, 7, 6]), False),
        ((2, [4, 5]), (3, [7, 6]), False),
        ((0, [4, 5]), (1, [4]), False),
    ],
)
def test_tables_agree_where_they_name_one_id_for_each_block_that_both_have(
    one: tuple[int, list[int]], other: tuple[int, list[int]], same: bool
) -> None:
    a, b = BlockTable.of(*one), BlockTable.of(*other)
    assert agree(a, b) is agree(b, a) is same
