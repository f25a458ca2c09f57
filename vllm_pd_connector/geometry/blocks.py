"""The block table of a request in one KV-cache group, in the one form that it has from end to end.

The scheduler halves make it of vLLM's lists, leases and pushes keep it, messages and engine steps carry it, and `bind`
reads it: it is the wire form itself, so nothing is converted on the way. Only `kv_transfer_params` have lists of
numbers instead, as routers know them from vLLM's connectors (`protocol.params`).

Source: vLLM 0.32 `v1/core/block_pool.py` (block 0 is the null block).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

if TYPE_CHECKING:
    from numpy.typing import NDArray

NULL_BLOCK: Final = 0
"""vLLM's placeholder block: its bytes belong to nobody (BlockPool.null_block is the first block)."""
MAX_TABLE_BYTES: Final = 512 * 1024
_ID: Final = np.dtype("<i4")
_ID_BYTES: Final = 4


class BlockTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Logical block ids of one request in one group: entry i is logical block `first_block` + i, id 0 means absent.

    Strict, immutable, comparable by value. On the wire the ids are little-endian int32 under the name "ids"; a peer's
    are only numbers until `bind` has compared them with a cache.

    Raises:
        ValueError: a first block below 0, or bytes that are no whole ids. A decoder makes its own error of it.
    """

    first_block: Annotated[int, Meta(ge=0, lt=2**31)]
    packed: Annotated[bytes, Meta(max_length=MAX_TABLE_BYTES)] = msgspec.field(name="ids")

    def __post_init__(self) -> None:
        if self.first_block < 0 or len(self.packed) % _ID_BYTES:
            raise ValueError(
                f"first_block {self.first_block} and {len(self.packed)} bytes of ids: expected a block from 0 on, and "
                f"{_ID_BYTES} bytes for each id"
            )

    @classmethod
    def of(cls, first_block: int, ids: Sequence[int]) -> BlockTable:
        """A table of these ids.

        Raises:
            struct.error: an id of vLLM's list has more than 32 bits.
        """
        return cls(first_block, struct.pack(f"<{len(ids)}i", *ids))  # faster than by way of an array

    @property
    def ids(self) -> NDArray[np.int64]:
        """Shape (n,), one id per entry; wide enough for addresses to be made of them."""
        return self.narrow.astype(np.int64)

    @property
    def narrow(self) -> NDArray[np.int32]:
        """The same as `ids`, in the width in which they are packed and without a copy; not to be calculated with."""
        return np.frombuffer(self.packed, dtype=_ID)

    def ids_behind(self, known: bytes) -> tuple[int, ...]:
        """The ids behind these packed ones, with which it begins; the cheapest way to a few."""
        return struct.unpack_from(f"<{(len(self.packed) - len(known)) // _ID_BYTES}i", self.packed, len(known))

    @property
    def end(self) -> int:
        """The logical block behind the last entry."""
        return self.first_block + len(self.packed) // _ID_BYTES

    @property
    def begin(self) -> int:
        """The first logical block that is not absent; `end` if all are."""
        ids = self.narrow
        if len(ids) and ids.item(0) != NULL_BLOCK:  # mostly so, and a long prompt's table is long
            return self.first_block
        present = ids != NULL_BLOCK
        return self.first_block + int(np.argmax(present)) if present.any() else self.end


def agree(one: BlockTable, other: BlockTable) -> bool:
    """Whether two tables of a request name the same ids for the logical blocks that both have."""
    first, end = max(one.begin, other.begin), min(one.end, other.end)
    if first >= end:
        return True
    parts = (t.packed[(first - t.first_block) * _ID_BYTES : (end - t.first_block) * _ID_BYTES] for t in (one, other))
    return next(parts) == next(parts)


BlockTables = Sequence[BlockTable]
"""One table per KV-cache group of a side, in the order of its manifest's groups."""


def unsendable(tables: BlockTables) -> str:
    """Why no message may hold these tables: whoever got one could not decode it. Empty if it may. A table is not asked
    for this where it is made: `kv_transfer_params` have longer ones."""
    for table in tables:
        if (size := len(table.packed)) > MAX_TABLE_BYTES:
            return (
                f"a table of {size // _ID_BYTES} blocks, the limit is {MAX_TABLE_BYTES // _ID_BYTES}: use larger blocks"
            )
    return ""
