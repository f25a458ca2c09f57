"""What Mooncake's library does between hosts and over RDMA, on one host: engines that a test has answer, wait or fall
back, listeners asked from elsewhere, peers that stop in the middle of an exchange."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.transport.ends import End, ProcessPeer, until, whole
from vllm_pd_connector.errors import InvalidConfig, PeerLost, TransferError
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.transport.base import TransferStatus
from vllm_pd_connector.transport.mooncake import engine as mooncake_engine
from vllm_pd_connector.transport.mooncake import transport as mooncake_transport
from vllm_pd_connector.transport.mooncake.descriptor import Device, SegmentDescriptor, fetch_descriptor
from vllm_pd_connector.transport.mooncake.engine import (
    BUILT_FOR,
    DEFAULTS,
    MooncakeOptions,
    check_reachability,
    check_started,
    choose_protocol,
    load_module,
    own_devices,
    require_offered,
    start_engine,
)
from vllm_pd_connector.transport.mooncake.sockets import restrict_listeners
from vllm_pd_connector.transport.ranges import Ranges
from vllm_pd_connector.transport.registry import create

pytestmark = pytest.mark.libraries

SIZE = 1 << 20
LOCAL = {"protocol": "tcp", "address": "127.0.0.1"}
HERE = ipaddress.ip_address("127.0.0.1")


@pytest.fixture
def end() -> Iterator[End]:
    made = End("mooncake", LOCAL, SIZE)
    yield made
    made.transport.close()


@pytest.fixture
def peer() -> Iterator[ProcessPeer]:
    made = ProcessPeer("mooncake", LOCAL, SIZE)
    yield made
    made.stop()


def found(protocol: str, *devices: str) -> SegmentDescriptor:
    return SegmentDescriptor(protocol, devices=tuple(map(Device, devices)))


def test_an_engine_that_fell_back_to_tcp_is_refused_where_rdma_was_asked_for() -> None:
    """The library's own way: there is no RDMA device here, and it says nothing."""
    module = load_module("rdma", HERE)
    with pytest.raises(TransferError, match=r"was to use rdma .* and uses tcp with none: a device cannot be opened"):
        start_engine(module, MooncakeOptions(protocol="rdma"), "rdma", HERE, serves=True)
    engine, used = start_engine(module, MooncakeOptions(), "rdma", HERE, serves=True)
    assert used == "tcp"
    assert fetch_descriptor(HERE, engine.get_rpc_port(), 10).protocol == "tcp"


def test_memory_that_the_library_takes_and_does_not_offer_is_refused() -> None:
    """Over NVLink it takes memory of other allocators with a warning alone, and no transfer of it would ever work."""
    engine, _ = start_engine(load_module("tcp", HERE), MooncakeOptions(protocol="tcp"), "tcp", HERE, serves=True)
    memory = np.zeros((4, 1 << 16), dtype=np.uint8)
    port, segments = engine.get_rpc_port(), [Segment(row.ctypes.data, row.nbytes, "cpu", 0) for row in memory]
    for row in memory[:3]:
        assert engine.register_memory(row.ctypes.data, row.nbytes) == 0
    offered = [*segments[:1], Segment(segments[1].address, 2 << 16, "cpu", 0)]  # one piece of two registrations
    require_offered(HERE, port, Ranges.of(offered, "this worker"), "tcp")
    with pytest.raises(TransferError, match=rf"took 65536 bytes at {segments[3].address:#x} and offers peers 0 of"):
        require_offered(HERE, port, Ranges.of([*offered, segments[3]], "this worker"), "nvlink")
    both = Segment(segments[2].address, 2 << 16, "cpu", 0)
    with pytest.raises(TransferError, match=r"took 131072 bytes .* offers peers 65536 of"):
        require_offered(HERE, port, Ranges.of([both], "this worker"), "nvlink")
    with contextlib.closing(create("mooncake", LOCAL)) as transport:
        transport._engine = held = HeldEngine(transport._engine)  # type: ignore[attr-defined]
        held.batch_register_memory = lambda *_: 0  # type: ignore[attr-defined]
        with pytest.raises(TransferError, match="offers peers 0 of"):
            transport.register(segments)


def test_a_fall_back_that_nobody_forbade_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert check_started(found("tcp"), MooncakeOptions(), "rdma") == "tcp"
    assert "was to use rdma with the devices that there are and uses tcp" in caplog.text


