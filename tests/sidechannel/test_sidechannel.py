"""Server and client over real sockets: what they answer, what they survive, and what they cost when nothing happens."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from vllm_pd_connector.errors import DeadlineExceeded, InvalidConfig, ProtocolError
from vllm_pd_connector.protocol import messages as m
from vllm_pd_connector.protocol.fields import MAX_LEASES, MAX_REQUEST_FRAME, LeaseRef
from vllm_pd_connector.protocol.lease import End, Freed
from vllm_pd_connector.sidechannel import server as server_module
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.server import SideChannelServer
from vllm_pd_connector.sidechannel.sockets import endpoint

ENGINE, INCARNATION = "engine-0", "ab" * 16
A, B = b"a" * 16, b"b" * 16
REF = LeaseRef("req", A)
PATIENCE_S = float(os.environ.get("PD_TEST_PATIENCE", "20"))


@pytest.fixture
def server() -> Iterator[SideChannelServer]:
    made = SideChannelServer("127.0.0.1", 0, ENGINE, INCARNATION)
    made.set_manifests([b"rank 0", b"rank 1"])
    yield made
    made.close()


@pytest.fixture
def client() -> Iterator[SideChannelClient]:
    made = SideChannelClient()
    yield made
    made.close()


@pytest.fixture
def raw(server) -> Iterator[zmq.Socket]:
    """A socket that sends whatever it is told to."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.rcvtimeo = int(PATIENCE_S * 1000)
    dealer.connect(address(server))
    yield dealer
    context.destroy(linger=0)


def address(server: SideChannelServer) -> str:
    return endpoint("127.0.0.1", server.port)


def collect(client: SideChannelClient, count: int) -> dict[int, object]:
    """What became of the next `count` tokens."""
    outcomes: dict[int, object] = {}
    limit = time.monotonic() + PATIENCE_S
    while len(outcomes) < count:
        assert time.monotonic() < limit, f"{len(outcomes)} of {count} outcomes"
        poller = zmq.Poller()
        for waited in client.sockets():
            poller.register(waited, zmq.POLLIN)
        poller.poll(max(0.0, min(client.next_deadline() or limit, limit) - time.monotonic()) * 1000)
        for token, outcome in client.receive():
            assert token not in outcomes, "a token came back twice"
            outcomes[token] = outcome
    return outcomes


def ask(client: SideChannelClient, server: SideChannelServer, request: m.Request) -> object:
    token = client.send(address(server), request, PATIENCE_S)
    return collect(client, 1)[token]


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.002)


def frame(body: object, version: int = m.PROTOCOL_VERSION, seq: int = 7) -> bytes:
    return struct.pack("!4sHQ", m.MAGIC, version, seq) + msgspec.msgpack.encode(body)


def assert_serves(client: SideChannelClient, server: SideChannelServer) -> None:
    assert isinstance(ask(client, server, m.GetManifests(ENGINE)), m.Manifests)


def test_manifests_arrive_with_their_incarnation(server, client):
    assert ask(client, server, m.GetManifests(ENGINE)) == m.Manifests(ENGINE, INCARNATION, (b"rank 0", b"rank 1"))


def test_a_large_manifest_arrives_whole(server, client):
    large = bytes(range(256)) * (8 << 12)
    server.set_manifests([large])
    assert ask(client, server, m.GetManifests(ENGINE)).manifests == (large,)
    with pytest.raises(ProtocolError, match="limit"):
        server.set_manifests([large, large])


def test_before_the_workers_have_described_themselves_a_client_is_told_to_wait(client):
    server = SideChannelServer("127.0.0.1", 0, ENGINE, INCARNATION)
    try:
        reply = ask(client, server, m.GetManifests(ENGINE))
        assert isinstance(reply, m.Failure) and reply.code is m.FailureCode.NOT_READY
    finally:
        server.close()


def test_a_foreign_engine_id_is_refused_naming_both(server, client):
    reply = ask(client, server, m.GetManifests("engine-1"))
    assert isinstance(reply, m.Failure) and reply.code is m.FailureCode.FOREIGN_ENGINE
    assert "engine-1" in reply.message and ENGINE in reply.message


def test_a_lease_is_renewed_read_confirmed_and_freed(server, client):
    server.hold("req", A, 60.0)
    assert ask(client, server, m.Renew((REF, LeaseRef("other", A)))) == m.Renewed(("other",))
    for reader in (0, 1):
        assert server.take_freed() == []
        assert ask(client, server, m.ReadDone(REF, reader, 2, B)) == m.ReadVerdict(held=True, reason="")
    assert server.take_freed() == [Freed("req", End.READ)]


