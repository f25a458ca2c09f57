"""The first peer of an agent is met in a thread of its own: UCX takes 10 ms for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.transport.agents import OPTIONS, error, instead
from tests.support.transport.ends import End, until, whole
from tests.support.transport.variants import MIB
from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.transport.nixl.agents import Library

pytestmark = pytest.mark.libraries
SIZE = MIB


class Loads:
    """Loads of peers: by which thread, and of whom; each waits for `goes`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes, self.by = threading.Event(), list[tuple[str, threading.Thread]]()
        self.goes.set()
        real = Library._load

        def load(library: Library, agent: Any, name: str, metadata: bytes) -> None:
            self.by.append((name, threading.current_thread()))
            assert self.goes.wait(60)
            real(library, agent, name, metadata)

        monkeypatch.setattr(Library, "_load", load)

    @property
    def aside(self) -> list[bool]:
        return [thread is not threading.current_thread() for _, thread in self.by]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    return Loads(monkeypatch)


@pytest.fixture
def made() -> Any:
    """Ends, which are closed."""
    ends: list[End] = []

    def make() -> End:
        ends.append(End("nixl", OPTIONS, SIZE))
        return ends[-1]

    yield make
    for end in ends:
        end.transport.close()


def met(end: End, other: End) -> Callable[[], bool]:
    return lambda: end.transport.meet(other.endpoint)


def reads(end: End, other: End, peer: Any) -> None:
    other.fill(3)
    end.zero()
    end.finish(end.transport.read(peer, whole(other.address, end.address, SIZE)))
    assert end.digest() == other.digest()


def test_the_first_peer_is_met_aside_and_others_where_transfers_may_run(made: Any, loads: Loads) -> None:
    end, first, second = made(), made(), made()
    loads.goes.clear()
    assert not end.transport.meet(first.endpoint) and not end.transport.meet(first.endpoint)
    loads.goes.set()
    until(met(end, first), "the first peer")
    reads(end, first, peer := end.transport.connect(first.endpoint, first.segments))
    assert end.transport.meet(second.endpoint), "nothing was begun aside"
    reads(end, second, end.transport.connect(second.endpoint, second.segments))
    assert loads.aside == [True, False], "each was loaded once"
    end.transport.disconnect(peer)


def test_who_is_not_met_is_connected_all_the_same(made: Any, loads: Loads) -> None:
    end, other = made(), made()
    reads(end, other, end.transport.connect(other.endpoint, other.segments))
    assert loads.aside == [False]


def test_who_is_connected_before_the_meeting_is_over_waits_for_it(made: Any, loads: Loads) -> None:
    end, other = made(), made()
    loads.goes.clear()
    assert not end.transport.meet(other.endpoint)
    threading.Timer(0.05, loads.goes.set).start()
    reads(end, other, end.transport.connect(other.endpoint, other.segments))
    assert loads.aside == [True]


def test_what_the_library_does_not_take_is_said_by_connect(made: Any, loads: Loads) -> None:
    end, other = made(), made()

    def refuses(_: bytes) -> None:
        raise error("nixlBackendError")

    real = end.transport._posting().library
    instead(end, loadRemoteMD=refuses)
    until(met(end, other), "the meeting's end")
    with pytest.raises(TransferError, match="adding agent") as refusal:
        end.transport.connect(other.endpoint, other.segments)
    assert refusal.value.retryable and loads.aside == [True]
    end.transport._posting().library = real
    until(met(end, other), "the second meeting's end")
    reads(end, other, end.transport.connect(other.endpoint, other.segments))


def test_who_was_met_and_is_not_connected_to_is_forgotten_when_another_comes(made: Any, loads: Loads) -> None:
    end, first, second = made(), made(), made()
    forgotten: list[str] = []
    real = end.transport._posting().library

    def invalidate(name: str) -> None:
        forgotten.append(name)
        real.invalidateRemoteMD(name)

    instead(end, invalidateRemoteMD=invalidate)
    until(met(end, first), "the first peer")
    until(met(end, second), "the second")
    assert forgotten == [loads.by[0][0]]
    reads(end, second, end.transport.connect(second.endpoint, second.segments))
    reads(end, first, end.transport.connect(first.endpoint, first.segments))
    assert loads.aside == [True, False, False]


def test_two_that_are_met_in_turns_are_both_connected(made: Any, loads: Loads) -> None:
    """A worker may begin to read from one peer and to write to another in the same turns."""
    end, others = made(), [made(), made()]
    peers: dict[int, Any] = {}
    for turn in range(10_000):
        number = turn % 2
        if number not in peers and end.transport.meet(others[number].endpoint):
            peers[number] = end.transport.connect(others[number].endpoint, others[number].segments)
        if len(peers) == 2:
            break
    for number, peer in peers.items():
        reads(end, others[number], peer)
    assert len(peers) == 2


def test_a_meeting_that_goes_on_ends_with_the_transport(loads: Loads) -> None:
    end, other = End("nixl", OPTIONS, SIZE), End("nixl", OPTIONS, SIZE)
    loads.goes.clear()
    assert not end.transport.meet(other.endpoint)
    threading.Timer(0.05, loads.goes.set).start()
    end.transport.close()
    [(_, thread)] = loads.by
    assert not thread.is_alive()
    other.transport.close()


def test_a_meeting_that_met_a_defect_costs_no_other_peer_and_ends_with_the_transport(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, alone, first, second = made(), End("nixl", OPTIONS, SIZE), made(), made()
    load, defects = Library._load, [RuntimeError("a defect"), RuntimeError("another")]

    def broken(library: Library, *given: Any) -> None:
        if defects:
            raise defects.pop()
        load(library, *given)

    monkeypatch.setattr(Library, "_load", broken)
    for one in (end, alone):
        until(met(one, first), "the end of a meeting of which nobody takes what came of it")
    alone.transport.close()
    assert alone.transport._poster.library is None
    until(met(end, second), "the other peer")
    reads(end, second, end.transport.connect(second.endpoint, second.segments))


def test_where_no_thread_is_left_the_peer_is_met_by_who_connects(
    made: Any, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, other = made(), made()

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        assert end.transport.meet(other.endpoint)
    reads(end, other, end.transport.connect(other.endpoint, other.segments))
    assert loads.aside == [False]


def test_an_endpoint_that_is_not_one_is_not_met(made: Any, loads: Loads) -> None:
    end = made()
    with pytest.raises(TransferError):
        end.transport.meet(b"nothing of the kind")
    with pytest.raises(TransferError, match="own"):
        end.transport.meet(end.endpoint)
    assert not loads.by
