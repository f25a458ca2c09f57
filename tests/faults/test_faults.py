"""The short campaign of `make test`: a bit of every kind of fault on one pair. `make faults` runs the long one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from faults.campaign import run, table
from faults.plan import ONE_PAIR, plan
from faults.world import World
from launch import Servers

NUMBER = 32
SEED = 20261121
SECONDS = 480.0


@pytest.mark.e2e
def test_no_fault_makes_wrong_tokens_leaks_blocks_loses_requests_or_kills_an_engine(tmp_path: Path) -> None:
    with Servers(tmp_path / "logs") as servers:
        world = World(servers)
        try:
            results = run(world, plan(ONE_PAIR, NUMBER, SEED), tmp_path / "results.jsonl", time.monotonic() + SECONDS)
        finally:
            world.close()
    print(table(results))
    assert not [f"{result.fault}: {problem}" for result in results for problem in result.problems]
    assert len(results) == NUMBER, f"only {len(results)} faults in {SECONDS:g} s"
