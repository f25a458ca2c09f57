"""What an instance tells of its prefix cache: vLLM's KV-cache events, as a router subscribes to them."""

from __future__ import annotations

import json
import time
from typing import TypeAlias

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

TOPIC = "kv"
Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


def announcing(endpoint: str, replay: str | None = None) -> tuple[str, str]:
    """The flags of an instance that publishes its events there, and replays them."""
    facts = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "topic": TOPIC}
    facts |= {"replay_endpoint": replay} if replay else {}
    return "--kv-events-config", json.dumps(facts)


class Subscriber:
    """Reads what an instance publishes from now on."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(TOPIC)
        self._socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def told(self, seconds: float = 0.0) -> list[Event]:
        """What came until now, and what comes within so long after it."""
        events: list[Event] = []
        until = time.monotonic() + seconds
        while self._socket.poll(max(int((until - time.monotonic()) * 1000), 0)):
            _, _, payload = self._socket.recv_multipart()
            events += self._decoder.decode(payload).events
        return events

    def close(self) -> None:
        self._context.destroy(linger=0)


def stored(events: list[Event]) -> set[tuple[int | None, object]]:
    """(group, hash) of the blocks that were announced. A hash stands for the block's tokens and all before them."""
    told = [event for event in events if isinstance(event, BlockStored)]
    return {(event.group_idx, name) for event in told for name in event.block_hashes}


def chains(events: list[Event]) -> set[tuple[object, ...]]:
    """(group, parent, hashes, tokens) of each announcement without a gap: vLLM leaves out what a window has lost, but
    not its tokens."""
    told = [event for event in events if isinstance(event, BlockStored)]
    return {
        (event.group_idx, event.parent_block_hash, *event.block_hashes, *event.token_ids)
        for event in told
        if len(event.block_hashes) * event.block_size == len(event.token_ids)
    }
