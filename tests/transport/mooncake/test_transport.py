"""What is Mooncake's alone: options, protocol and device, endpoints of others, failures of single descriptors."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.descriptors import no_descriptor_left
from tests.support.transport.ends import PATIENCE_S, End, ProcessPeer, runs, until, whole
from vllm_pd_connector.errors import InvalidConfig, PeerLost, TransferError
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.transport.addresses import host_identity
from vllm_pd_connector.transport.base import TransferStatus
from vllm_pd_connector.transport.endpoint import seal, unseal
from vllm_pd_connector.transport.liveness_link import LivenessState
from vllm_pd_connector.transport.mooncake import opening as mooncake_opening
from vllm_pd_connector.transport.mooncake.engine import MooncakeOptions, check_options, choose_protocol
from vllm_pd_connector.transport.mooncake.whereabouts import Whereabouts
from vllm_pd_connector.transport.registry import create

pytestmark = pytest.mark.libraries

SIZE = 1 << 20
LOCAL = {"protocol": "tcp", "address": "127.0.0.1"}


@pytest.fixture(scope="module")
def standing() -> Iterator[End]:
    yield (made := End("mooncake", LOCAL, SIZE))
    made.transport.close()


@pytest.fixture
def end(standing: End) -> End:
    standing.renew()
    return standing


@pytest.fixture(scope="module")
def peer() -> Iterator[ProcessPeer]:
    made = ProcessPeer("mooncake", LOCAL, SIZE)
    yield made
    made.stop()


def devices(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).mkdir(parents=True)
    return directory


def test_the_protocol_follows_the_machine_unless_it_is_given(tmp_path: Path) -> None:
    none, two = tmp_path / "none", devices(tmp_path / "two", "mlx5_0", "mlx5_1")
    assert choose_protocol(MooncakeOptions(), none, "cuda") == "tcp"
    assert choose_protocol(MooncakeOptions(), two, "cuda") == "rdma"
    assert choose_protocol(MooncakeOptions(protocol="tcp"), two, "cuda") == "tcp"
    assert choose_protocol(MooncakeOptions(protocol="rdma", device="mlx5_1,mlx5_0"), two, "cuda") == "rdma"


def test_cpu_memory_moves_over_tcp_unless_rdma_is_asked_for(tmp_path: Path) -> None:
    two = devices(tmp_path, "mlx5_0", "mlx5_1")
    assert choose_protocol(MooncakeOptions(), two, "cpu") == "tcp"
    assert choose_protocol(MooncakeOptions(protocol="rdma", device="mlx5_1"), two, "cpu") == "rdma"
    with pytest.raises(InvalidConfig, match=r"protocol: auto, caches in cpu.*give protocol rdma.*mlx5_0, mlx5_1"):
        choose_protocol(MooncakeOptions(device="mlx5_0"), two, "cpu")


@pytest.mark.parametrize(
    ("options", "names", "message"),
    [
        (MooncakeOptions(protocol="rdma"), (), "RDMA devices: none"),
        (MooncakeOptions(protocol="rdma", device="mlx5_7"), ("mlx5_0",), "device 'mlx5_7'.*devices: mlx5_0"),
        (MooncakeOptions(device="mlx5_7"), ("mlx5_0",), "device 'mlx5_7'"),
        (MooncakeOptions(protocol="tcp", device="mlx5_0"), ("mlx5_0",), "tcp, which has no devices"),
        (MooncakeOptions(device="mlx5_0"), (), "tcp, which has no devices"),
    ],
)
def test_a_protocol_or_device_that_is_not_there_is_refused(
    tmp_path: Path, options: MooncakeOptions, names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        choose_protocol(options, devices(tmp_path / "devices", *names), "cuda")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run_bytes", (1 << 20) - 1),
        ("run_bytes", (8 << 20) + 1),
        ("in_flight", 0),
        ("in_flight", 1025),
        ("in_flight_bytes", 0),
        ("connect_timeout", 0.0),
        ("silence_timeout", 2),
    ],
)
def test_numbers_out_of_range_are_refused_with_the_range(key: str, value: float) -> None:
    with pytest.raises(InvalidConfig, match=rf"{key} is {value}: it must be in \["):
        create("mooncake", {key: value})


def test_unacknowledged_writes_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="MC_TCP_PROTO=1"):
        check_options(MooncakeOptions(), {"MC_TCP_PROTO": "1"})
    check_options(MooncakeOptions(), {"MC_TCP_PROTO": "2"})


def test_a_missing_library_is_a_configuration_error_with_an_install_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(InvalidConfig, match="mooncake-transfer-engine-non-cuda"):
        create("mooncake", LOCAL)


def test_the_environment_is_as_before_after_a_start() -> None:
    before = {key: value for key, value in os.environ.items() if key != "MC_LOG_LEVEL"}
    create("mooncake", LOCAL).close()
    assert {key: value for key, value in os.environ.items() if key != "MC_LOG_LEVEL"} == before


def test_the_endpoint_says_the_chosen_address_and_never_another(end: End) -> None:
    where = msgspec.msgpack.decode(unseal("mooncake", end.endpoint).metadata, type=Whereabouts)
    assert (where.address, where.protocol, where.host) == ("127.0.0.1", "tcp", host_identity())


def elsewhere(endpoint: bytes, **changes: Any) -> bytes:
    made = unseal("mooncake", endpoint)
    where = msgspec.msgpack.decode(made.metadata, type=Whereabouts)
    return seal("mooncake", made.name, msgspec.msgpack.encode(msgspec.structs.replace(where, **changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host": "another boot:1"}, "on another machine and advertises the loopback address"),
        ({"address": "fd00::1"}, "address: 127.0.0.1 here, fd00::1 there"),
        ({"address": "prefill-0"}, "no IP address"),
        ({"address": "fd00::5%nowhere"}, "leads to no machine"),
        ({"protocol": "rdma"}, "protocol: tcp here, rdma there"),
        ({"engine_port": 0}, "not ports"),
        ({"line_port": 70000}, "not ports"),
    ],
)
def test_an_endpoint_that_cannot_be_used_from_here_is_refused_with_the_reason(
    end: End, peer: ProcessPeer, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TransferError, match=message) as refusal:
        end.connect(elsewhere(peer.endpoint, **changes), peer.segments)
    assert refusal.value.terminal and not refusal.value.retryable
    with pytest.raises(TransferError, match="malformed"):
        end.connect(seal("mooncake", "pd-1", b"\xc1"), peer.segments)


def test_two_workers_speak_ipv6() -> None:
    """In processes of their own: Mooncake speaks one version of IP per process."""
    options = {"protocol": "tcp", "address": "::1"}
    first, second = ProcessPeer("mooncake", options, SIZE), ProcessPeer("mooncake", options, SIZE)
    second.call("fill", 1)
    first.call("read_all", second.endpoint, second.segments, second.address)
    assert first.call("digest") == second.call("digest")
    for one in (first, second):
        one.tell_to_stop()
    for one in (first, second):
        one.stop()


def lying_about_memory(peer: ProcessPeer) -> tuple[Segment, ...]:
    """Segments that reach past what the peer registered."""
    last = peer.segments[-1]
    return (*peer.segments[:-1], msgspec.structs.replace(last, length=last.length + SIZE))


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_refused_descriptor_fails_its_transfer_when_its_neighbours_have_ended(
    end: End, peer: ProcessPeer, operation: str
) -> None:
    peer.call("fill", 2)
    connection = end.connect(peer.endpoint, lying_about_memory(peer))
    rows = [(peer.address, end.address, SIZE // 2), (peer.address + SIZE, end.address + SIZE // 2, SIZE // 2)]
    if operation == "write":
        rows = [(there, here, length) for here, there, length in rows]
    transfer = getattr(end.transport, operation)(connection, runs(rows))
    with pytest.raises(TransferError, match="which is alive: its memory is not registered") as failure:
        end.finish(transfer)
    # A failed write may still be on its way into a live peer's memory; a failed read touches nothing any more.
    assert failure.value.terminal == (operation == "read")
    assert not isinstance(failure.value, PeerLost)
    assert not transfer.in_flight
    end.finish(end.transport.read(connection, whole(peer.address, end.address, SIZE)))
    assert end.digest() == peer.call("digest")


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_write_that_fails_because_the_peer_fell_silent_may_still_arrive(
    end: End, peer: ProcessPeer, operation: str
) -> None:
    connection = end.connect(peer.endpoint, lying_about_memory(peer))
    end.finish(end.transport.read(connection, whole(peer.address, end.address, SIZE)))
    there, here = (peer.address + SIZE, end.address) if operation == "read" else (end.address, peer.address + SIZE)
    transfer = getattr(end.transport, operation)(connection, runs([(there, here, SIZE)]))
    connection.liveness.give_up("no answer of its machine")
    with pytest.raises(TransferError, match="no answer of its machine") as failure:
        end.finish(transfer)
    assert failure.value.terminal is isinstance(failure.value, PeerLost) is (operation == "read")


def test_an_end_that_is_closed_is_lost_for_its_peers(end: End) -> None:
    other = End("mooncake", LOCAL, SIZE)
    connection = end.connect(other.endpoint, other.segments)
    end.finish(end.transport.read(connection, whole(other.address, end.address, SIZE)))
    other.transport.close()
    with pytest.raises(PeerLost, match="its process ended or its transport was closed"):
        end.finish(end.transport.read(connection, whole(other.address, end.address, SIZE)))


def test_a_lost_line_that_somebody_still_holds_keeps_nobody_from_the_next_one(end: End, peer: ProcessPeer) -> None:
    idle = end.connect(peer.endpoint, peer.segments)
    broken = end.connect(peer.endpoint, peer.segments)
    read = whole(peer.address, end.address, SIZE)
    end.finish(end.transport.read(broken, read))
    broken.liveness.socket.shutdown(socket.SHUT_RDWR)
    until(lambda: broken.liveness.state is LivenessState.LOST, "the loss to be noticed")
    end.disconnect(broken)
    again = end.connect(peer.endpoint, peer.segments)
    end.finish(end.transport.read(again, read))
    with pytest.raises(PeerLost):
        end.finish(end.transport.write(idle, whole(end.address, peer.address, SIZE)))
    end.disconnect(idle)
    end.finish(end.transport.read(again, read))


def test_a_peer_that_tells_of_other_memory_under_one_name_is_refused(end: End, peer: ProcessPeer) -> None:
    connection = end.connect(peer.endpoint, peer.segments)
    with pytest.raises(TransferError, match=r"tells of other memory than when it was connected first: .* overlaps"):
        end.connect(peer.endpoint, lying_about_memory(peer))
    end.finish(end.transport.read(connection, whole(peer.address, end.address, SIZE)))


def stopped_when_its_line_is_open(end: End, peer: ProcessPeer) -> Any:
    """A connection to a peer that answered on its line, and was frozen before the library was asked for it."""
    connection = end.transport.connect(peer.endpoint, peer.segments)
    until(lambda: connection.liveness.state is LivenessState.OPEN, "the line")
    peer.freeze()
    return connection


def test_a_peer_that_stops_when_its_line_has_opened_delays_nobody(peer: ProcessPeer) -> None:
    end, stopped = End("mooncake", LOCAL | {"connect_timeout": 60.0}, SIZE), ProcessPeer("mooncake", LOCAL, SIZE)
    living = end.transport.connect(peer.endpoint, peer.segments)
    connection = stopped_when_its_line_is_open(end, stopped)
    waiting = end.transport.read(connection, whole(stopped.address, end.address, 4096))
    assert connection.opening.runs()
    end.finish(end.transport.read(living, whole(peer.address, end.address, SIZE)))
    assert connection.opening.runs(), "the other read had to wait for this peer"
    connection.opening.deadline = 0.0  # the time to answer is over
    with pytest.raises(PeerLost, match="no answer in time; it is stopped") as loss:
        end.finish(waiting)
    assert loss.value.terminal and loss.value.retryable
    stopped.tell_to_stop()
    end.transport.close()
    stopped.stop()


def test_a_peer_that_stops_just_when_it_is_opened_delays_others_for_a_bounded_time(
    peer: ProcessPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, stopped = End("mooncake", LOCAL | {"connect_timeout": 60.0}, SIZE), ProcessPeer("mooncake", LOCAL, SIZE)
    living = end.transport.connect(peer.endpoint, peer.segments)
    end.finish(end.transport.read(living, whole(peer.address, end.address, SIZE)))
    monkeypatch.setattr(mooncake_opening, "OPEN_S", 0.5)
    connection = end.transport.connect(stopped.endpoint, stopped.segments)
    until(lambda: connection.liveness.state is LivenessState.OPEN, "the line")
    waiting = end.transport.read(connection, whole(stopped.address, end.address, 4096))
    until(lambda: not connection.opening.runs(), "the answer to the probe")
    assert connection.opening.result == 0 and not connection.opening.opens
    stopped.freeze()
    assert end.transport.poll(waiting) is not TransferStatus.DONE
    assert connection.opening.opens and connection.opening.runs()
    end.transport.disconnect(connection)  # who forgets the peer does not forget what the library is doing
    with pytest.raises(TransferError, match="was disconnected"):
        end.finish(waiting)
    end.finish(end.transport.read(living, whole(peer.address, end.address, SIZE)))
    assert connection.opening.overdue and not connection.opening.runs()
    stopped.tell_to_stop()
    end.transport.close()
    stopped.stop()


def test_an_engine_that_opens_a_stopped_peer_is_destroyed_by_close() -> None:
    end, stopped = End("mooncake", LOCAL | {"connect_timeout": 60.0}, SIZE), ProcessPeer("mooncake", LOCAL, SIZE)
    connection = stopped_when_its_line_is_open(end, stopped)
    end.transport.read(connection, whole(stopped.address, end.address, 4096))
    assert connection.opening.runs()
    port = end.transport._engine.get_rpc_port()
    end.transport.close()
    assert not connection.opening.runs()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    stopped.stop()


@pytest.mark.parametrize("files", [contextlib.nullcontext, no_descriptor_left], ids=["files", "no files"])
def test_an_engine_that_outlives_close_is_an_error(
    monkeypatch: pytest.MonkeyPatch, files: Callable[[], AbstractContextManager[None]]
) -> None:
    """A connection that is not made yet leads nowhere that could be seen, so it cannot be shut down."""
    answers = threading.Event()

    class Engine:
        def send_probe(self, segment: str) -> int:
            return 0 if answers.wait(60) else -1

    monkeypatch.setattr(mooncake_opening, "CLOSE_S", 0.3)
    openings = mooncake_opening.Openings(Engine(), 60.0)
    opening = mooncake_opening.Opening("10.0.0.5:15000", ipaddress.ip_address("10.0.0.5"), 15000)
    assert not openings.ready(opening)
    with files(), pytest.raises(TransferError, match=r"still opening 10\.0\.0\.5:15000"):
        openings.close()
    answers.set()
    until(lambda: not opening.runs(), "the end of the exchange")


def test_a_peer_stopped_in_the_middle_of_a_transfer_does_not_delay_others(peer: ProcessPeer) -> None:
    large = 64 << 20
    end, stopped = End("mooncake", LOCAL, large), ProcessPeer("mooncake", LOCAL, large)
    connection = end.transport.connect(stopped.endpoint, stopped.segments)
    end.finish(end.transport.read(connection, whole(stopped.address, end.address, 4096)))
    stopped.freeze()
    frozen = end.transport.read(connection, whole(stopped.address, end.address, large))
    living = end.transport.connect(peer.endpoint, peer.segments)
    for _ in range(50):
        assert end.transport.poll(frozen) is not TransferStatus.DONE
        end.finish(end.transport.read(living, whole(peer.address, end.address, SIZE)))
    stopped.thaw()
    end.finish(frozen)
    assert end.digest() == stopped.call("digest")
    stopped.tell_to_stop()
    end.transport.close()
    stopped.stop()


def test_incarnations_at_one_port_have_names_of_their_own_that_the_library_takes_for_the_same_place(
    end: End, peer: ProcessPeer
) -> None:
    """The library never forgets what it learnt under a name, and ports come back after restarts."""
    where = msgspec.msgpack.decode(unseal("mooncake", peer.endpoint).metadata, type=Whereabouts)
    name_of, address = end.transport._segment_names.of, end.transport._address
    names = [name_of(name, address, where.engine_port) for name in ("first", "second", "first", "third")]
    assert len(set(names)) == 3 and names[0] == names[2]
    peer.call("fill", 3)
    connection = end.connect(peer.endpoint, peer.segments)
    assert connection.opening.segment not in names
    end.finish(end.transport.read(connection, whole(peer.address, end.address, SIZE)))
    assert end.digest() == peer.call("digest")


def test_what_is_in_flight_is_bounded(end: End, peer: ProcessPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end.transport, "_options", MooncakeOptions(in_flight=3))
    connection = end.connect(peer.endpoint, peer.segments)
    transfer = end.transport.read(
        connection, runs([(peer.address + 64 * i, end.address + 64 * i, 64) for i in range(1000)])
    )
    most, limit = 0, time.monotonic() + PATIENCE_S
    while end.transport.poll(transfer) is not TransferStatus.DONE:
        assert time.monotonic() < limit, "the transfer does not end"
        most = max(most, len(transfer.in_flight))
        assert connection.queued == len(transfer.in_flight) <= 3
    assert most > 0 and connection.queued == 0
    assert transfer.descriptors == 1000


def test_device_memory_needs_a_build_with_cuda(end: End) -> None:
    if end.transport._module.SUPPORT_CUDA:
        return
    with pytest.raises(TransferError, match="built without CUDA"):
        end.transport.register([Segment(address=1 << 40, length=4096, device="cuda", device_id=0)])
