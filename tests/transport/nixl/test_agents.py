"""Agents of NIXL that take another's place, and memory that takes long to register."""

from __future__ import annotations

import importlib
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.transport.agents import OPTIONS, SIZE, instead, raises
from tests.support.transport.ends import End, until, whole
from tests.support.transport.variants import MIB
from vllm_pd_connector.errors import PeerLost, TransferError
from vllm_pd_connector.transport.nixl import transfer as nixl_transfer
from vllm_pd_connector.transport.nixl.agents import Agent, Library
from vllm_pd_connector.transport.nixl.bindings import NixlOptions

pytestmark = pytest.mark.libraries


class Slow:
    """A registration that takes until `done` is set, as device memory's takes seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done, self.began = threading.Event(), threading.Event()
        real = Library.register

        def register(library: Library, agent: Any, ranges: Any) -> None:
            self.began.set()
            assert self.done.wait(60)
            real(library, agent, ranges)

        monkeypatch.setattr(Library, "register", register)


def test_other_transfers_go_on_while_another_agent_registers_the_memory(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    end, other = ends
    other.fill(3)
    peer = end.transport.connect(other.endpoint, other.segments)
    slow = Slow(monkeypatch)
    with pytest.raises(TransferError, match="being made") as refusal:
        end.transport.replace_endpoint(peer)
    assert refusal.value.retryable
    assert slow.began.wait(60)
    end.finish(end.transport.read(peer, whole(other.address, end.address, SIZE)))
    assert end.digest() == other.digest()
    with pytest.raises(TransferError, match="being made"):
        end.transport.replace_endpoint(peer)
    slow.done.set()
    replace(end, peer)
    end.zero()
    again = end.transport.connect(other.endpoint, other.segments)
    assert again.agent is not peer.agent
    end.finish(end.transport.read(again, whole(other.address, end.address, SIZE)))
    assert end.digest() == other.digest()


def test_an_agent_that_is_being_made_ends_with_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    end, other = End("nixl", OPTIONS, SIZE), End("nixl", OPTIONS, SIZE)
    peer = end.transport.connect(other.endpoint, other.segments)
    slow = Slow(monkeypatch)
    with pytest.raises(TransferError, match="being made"):
        end.transport.replace_endpoint(peer)
    threading.Timer(0.1, slow.done.set).start()
    end.transport.close()
    assert not end.transport._next._thread.is_alive()
    other.transport.close()


def test_who_posts_has_registered_its_memory_before_it_meets_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    real = Library.register

    def register(library: Library, agent: Any, ranges: Any) -> None:
        registered.append(agent)
        real(library, agent, ranges)

    monkeypatch.setattr(Library, "register", register)
    end, other = End("nixl", OPTIONS, MIB), End("nixl", OPTIONS, MIB)
    assert len(registered) == 4 and end.transport._poster in registered
    end.transport.connect(other.endpoint, other.segments)
    assert len(registered) == 4, "memory was registered while transfers may run"
    for one in (end, other):
        one.transport.close()


def test_an_agent_that_ends_gives_its_memory_back_beside_the_transfers(
    ends: tuple[End, End],
) -> None:
    end, other = ends
    peer = end.transport.connect(other.endpoint, other.segments)
    gone, goes = threading.Event(), threading.Event()

    def deregister(*arguments: Any) -> None:
        gone.set()
        assert goes.wait(60)

    poster = end.transport._poster
    instead(end, deregisterMem=deregister)

    replace(end, peer)
    again = end.transport.connect(other.endpoint, other.segments)
    end.transport.disconnect(peer)
    assert gone.wait(60) and poster.library is None
    other.fill(4)
    end.finish(end.transport.read(again, whole(other.address, end.address, SIZE)))
    assert end.digest() == other.digest()
    goes.set()


@pytest.mark.parametrize("unclear", [False, True])
def test_what_the_library_never_ends_keeps_no_agent_when_its_peer_s_process_has_ended(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch, unclear: bool
) -> None:
    """Who waited for it looks at it no more, and three agents are all that may be replaced."""
    monkeypatch.setattr(nixl_transfer, "SETTLE_S", 0.0)
    end, other = ends
    peer = end.transport.connect(other.endpoint, other.segments)
    running = importlib.import_module("nixl")._bindings.NIXL_IN_PROG
    post = end.transport._posting().library.postXferReq
    agent = instead(
        end,
        postXferReq=lambda *given: (post(*given), running)[1],
        getXferStatus=raises("nixlBackendError") if unclear else lambda handle: running,
    )
    transfer = end.transport.read(peer, whole(other.address, end.address, MIB))
    if unclear:
        with pytest.raises(TransferError, match="who knows"):
            end.transport.poll(transfer)
    replace(end, peer)
    end.transport.disconnect(peer)
    assert end.transport._older == [peer.agent] and not agent.released
    until(lambda: end.transport.settle(peer), "what its process had sent")
    assert agent.released and not peer.transfers and not transfer.posted and peer.window.running == 0
    assert not end.transport._older and not peer.agent.peers
    if not unclear:
        with pytest.raises(PeerLost, match="has ended") as failure:
            end.transport.poll(transfer)
        assert failure.value.terminal


def test_where_no_thread_is_left_another_agent_is_made_later_and_one_that_ends_waits_for_the_transport(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Transfers that are well go on: they are polled by who asks for both."""
    end, other = End("nixl", OPTIONS, SIZE), End("nixl", OPTIONS, SIZE)
    peer = end.transport.connect(other.endpoint, other.segments)

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(TransferError, match="can't start new thread") as refusal:
            end.transport.replace_endpoint(peer)
        assert refusal.value.retryable
    replace(end, peer)
    given_back: list[object] = []
    instead(end, peer.agent, deregisterMem=lambda *what: given_back.append(what))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        end.transport.disconnect(peer)
    assert not given_back and peer.agent.library is None
    again = end.transport.connect(other.endpoint, other.segments)
    end.finish(end.transport.read(again, whole(other.address, end.address, SIZE)))
    end.transport.close()
    assert given_back
    other.transport.close()


