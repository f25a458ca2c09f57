"""Edges and manifests of small models, and runs as offsets."""

from typing import Any

from tests.support.geometry.world import Model, Side, instance
from vllm_pd_connector.geometry.manifest import Manifest
from vllm_pd_connector.geometry.plan import Edge, make_plan
from vllm_pd_connector.geometry.runs import Runs

BASE = 1 << 40


def manifest(model: Model, engine: str = "p-0", **side: Any) -> Manifest:
    return instance(model, Side(**side), engine)[0].manifest


def edge(model: Model, source: dict[str, Any], destination: dict[str, Any]) -> Edge:
    return make_plan(manifest(model, "d-1", **destination), [manifest(model, **source)]).edges[0]


def offsets(runs: Runs) -> list[tuple[int, int, int]]:
    """(source, destination, length) in bytes from the segments' starts, in order of destination."""
    rows = zip(
        (runs.source - BASE - 3).tolist(), (runs.destination - BASE - 3).tolist(), runs.length.tolist(), strict=True
    )
    return sorted(rows, key=lambda row: row[1])


# One layer, one head, K and V of one two-byte channel: a token is 4 bytes, a block of 4 tokens 16.
ONE = Model(layers=1, heads=1, key=1, value=1)
