"""Events in their order, one at a time, whoever puts them."""

from __future__ import annotations

import pytest

from vllm_pd_connector.worker.peers.event_queue import EventQueue


def test_what_comes_of_an_event_waits_until_it_has_been_handled() -> None:
    events, seen = EventQueue(), []

    def first() -> None:
        events.put(lambda: seen.append("what came of the first"))
        events.put(second)
        seen.append("first")

    def second() -> None:
        events.put(lambda: seen.append("what came of the second"))
        seen.append("second")

    events.put(first)
    assert seen == ["first", "what came of the first", "second", "what came of the second"]


def test_a_defect_costs_no_other_event() -> None:
    events, seen = EventQueue(), []

    def broken() -> None:
        events.put(lambda: seen.append("the next"))
        raise ZeroDivisionError("a defect")

    with pytest.raises(ZeroDivisionError):
        events.put(broken)
    assert not seen
    events.drain()
    assert seen == ["the next"]
