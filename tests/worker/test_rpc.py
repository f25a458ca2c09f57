"""Requests that carry their continuation."""

from __future__ import annotations

import contextlib
import time

import pytest

from tests.support.worker.decode_instance import PATIENCE_S
from vllm_pd_connector.protocol.wire.messages import LeaseCount
from vllm_pd_connector.wake import Wake
from vllm_pd_connector.worker.rpc import PendingCalls


def test_a_handler_that_raises_costs_the_others_nothing(monkeypatch):
    heard: list[object] = []
    came = [[(1, LeaseCount(1)), (2, LeaseCount(2))]]

    def broken(outcome: object, now: float) -> None:
        raise RuntimeError("a defect")

    with contextlib.closing(PendingCalls(None)) as calls, contextlib.closing(Wake()) as wake:
        calls._handlers = {1: broken, 2: lambda outcome, now: heard.append(outcome)}
        monkeypatch.setattr(calls._client, "receive", lambda: came.pop() if came else [])
        with pytest.raises(RuntimeError, match="a defect"):
            calls.deliver(0.0)
        late = time.monotonic() + PATIENCE_S
        calls.wait(wake, late)
        assert time.monotonic() < late, "it slept while an answer waited"
        calls.deliver(0.0)
        assert heard == [LeaseCount(2)]
