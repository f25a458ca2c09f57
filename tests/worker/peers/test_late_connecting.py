"""A library that does not come back while a peer is connected costs that peer's requests their time, and no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.worker.decode_instance import Decode, Prefill, in_its_thread
from vllm_pd_connector.bounded import Pieces
from vllm_pd_connector.errors import DeadlineExceeded
from vllm_pd_connector.protocol import peer as peers
from vllm_pd_connector.worker.peers import connecting
from vllm_pd_connector.worker.peers.connecting import AT_ONCE_S, Connecting
from vllm_pd_connector.worker.poll_interval import LONGEST_OF_OLD_S

LIMIT_S = 8.0
ARRIVED = peers.ManifestsArrived(1, "f" * 32)


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        self.now += 1e-6
        return self.now


class Link:
    """What is connected of it in `pieces`, of which the last waits until `met`."""

    waits_for, met, fails = "", False, False
    manifests: Any = ()
    machine = SimpleNamespace(connects=lambda arrived: True)

    def __init__(self) -> None:
        self.steps = 0

    def disconnect(self, transport: object) -> None: ...

    def connecting(self) -> Pieces[Any]:
        try:
            while not self.met:
                self.waits_for = "rank 7"
                self.steps += 1
                yield
            self.waits_for = ""
        except DeadlineExceeded as error:
            self.waits_for = ""
            return peers.ConnectFailed(str(error), late=True)
        return peers.ConnectFailed("refused") if self.fails else peers.Connected()


class Decoded(Link):
    """Whose first piece waits for nothing."""

    def connecting(self) -> Pieces[Any]:
        yield
        return (yield from super().connecting())


class Slow(Link):
    """Each piece of which takes a turn."""

    def connecting(self) -> Pieces[Any]:
        while not self.met:
            connecting.time.now += connecting.PIECES_S  # type: ignore[attr-defined]
            yield
        return peers.Connected()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(connecting, "time", made)
    return made


@pytest.fixture
def begun() -> Connecting[Any]:
    return Connecting(None, lambda link: link.connecting(), LIMIT_S)  # type: ignore[arg-type]


def test_a_peer_that_is_not_connected_in_time_is_given_up_and_says_what_it_waits_for(clock, begun):
    link, behind = Link(), Link()
    begun.begin(link, ARRIVED, ())
    assert not list(begun.go_on())
    clock.now += 1.0
    begun.begin(behind, ARRIVED, ())
    while clock.now < 100.0 + LIMIT_S - 0.1:
        assert not list(begun.go_on())
        clock.now += 0.05
    clock.now += 0.2
    assert list(begun.go_on()) == [
        (link, ARRIVED, peers.ConnectFailed(f"it was not connected within {LIMIT_S:g} s: rank 7", late=True))
    ]
    assert behind in begun and begun.due > clock.now
    clock.now += 1.0
    [(ended, _, failure)] = begun.go_on()
    assert ended is behind and failure.late and not begun and begun.due is None, "its time began with its manifests"


def test_who_is_connected_slowly_takes_its_time_and_so_does_who_comes_behind(clock, begun):
    """A thousand ranks, or a starved processor: something is connected all the time."""
    slow, behind = Slow(), Link()
    begun.begin(slow, ARRIVED, ())
    begun.begin(behind, ARRIVED, ())
    for _ in range(int(2 * LIMIT_S)):
        assert not list(begun.go_on())
        clock.now += 1.0
    slow.met = True
    assert list(begun.go_on()) == [(slow, ARRIVED, peers.Connected())]
    assert behind in begun
    clock.now += LIMIT_S - 2.0
    assert not list(begun.go_on()), "its transport began when its turn came"
    clock.now += 2.0
    [(ended, _, failure)] = begun.go_on()
    assert ended is behind and failure.late


def test_who_waits_behind_a_peer_for_a_library_that_does_not_come_back_is_given_up_with_it(clock, begun):
    """Each took the time of a handshake behind the one before it: the n-th peer waited n times as long."""
    links = [Decoded() for _ in range(3)]
    for link in links:
        begun.begin(link, ARRIVED, ())
    ended: list[Any] = []
    while clock.now < 100.0 + LIMIT_S + 1.0:
        ended += begun.go_on()
        assert bool(ended) == (clock.now > 100.0 + LIMIT_S)
        clock.now += 0.3
    assert [link for link, _, _ in ended] == links and all(failure.late for _, _, failure in ended)
    begun.begin(later := Decoded(), ARRIVED, ())
    clock.now += LIMIT_S - 1.0
    assert not list(begun.go_on()) and later in begun, "its time is its own"


@pytest.mark.parametrize("fails", [False, True])
def test_who_waits_behind_a_peer_for_a_library_that_comes_back_has_its_whole_time(clock, begun, fails):
    first, behind = Decoded(), Decoded()
    for link in (first, behind):
        begun.begin(link, ARRIVED, ())
    assert not list(begun.go_on())
    clock.now += LIMIT_S - 1.0
    first.met, first.fails = True, fails
    [(ended, _, _)] = begun.go_on()
    assert ended is first
    clock.now += LIMIT_S - 1.0
    assert not list(begun.go_on()) and behind in begun
    clock.now += 2.0
    assert [link for link, _, failure in begun.go_on() if failure.late] == [behind]


def test_what_a_library_does_aside_is_looked_at_ever_more_rarely(clock, begun):
    begun.begin(link := Link(), ARRIVED, ())
    assert begun.due == 0.0
    for _ in range(1000):  # turns for other reasons, in a tenth of a second
        assert not list(begun.go_on())
        clock.now += 0.0001
    assert 50 < link.steps < 500
    clock.now += 5.0
    assert not list(begun.go_on()) and begun.due - clock.now == pytest.approx(LONGEST_OF_OLD_S, abs=1e-4)
    begun.begin(Link(), ARRIVED, ())
    assert begun.due == 0.0, "who comes is looked at at once"


def test_a_peer_that_is_met_after_all_is_connected(clock, begun):
    begun.begin(link := Link(), ARRIVED, ())
    assert not list(begun.go_on())
    clock.now += LIMIT_S - 0.1
    link.met = True
    assert list(begun.go_on()) == [(link, ARRIVED, peers.Connected())] and begun.due is None


def test_a_peer_that_is_linked_anew_in_one_turn_does_not_take_it_for_ever(clock, begun):
    failure = begun.at_once(Link())
    assert isinstance(failure, peers.ConnectFailed) and clock.now - 100.0 == pytest.approx(AT_ONCE_S, abs=0.01)


@pytest.mark.parametrize("decode", [{"handshake_timeout": 1.0}], indirect=True)
def test_requests_fail_by_the_handshakes_time_where_a_library_does_not_come_back(
    prefill: Prefill, decode: Decode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They were given more time for ever, and the loop ran without a pause."""
    met: list[bool] = []
    monkeypatch.setattr(decode.transport, "meet", lambda endpoint: bool(met), raising=False)
    links, turns = decode.loop._receives._links, []
    tick = links.tick
    monkeypatch.setattr(links, "tick", lambda now: (turns.append(now), tick(now)))
    assert decode.received(prefill.request("a")) == [False]
    assert decode.failures == {"peer_unreachable": 1} and not decode.quarantined
    assert "answers and cannot be connected to: it was not connected within 1 s" in caplog.text
    assert "the library of transport loopback has not come back with rank" in caplog.text
    assert turns[-1] - turns[0] < 10.0 and len(turns) < 2000
    met.append(True)
    [link] = links._links.values()
    in_its_thread(decode.loop, lambda now: setattr(link.machine, "_retry_at", now))
    assert decode.received(prefill.request("b")) == [True]
