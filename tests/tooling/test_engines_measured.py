"""The benchmark of a step makes its engines by hand: what the connector asks of vLLM's configuration is there."""

from __future__ import annotations

import pytest

from benchmarks.engine_halves import Engine

pytestmark = pytest.mark.libraries


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_an_engine_that_is_measured_starts(role: str) -> None:
    engine = Engine(role)
    try:
        assert engine.scheduler.scheduler.epochs.adapters.take_moved() == []
    finally:
        engine.worker.shutdown()
        engine.scheduler.shutdown()
