"""What NIXL's failures leave running."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import pytest

from tests.support.transport.agents import SIZE, error, instead, raises
from tests.support.transport.ends import End, runs, until, whole
from tests.support.transport.variants import MIB
from vllm_pd_connector.errors import PeerLost, TransferError
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.transport.base import TransferStatus
from vllm_pd_connector.transport.nixl import transfer as nixl_transfer
from vllm_pd_connector.transport.nixl import transport as nixl_transport
from vllm_pd_connector.transport.nixl.bindings import NixlOptions, translate
from vllm_pd_connector.transport.nixl.transfer import SETTLE_POLLS, Ended
from vllm_pd_connector.transport.nixl.window import _STRAIGHT, Window
from vllm_pd_connector.transport.ranges import Ranges, batches

pytestmark = pytest.mark.libraries


def test_only_a_disconnect_ends_what_was_started() -> None:
    assert isinstance(translate("nixlRemoteDisconnectError", "read", True), PeerLost)
    assert isinstance(translate("nixlRemoteDisconnectError", "read", False), PeerLost)
    # The transfer that saw the disconnect made the library forget the peer.
    assert isinstance(translate("nixlNotFoundError", "read", True), PeerLost)
    for kind in ("nixlBackendError", "nixlInvalidParamError", "nixlNotAllowedError"):
        assert not translate(kind, "read", True).terminal
    for kind in ("nixlBackendError", "nixlInvalidParamError", "nixlNotFoundError"):
        assert translate(kind, "read", False).terminal and not isinstance(translate(kind, "read", False), PeerLost)


def test_16_mib_in_runs_of_256_kib_are_one_post() -> None:
    memory = Ranges.of([Segment(1 << 30, 64 * MIB, "cpu", 0)], "a worker")
    scattered = runs([((1 << 30) + (i << 19), (1 << 30) + (i << 19), 1 << 18) for i in range(64)])
    [waiting] = batches(scattered, memory, memory, nixl_transport._DESCRIPTOR_COST_BYTES)
    waiting.take(NixlOptions().batch_bytes, Window().descriptors)
    assert not waiting.left


def test_what_runs_of_a_transfer_has_a_bound_whatever_a_batch_may_be(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    end, other = ends
    monkeypatch.setattr(end.transport, "_options", NixlOptions(batch_bytes=1 << 40))
    assert end.transport.connect(other.endpoint, other.segments).window.size == 2 * MIB


def test_descriptors_are_short_but_where_the_call_that_posts_copies(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One alone may be a batch: such a call is short, and progress is seen over a slow network."""
    end, other = ends
    monkeypatch.setattr(end.transport, "_options", NixlOptions())
    peer = end.transport.connect(other.endpoint, other.segments)
    counts = []
    for window, inline in ((2, True), (4, True), (16, True), (24, True), (256, True), (256, False)):
        peer.window.size = window * MIB
        peer.window.straight = _STRAIGHT
        peer.window.posted(0, None, runs=not inline, writes=False)
        transfer = end.transport.read(peer, whole(other.address, end.address, 16 * MIB))
        counts.append(transfer.descriptors)
        end.finish(transfer)
    assert counts == [16, 16, 4, 3, 2, 16]


