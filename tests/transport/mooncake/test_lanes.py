"""The library's connections to peers that are gone: it is made to close them, and nothing else is asked for that."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.transport.ends import End, ProcessPeer, runs, until
from vllm_pd_connector.transport.liveness_link import LivenessState
from vllm_pd_connector.transport.mooncake.lanes import Lanes, lanes_per_peer
from vllm_pd_connector.transport.mooncake.sockets import _descriptors, _sockets

LOCAL = {"protocol": "tcp", "address": "127.0.0.1"}
CLOSE_WAIT = 8
PIECES = 16


def ended_there() -> int:
    """How many connections of this process its peers have ended and it has not."""
    states = [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] for one in _sockets(_descriptors())
              if one.type is socket.SOCK_STREAM]  # fmt: skip
    return states.count(CLOSE_WAIT)


def read_in_pieces(end: End, peer: Any, process: ProcessPeer) -> None:
    """In as many as take all connections."""
    length = end.length // PIECES
    rows = [(process.address + at, end.address + at, length) for at in range(0, end.length, length)]
    rows = rows[::2] + rows[1::2]  # which cannot be merged
    end.finish(end.transport.read(peer, runs(rows)))


@pytest.mark.libraries
@pytest.mark.parametrize("left_first", [False, True])
def test_peers_that_ended_leave_no_connection_behind(left_first: bool) -> None:
    end = End("mooncake", LOCAL, 1 << 20)
    before = ended_there()
    for _ in range(3):
        process = ProcessPeer("mooncake", LOCAL, 1 << 20)
        peer = end.connect(process.endpoint, process.segments)
        read_in_pieces(end, peer, process)
        if left_first:  # it says that it will end
            end.disconnect(peer)
        process.stop()
        until(lambda peer=peer: peer.liveness.state is LivenessState.LOST, "the end of a peer")
        if not left_first:
            end.disconnect(peer)
    end.transport._lanes.close_dead()  # as before the next is dialled
    until(lambda: ended_there() <= before, "the library to close what leads to nobody")
    assert not end.transport._lanes._left
    end.transport.close()


@pytest.mark.libraries
def test_a_peer_that_lives_is_used_again_after_it_was_left() -> None:
    end, process = End("mooncake", LOCAL, 1 << 20), ProcessPeer("mooncake", LOCAL, 1 << 20)
    for seed in range(3):
        process.call("fill", seed)
        peer = end.connect(process.endpoint, process.segments)
        read_in_pieces(end, peer, process)
        assert end.digest() == process.call("digest")
        assert not end.transport._lanes._left, "it is in use"
        end.disconnect(peer)
    process.stop()
    end.transport.close()


@pytest.mark.libraries
def test_a_process_that_has_not_what_it_is_asked_for_refuses_it_and_lives() -> None:
    """As one would that has the port of a peer that ended."""
    end, process = End("mooncake", LOCAL, 1 << 20), ProcessPeer("mooncake", LOCAL, 1 << 20)
    process.call("fill", 1)
    peer = end.connect(process.endpoint, process.segments)
    read_in_pieces(end, peer, process)
    engine, nowhere = end.transport._engine, process.address + (1 << 40)
    read = end.transport._module.TransferOpcode.Read
    for _ in range(4):
        batch = engine.batch_transfer_async(peer.opening.segment, [end.address], [nowhere], [1], read)
        assert not batch or until(lambda batch=batch: engine.transfer_check_status(batch), "an answer") == -1
    read_in_pieces(end, peer, process)
    assert end.digest() == process.call("digest")
    process.stop()
    end.transport.close()


def test_what_the_library_raises_fails_nothing_of_others(caplog: pytest.LogCaptureFixture) -> None:
    made, engine, _ = lanes()
    engine.batch_transfer_async = lambda *_: 1 // 0  # type: ignore[method-assign]
    made.leave("peer", OPENING, liveness(LivenessState.LOST), 4096)
    assert "could not be closed" in caplog.text
    made.meet("another")


class Engine:
    """Notes what is asked; nothing ends before it is told to."""

    status = 0

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def batch_transfer_async(self, *what: Any) -> int:
        self.asked.append(what)
        return len(self.asked)

    def transfer_check_status(self, _batch: int) -> int:
        return self.status


def liveness(state: LivenessState) -> Any:
    made = SimpleNamespace(state=state, hung_up=False)
    made.hang_up = lambda: setattr(made, "hung_up", True)
    return made


def lanes(count: int = 4) -> tuple[Lanes, Engine, Any]:
    engine, openings = Engine(), SimpleNamespace(is_ready=True)
    openings.ready = lambda _opening: openings.is_ready
    return Lanes(engine, openings, "read", count), engine, openings


OPENING: Any = SimpleNamespace(segment="there")


def test_a_peer_is_asked_once_for_each_connection_when_it_has_ended() -> None:
    made, engine, _ = lanes()
    there = liveness(LivenessState.OPEN)
    made.leave("peer", OPENING, there, 4096)
    made.close_dead()
    assert not engine.asked and not there.hung_up, "it lives"
    there.state = LivenessState.LOST
    made.meet("another")
    made.meet("another")
    assert len(engine.asked) == 4 and there.hung_up
    segment, (here,), place, length, opcode = engine.asked[0]
    assert (segment, place, length, opcode) == ("there", [4096], [1], "read") and here
    assert len(made._asked) == 4
    engine.status = -1
    made.close_dead()
    assert not made._asked


def test_nobody_is_asked_while_that_would_wait() -> None:
    made, engine, openings = lanes()
    openings.is_ready = False
    made.leave("peer", OPENING, liveness(LivenessState.LOST), 4096)
    assert not engine.asked
    openings.is_ready = True
    made.close_dead()
    assert len(engine.asked) == 4


@pytest.mark.parametrize(("count", "place"), [(0, 4096), (4, None)])
def test_where_there_are_no_connections_nothing_is_asked(count: int, place: int | None) -> None:
    made, engine, _ = lanes(count)
    there = liveness(LivenessState.OPEN)
    made.leave("peer", OPENING, there, place)
    assert there.hung_up
    there.state = LivenessState.LOST
    made.close_dead()
    assert not engine.asked


def test_a_peer_that_is_met_again_is_not_asked_for_having_been_left() -> None:
    made, engine, _ = lanes()
    there = liveness(LivenessState.OPEN)
    made.leave("peer", OPENING, there, 4096)
    made.meet("peer")
    assert there.hung_up
    there.state = LivenessState.LOST
    made.close_dead()
    assert not engine.asked


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({}, 4),
        ({"MC_TCP_LANES_PER_PEER": "8"}, 8),
        ({"MC_TCP_LANES_PER_PEER": "17"}, 4),
        ({"MC_TCP_LANES_PER_PEER": "0"}, 4),
        ({"MC_TCP_LANES_PER_PEER": "many"}, 4),
        ({"MC_TCP_MAX_CONNECTIONS_PER_PEER": "2"}, 2),
        ({"MC_TCP_LANES_PER_PEER": "3", "MC_TCP_MAX_CONNECTIONS_PER_PEER": "2"}, 3),
        ({"MC_TCP_ENABLE_CONNECTION_POOL": "0"}, 0),
        ({"MC_TCP_ENABLE_CONNECTION_POOL": "False"}, 0),
        ({"MC_TCP_ENABLE_CONNECTION_POOL": "1"}, 4),
    ],
)
def test_the_number_of_connections_is_the_librarys(environment: dict[str, str], count: int) -> None:
    assert lanes_per_peer("tcp", environment) == count
    assert lanes_per_peer("rdma", environment) == 0