def test_no_reply_of_a_burst_is_lost(server, client):
    """A lost reply is asked for again only after its time-out, which stalls a receive for seconds."""
    server.hold("req", A, 60.0)
    for _ in range(40):
        tokens = {client.send(address(server), m.Renew((REF,)), PATIENCE_S) for _ in range(100)}
        outcomes = collect(client, len(tokens))
        assert set(outcomes.values()) == {m.Renewed(())}
    assert server.counts()["Renew"] == 4000, "a request was sent again"


def test_duplicates_and_replays_are_answered_alike_and_free_nothing_twice(server, client):
    server.hold("req", A, 60.0)
    verdicts = [ask(client, server, m.ReadDone(REF, 0, 1, B)) for _ in range(3)]
    assert all(verdict.held for verdict in verdicts)
    assert ask(client, server, m.Release((REF, REF))) == m.Released()
    assert server.take_freed() == [Freed("req", End.READ)] and server.take_freed() == []


def test_a_stale_nonce_neither_confirms_nor_releases(server, client):
    server.hold("req", B, 60.0)
    assert ask(client, server, m.Release((REF,))) == m.Released()
    verdict = ask(client, server, m.ReadDone(REF, 0, 1, A))
    assert not verdict.held and "nonce" in verdict.reason
    assert server.take_freed() == []


def test_a_read_after_the_lease_expired_is_not_vouched_for(server, client):
    server.hold("req", A, 0.05)
    wait_for(lambda: server.take_freed() == [Freed("req", End.EXPIRED)])
    verdict = ask(client, server, m.ReadDone(REF, 0, 1, A))
    assert not verdict.held and "expired" in verdict.reason


def test_a_sleeping_server_expires_leases_by_itself(server):
    server.hold("req", A, 0.05)
    wait_for(lambda: len(server._leases) == 0)
    assert server.take_freed() == [Freed("req", End.EXPIRED)]


def test_a_dropped_lease_comes_out_once(server, client):
    server.hold("req", A, 60.0)
    server.drop("req")
    assert server.take_freed() == [Freed("req", End.DROPPED)]
    assert not ask(client, server, m.ReadDone(REF, 0, 1, A)).held


def test_fifty_clients_are_served_at_once(server):
    for n in range(50):
        server.hold(f"r{n}", A, 60.0)
    clients = [SideChannelClient() for _ in range(50)]
    try:
        tokens = [
            [
                client.send(address(server), m.GetManifests(ENGINE), PATIENCE_S),
                client.send(address(server), m.ReadDone(LeaseRef(f"r{n}", A), 0, 1, B), PATIENCE_S),
            ]
            for n, client in enumerate(clients)
        ]
        for client, (manifests, verdict) in zip(clients, tokens, strict=True):
            outcomes = collect(client, 2)
            assert isinstance(outcomes[manifests], m.Manifests) and outcomes[verdict].held
    finally:
        for client in clients:
            client.close()
    assert sorted(freed.request_id for freed in server.take_freed()) == sorted(f"r{n}" for n in range(50))


RENEW = {"type": "renew", "leases": []}
MALFORMED = {
    "empty": (b"", m.FailureCode.MALFORMED, 0),
    "http": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", m.FailureCode.MALFORMED, 0),
    "header only": (frame(RENEW)[:14], m.FailureCode.MALFORMED, 7),
    "cut header": (frame(RENEW)[:9], m.FailureCode.MALFORMED, 0),
    "later version": (frame({"type": "warp"}, version=9), m.FailureCode.VERSION, 7),
    "unknown tag": (frame({"type": "warp"}), m.FailureCode.MALFORMED, 7),
    "no tag": (frame({"leases": []}), m.FailureCode.MALFORMED, 7),
    "a reply": (frame({"type": "released"}), m.FailureCode.MALFORMED, 7),
    "unknown field": (frame(RENEW | {"more": 1}), m.FailureCode.MALFORMED, 7),
    "missing field": (frame({"type": "renew"}), m.FailureCode.MALFORMED, 7),
    "wrong type": (frame({"type": "renew", "leases": 3}), m.FailureCode.MALFORMED, 7),
    "too many leases": (
        frame({"type": "renew", "leases": [{"request_id": "r", "nonce": A}] * (MAX_LEASES + 1)}),
        m.FailureCode.MALFORMED,
        7,
    ),
    "nested without end": (struct.pack("!4sHQ", m.MAGIC, 1, 7) + b"\x91" * 60000, m.FailureCode.MALFORMED, 7),
    "huge array": (struct.pack("!4sHQ", m.MAGIC, 1, 7) + b"\xdd\xff\xff\xff\xff", m.FailureCode.MALFORMED, 7),
}


