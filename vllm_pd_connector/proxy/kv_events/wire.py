"""vLLM's KV-cache events as they come over ZMQ, with bounds; they are untrusted.

A message has three frames: a topic, a sequence number (8 bytes, big-endian, from 0 in each process of an engine) and a
batch in msgpack. A batch is an array; its events are maps with a `type`. Fields that are unknown here are passed over,
since vLLM adds some in most releases; an event of an unknown type makes its batch unreadable, because it may say that
blocks are gone.

Source: vLLM 0.32 and 0.33, `vllm/distributed/kv_events.py` (`KVEventBatch`, `ZmqEventPublisher`).
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from vllm_pd_connector.errors import ProtocolError

MAX_BATCH_BYTES = 32 << 20
MAX_EVENTS = 1 << 18
MAX_HASHES = 1 << 17
MAX_TOKENS = 1 << 21
MAX_BLOCK_TOKENS = 1 << 20

BlockHash: TypeAlias = Annotated[bytes, Meta(min_length=1, max_length=64)] | int
"""A name that the engine gives to a block and all before it; how it is made is the engine's affair."""
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Hashes: TypeAlias = Annotated[list[BlockHash], Meta(max_length=MAX_HASHES)]
Word: TypeAlias = Annotated[str, Meta(max_length=256)]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """Base of the events."""


class BlockStored(Event, frozen=True):
    """These blocks, one after the other behind the parent, are in the cache now.

    `token_ids` are those of all blocks of the stretch; vLLM leaves the hashes of some out where a window or a state
    keeps not all. `extra_keys` are what else than tokens a block stands for, one entry for each hash: compared only,
    and so not decoded.
    """

    block_hashes: Hashes
    parent_block_hash: BlockHash | None
    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_TOKENS)]
    medium: Word | None = None
    lora_name: Word | None = None
    extra_keys: Annotated[list[msgspec.Raw], Meta(max_length=MAX_HASHES)] | None = None
    group_idx: Annotated[int, Meta(ge=0, le=255)] | None = None
    kv_cache_spec_kind: Word | None = None
    locality: Word | None = None


class BlockRemoved(Event, frozen=True):
    """One copy of each of these blocks is gone."""

    block_hashes: Hashes
    medium: Word | None = None
    group_idx: Annotated[int, Meta(ge=0, le=255)] | None = None
    locality: Word | None = None


class AllBlocksCleared(Event, frozen=True):
    """The cache is empty."""


AnyEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one engine step announced."""

    ts: float
    events: Annotated[list[AnyEvent], Meta(max_length=MAX_EVENTS)]


_decoder = msgspec.msgpack.Decoder(Batch)


def decode_batch(payload: bytes) -> Batch:
    """The batch in a message's last frame.

    Raises:
        ProtocolError: it is none, or has more than it may.
    """
    if len(payload) > MAX_BATCH_BYTES:
        raise ProtocolError(f"KV-cache events: {len(payload)} bytes in a batch there, at most {MAX_BATCH_BYTES} here")
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"KV-cache events: not a batch of a vLLM release known here: {error}") from error


def sequence_number(frame: bytes) -> int:
    """The number of a message; -1 ends a replay.

    Raises:
        ProtocolError: the frame has not 8 bytes, or says another negative number.
    """
    number = int.from_bytes(frame, "big", signed=True)
    if len(frame) != 8 or number < -1:
        raise ProtocolError(f"KV-cache events: sequence number: {frame[:16]!r} there, 8 bytes of a number here")
    return number
