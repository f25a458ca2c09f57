"""Records of receives, as a worker would write them of a made-up move."""

from __future__ import annotations

from typing import Any

from tests.support.geometry.request import Move
from tests.support.geometry.world import instance
from vllm_pd_connector.geometry.staging.chunks import RUN_COST_BYTES
from vllm_pd_connector.observability.record import RECORD_VERSION, Moved, Record, Stage, shareable


def records(move: Move, **changes: Any) -> list[Record]:
    """One for every rank of the decode side."""
    sources = tuple(shareable(worker.manifest) for worker in instance(move.model, move.source, "p-0"))
    workers = instance(move.model, move.destination, "decode-1")
    facts: dict[str, Any] = {
        "version": RECORD_VERSION,
        "software": "test",
        "at": 1_800_000_000.0,
        "request": "cmpl-7",
        "prefill": "cmpl-7-prefill",
        "peer": "10.0.0.7:5600",
        "way": "pull",
        "start": move.start,
        "stop": move.stop,
        "blocks": tuple(move.destination_tables),
        "source_blocks": tuple(move.source_tables),
        "sources": sources,
        "same_weights": False,
        "chunk_bytes": 1 << 16,
        "run_cost": RUN_COST_BYTES,
        "verified": False,
        "waited_s": 0.25,
        "stages": (Stage(name="queue", began=0.0, ended=0.125),),
        "moved": Moved(bytes=640, runs=4, descriptors=4),
        "ok": True,
        "reason": "",
        "kind": "",
        "quarantined": False,
        "seconds": 0.5,
    }
    return [Record(**(facts | {"destination": shareable(worker.manifest)} | changes)) for worker in workers]
