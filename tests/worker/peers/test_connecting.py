"""A peer is connected piece by piece: other requests go on meanwhile, and one that ends meanwhile is let go of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.worker.decode_instance import Decode, Prefill, in_its_thread, until_in
from vllm_pd_connector.bounded import Pieces
from vllm_pd_connector.protocol import peer as peers
from vllm_pd_connector.protocol.peer import PeerKey, PeerState
from vllm_pd_connector.worker.peers import connecting
from vllm_pd_connector.worker.receive.read_link import ReadLink

PIECES = 40


@pytest.fixture(autouse=True)
def one_piece_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "PIECES_S", 0.0)


class Held:
    """Connecting to engine p-1 stops before its last piece until `free` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.link, self.pieces, self.begun = False, None, 0, 0
        real = ReadLink.connecting

        def held(link: ReadLink, *given: Any) -> Pieces[str]:
            self.begun += link.engine_id == "p-1"
            verdict = yield from real(link, *given)
            while link.engine_id == "p-1" and not self.free:
                self.link, self.pieces = link, self.pieces + 1
                yield
            return verdict

        monkeypatch.setattr(ReadLink, "connecting", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


@pytest.fixture
def other() -> Iterator[Prefill]:
    with contextlib.closing(Prefill("p-1")) as made:
        yield made


def begun(decode: Decode, other: Prefill, held: Held) -> Any:
    """The link of a request that waits for a peer that is being connected, all of whose ranks are."""
    decode.loop.submit([other.request("a", remote_engine_id="p-1")], [])
    until_in(decode.loop, lambda: held.pieces > 0, "the peer to be connected in part")
    assert held.link.ranks and held.link.machine.state is PeerState.CONNECTING
    return held.link


def test_others_are_served_while_a_peer_is_connected_and_then_it_is(prefill, decode, other, held):
    assert decode.received(prefill.request("warm")) == [True]
    begun(decode, other, held)
    assert decode.received(prefill.request("b")) == [True]
    until_in(decode.loop, lambda: held.pieces >= PIECES, "turn after turn to go on with it")
    assert not decode.failures
    held.free = True
    assert decode.wait_for("a") == [True]
    assert held.link.machine.state is PeerState.READY and not held.link.manifests


def test_a_request_does_not_fail_by_its_deadline_while_its_peer_is_connected(decode, other, held):
    begun(decode, other, held)
    receives = decode.loop._receives

    def wait(now: float) -> None:
        late = now + 2 * receives._limits.wait_s
        receives._tick(receives._active["a"], late)
        assert receives._active["a"].machine.next_deadline() == late + receives._limits.wait_s

    in_its_thread(decode.loop, wait)
    held.free = True
    assert decode.wait_for("a") == [True] and not decode.failures


def test_a_peer_that_ends_while_it_is_connected_is_let_go_of(prefill, decode, other, held):
    link = begun(decode, other, held)
    links = decode.loop._receives._links
    in_its_thread(decode.loop, lambda now: links.drive(link, peers.Dismissed("it ends"), now))
    assert decode.wait_for("a") == [False] and not decode.quarantined
    until_in(decode.loop, lambda: not links._connecting, "it to be abandoned")
    assert not link.ranks and not link.manifests and link.machine.state is PeerState.DEAD
    held.free = True
    assert decode.received(prefill.request("b")) == [True]


def test_a_peer_that_ends_in_the_moment_in_which_it_is_connected_is_let_go_of(prefill, decode, other, held):
    link = begun(decode, other, held)
    links = decode.loop._receives._links

    def both(now: float) -> None:
        held.free = True
        dismissed = peers.Dismissed("it ends")
        links._events.put(lambda: (links.tick(now), links.tick(now), links._handle(link, dismissed, now)))
        assert not links._connecting, "it was abandoned, and not connected"

    in_its_thread(decode.loop, both)
    assert decode.wait_for("a") == [False]
    until_in(decode.loop, lambda: not links._connecting, "nothing to be left")
    assert not link.ranks and link.machine.state is PeerState.DEAD


def test_a_peer_that_is_being_connected_is_compared_whatever_is_known_for_another_request(prefill, decode, other, held):
    link = begun(decode, other, held)
    links = decode.loop._receives._links

    def known(now: float) -> None:
        assert links.get(link.machine.key, "p-1", now, same_weights=True) is not link
        assert link in links._connecting and not link.same_weights

    in_its_thread(decode.loop, known)
    held.free = True
    assert decode.wait_for("a") == [True] and held.begun == 1


def test_a_request_that_gives_up_while_its_peer_is_connected_costs_the_link_nothing(prefill, decode, other, held):
    link = begun(decode, other, held)
    decode.loop.submit([], ["a"])
    assert decode.wait_for("a") == [False]
    held.free = True
    until_in(decode.loop, lambda: link.machine.state is PeerState.READY, "the link")
    assert decode.received(other.request("c", remote_engine_id="p-1")) == [True]


@pytest.mark.parametrize("answers", ["the life that runs", "a life before"])
def test_of_a_peer_that_is_being_connected_the_life_counts_that_has_answered(decode, other, held, answers):
    """A link that means whoever is at the address: another link's answer tells which life runs there."""
    links = decode.loop._receives._links
    link = begun(decode, other, held)
    running = link.machine.key.incarnation
    other_life = "f" * 32

    def another_link_is_answered(now: float) -> None:
        began = links._connecting._begun[link]
        known = "e" * 32 if answers == "the life that runs" else ""  # of a life that was linked before, or of none
        link.machine.key, link.machine._any_life = replace(link.machine.key, incarnation=known), True
        named = links._make(peers.Peer(PeerKey("h", 1, ""), lambda: 0.5), "p-1", link.endpoint, now)
        assert began.arrived.incarnation == running
        links._end_others_at(named, running if answers == "the life that runs" else other_life, now)

    in_its_thread(decode.loop, another_link_is_answered)
    held.free = True
    assert decode.wait_for("a") == [answers == "the life that runs"]


def test_before_a_peer_is_linked_it_is_looked_whether_files_are_left(prefill, decode, monkeypatch):
    looks: list[object] = []
    monkeypatch.setattr(connecting.FilesLeft, "look", lambda self: looks.append(self))
    assert decode.received(prefill.request("a")) == [True]
    assert len(looks) == 1
