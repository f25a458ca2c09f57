"""A binding that takes several turns: what becomes of it when its peer, its link or its request ends meanwhile. Each
piece takes a turn here."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.worker.decode_instance import in_its_thread, until_in
from vllm_pd_connector.protocol import peer as peers
from vllm_pd_connector.worker import transfer_loop
from vllm_pd_connector.worker.in_flight import InFlight
from vllm_pd_connector.worker.receive import read_link
from vllm_pd_connector.worker.receive.read_link import ReadLink


@pytest.fixture(autouse=True)
def one_piece_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_loop, "TURN_S", 0.0)


@pytest.fixture(autouse=True)
def linked(prefill, decode) -> None:
    assert decode.received(prefill.request("warm")) == [True]
    decode.collect()


def half_bound(receives: Any, request: Any, now: float) -> Any:
    """A receive of which the first piece is bound, and others are not; `receives` is used in its thread."""
    receives.begin(request, now)
    [active] = receives._linked.values()
    while active.binding is None:
        receives.poll(now, 0.0)
    assert receives._linked and not active.reads
    return active


def test_the_end_of_a_binding_in_pieces_and_the_first_slice_are_not_one_turn(prefill, decode, monkeypatch):
    """Each of both may be some milliseconds of a long prompt."""
    receives, far = decode.loop._receives, time.monotonic() + 1000.0
    begun, begin = [], InFlight._begin_slice
    monkeypatch.setattr(InFlight, "_begin_slice", lambda *given: (begun.append(1), begin(*given))[1])

    def bind_the_rest(now: float) -> None:
        active = half_bound(receives, prefill.request("a"), now)
        while receives._linked:
            receives.poll(now, far)
        assert active.posting and not begun
        receives.poll(now, far)
        assert begun

    in_its_thread(decode.loop, bind_the_rest)
    assert decode.wait_for("a") == [True]


def test_what_is_bound_in_part_fails_with_its_link(prefill, decode):
    receives = decode.loop._receives

    def lose(now: float) -> Any:
        active = half_bound(receives, prefill.request("a"), now)
        receives._links._disconnect(active.link, "gone", now)
        assert not receives._linked
        return active

    active = in_its_thread(decode.loop, lose)
    assert decode.wait_for("a") == [False] and not decode.quarantined
    assert active.binding is None and not active.reads


def test_what_is_given_up_while_it_is_bound_goes_no_further(prefill, decode):
    receives = decode.loop._receives

    def give_up(now: float) -> Any:
        active = half_bound(receives, prefill.request("a"), now)
        receives.abort("a", now)
        return active

    active = in_its_thread(decode.loop, give_up)
    assert decode.wait_for("a") == [False] and not decode.quarantined
    until_in(decode.loop, lambda: not receives._linked, "it to be taken out")
    assert active.binding is None and not active.reads and decode.failures == {"aborted": 1}


def test_what_is_bound_in_part_while_its_peer_is_in_doubt_is_bound_anew(prefill, decode, monkeypatch):
    """The link may have another plan and other peers when it is ready again."""
    receives = decode.loop._receives
    begun, binding = [], ReadLink.binding
    monkeypatch.setattr(ReadLink, "binding", lambda *given: (begun.append(given), binding(*given))[1])

    def doubt(now: float) -> None:
        active = half_bound(receives, prefill.request("a"), now)
        receives._links.drive(active.link, peers.Suspected("a test"), now)
        while receives._linked:
            receives.poll(now, 0.0)
        assert active.binding is None

    in_its_thread(decode.loop, doubt)
    assert decode.wait_for("a") == [True] and (decode.worker.memory == decode.expected()).all()
    assert len(begun) == 2


def test_a_request_whose_peer_has_answered_and_that_waits_for_this_thread_does_not_fail_by_its_deadline(
    prefill, decode
):
    """Long prompts before it, or a starved processor: nothing of it is the peer's fault."""
    receives, waited = decode.loop._receives, 2 * decode.loop._receives._limits.wait_s

    def wait(now: float) -> None:
        active = half_bound(receives, prefill.request("a"), now)
        receives.tick(now + waited)
        assert not active.reported and active.machine.next_deadline() == now + waited + receives._limits.wait_s

    in_its_thread(decode.loop, wait)
    assert decode.wait_for("a") == [True] and not decode.failures


def test_what_is_left_of_a_turn_after_a_binding_in_pieces_binds_others(prefill, decode, monkeypatch):
    """Of many short requests one is always cut by the end of a turn: the next one is not its alone."""
    receives, far = decode.loop._receives, time.monotonic() + 1000.0
    begun, begin = [], InFlight._begin_slice
    monkeypatch.setattr(InFlight, "_begin_slice", lambda *given: (begun.append(1), begin(*given))[1])

    def bind_all(now: float) -> None:
        half_bound(receives, prefill.request("a"), now)
        receives.begin(prefill.request("b"), now)
        receives.begin(prefill.request("c"), now)
        receives.waited, receives.bound_long = True, False
        receives.poll(now, far)
        assert not receives._linked and not begun
        assert all(receives._active[name].posting for name in "abc")

    in_its_thread(decode.loop, bind_all)
    assert decode.wait_for("a", "b", "c") == [True] * 3


def test_an_end_of_an_old_self_test_changes_nothing_of_a_link_that_is_being_connected(prefill, decode, monkeypatch):
    """What is read directly and what is converted are split by one cost of a run, the same for all ranks."""
    split, costs = read_link.split, []

    def noted(*given: Any, run_cost: int, **more: Any) -> Any:
        costs.append(run_cost)
        if link.plan is None:
            link.use_run_cost(run_cost + len(costs))
        return split(*given, run_cost=run_cost, **more)

    [link] = decode.loop._receives._links._links.values()
    monkeypatch.setattr(read_link, "split", noted)
    in_its_thread(decode.loop, lambda now: decode.loop._receives._links._disconnect(link, "gone", now))
    in_its_thread(decode.loop, lambda now: decode.loop._receives._links.drive(link, peers.Lost("gone"), now))
    assert decode.received(prefill.request("a")) == [True]
    assert len(costs) > 1 and set(costs) == {link.run_cost}