@pytest.mark.parametrize(
    ("descriptor", "options"),
    [
        (found("tcp"), MooncakeOptions(protocol="rdma")),
        (found("tcp"), MooncakeOptions(device="mlx5_0")),
        (found("rdma", "mlx5_0"), MooncakeOptions(device="mlx5_0,mlx5_1")),
        (found("rdma", "mlx5_0"), MooncakeOptions(protocol="rdma", device="mlx5_1")),
    ],
)
def test_a_protocol_or_a_device_that_is_not_used_is_refused(descriptor: SegmentDescriptor, options: Any) -> None:
    with pytest.raises(TransferError, match=r"was to use rdma .*unlimited locked memory"):
        check_started(descriptor, options, "rdma")
    assert check_started(found("rdma", "mlx5_0", "mlx5_1"), options, "rdma") == "rdma"


@pytest.mark.parametrize("protocol", sorted(BUILT_FOR))
def test_protocols_of_builds_of_their_own_are_taken_at_their_word(tmp_path: Path, protocol: Any) -> None:
    none = tmp_path / "none"
    assert choose_protocol(MooncakeOptions(protocol=protocol), none, "cuda") == protocol
    if protocol != "efa":
        with pytest.raises(InvalidConfig, match=f"'mlx5_0' and the protocol is {protocol}, whose devices"):
            choose_protocol(MooncakeOptions(protocol=protocol, device="mlx5_0"), none, "cuda")


def test_a_build_for_another_protocol_is_refused() -> None:
    """The library's own way with a protocol that it was not built for: it takes one that it was."""
    assert check_started(found("nvlink"), MooncakeOptions(protocol="nvlink"), "nvlink") == "nvlink"
    module = load_module("nvlink", HERE)
    with pytest.raises(TransferError, match=r"was to use nvlink and uses tcp: the installed one was not built for it"):
        start_engine(module, MooncakeOptions(protocol="nvlink"), "nvlink", HERE, serves=False)


def test_what_forces_tcp_and_meets_rdma_is_refused() -> None:
    with pytest.raises(TransferError, match="was to use tcp"):
        check_started(found("rdma", "mlx5_0"), MooncakeOptions(protocol="tcp"), "tcp")


def test_each_gpu_may_have_devices_of_its_own() -> None:
    options = MooncakeOptions(protocol="rdma", device="mlx5_0,mlx5_1;mlx5_2")
    assert [own_devices(options, number).device for number in (0, 1)] == ["mlx5_0,mlx5_1", "mlx5_2"]
    assert own_devices(MooncakeOptions(device="mlx5_0"), 7).device == "mlx5_0"
    with pytest.raises(InvalidConfig, match=r"device has 2 lists.* on GPU 2"):
        own_devices(options, 2)


