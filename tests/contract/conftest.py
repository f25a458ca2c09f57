"""Engines of the tests here, which are ended after each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.scheduler.engines import Engine, transfer
from vllm_pd_connector.scheduler.leases import lease_renewer


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation of which nothing is heard for 2 s is computed, and this machine may stand still for so long."""
    monkeypatch.setattr(lease_renewer, "ASK_TIMEOUT_S", 30.0)


@pytest.fixture(params=[False, True], ids=["one step", "overlapping steps"])
def engine(request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """Makes engines, by role or whole configuration: of vLLM's Scheduler, and of its AsyncScheduler."""
    made: list[Engine] = []

    def make(config: Any, **arguments: Any) -> Engine:
        config = transfer(config) if isinstance(config, str) else config
        made.append(Engine(config, overlapping=request.param, **arguments))
        return made[-1]

    yield make
    # Decode first: what it holds it gives back, and it waits some seconds for an answer.
    for each in sorted(made, key=lambda each: each.role == "kv_producer"):
        each.connector.shutdown()
