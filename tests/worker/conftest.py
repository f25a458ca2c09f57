"""What all tests of workers share."""

from __future__ import annotations

import pytest

from vllm_pd_connector.worker.peers import process_watch


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has ended is known to have ended soon."""
    monkeypatch.setattr(process_watch, "SETTLE_S", 0.1)
    monkeypatch.setattr(process_watch, "AGAIN_S", 0.05)
    monkeypatch.setattr(process_watch, "LOOK_S", 0.02)
