"""Requests that carry their continuation."""

from __future__ import annotations

import contextlib
import time

import pytest
from test_loop import PATIENCE_S

from vllm_pd_connector.protocol.messages import Standing
from vllm_pd_connector.sidechannel.waiting import Wake
from vllm_pd_connector.worker.calls import Calls


def test_a_handler_that_raises_costs_the_others_nothing(monkeypatch):
    heard: list[object] = []
    came = [[(1, Standing(1)), (2, Standing(2))]]

    def broken(outcome: object, now: float) -> None:
        raise RuntimeError("a defect")

    with contextlib.closing(Calls(None)) as calls, contextlib.closing(Wake()) as wake:
        calls._handlers = {1: broken, 2: lambda outcome, now: heard.append(outcome)}
        monkeypatch.setattr(calls._client, "receive", lambda: came.pop() if came else [])
        with pytest.raises(RuntimeError, match="a defect"):
            calls.deliver(0.0)
        late = time.monotonic() + PATIENCE_S
        calls.wait(wake, late)
        assert time.monotonic() < late, "it slept while an answer waited"
        calls.deliver(0.0)
        assert heard == [Standing(2)]