@pytest.mark.parametrize(("device", "empty"), [("mlx5_0;;mlx5_2", 1), (";mlx5_0", 0), ("mlx5_0;", 1), ("a;,", 1)])
def test_an_empty_list_of_devices_is_not_all_of_them(device: str, empty: int) -> None:
    with pytest.raises(InvalidConfig, match=rf"device: list {empty} of '{device}' is empty"):
        own_devices(MooncakeOptions(protocol="rdma", device=device), 0)


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
def test_the_library_tries_once_and_not_for_long_unless_the_environment_says_otherwise(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in DEFAULTS:
        monkeypatch.delenv(key, raising=False)
    with mooncake_engine._environment(protocol, HERE):
        assert {key: os.environ[key] for key in DEFAULTS} == DEFAULTS
    assert not DEFAULTS.keys() & os.environ.keys()
    monkeypatch.setenv("MC_RETRY_CNT", "9")
    with mooncake_engine._environment(protocol, HERE):
        assert os.environ["MC_RETRY_CNT"] == "9"


def test_the_library_is_not_reached_from_other_hosts_unless_that_is_allowed() -> None:
    elsewhere = ipaddress.ip_address("192.0.2.2")
    with pytest.raises(InvalidConfig, match=r"serve at 192\.0\.2\.2, .*allow_unauthenticated_peers to true"):
        check_reachability(MooncakeOptions(), elsewhere, serves=True)
    check_reachability(MooncakeOptions(), elsewhere, serves=False)
    check_reachability(MooncakeOptions(), HERE, serves=True)
    check_reachability(MooncakeOptions(allow_unauthenticated_peers=True), elsewhere, serves=True)


def reached(host: str, port: int) -> bool:
    """Whether something answers there. What a filter drops never does."""
    with contextlib.suppress(TimeoutError):
        socket.create_connection((host, port), 0.3).close()
        return True
    return False


def ports(end: End) -> list[int]:
    port = end.transport._engine.get_rpc_port()
    return [port, fetch_descriptor(HERE, port, 10).tcp_data_port]


def test_the_librarys_ports_are_reached_at_the_advertised_address_alone(end: End) -> None:
    """It listens on every interface; 127.0.0.2 is another address of this machine."""
    assert [reached("127.0.0.1", port) for port in ports(end)] == [True, True]
    assert [reached("127.0.0.2", port) for port in ports(end)] == [False, False]


def test_nobody_reaches_the_ports_of_a_worker_that_only_reads(peer: ProcessPeer) -> None:
    peer.call("fill", 3)
    with contextlib.closing(End("mooncake", LOCAL, SIZE, serves=False).transport) as transport:
        assert not reached("127.0.0.1", transport._engine.get_rpc_port())
    reader = End("mooncake", LOCAL, SIZE, serves=False)
    reader.read_all(peer.endpoint, peer.segments, peer.address)
    assert reader.digest() == peer.call("digest")
    reader.transport.close()


@pytest.mark.parametrize(("address", "other"), [("127.0.0.1", "127.0.0.2"), ("::1", "127.0.0.1")])
def test_a_listener_on_all_interfaces_is_kept_to_one_address_of_either_version(address: str, other: str) -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        port = listener.getsockname()[1]
        assert reached(address, port) and reached(other, port)
        restrict_listeners({port}, ipaddress.ip_address(address))
        assert reached(address, port) and not reached(other, port)


def test_listeners_that_are_not_there_are_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(TransferError, match=rf"ports \[{port}\] cannot be kept to nobody"):
        restrict_listeners({port}, None)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "closed after 0 of 9"),
        (b"\x05" + bytes(7) + b"\x01nope", "another form"),
        (b"\x03" + bytes(7) + b"\x01{}", "another form"),
        (b"\x05" + bytes(7) + b"\x03null", "answers kind 3"),
        (b"\xff" * 8 + b"\x01", "bytes; 1 was expected"),
    ],
)
def test_an_engine_that_describes_itself_otherwise_is_an_error(answer: bytes, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(64)
                connection.sendall(answer)

        (thread := threading.Thread(target=serve)).start()
        with pytest.raises(TransferError, match=message):
            fetch_descriptor(HERE, listener.getsockname()[1], 10)
        thread.join()


def test_a_silent_stranger_at_the_handshake_port_delays_an_opening_and_nothing_that_is_open(
    end: End, peer: ProcessPeer
) -> None:
    """The library serves one dialler after the other, each for 5 s."""
    other = End("mooncake", LOCAL, SIZE)
    opened = end.connect(peer.endpoint, peer.segments)
    read, late_read = (whole(peer.address, one.address, SIZE) for one in (end, other))
    end.finish(end.transport.read(opened, read))
    with socket.create_connection(("127.0.0.1", opened.opening.port)):
        late = other.transport.read(other.connect(peer.endpoint, peer.segments), late_read)
        until(lambda: (other.transport.poll(late), late.peer.opening.runs())[1], "the opening to begin")
        for _ in range(5):
            end.finish(end.transport.read(opened, read))
        assert late.peer.opening.runs(), "they waited until the stranger was through"
        other.finish(late)
    assert other.digest() == end.digest() == peer.call("digest")
    other.transport.close()


class HeldEngine:
    """The engine, except that descriptors end when the test says so, and how."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.status = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def transfer_check_status(self, batch: int) -> int:
        return self.status and self._engine.transfer_check_status(batch)


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("ended", [False, True], ids=["silent", "ended"])
def test_what_ended_after_the_line_did_is_not_believed(
    end: End, peer: ProcessPeer, operation: str, ended: bool
) -> None:
    """Another process may listen at that port by now, and have answered the library."""
    connection = end.connect(peer.endpoint, peer.segments)
    end.finish(end.transport.read(connection, whole(peer.address, end.address, SIZE)))
    end.transport._engine = held = HeldEngine(end.transport._engine)
    here, there = (peer.address, end.address) if operation == "read" else (end.address, peer.address)
    transfer = getattr(end.transport, operation)(connection, whole(here, there, SIZE))
    assert end.transport.poll(transfer) is not TransferStatus.DONE
    connection.liveness.lose("gone", ended=ended)
    assert end.transport.poll(transfer) is not TransferStatus.DONE, "the library may still move bytes"
    held.status = 1
    with pytest.raises(TransferError, match="gone") as failure:
        end.finish(transfer)
    assert failure.value.terminal is isinstance(failure.value, PeerLost) is (ended or operation == "read")
    end.transport._engine = held._engine


class RdmaEngine:
    """An engine that works as Mooncake's does over RDMA: one thread posts, and with a first descriptor for a peer asks
    the peer for its queue pairs, for up to 60 s."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._posted: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._status: dict[int, int] = {}
        self.asked: list[str] = []
        self.slow_s = 1.0  # an exchange with another peer than the first; longer than the pause between two looks
        self._thread = threading.Thread(target=self._post)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def batch_transfer_async(self, segment: str, *descriptor: Any) -> int:
        batch = len(self._status) + 1
        self._status[batch] = 0
        self._posted.put((batch, segment))
        return batch

    def transfer_check_status(self, batch: int) -> int:
        return self._status[batch]

    def _post(self) -> None:
        while (work := self._posted.get()) is not None:
            batch, segment = work
            host, _, port = segment.rpartition(":")
            self.asked.append(segment)
            try:
                self._status[batch] = 1 if self._exchange(host, int(port), segment) else -1
            except OSError:  # torn before it was asked, at any of its steps
                self._status[batch] = -1

    def _exchange(self, host: str, port: int, segment: str) -> bytes:
        with socket.create_connection((host, port), 1) as connection:
            connection.settimeout(60)
            time.sleep(0.0 if segment == self.asked[0] else self.slow_s)
            connection.sendall((3).to_bytes(8, "little") + b"\x01{}")
            return connection.recv(8)

    def close(self) -> None:
        self._posted.put(None)
        self._thread.join()


@pytest.mark.parametrize("lost", [False, True], ids=["stopped", "lost"])
def test_a_peer_that_does_not_answer_for_its_queue_pairs_does_not_hold_up_the_others(
    end: End, peer: ProcessPeer, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    monkeypatch.setattr(mooncake_transport, "STILL_S", 60.0 if lost else 10.0)
    monkeypatch.setattr(end.transport, "_options", MooncakeOptions(connect_timeout=60.0))
    stopped = ProcessPeer("mooncake", LOCAL, SIZE)
    connections = [end.connect(one.endpoint, one.segments) for one in (stopped, peer)]
    for one, connection in zip((stopped, peer), connections, strict=True):
        end.finish(end.transport.read(connection, whole(one.address, end.address, SIZE)))
    end.transport._engine = rdma = RdmaEngine(end.transport._engine)
    stopped.freeze()
    waiting = end.transport.read(connections[0], whole(stopped.address, end.address, SIZE))
    until(lambda: rdma.asked, "the exchange")
    behind = end.transport.read(connections[1], whole(peer.address, end.address, SIZE))
    assert end.transport.poll(behind) is not TransferStatus.DONE
    if lost:
        connections[0].liveness.lose("no answer of its machine")
    with pytest.raises(TransferError, match="no answer" if lost else "gave up a descriptor"):
        end.finish(waiting)
    end.finish(behind)
    rdma.close()
    end.transport._engine = rdma._engine
    stopped.stop()


def test_a_peer_that_does_not_answer_fails_within_the_connect_timeout_and_delays_nobody(
    peer: ProcessPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process takes the connection (its kernel does) and never says its name: a half-open peer."""
    end = End("mooncake", LOCAL, SIZE)
    living = end.transport.connect(peer.endpoint, peer.segments)
    end.finish(end.transport.read(living, whole(peer.address, end.address, SIZE)))
    silent = ProcessPeer("mooncake", LOCAL, SIZE)
    silent.freeze()
    with monkeypatch.context() as patch:
        patch.setattr(end.transport, "_options", MooncakeOptions(**LOCAL, connect_timeout=1.0))
        half_open = end.transport.connect(silent.endpoint, silent.segments)
    waiting = end.transport.read(half_open, whole(silent.address, end.address, 4096))
    fresh = ProcessPeer("mooncake", LOCAL, SIZE)  # is opened while the other one does not answer
    opened = end.transport.connect(fresh.endpoint, fresh.segments)
    end.finish(end.transport.read(opened, whole(fresh.address, end.address, SIZE)))
    fresh.stop()
    for _ in range(20):
        end.finish(end.transport.read(living, whole(peer.address, end.address, SIZE)))
    with pytest.raises(PeerLost, match="did not answer in time") as loss:
        end.finish(waiting)
    assert loss.value.terminal and loss.value.retryable
    silent.tell_to_stop()
    end.transport.close()
    silent.stop()
