"""Runs by layout are counts, so they are held: those of the benchmark, and of the page that shows them."""

from __future__ import annotations

import pytest

from benchmarks.layouts import page, table
from tools.performance_page import PAGES
from vllm_pd_connector.geometry.staging.chunks import RUN_COST_BYTES

ROWS = table(4001, RUN_COST_BYTES)


@pytest.mark.parametrize(
    ("layout", "tp", "runs", "size"),
    [
        ("LBNHC", "4 -> 4", 2008, 16 << 10),
        ("BLNHC", "4 -> 4", 251, 128 << 10),
        ("LBNHC", "4 -> 8", 32008, 512),
        ("LBHNC", "4 -> 8", 2008, 8 << 10),
    ],
)
def test_how_many_runs_a_request_is(layout: str, tp: str, runs: int, size: int) -> None:
    [row] = [one for one in ROWS if (one["layout"], one["tp"]) == (layout, tp)]
    assert (row["straight runs"], row["mean bytes"]) == (runs, size)


def test_the_page_has_the_benchmark_s_table() -> None:
    [shown] = [one for one in PAGES if "Runs by layout" in one.read_text()]
    assert "\n".join(page(ROWS)) in shown.read_text()
