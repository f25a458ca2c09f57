"""How long one call of the NIXL transport is: what is looked at and posted in it."""

from __future__ import annotations

import importlib
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.transport.agents import error, instead
from tests.support.transport.ends import End, runs, until
from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.runs import Runs
from vllm_pd_connector.transport.base import TransferStatus
from vllm_pd_connector.transport.nixl import transport as nixl_transport
from vllm_pd_connector.transport.nixl import window as windows
from vllm_pd_connector.transport.nixl.bindings import NixlOptions
from vllm_pd_connector.transport.nixl.window import _STRAIGHT, EMPTY_S, Window

pytestmark = pytest.mark.libraries

SHORT, BYTES = 1000, 64


@pytest.fixture
def peer(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A peer whose window is as wide as it may be, whatever else the processor does meanwhile."""
    end, other = ends
    monkeypatch.setattr(end.transport, "_options", NixlOptions())
    monkeypatch.setattr(Window, "_fit", lambda window, began, ended: None)
    connected = end.transport.connect(other.endpoint, other.segments)
    connected.window.size = 256 << 20
    return connected


def scattered(end: End, other: End, count: int = SHORT) -> Runs:
    return runs([(other.address + 2 * at, end.address + 2 * at, BYTES) for at in range(0, count * BYTES, BYTES)])


def test_a_post_has_fewer_descriptors_where_it_takes_longer_for_each(
    ends: tuple[End, End], peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP each is sent in it, and copied if it is written; where all posts copy, half as many would cost as many
    calls again."""
    end, other = ends
    monkeypatch.setattr(nixl_transport, "_CALL_S", 60.0)
    library, posted = importlib.import_module("nixl")._bindings, []
    post, create = (getattr(end.transport._posting().library, name) for name in ("postXferReq", "createXferReq"))
    there = scattered(end, other)
    back = Runs(there.destination, there.source, there.length)
    for operation, ends_in_call, most in (("read", False, 128), ("read", True, 256), ("write", True, 256)):
        peer.window.straight, peer.window.writes = ends_in_call * _STRAIGHT, operation == "write"
        answer = library.NIXL_SUCCESS if ends_in_call else library.NIXL_IN_PROG
        agent = instead(
            end,
            createXferReq=lambda *given: (posted.append(given[1].descCount()), create(*given))[1],
            postXferReq=lambda *given, answer=answer: (post(*given), answer)[1],
        )
        posted.clear()
        moves = getattr(end.transport, operation), there if operation == "read" else back
        transfer = moves[0](peer, moves[1])
        assert posted == [most] * (SHORT // most) + [SHORT % most]
        agent._calls.clear()
        end.finish(transfer)
    peer.window.straight, peer.window.writes = 0, False
    agent = instead(end, createXferReq=lambda *given: (posted.append(given[1].descCount()), create(*given))[1])
    posted.clear()
    end.finish(end.transport.read(peer, scattered(end, other, 200)))
    assert posted == [128, 72], "also of a transfer that is one post"


def copies(agent: Any, handle: int, *given: Any) -> Any:
    """A post that copies, as on one host."""
    state, running = agent.postXferReq(handle, *given), importlib.import_module("nixl")._bindings.NIXL_IN_PROG
    until(lambda: state != running or agent.getXferStatus(handle) != running, "a batch that is copied")
    return agent.getXferStatus(handle)


def test_where_posts_copy_requests_are_made_several_at_a_time(
    ends: tuple[End, End], peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a copy all code is cold. Elsewhere each is made when it is posted."""
    end, other = ends
    monkeypatch.setattr(nixl_transport, "_CALL_S", 60.0)
    library, done = end.transport._posting().library, []
    instead(
        end,
        createXferReq=lambda *given: (done.append("made"), library.createXferReq(*given))[1],
        postXferReq=lambda *given: (done.append("posted"), copies(library, *given))[1],
    )
    peer.window.straight = _STRAIGHT
    end.finish(end.transport.read(peer, scattered(end, other, 6 * 256)))
    assert done == ["made"] * 4 + ["posted"] * 4 + ["made"] * 2 + ["posted"] * 2
    done.clear()
    peer.window.straight = 0
    end.finish(end.transport.read(peer, scattered(end, other, 128 + 2 * 256)))
    assert done == ["made", "posted"] * 3, "one that ended in its call is not known to have been copied there"


@pytest.mark.parametrize("why", ["left", "failed", "not made", "ended"])
def test_requests_that_were_made_ahead_are_given_back_where_they_are_not_posted(
    ends: tuple[End, End], peer: Any, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    end, other = ends
    monkeypatch.setattr(nixl_transport, "_CALL_S", 0.0)  # one post in a call
    library, made, posted = end.transport._posting().library, [], []

    def create(*given: Any) -> int:
        if why == "not made" and len(made) == 3:
            raise error("nixlInvalidParamError")
        made.append(library.createXferReq(*given))
        return made[-1]

    def post(*given: Any) -> Any:
        posted.append(given[0])
        if why == "failed" and len(posted) == 2:
            raise error("nixlRemoteDisconnectError")
        return copies(library, *given)

    agent = instead(end, createXferReq=create, postXferReq=post)
    peer.window.straight = _STRAIGHT
    transfer = end.transport.read(peer, scattered(end, other, 6 * 256))
    if why != "not made":
        assert end.transport.poll(transfer) is TransferStatus.POSTING
        assert len(made) == 4 and len(posted) == 1 and transfer.left == 5 * 256
    if why == "left":
        end.transport.disconnect(peer)
    if why == "ended":
        assert until(lambda: end.transport.settle(peer), "the polls after the end of its process")
        assert transfer.left == 0
    with pytest.raises(TransferError):
        end.finish(transfer)
    assert len(made) == (3 if why == "not made" else 4) and sorted(agent.released) == sorted(made)
    assert len(posted) == {"not made": 0, "failed": 2}.get(why, 1)


@pytest.mark.parametrize("count", [1, SHORT])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_peers_window_knows_whether_it_is_written_to(ends: tuple[End, End], operation: str, count: int) -> None:
    """Of what is written a call copies more than what waits; also where a transfer is one post."""
    end, other = ends
    peer, there = end.transport.connect(other.endpoint, other.segments), scattered(end, other, count)
    moves = there if operation == "read" else Runs(there.destination, there.source, there.length)
    end.finish(getattr(end.transport, operation)(peer, moves))
    assert peer.window.writes is (operation == "write")
    end.finish(end.transport.read(peer, there))
    assert peer.window.writes is (operation == "write"), "reads of it are looked at by the same calls"


def test_what_follows_a_long_look_is_posted_in_the_next_call_and_comes_before_another_look(
    ends: tuple[End, End], peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either takes as long as a turn may; a peer that sends without pause must not keep posts from being made."""
    monkeypatch.setattr(nixl_transport, "_CALL_S", 0.05)  # of which a busy machine takes little
    monkeypatch.setattr("vllm_pd_connector.transport.nixl.window._STILL_S", 3600.0)
    end, other = ends
    running = importlib.import_module("nixl")._bindings.NIXL_IN_PROG
    post, done = end.transport._posting().library.postXferReq, []

    def look(handle: int) -> Any:
        done.append("look")
        time.sleep(2 * nixl_transport._CALL_S)
        return running

    def posts(*given: Any) -> Any:
        done.append("post")
        post(*given)
        time.sleep(2 * nixl_transport._CALL_S)
        return running

    agent = instead(end, getXferStatus=look, postXferReq=posts)
    transfer = end.transport.read(peer, scattered(end, other))
    assert done == ["post"]
    for call in range(10):
        done.clear()
        assert end.transport.poll(transfer) is TransferStatus.POSTING
        assert done == [("look", "post")[call % 2]]
    peer.window.size = transfer.runs  # no room
    for _ in range(3):
        done.clear()
        assert end.transport.poll(transfer) is TransferStatus.MOVING
        assert done == ["look"], "nothing is owed where nothing may be posted"
    agent._calls.clear()
    peer.window.size = 256 << 20
    end.finish(transfer)
    length = 2 * SHORT * BYTES
    assert (end.memory[:length].reshape(-1, 2, BYTES)[:, 0] == other.memory[:length].reshape(-1, 2, BYTES)[:, 0]).all()


@pytest.mark.parametrize("comes", [0, 1, 3])
def test_a_batch_is_looked_at_again_while_bytes_come_and_who_asks_is_told(
    ends: tuple[End, End], peer: Any, monkeypatch: pytest.MonkeyPatch, comes: int
) -> None:
    """Over TCP they come in looks alone. One that finds none is the last when none has come for a moment."""
    clock, took = [1000.0], 10 * EMPTY_S
    for module in (nixl_transport, windows):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    end, other = ends
    running = importlib.import_module("nixl")._bindings.NIXL_IN_PROG
    post, looks = end.transport._posting().library.postXferReq, []

    def look(handle: int) -> Any:
        looks.append(handle)
        clock[0] += took if len(looks) <= comes else 0.4 * EMPTY_S
        return running

    agent = instead(end, getXferStatus=look, postXferReq=lambda *given: (post(*given), running)[1])
    transfer = end.transport.read(peer, scattered(end, other, 1))
    assert end.transport.poll(transfer) is (TransferStatus.MOVING if comes else TransferStatus.RUNNING)
    assert len(looks) == (comes + 3 if comes else 1) and len(set(looks)) == 1
    looks.clear()
    comes, took = 100, nixl_transport._CALL_S / 4
    assert end.transport.poll(transfer) is TransferStatus.MOVING and len(looks) <= 5, "a call is as long as ever"
    comes = 0
    assert end.transport.poll(transfer) is TransferStatus.RUNNING
    agent._calls.clear()
    monkeypatch.undo()
    end.finish(transfer)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_what_a_post_copied_is_looked_at_soon_and_for_a_moment(
    ends: tuple[End, End], peer: Any, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """Most of a batch that is written over TCP has gone when the call returns, and the rest goes at once. One that is
    read has not begun to come."""
    clock = [1000.0]
    for module in (nixl_transport, windows):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    end, other = ends
    running = importlib.import_module("nixl")._bindings.NIXL_IN_PROG
    post, looks = end.transport._posting().library.postXferReq, []

    def posts(*given: Any) -> Any:
        post(*given)
        clock[0] += nixl_transport._CALL_S
        return running

    def look(handle: int) -> Any:
        looks.append(handle)
        clock[0] += 0.4 * EMPTY_S
        return running

    agent, there = instead(end, getXferStatus=look, postXferReq=posts), scattered(end, other, 2 * 128)
    moves = there if operation == "read" else Runs(there.destination, there.source, there.length)
    transfer = getattr(end.transport, operation)(peer, moves)
    written = operation == "write"
    assert end.transport.poll(transfer) is (TransferStatus.MOVING if written else TransferStatus.RUNNING)
    looks.clear()
    for expected in (3 if written else 1, 1):
        assert end.transport.poll(transfer) is TransferStatus.RUNNING and len(looks) == expected
        looks.clear()
    agent._calls.clear()
    monkeypatch.undo()
    end.finish(transfer)