def test_no_more_runs_than_the_window_and_the_rest_follows(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    end, other = ends
    monkeypatch.setattr(Window, "_fit", lambda window, began, ended: None)  # whatever else the processor does meanwhile
    monkeypatch.setattr("vllm_pd_connector.transport.nixl.window._STILL_S", 3600.0)
    peer = end.transport.connect(other.endpoint, other.segments)
    running = importlib.import_module("nixl")._bindings.NIXL_IN_PROG
    agent = instead(end, getXferStatus=lambda handle: running)
    transfer = end.transport.read(peer, whole(other.address, end.address, SIZE))
    for _ in range(20):
        assert end.transport.poll(transfer) is not TransferStatus.DONE
        assert transfer.waiting and 0 < transfer.runs == peer.window.running <= peer.window.size
    assert end.transport.poll(transfer) is TransferStatus.RUNNING, "coming back at once gains nothing"
    agent._calls.clear()
    end.finish(transfer)
    assert (end.memory == other.memory).all()


def test_few_runs_leave_the_window_as_it_is(ends: tuple[End, End]) -> None:
    """They are posted untimed, at a bound of their cost."""
    end, other = ends
    peer = end.transport.connect(other.endpoint, other.segments)
    running = importlib.import_module("nixl")._bindings.NIXL_IN_PROG
    post = end.transport._posting().library.postXferReq
    instead(end, postXferReq=lambda *given: (post(*given), running)[1])  # as over TCP: it ends in a look
    before = peer.window.size, peer.window.ended, peer.window.spent
    for _ in range(20):
        transfer = end.transport.read(peer, runs([(other.address + at, end.address + at, 64) for at in (0, 128)]))
        assert transfer.posted and peer.window.running
        end.finish(transfer)
    assert (peer.window.size, peer.window.ended, peer.window.spent) == before and not peer.window.running


def test_what_is_one_post_within_the_window_teaches_it(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    end, other = ends
    monkeypatch.setattr(end.transport, "_options", NixlOptions())
    peer = end.transport.connect(other.endpoint, other.segments)
    work = runs([(other.address + at, end.address + at, MIB // 4) for at in range(0, 16 * MIB, MIB // 4)])
    transfer = end.transport.read(peer, work)
    assert transfer.waiting, "more than the window at its beginning"
    end.finish(transfer)
    for _ in range(3):
        peer.window.size, peer.window.timed = 32 * MIB, 64  # a call that seems slow is believed by the thread's time
        before = peer.window.ended, peer.window.spent
        transfer = end.transport.read(peer, work)
        assert isinstance(transfer, Ended) or (len(transfer.posted) == 1 and not transfer.waiting)
        assert transfer.descriptors == 64
        end.finish(transfer)
        assert (peer.window.ended, peer.window.spent) != before and not peer.window.running
    assert (end.memory == other.memory).all()


def test_of_the_batches_that_run_only_the_oldest_is_looked_at(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library polls once for each descriptor of a batch that it is asked about."""
    end, other = ends
    monkeypatch.setattr(end.transport, "_options", NixlOptions())
    monkeypatch.setattr(nixl_transport, "_CALL_S", 60.0)  # all are posted in the call that begins
    peer = end.transport.connect(other.endpoint, other.segments)
    peer.window.size = 256 * MIB
    monkeypatch.setattr(Window, "_fit", lambda window, began, ended: None)  # whatever else the processor does meanwhile
    running = importlib.import_module("nixl")._bindings.NIXL_IN_PROG
    post, asked = end.transport._posting().library.postXferReq, []
    agent = instead(
        end,
        postXferReq=lambda *given: (post(*given), running)[1],  # as over TCP: it ends in a look
        getXferStatus=lambda handle: (asked.append(handle), running)[1],
    )
    transfer = end.transport.read(
        peer, runs([(other.address + at, end.address + at, 64) for at in range(0, 64000, 64)])
    )
    assert len(transfer.posted) == 8
    for _ in range(3):
        assert end.transport.poll(transfer) is TransferStatus.RUNNING
    assert asked == [next(iter(transfer.posted))] * 3
    agent._calls.clear()
    end.finish(transfer)
    assert (end.memory[:64000] == other.memory[:64000]).all()


def test_what_is_posted_has_not_moved(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines run on while nothing is left less."""
    monkeypatch.setattr(nixl_transport, "_CALL_S", 60.0)  # all are posted in the call that begins
    end, other = ends
    peer = end.transport.connect(other.endpoint, other.segments)
    running = importlib.import_module("nixl")._bindings.NIXL_IN_PROG
    agent = instead(end, getXferStatus=lambda handle: running)
    short = runs([(other.address + at, end.address + at, 64 << 10) for at in range(0, SIZE, 64 << 10)])
    transfer = end.transport.read(peer, short)
    waiting = sum(batches.left for batches in transfer.waiting)
    assert transfer.left == transfer.descriptors == len(short) > waiting + len(transfer.posted)
    for _ in range(20):
        end.transport.poll(transfer)
        assert transfer.left == transfer.descriptors
    agent._calls.clear()
    end.finish(transfer)
    assert transfer.left == 0


def test_a_peer_that_the_library_forgot_is_met_again_by_all_who_are_connected_to_it(ends: tuple[End, End]) -> None:
    end, other = ends
    first, second = (end.transport.connect(other.endpoint, other.segments) for _ in range(2))
    moved = whole(other.address, end.address, SIZE)

    def disconnects(handle: int) -> Any:
        poster.library._agent.invalidateRemoteMD(first.name)  # as the library does
        raise error("nixlRemoteDisconnectError")

    instead(end, getXferStatus=disconnects)
    poster = end.transport._posting()
    with pytest.raises(PeerLost):
        end.finish(end.transport.read(first, moved))
    poster.library._calls.clear()
    with pytest.raises(PeerLost):
        end.finish(end.transport.read(second, moved))
    end.transport.disconnect(first)
    again = end.transport.connect(other.endpoint, other.segments)
    for peer in (again, second):
        end.finish(end.transport.read(peer, moved))


@pytest.mark.parametrize("kind", ["nixlBackendError", "nixlInvalidParamError"])
def test_a_failure_of_unknown_extent_is_not_terminal_and_releases_nothing(
    ends: tuple[End, End], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transport, "_CALL_S", 60.0)  # all are posted in the call that begins
    end, other = ends
    peer = end.transport.connect(other.endpoint, other.segments)
    agent = instead(end, getXferStatus=raises(kind))
    transfer = end.transport.read(peer, whole(other.address, end.address, SIZE))
    assert transfer.posted, "nothing was in flight"
    running = list(transfer.posted)
    with pytest.raises(TransferError, match="who knows") as failure:
        end.transport.poll(transfer)
    assert not failure.value.terminal
    assert list(transfer.posted) == running and not set(running) & set(agent.released)
    assert peer.window.running == 0, "nobody waits for it, and others of the peer are to be posted"
    end.transport.disconnect(peer)
    assert end.transport._posting().peers, "the peer of a transfer that may still run was forgotten"


class Late:
    """A post that fails when a part of it has begun, which lands at this end 100 ms later."""

    def __init__(self, end: End, kind: str) -> None:
        self._kind = kind
        self.landed = threading.Timer(0.1, end.memory.fill, (7,))

    def post(self, handle: int, notification: bytes) -> Any:
        self.landed.start()
        raise error(self._kind)


def test_a_post_that_failed_in_the_middle_may_still_write(ends: tuple[End, End]) -> None:
    end, other = ends
    peer = end.transport.connect(other.endpoint, other.segments)
    late = Late(end, "nixlBackendError")
    agent = instead(end, postXferReq=late.post)
    transfer = end.transport.read(peer, whole(other.address, end.address, MIB))
    with pytest.raises(TransferError, match="who knows") as failure:
        end.finish(transfer)
    assert not failure.value.terminal and not agent.released, "the blocks would be another request's when it lands"
    late.landed.join()


def test_a_post_that_a_defect_ended_is_one_that_may_still_write(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is none of the library's, out of one of several posts or behind it."""
    monkeypatch.setattr(nixl_transport, "_CALL_S", 60.0)  # both posts come in the call that begins
    monkeypatch.setattr(Window, "room", lambda window, now: 4 * MIB)
    end, other = ends
    peer = end.transport.connect(other.endpoint, other.segments)
    post, posted = end.transport._posting().library.postXferReq, []

    def posts(handle: int, notification: bytes) -> Any:
        posted.append(post(handle, notification))
        return posted[-1] if len(posted) < 2 else 1 // 0

    agent = instead(end, postXferReq=posts)
    transfer = end.transport.read(peer, whole(other.address, end.address, SIZE))
    with pytest.raises(TransferError, match="unexpected ZeroDivisionError") as failure:
        end.finish(transfer)
    assert not failure.value.terminal and len(posted) == 2 and len(agent.released) < 2
    assert peer.window.running == 0, "others of the peer are to be posted"


def test_a_short_transfer_that_a_defect_ended_may_still_write_too(ends: tuple[End, End]) -> None:
    end, other = ends
    peer = end.transport.connect(other.endpoint, other.segments)
    agent = instead(end, postXferReq=lambda handle, notification: 1 // 0)
    transfer = end.transport.read(peer, whole(other.address, end.address, MIB))
    with pytest.raises(TransferError, match="unexpected ZeroDivisionError") as failure:
        end.finish(transfer)
    assert not failure.value.terminal and not agent.released and peer.window.running == 0


def test_a_disconnect_is_reported_when_nothing_lands_any_more(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transfer, "SETTLE_S", 2.0)  # the machine may be busy when that lands
    end, other = ends
    peer = end.transport.connect(other.endpoint, other.segments)
    late = Late(end, "nixlRemoteDisconnectError")
    agent = instead(end, postXferReq=late.post)
    transfer = end.transport.read(peer, whole(other.address, end.address, MIB))
    assert end.transport.poll(transfer) is TransferStatus.RUNNING and not agent.released
    with pytest.raises(PeerLost, match="who knows") as failure:
        end.finish(transfer)
    assert failure.value.terminal
    assert not late.landed.is_alive(), "the blocks were given back before that landed"
    assert agent.released and not transfer.posted and peer.window.running == 0
    end.transport.disconnect(peer)
    assert not end.transport._posting().peers


def test_what_was_written_when_its_connection_was_lost_may_still_arrive(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel sends what a closed connection held, and a process whose connection was reset may live."""
    monkeypatch.setattr(nixl_transfer, "SETTLE_S", 0.0)
    end, other = ends
    peer = end.transport.connect(other.endpoint, other.segments)
    agent = instead(end, postXferReq=raises("nixlRemoteDisconnectError"))
    transfer = end.transport.write(peer, whole(end.address, other.address, MIB))
    with pytest.raises(PeerLost, match="may still arrive there until one of the two processes ends") as failure:
        end.finish(transfer)
    assert failure.value.retryable and not failure.value.terminal
    assert agent.released and not transfer.posted and peer.window.running == 0, "UCX has ended its part"
    agent._calls.clear()
    again = end.transport.connect(other.endpoint, other.segments)
    end.transport.disconnect(peer)
    end.finish(end.transport.write(again, whole(end.address, other.address, SIZE)))
    assert end.digest() == other.digest()


@pytest.mark.parametrize("method", ["read", "write"])
def test_what_was_never_posted_to_a_lost_peer_is_over(ends: tuple[End, End], method: str) -> None:
    end, other = ends
    peer = end.transport.connect(other.endpoint, other.segments)
    instead(end, createXferReq=raises("nixlRemoteDisconnectError"))
    with pytest.raises(PeerLost) as failure:
        if method == "read":
            end.finish(end.transport.read(peer, whole(other.address, end.address, MIB)))
        else:
            end.finish(end.transport.write(peer, whole(end.address, other.address, MIB)))
    assert failure.value.terminal


def test_what_waits_for_the_end_of_a_lost_connection_is_not_asked_again_at_once(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transport, "_CALL_S", 60.0)  # all are posted in the call that begins
    monkeypatch.setattr(nixl_transfer, "SETTLE_S", 0.05)
    end, other = ends
    peer = end.transport.connect(other.endpoint, other.segments)
    instead(end, postXferReq=raises("nixlRemoteDisconnectError"))
    transfer = end.transport.read(peer, whole(other.address, end.address, SIZE))
    assert transfer.settling and end.transport.poll(transfer) is TransferStatus.RUNNING
    with pytest.raises(PeerLost):
        end.finish(transfer)


def test_a_disconnect_is_reported_when_the_library_was_polled_often_enough(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends a lost connection's other lanes only then: what is looked at rarely is not over by the clock."""
    monkeypatch.setattr(nixl_transfer, "SETTLE_S", 0.0)
    end, other = ends
    peer = end.transport.connect(other.endpoint, other.segments)
    polls: list[None] = []
    agent = instead(
        end,
        postXferReq=raises("nixlRemoteDisconnectError"),
        getNotifs=lambda notifications, backends: polls.append(None),
    )
    transfer = end.transport.read(peer, whole(other.address, end.address, MIB))
    while end.transport.poll(transfer) is not TransferStatus.DONE:
        assert len(polls) < SETTLE_POLLS and not agent.released
        if len(polls) == SETTLE_POLLS - 1:
            break
    with pytest.raises(PeerLost):
        end.transport.poll(transfer)
    assert len(polls) == SETTLE_POLLS >= 20 and agent.released


def test_a_connection_has_settled_when_its_agent_was_polled_often_and_long_enough(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transfer, "SETTLE_S", 0.05)
    end, other = ends
    peer, polls = end.transport.connect(other.endpoint, other.segments), list[None]()

    def polled(*_: Any) -> None:
        polls.append(None)
        if len(polls) % 2:
            raise error("nixlBackendError")

    instead(end, getNotifs=polled)
    settled = [end.transport.settle(peer) for _ in range(SETTLE_POLLS)]
    assert not any(settled[:-1])
    until(lambda: end.transport.settle(peer), "the time to be over")
    asked = len(polls)
    assert end.transport.settle(peer) and len(polls) == asked, "it was polled on"
    end.transport.disconnect(peer)
    peer.agent.library, peer.settling = None, None
    until(lambda: end.transport.settle(peer), "an agent that has ended")


def test_a_batch_whose_peer_another_one_lost_is_waited_for_too(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library forgets a peer with the first disconnect; the other batches' state cannot be asked for any more."""
    monkeypatch.setattr(nixl_transport, "_CALL_S", 60.0)  # all are posted in the call that begins
    monkeypatch.setattr(nixl_transfer, "SETTLE_S", 0.05)
    end, other = ends
    peer = end.transport.connect(other.endpoint, other.segments)
    instead(end, getXferStatus=raises("nixlNotFoundError"))
    transfer = end.transport.read(peer, whole(other.address, end.address, SIZE))
    running = len(transfer.posted)
    assert running
    assert end.transport.poll(transfer) is TransferStatus.RUNNING and len(transfer.posted) == running
    with pytest.raises(PeerLost):
        end.finish(transfer)
