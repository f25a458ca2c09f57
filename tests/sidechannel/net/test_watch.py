"""Messages without end: their sender is cut off, others are served, memory stays bounded; long talks are not cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from tests.support.forked import PROCESSES
from tests.support.patience import PATIENCE_S
from tests.support.sidechannel.endless import attack_client, attack_server, memory_of
from tests.support.sidechannel.ends import ENGINE, INCARNATION, collect, wait_for
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.protocol.wire.fields import LeaseRef
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.net import keys as k
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.sidechannel.server import SideChannelServer

MIB = 1 << 20
# Bytes of a part, bytes sent if nobody stops it, and by how much the victim may grow. libzmq keeps 64 bytes for a part
# without content, of which 2 are sent: so what a server lets in (6 MiB) may be 32 times as much in memory.
PARTS = {"large parts": (64 << 10, 768 * MIB, 384 * MIB), "empty parts": (0, 24 * MIB, 448 * MIB)}


def serve(pipe: Connection) -> None:
    with contextlib.closing(SideChannelServer("127.0.0.1", 0, ENGINE, INCARNATION)) as server:
        server.set_manifests([b"rank 0"])
        pipe.send(server.port)
        pipe.recv()


def ask_for_manifests(pipe: Connection) -> None:
    with contextlib.closing(SideChannelClient()) as client:
        pipe.send("ready")
        hostile, friendly = (endpoint("127.0.0.1", port) for port in pipe.recv())
        client.send(hostile, m.GetManifests(ENGINE), 3600.0)
        while not pipe.poll():
            token = client.send(friendly, m.GetManifests(ENGINE), PATIENCE_S)
            outcomes: dict[int, object] = {}
            while token not in outcomes:  # that of the other may come, too
                outcomes |= collect(client, 1)
            assert isinstance(outcomes[token], m.Manifests)
        pipe.send("served")


@contextlib.contextmanager
def process(target) -> Iterator[tuple[int, Connection]]:
    ours, theirs = PROCESSES.Pipe()
    made = PROCESSES.Process(target=target, args=(theirs,), daemon=True)
    made.start()
    theirs.close()  # so that a process that ends is heard of
    try:
        yield made.pid, ours
        ours.send("end")
        made.join(PATIENCE_S)
        assert made.exitcode == 0
    finally:
        made.kill()
        made.join()


@pytest.mark.parametrize("parts", PARTS)
def test_a_message_without_end_costs_a_server_little_and_others_nothing(client, parts):
    part_bytes, most, growth = PARTS[parts]
    with process(serve) as (pid, pipe):
        where = endpoint("127.0.0.1", port := pipe.recv())
        client.send(where, m.GetManifests(ENGINE), PATIENCE_S)
        collect(client, 1)
        before, _ = memory_of(pid)
        cut: list[bool] = []
        attack = threading.Thread(target=lambda: cut.append(attack_server("127.0.0.1", port, part_bytes, most)))
        attack.start()
        while attack.is_alive():
            token = client.send(where, m.GetManifests(ENGINE), PATIENCE_S)
            assert isinstance(collect(client, 1)[token], m.Manifests)
        assert cut == [True], f"{most} bytes were taken in"
        _, peak = memory_of(pid)
        assert peak - before < growth, f"{(peak - before) // MIB} MiB"


def test_a_message_without_end_costs_a_client_little_and_others_nothing(server):
    part_bytes, most, growth = PARTS["large parts"]
    with process(ask_for_manifests) as (pid, pipe), socket.create_server(("127.0.0.1", 0)) as listener:
        assert pipe.recv() == "ready"
        before, _ = memory_of(pid)
        pipe.send((listener.getsockname()[1], server.port))
        assert attack_client(listener, part_bytes, most), f"{most} bytes were taken in"
        _, peak = memory_of(pid)
        assert peak - before < growth, f"{(peak - before) // MIB} MiB"
    assert pipe.recv() == "served"


def test_who_sends_a_server_a_message_without_end_is_cut_off(server):
    assert attack_server("127.0.0.1", server.port, 64 << 10, 768 * MIB)


def test_who_asked_a_server_that_was_cut_off_hears_why(client):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        token = client.send(endpoint("127.0.0.1", listener.getsockname()[1]), m.GetManifests(ENGINE), 3600.0)
        attack = threading.Thread(target=attack_client, args=(listener, 64 << 10, 768 * MIB), daemon=True)
        attack.start()
        outcome = collect(client, 1)[token]
        attack.join()
    assert "a message without end" in str(outcome)


@pytest.fixture(params=["without keys", "with keys"])
def ends(request, tmp_path) -> Iterator[tuple[SideChannelServer, SideChannelClient, str]]:
    keys = None
    if request.param == "with keys":
        k.create_keys(tmp_path, "both")
        keys = k.load_keys(tmp_path)
    server = SideChannelServer("127.0.0.1", 0, ENGINE, INCARNATION, keys=keys)
    client = SideChannelClient(keys=keys)
    with contextlib.closing(server), contextlib.closing(client):
        yield server, client, endpoint("127.0.0.1", server.port, keys.public if keys is not None else None)


def test_whoever_ends_each_message_may_send_any_number(ends):
    server, client, where = ends
    server.set_manifests([bytes(15 * MIB)])
    large = m.GetManifests(ENGINE + "x" * 400), m.Renew(tuple(LeaseRef("r" * 500, bytes(16)) for _ in range(24)))
    for _ in range(20):
        tokens = [client.send(where, m.GetManifests(ENGINE), PATIENCE_S)]
        tokens += [client.send(where, request, PATIENCE_S) for request in large * 32]
        outcomes = collect(client, len(tokens))
        assert isinstance(outcomes[tokens[0]], m.Manifests)
        assert not any(isinstance(outcome, Exception) for outcome in outcomes.values())
    assert not server._watch._cut and not client._watch._cut
    for watch in (server._watch, client._watch):  # whose own threads count
        wait_for(lambda watch=watch: any(one.got > one.allowed for one in list(watch._connections.values())))


def test_without_a_thread_for_a_moment_who_asks_fails_and_the_next_is_watched(monkeypatch):
    """A watch that had failed to start once stayed dead: nobody heard of lost connections, and it could not end."""
    start, refused = threading.Thread.start, []

    def starts(thread: threading.Thread) -> None:
        if thread.name == "pd-watch" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    with contextlib.closing(SideChannelClient()) as client:
        with pytest.raises(ProtocolError, match="no thread is left"):
            client.send(endpoint("127.0.0.1", 9), m.GetManifests(ENGINE), PATIENCE_S)
        client.send(endpoint("127.0.0.1", 9), m.GetManifests(ENGINE), PATIENCE_S)
        assert client._watch._thread is not None and client._watch._thread.is_alive()
