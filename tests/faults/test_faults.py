"""The short campaign of `make test`: a bit of every kind of fault on one pair. `make faults` runs the long ones."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from examples.launch import Servers
from tests.faults.campaign import make_world, run
from tests.faults.plan import ONE_PAIR, plan
from tests.faults.results import by_kind, count
from tests.faults.short_campaign import NUMBER, SECONDS, SEED


@pytest.mark.e2e
def test_no_fault_makes_wrong_tokens_leaks_blocks_loses_requests_or_kills_an_engine(tmp_path: Path) -> None:
    until = time.monotonic() + SECONDS
    with Servers(tmp_path / "logs") as servers:
        world = make_world(servers, "pair", "gqa")
        try:
            results = run(world, plan(ONE_PAIR, NUMBER, SEED), tmp_path / "results.jsonl", until)
        finally:
            world.close()
    print(by_kind(results))
    assert not [f"{result.fault}: {problem}" for result in results for problem in result.sentences]
    assert count(results)["faults"] == NUMBER, f"only {len(results)} faults in {SECONDS:g} s"
