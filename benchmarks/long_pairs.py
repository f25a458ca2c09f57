"""The pairs of instances of `long_prompts`: their layouts and memory, and the process that holds a prompt.

A prompt takes BYTES_PER_TOKEN for each token in every pair, so that what the pairs are in runs can be compared. Where a
pair has two heads, each has half of the channels.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.bind import ITEM, make_worker
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.manifest import Manifest, Segment
from vllm_pd_connector.protocol.wire.fields import LeaseRef
from vllm_pd_connector.sidechannel.server import SideChannelServer
from vllm_pd_connector.transport.registry import create
from vllm_pd_connector.worker.peers.process_watch import ProcessWatches

LAYERS, CHANNELS = 16, 16
"""CHANNELS: of all heads of a layer together."""
BYTES_PER_TOKEN = LAYERS * 2 * CHANNELS * ITEM
TRANSPORTS: dict[str, dict[str, Any]] = {
    "nixl": {"ucx": {"TLS": "tcp"}},
    "mooncake": {"protocol": "tcp", "address": "127.0.0.1"},
}
FILLED = 7
"""What every byte of a prompt is."""
PATIENCE_S = 300.0
MOST_ROUNDS = 15
"""Receives of a prompt that a prefill process can serve."""
_LOOPBACK = ipaddress.ip_address("127.0.0.1")


class Layout(NamedTuple):
    """A side's blocks: vLLM's name of the order of layers, blocks, heads, tokens and content, a block's tokens, and
    among how many workers the heads are divided."""

    name: str
    block_tokens: int
    tp: int = 1


class Pair(NamedTuple):
    """The layouts of the prefill and of the decode instance, of a model with so many heads."""

    theirs: Layout
    ours: Layout
    heads: int = 1


PAIRS = {
    "blocks of 16": Pair(Layout("LBHNC", 16), Layout("LBHNC", 16)),
    "blocks of 128": Pair(Layout("LBHNC", 128), Layout("LBHNC", 128)),
    "blocks of 16 → 64": Pair(Layout("LBHNC", 16), Layout("LBHNC", 64)),
    "blocks of 64, a block's layers together → apart": Pair(Layout("BLHNC", 64), Layout("LBHNC", 64)),
    "blocks of 16, NHD": Pair(Layout("LBNHC", 16), Layout("LBNHC", 16), heads=2),
    "blocks of 16, NHD → HND": Pair(Layout("LBNHC", 16), Layout("LBHNC", 16), heads=2),
    "blocks of 16, TP 2 → 1": Pair(Layout("LBHNC", 16, tp=2), Layout("LBHNC", 16), heads=2),
    "blocks of 16, NHD, TP 2 → 1": Pair(Layout("LBNHC", 16, tp=2), Layout("LBNHC", 16), heads=2),
}
"""Where nothing else is said the layout is HND and a side has one worker."""
ON_EVERY_TRANSPORT = tuple(name for name, pair in PAIRS.items() if pair.heads == 1)
"""The others' counts are the same on each, so they are received over the first transport only."""


def describe(
    layout: Layout,
    tokens: int,
    engine: str,
    memory: np.ndarray,
    layers: int = LAYERS,
    channels: int = CHANNELS,
    heads: int = 1,
    rank: int = 0,
) -> Manifest:
    """A worker whose caches have room for a prompt of so many tokens; `channels` are those of one head."""
    blocks = tokens // layout.block_tokens + 1
    made = make_worker(rank, layout.tp, layout.name, layout.block_tokens, blocks, layers, heads, channels)
    segments = (Segment(memory.ctypes.data, len(memory), "cpu", 0),)
    return msgspec.structs.replace(made, engine_id=engine, incarnation=secrets.token_hex(16), segments=segments)


def make_memory(layout: Layout, tokens: int, filled: int) -> np.ndarray:
    """The caches of one worker; every page of them has been touched."""
    blocks = tokens // layout.block_tokens + 1
    return np.full(blocks * layout.block_tokens * BYTES_PER_TOKEN // layout.tp, filled, dtype=np.uint8)


def scattered(layout: Layout, tokens: int, seed: int) -> BlockTable:
    """All blocks of a prompt, in an order in which they do not follow each other."""
    ids = np.random.default_rng(seed).permutation(np.arange(1, tokens // layout.block_tokens + 1))
    return BlockTable.of(0, ids.tolist())


def beginning(table: BlockTable, layout: Layout, tokens: int) -> BlockTable:
    """The blocks of the first tokens."""
    return BlockTable.of(0, table.ids[: -(-tokens // layout.block_tokens)].tolist())


class Place(NamedTuple):
    """Where a prefill instance is found, and what it holds its prompt under: once to connect, then to be measured."""

    port: int
    incarnation: str
    leases: tuple[LeaseRef, ...]


def prefill(pipe: Connection, name: str, tokens: int, transport: str, options: Mapping[str, Any]) -> None:
    """Main of a process with the workers of a prefill instance, until the pipe is closed."""
    pair = PAIRS[name]
    life = ProcessWatches(_LOOPBACK, lambda: None)
    server = SideChannelServer("127.0.0.1", 0, "p-0", secrets.token_hex(16))
    ends, memories, encoded = [], [], []
    for rank in range(pair.theirs.tp):
        memories.append(make_memory(pair.theirs, tokens, FILLED))
        ends.append(create(transport, options))
        manifest = describe(
            pair.theirs, tokens, "p-0", memories[-1], channels=CHANNELS // pair.heads, heads=pair.heads, rank=rank
        )
        ends[-1].register(manifest.segments)
        served = msgspec.structs.replace(manifest, transport=transport, endpoint=ends[-1].describe(), life=life.own)
        encoded.append(msgspec.msgpack.encode(served))
    server.set_manifests(encoded)
    leases = tuple(LeaseRef(f"r-{number}", secrets.token_bytes(16)) for number in range(1 + MOST_ROUNDS))
    for lease in leases:
        server.hold(lease.request_id, lease.nonce, PATIENCE_S)
    pipe.send(Place(server.port, server._incarnation, leases))
    try:
        pipe.recv()
    except EOFError:
        server.close()
        for end in ends:
            end.close()
        life.close()