@pytest.mark.parametrize("case", MALFORMED, ids=str)
def test_a_malformed_frame_is_answered_and_survived(server, client, raw, case):
    sent, code, seq = MALFORMED[case]
    raw.send(sent)
    answered, reply = m.decode_reply(raw.recv())
    assert isinstance(reply, m.Failure) and reply.code is code and reply.message
    assert answered == seq
    assert server.counts()[f"failure:{code}"] == 1
    assert_serves(client, server)


def test_a_message_of_several_parts_is_answered_and_survived(server, client, raw):
    raw.send_multipart([b"", m.encode(3, m.GetManifests(ENGINE))])
    _, reply = m.decode_reply(raw.recv())
    assert isinstance(reply, m.Failure) and "parts" in reply.message
    assert_serves(client, server)


def test_ten_megabytes_of_junk_never_reach_the_server(server, client, raw):
    with raw.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        raw.send(b"\xff" * (10 << 20))
        assert monitor.poll(PATIENCE_S * 1000), "the connection was not cut"
        raw.disable_monitor()
    assert_serves(client, server)
    assert set(server.counts()) == {"GetManifests"}


def test_junk_on_the_bare_tcp_port_is_survived(server, client):
    greeting = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + b"\0" * 48
    for junk in (b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 65536, greeting + b"\7" * 9000):
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
            connection.sendall(junk)
    assert_serves(client, server)


def test_a_client_that_takes_no_replies_cannot_make_the_server_hoard_them(server, client, monkeypatch):
    server.set_manifests([bytes(8 << 20)])
    monkeypatch.setattr(server_module, "MAX_UNSENT_REPLIES_PER_CLIENT", 2)
    context = zmq.Context()
    greedy = context.socket(zmq.DEALER)
    greedy.linger = 0
    greedy.rcvhwm = 1
    greedy.connect(address(server))
    try:
        for n in range(1, 13):
            greedy.send(m.encode(n, m.GetManifests(ENGINE)))
        wait_for(lambda: server.counts().get("GetManifests", 0) == 12)
        wait_for(lambda: server.counts().get("failure:busy", 0) > 0)
        assert_serves(client, server)
        assert len(server._unsent) <= 3
    finally:
        context.destroy(linger=0)


def test_the_server_listens_on_ipv6(client):
    try:
        server = SideChannelServer("::1", 0, ENGINE, INCARNATION)
    except InvalidConfig as error:  # a machine without IPv6 must say so, and nothing else
        assert "::1" in str(error)
        return
    try:
        server.set_manifests([b"rank 0"])
        token = client.send(endpoint("::1", server.port), m.GetManifests(ENGINE), PATIENCE_S)
        assert isinstance(collect(client, 1)[token], m.Manifests)
    finally:
        server.close()


def test_an_address_that_is_taken_is_refused_at_start(server):
    with pytest.raises(InvalidConfig, match=str(server.port)):
        SideChannelServer("127.0.0.1", server.port, ENGINE, INCARNATION)


def test_closing_twice_is_closing_once():
    server = SideChannelServer("127.0.0.1", 0, ENGINE, INCARNATION)
    server.close()
    server.close()
    server.drop("whatever")


def test_an_idle_server_and_a_waiting_client_use_no_processor(server, client):
    assert_serves(client, server)
    server.hold("req", A, 3600.0)
    used, began = time.process_time(), time.monotonic()
    poller = zmq.Poller()
    for waited in client.sockets():
        poller.register(waited, zmq.POLLIN)
    assert poller.poll(1000) == []
    assert time.process_time() - used < 0.1 * (time.monotonic() - began)


class Puppet:
    """A server that answers with whatever a test says, or not at all."""

    def __init__(self):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.rcvtimeo = int(PATIENCE_S * 1000)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    def take(self) -> tuple[bytes, int, m.Request]:
        peer, sent = self.socket.recv_multipart()
        return (peer, *m.decode_request(sent))


@pytest.fixture
def puppet() -> Iterator[Puppet]:
    made = Puppet()
    yield made
    made.context.destroy(linger=0)


def test_replies_are_matched_by_token_in_any_order(puppet, client):
    where = endpoint("127.0.0.1", puppet.port)
    first = client.send(where, m.Release(()), PATIENCE_S)
    second = client.send(where, m.Renew(()), PATIENCE_S)
    (peer, seq1, _), (_, seq2, _) = puppet.take(), puppet.take()
    puppet.socket.send_multipart([peer, m.encode(seq2, m.Renewed(()))])
    puppet.socket.send_multipart([peer, m.encode(seq2, m.Renewed(()))])
    puppet.socket.send_multipart([peer, m.encode(12345, m.Released())])
    puppet.socket.send_multipart([peer, m.encode(seq1, m.Released())])
    assert client.under_way() == 2
    assert collect(client, 2) == {second: m.Renewed(()), first: m.Released()}
    assert client.under_way() == 0