def test_an_agent_that_cannot_give_its_memory_back_does_not_keep_the_transport_from_closing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its device, say, cannot be made current in the thread that would."""
    end = End("nixl", OPTIONS, SIZE)
    library = end.transport._library
    kept = Agent("pd-kept", SimpleNamespace())
    agents = [agent for agent in (end.transport._target, end.transport._poster) if agent is not None]

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        library.end_in_background(kept)
    monkeypatch.setattr(library, "_prepare_thread", lambda: 1 // 0)
    end.transport.close()
    assert not library._unended and [agent.library for agent in agents] == [None] * len(agents)


def replace(end: End, peer: Any) -> None:
    """Have another agent take the place of the one that posts."""

    def replaced() -> bool:
        try:
            end.transport.replace_endpoint(peer)
        except TransferError as error:
            assert error.retryable
            return False
        return True

    until(replaced, "the other agent")


@pytest.mark.parametrize(("says", "knows"), [("pd-victim", []), ("pd-own", ["pd-victim"])])
def test_who_shows_another_agent_s_metadata_takes_nobody_s_place(says: str, knows: list[str]) -> None:
    """A name stands in its metadata, wherever; the library takes an agent's name from where it looks."""
    forgotten: list[str] = []
    library: Any = SimpleNamespace(loadRemoteMD=lambda _: says.encode(), invalidateRemoteMD=forgotten.append)
    agent = Agent("pd-here", library, peers=Counter(knows))
    with pytest.raises(TransferError, match=r"says agent pd-own, its metadata .*pd-victim"):
        Library(NixlOptions()).load(agent, "pd-own", b"pd-victim, and somewhere pd-own")
    assert forgotten == ([] if knows else ["pd-victim"]), "who is connected stays so"
