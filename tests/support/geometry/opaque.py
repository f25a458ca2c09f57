"""A worker whose only tensor is opaque: eight heads of 6 bytes per token, in pages of unknown form."""

from __future__ import annotations

import numpy as np

from tests.support.geometry.world import FACTS, Worker
from vllm_pd_connector.geometry.layouts.attention import PageView, opaque
from vllm_pd_connector.geometry.manifest import MANIFEST_VERSION, Coordinates, Group, GroupKind, Manifest, Segment
from vllm_pd_connector.geometry.sharding import shard

BLOCKS = 6


def opaque_worker(description: str, tokens: int, tp: int, rank: int, engine: str = "p-0") -> Worker:
    heads = shard(8, tp, rank)
    page = len(heads) * tokens * 6
    strides = (page, tokens * 6, 6, 1)
    view = PageView("layers.0.attn", 0, 0, 0, (BLOCKS, len(heads), tokens, 6), strides, "bfloat16", 2, 1, heads, 8)
    memory = np.random.default_rng([rank, len(engine)]).integers(0, 256, page * BLOCKS, dtype=np.uint8)
    manifest = Manifest(
        version=MANIFEST_VERSION,
        engine_id=engine,
        incarnation="0" * 32,
        software="test",
        model=FACTS,
        parallel=Coordinates(rank, tp, 0, 1, 0, 1, 1, 1),
        segments=(Segment((1 << 40) + (rank << 33), len(memory), "cpu", 0),),
        groups=(Group(GroupKind.FULL, tokens, BLOCKS),),
        tensors=opaque(view, description),
        transport="loopback",
        endpoint=b"",
    )
    return Worker(manifest, memory, heads=heads)