def test_a_reply_of_another_kind_is_an_error_of_that_request(puppet, client):
    token = client.send(endpoint("127.0.0.1", puppet.port), m.Release(()), PATIENCE_S)
    peer, seq, _ = puppet.take()
    puppet.socket.send_multipart([peer, m.encode(seq, m.Renewed(()))])
    outcome = collect(client, 1)[token]
    assert isinstance(outcome, ProtocolError) and "Renewed there, Released" in str(outcome)


@pytest.mark.parametrize("junk", [b"", b"junk", frame({"type": "released"}, version=9, seq=0)], ids=str)
def test_an_answer_that_is_no_frame_of_ours_fails_what_is_under_way(puppet, client, junk):
    where = endpoint("127.0.0.1", puppet.port)
    tokens = {client.send(where, m.Release(()), PATIENCE_S) for _ in range(3)}
    peer, _, _ = puppet.take()
    puppet.socket.send_multipart([peer, junk])
    outcomes = collect(client, 3)
    assert set(outcomes) == tokens and all(isinstance(outcome, ProtocolError) for outcome in outcomes.values())


def test_a_server_of_another_version_is_told_apart(puppet, client):
    token = client.send(endpoint("127.0.0.1", puppet.port), m.Release(()), PATIENCE_S)
    peer, seq, _ = puppet.take()
    puppet.socket.send_multipart([peer, frame({"type": "failure"}, version=9, seq=seq)])
    assert "protocol version: 9 there, 1 to 1 here" in str(collect(client, 1)[token])


def test_a_request_that_times_out_takes_the_others_to_a_new_socket(puppet):
    now = 0.0
    client = SideChannelClient(clock=lambda: now)
    try:
        where = endpoint("127.0.0.1", puppet.port)
        patient = client.send(where, m.Renew(()), 10.0)
        hasty = client.send(where, m.Release(()), 5.0)
        (old, *first), (_, *second) = puppet.take(), puppet.take()
        assert first == [patient, m.Renew(())] and second == [hasty, m.Release(())]
        now = 4.9
        assert client.receive() == []
        now = 5.0
        ((token, outcome),) = client.receive()
        assert token == hasty and isinstance(outcome, DeadlineExceeded) and "5 s" in str(outcome)
        new, *again = puppet.take()
        assert again == first and new != old
        puppet.socket.send_multipart([new, m.encode(patient, m.Renewed(()))])
        arrived: list[object] = []
        wait_for(lambda: bool(arrived.extend(client.receive()) or arrived))
        assert arrived == [(patient, m.Renewed(()))]
    finally:
        client.close()


def test_a_server_that_is_not_there_is_a_deadline_and_found_when_it_comes(client):
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    token = client.send(endpoint("127.0.0.1", port), m.GetManifests(ENGINE), 0.05)
    assert isinstance(collect(client, 1)[token], DeadlineExceeded)
    server = SideChannelServer("127.0.0.1", port, ENGINE, INCARNATION)
    try:
        server.set_manifests([b"rank 0"])
        assert_serves(client, server)
        assert server.counts() == {"GetManifests": 1}, "the request that had timed out was sent after all"
    finally:
        server.close()


def test_sockets_that_nobody_uses_are_closed(server):
    now = 0.0
    client = SideChannelClient(clock=lambda: now, idle_s=60.0)
    try:
        client.send(address(server), m.GetManifests(ENGINE), 1e6)
        wait_for(lambda: bool(client.receive()))
        assert len(client.sockets()) == 1 and client.next_deadline() == 60.0
        now = 59.0
        assert client.receive() == [] and len(client.sockets()) == 1
        now = 60.0
        assert client.receive() == [] and client.sockets() == () and client.next_deadline() is None
    finally:
        client.close()


def test_what_cannot_be_sent_is_refused_before_it_is_sent(client):
    with pytest.raises(ProtocolError, match="not an address"):
        client.send("tcp://nowhere", m.Release(()), 1.0)
    with pytest.raises(ProtocolError, match="limit"):
        client.send("tcp://127.0.0.1:1", m.GetManifests("e" * MAX_REQUEST_FRAME), 1.0)
    assert client.sockets() == ()


def test_requests_under_way_are_bounded(client):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = endpoint("127.0.0.1", silent.getsockname()[1])
        for _ in range(1024):
            client.send(where, m.Release(()), PATIENCE_S)
        with pytest.raises(ProtocolError, match="1024 requests are under way"):
            client.send(where, m.Release(()), PATIENCE_S)
