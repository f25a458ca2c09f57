"""The client over real sockets: whose reply is whose, servers that say nothing or nonsense, and what is bounded."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import zmq
from side_channel_ends import ENGINE, INCARNATION, PATIENCE_S, address, assert_serves, collect, frame, wait_for

from vllm_pd_connector.errors import DeadlineExceeded, ProtocolError
from vllm_pd_connector.protocol import messages as m
from vllm_pd_connector.protocol.fields import MAX_REQUEST_FRAME
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.server import SideChannelServer
from vllm_pd_connector.sidechannel.sockets import endpoint


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


def test_servers_are_few_at_a_time_and_whoever_owes_no_answer_makes_room(puppet, client, monkeypatch):
    monkeypatch.setattr("vllm_pd_connector.sidechannel.client.MAX_SERVERS", 2)
    answers, silent, other = endpoint("127.0.0.1", puppet.port), *(endpoint("127.0.0.1", port) for port in (9, 10))
    token = client.send(answers, m.Release(()), PATIENCE_S)
    client.send(silent, m.Release(()), PATIENCE_S)
    with pytest.raises(ProtocolError, match="2 other servers owe answers"):
        client.send(other, m.Release(()), PATIENCE_S)
    peer, seq, _ = puppet.take()
    puppet.socket.send_multipart([peer, m.encode(seq, m.Released())])
    assert collect(client, 1) == {token: m.Released()}
    client.send(other, m.Release(()), PATIENCE_S)
    assert len(client.sockets()) == 2
    with pytest.raises(ProtocolError, match="owe answers"):
        client.send(answers, m.Release(()), PATIENCE_S)


def test_a_socket_that_cannot_be_had_is_an_error_of_those_who_need_it(client):
    client._context.set(zmq.MAX_SOCKETS, 1)
    token = client.send(endpoint("127.0.0.1", 9), m.Release(()), 0.05)
    with pytest.raises(ProtocolError, match="limit of open files"):
        client.send(endpoint("127.0.0.1", 10), m.Release(()), PATIENCE_S)
    outcome = collect(client, 1)[token]
    assert isinstance(outcome, DeadlineExceeded)
