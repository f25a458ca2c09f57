"""Runs by layout are counts, so they are held: those of the benchmark, and of the document that the page shows."""

from __future__ import annotations

import json

import pytest

from benchmarks.layouts import table
from tools.performance_page import RESULTS
from vllm_pd_connector.geometry.staging.chunks import RUN_COST_BYTES

ROWS = table(4001, RUN_COST_BYTES)


@pytest.mark.parametrize(
    ("layout", "tp", "blocks", "runs", "size"),
    [
        ("LBNHC", "4 → 4", "16 → 16", 2008, 16 << 10),
        ("BLNHC", "4 → 4", "16 → 16", 251, 128 << 10),
        ("LBNHC", "4 → 8", "16 → 16", 32008, 512),
        ("LBHNC", "4 → 8", "16 → 16", 2008, 8 << 10),
    ],
)
def test_how_many_runs_a_request_is(layout: str, tp: str, blocks: str, runs: int, size: int) -> None:
    [row] = [one for one in ROWS if (one["layout"], one["tp"], one["block tokens"]) == (layout, tp, blocks)]
    assert (row["straight runs"], row["mean bytes"]) == (runs, size)


def test_what_is_kept_has_the_benchmark_s_counts() -> None:
    assert json.loads((RESULTS / "layouts.json").read_text())["rows"] == ROWS
