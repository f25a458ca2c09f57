"""Requests that carry their continuation."""

from __future__ import annotations

import contextlib
import time

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port
from vllm_pd_connector.errors import Busy, Unreachable
from vllm_pd_connector.protocol.wire.messages import GetManifests, LeaseCount, Release
from vllm_pd_connector.sidechannel.net.sockets import endpoint
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


def test_the_client_is_read_where_something_came_or_is_due_and_else_not(monkeypatch):
    """A transfer over a slow link is looked at hundreds of times a second, and mostly nothing else is to be done."""
    heard: list[object] = []
    reads: list[float] = []
    with contextlib.closing(PendingCalls(None)) as calls, contextlib.closing(Wake()) as wake:
        receive = calls._client.receive
        monkeypatch.setattr(calls._client, "receive", lambda: reads.append(time.monotonic()) or receive())
        for _ in range(3):
            calls.wait(wake, time.monotonic())
            assert calls.deliver(0.0) == []
        assert not reads
        calls.ask(
            endpoint("127.0.0.1", free_port()), GetManifests("p"), 60.0, lambda outcome, now: heard.append(outcome)
        )
        late = time.monotonic() + PATIENCE_S
        while not heard and time.monotonic() < late:
            calls.wait(wake, late)
            calls.deliver(0.0)
        assert isinstance(heard[0], Unreachable)
        reads.clear()
        monkeypatch.setattr(calls._client, "next_deadline", time.monotonic)
        calls.wait(wake, late)
        calls.deliver(0.0)
        assert len(reads) == 1


def test_what_is_given_back_is_sent_again_when_there_was_no_room(monkeypatch):
    """In the turn that is due for it, though nothing comes."""
    with contextlib.closing(PendingCalls(None)) as calls, contextlib.closing(Wake()) as wake:
        sent: list[object] = []

        def send(where: str, request: object, _: float) -> int:
            sent.append(request)
            if len(sent) == 1:
                raise Busy("no socket is left")
            return 1

        monkeypatch.setattr(calls._client, "send", send)
        calls.give_back("tcp://a:1", lambda: Release(()), 5.0)
        late = time.monotonic() + PATIENCE_S
        while len(sent) < 2 and time.monotonic() < late:
            calls.wait(wake, late)
            calls.deliver(time.monotonic())
        assert sent == [Release(())] * 2
