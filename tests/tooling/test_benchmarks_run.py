"""Benchmarks without servers still run: what they build of an engine has to say what the connector asks of vLLM's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import tables
from benchmarks.witness import NEAR_S, together

ROOT = Path(__file__).resolve().parents[2]

SHORT = {
    "step": ("--reps", "20"),
    "scale": ("--instances", "2", "--peers", "9", "--in-flight", "4", "16", "--ranks", "8"),
    "long_prompts": (
        "--tokens",
        "4096",
        "--transports",
        "nixl",
        "--pairs",
        "blocks of 128",
        "blocks of 16, NHD, TP 2 → 1",
    ),
    "stalls": ("--seconds", "0.2"),
    "long_pushes": ("--tokens", "4096", "--transports", "nixl", "--pairs", "blocks of 128"),
}
"""Options with which each is over in seconds."""


@pytest.mark.parametrize("name", SHORT)
def test_a_benchmark_runs_and_writes_its_rows(name: str, tmp_path: Path) -> None:
    into = tmp_path / f"{name}.json"
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *SHORT[name], "--json", str(into)]
    of_checkout = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        command, cwd=tmp_path, env=of_checkout, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = [rows for _, rows in tables(json.loads(into.read_text()))]
    assert found and all(rows for rows in found)
    figures = [row[key] for rows in found for row in rows for key in row if "_us" in key or "_ms" in key]
    assert figures and all(value is None or value >= 0 for value in figures)


def test_a_turn_counts_as_the_machines_only_where_the_witness_was_slow_at_that_moment() -> None:
    slow = [(10.0, 10.02), (20.0, 20.001)]
    near, far = 20.001 + NEAR_S / 2, 20.001 + NEAR_S * 2
    assert together([(10.01, 10.015), (9.0, 11.0), (near, near + 1.0), (far, far + 1.0), (15.0, 15.5)], slow) == 3
    assert together([(1.0, 2.0)], []) == 0
