"""The first of many deadlines is never seen late, and rarely looked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_pd_connector.worker.peers.earliest import Agenda, Earliest

moments = st.none() | st.floats(0, 100)


@given(st.lists(st.tuples(st.integers(0, 5), moments, st.floats(0, 3))))
def test_no_deadline_is_over_unseen(steps: list[tuple[int, float | None, float]]) -> None:
    """Whatever is set, taken back and let pass: where the bound is not over, no deadline is."""
    earliest, deadlines, now = Earliest(), dict[int, float | None](), 0.0
    for owner, moment, later in steps:
        now += later
        deadlines[owner] = moment
        earliest.lower(moment)
        true = [one for one in deadlines.values() if one is not None]
        assert earliest.over(now) or all(one > now for one in true)
        assert earliest.at is None or not true or earliest.at <= min(true)
        if earliest.over(now):
            deadlines = {o: None if one is not None and one <= now else one for o, one in deadlines.items()}
            earliest.renew(deadlines.values())
            assert not earliest.over(now)


def test_what_was_taken_back_is_looked_for_once() -> None:
    earliest = Earliest()
    earliest.lower(1.0, None, 7.0)
    assert earliest.at == 1.0 and not earliest.over(0.9) and earliest.over(1.0)
    earliest.renew([None, 7.0])
    assert earliest.at == 7.0
    earliest.renew([])
    assert earliest.at is None and not earliest.over(1e9)


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 10), st.booleans())))
def test_what_is_due_is_taken_in_its_order_and_once(steps: list[tuple[int, float, bool]]) -> None:
    """Against a dict that is looked through; what became due at one moment is taken in the order of its setting."""
    agenda, moments, now = Agenda[int](), dict[int, float](), 0.0
    for item, moment, taken in steps:
        if taken:
            now = max(now, moment)
            due = [one for one, at in moments.items() if at <= now]
            first = min(due, key=moments.__getitem__, default=None)
            assert agenda.take(now) == first
            moments.pop(first, None)  # type: ignore[arg-type]
        else:
            moments.pop(item, None)
            moments[item] = moment
            agenda.set(item, moment)
        assert len(agenda) == len(moments) and agenda.at == min(moments.values(), default=None)
