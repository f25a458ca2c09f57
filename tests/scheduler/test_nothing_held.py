"""Prefills that end well and of which nothing can be held: who asked for their push hears it, and nothing stays."""

from __future__ import annotations

import pytest

from tests.support.scheduler.push_halves import Prefill, step
from vllm_pd_connector.observability.stats import NotHeld
from vllm_pd_connector.protocol.wire import push_messages as pm


def stay(prefill: Prefill) -> tuple[int, int]:
    """How many prefills are followed, and how many may be asked for."""
    producer = prefill.half.producer
    table = producer._server.pushes._table
    return len(producer.progress._running), len(table._rendezvous._prefills)


def test_who_asked_for_a_prefill_that_ends_without_blocks_is_told_at_once(prefill: Prefill) -> None:
    request, answer = prefill.arrive_asked_for()
    assert prefill.half.request_finished(request, ([],)) == (False, None)
    reply = answer()
    assert (reply.state, reply.terminal) == (pm.PushState.FAILED, True) and "without blocks" in reply.reason
    step(prefill.half)
    assert stay(prefill) == (0, 0) and prefill.held() == 0
    assert prefill.half.hand_over.not_held == {NotHeld.REFUSED: 1}


def test_a_prefill_without_blocks_that_nobody_asked_for_does_not_stay(prefill: Prefill) -> None:
    request = prefill.arrive()
    assert stay(prefill) == (1, 1)
    assert prefill.half.request_finished(request, ([],)) == (False, None)
    step(prefill.half)
    assert stay(prefill) == (0, 0)


def test_one_that_ends_while_the_instance_sleeps_does_not_stay_either(
    prefill: Prefill, caplog: pytest.LogCaptureFixture
) -> None:
    request = prefill.arrive()
    producer = prefill.half.producer
    producer.leave()
    assert prefill.half.request_finished(request, ([5, 6, 7],)) == (False, None)
    assert not producer.progress._running
    assert "the instance sleeps" in caplog.text and "kv_consumer" not in caplog.text
