"""The client over real sockets: whose reply is whose, servers that say nothing or nonsense, and what is bounded."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port
from tests.support.sidechannel.ends import ENGINE, INCARNATION, address, assert_serves, collect, frame, wait_for
from vllm_pd_connector.errors import Busy, DeadlineExceeded, ProtocolError, Unreachable
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.protocol.wire.fields import MAX_REQUEST_FRAME, LeaseRef
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.net.dial import Dial
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.sidechannel.server import SideChannelServer


class Puppet:
    """A server that answers with whatever a test says, or not at all."""

    def __init__(self, port: int = 0):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.rcvtimeo = int(PATIENCE_S * 1000)
        self.socket.bind(f"tcp://127.0.0.1:{port}")
        self.port = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def take(self, client: SideChannelClient) -> tuple[bytes, int, m.Request]:
        """The next request. Until it is here the client turns, which may have to dial, and keeps what comes back."""

        def here() -> bool:
            came = client.receive()
            client._due.extend(came)
            return bool(self.socket.poll(0))

        wait_for(here)
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
    (peer, seq1, _), (_, seq2, _) = puppet.take(client), puppet.take(client)
    puppet.socket.send_multipart([peer, m.encode(seq2, m.Renewed(()))])
    puppet.socket.send_multipart([peer, m.encode(seq2, m.Renewed(()))])
    puppet.socket.send_multipart([peer, m.encode(12345, m.Released())])
    puppet.socket.send_multipart([peer, m.encode(seq1, m.Released())])
    assert client.under_way() == 2
    assert collect(client, 2) == {second: m.Renewed(()), first: m.Released()}
    assert client.under_way() == 0


def test_a_reply_of_another_kind_is_an_error_of_that_request(puppet, client):
    token = client.send(endpoint("127.0.0.1", puppet.port), m.Release(()), PATIENCE_S)
    peer, seq, _ = puppet.take(client)
    puppet.socket.send_multipart([peer, m.encode(seq, m.Renewed(()))])
    outcome = collect(client, 1)[token]
    assert isinstance(outcome, ProtocolError) and "Renewed there, Released" in str(outcome)


@pytest.mark.parametrize("junk", [b"", b"junk", frame({"type": "released"}, version=9, seq=0)], ids=str)
def test_an_answer_that_is_no_frame_of_ours_fails_what_is_under_way(puppet, client, junk):
    where = endpoint("127.0.0.1", puppet.port)
    tokens = {client.send(where, m.Release(()), PATIENCE_S) for _ in range(3)}
    peer, _, _ = puppet.take(client)
    puppet.socket.send_multipart([peer, junk])
    outcomes = collect(client, 3)
    assert set(outcomes) == tokens and all(isinstance(outcome, ProtocolError) for outcome in outcomes.values())


def test_a_server_of_another_version_is_told_apart(puppet, client):
    token = client.send(endpoint("127.0.0.1", puppet.port), m.Release(()), PATIENCE_S)
    peer, seq, _ = puppet.take(client)
    puppet.socket.send_multipart([peer, frame({"type": "failure"}, version=9, seq=seq)])
    expected = f"protocol version: 9 there, {m.MIN_VERSION} to {m.PROTOCOL_VERSION} here"
    assert expected in str(collect(client, 1)[token])


def test_a_request_that_times_out_takes_the_others_to_a_new_socket(puppet):
    now = 0.0
    client = SideChannelClient(clock=lambda: now)
    try:
        where = endpoint("127.0.0.1", puppet.port)
        patient = client.send(where, m.Renew(()), 10.0)
        hasty = client.send(where, m.Release(()), 5.0)
        (old, *first), (_, *second) = puppet.take(client), puppet.take(client)
        assert first == [patient, m.Renew(())] and second == [hasty, m.Release(())]
        now = 4.9
        assert client.receive() == []
        now = 5.0
        ((token, outcome),) = client.receive()
        assert token == hasty and isinstance(outcome, DeadlineExceeded) and "5 s" in str(outcome)
        new, *again = puppet.take(client)
        assert again == first and new != old
        puppet.socket.send_multipart([new, m.encode(patient, m.Renewed(()))])
        arrived: list[object] = []
        wait_for(lambda: bool(arrived.extend(client.receive()) or arrived))
        assert arrived == [(patient, m.Renewed(()))]
    finally:
        client.close()


def test_a_server_that_is_not_there_is_told_at_once_and_found_when_it_comes(client):
    port = free_port()
    tokens = [client.send(endpoint("127.0.0.1", port), m.GetManifests(ENGINE), 3600.0) for _ in range(3)]
    assert {str(outcome) for outcome in collect(client, 3).values()} == {"connection refused"}
    tokens = [client.send(endpoint("127.0.0.1", port), m.GetManifests(ENGINE), 3600.0) for _ in range(3)]
    outcomes = collect(client, 3)  # after a pause, so that nobody asks without one
    assert set(outcomes) == set(tokens) and all(isinstance(outcome, Unreachable) for outcome in outcomes.values())
    server = SideChannelServer("127.0.0.1", port, ENGINE, INCARNATION)
    try:
        server.set_manifests([b"rank 0"])
        assert_serves(client, server)
        assert server.counts() == {"GetManifests": 1}, "a request that had failed was sent after all"
    finally:
        server.close()


def test_sockets_that_nobody_uses_are_closed(server):
    now = 0.0
    client = SideChannelClient(clock=lambda: now, idle_s=60.0)
    try:
        client.send(address(server), m.GetManifests(ENGINE), 1e6)
        wait_for(lambda: bool(client.receive()))
        assert len(client.sockets()) == 2 and client.next_deadline() == 60.0
        now = 59.0
        assert client.receive() == [] and len(client.sockets()) == 2
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
        done = m.ReadDone(LeaseRef("a", b"n" * 16), 0, 1, b"a" * 16)
        for _ in range(1024):
            client.send(where, done, PATIENCE_S)
        with pytest.raises(Busy, match="1024 requests are under way"):
            client.send(where, done, PATIENCE_S)
        # Else a peer to which much is asked could not be looked at, and what is held for nothing not given back.
        for message in (m.GetManifests(ENGINE), m.Release(()), m.Renew(())):
            client.send(where, message, PATIENCE_S)


def answer(puppet: Puppet, client: SideChannelClient) -> None:
    peer, seq, _ = puppet.take(client)
    puppet.socket.send_multipart([peer, m.encode(seq, m.Released())])


def test_servers_that_never_answer_are_few_at_a_time_and_displace_nobody_who_does(puppet, client, monkeypatch):
    monkeypatch.setattr("vllm_pd_connector.sidechannel.client.MAX_SERVERS", 3)
    monkeypatch.setattr("vllm_pd_connector.sidechannel.client.NEW_S", 0.0)
    known = endpoint("127.0.0.1", puppet.port)
    token = client.send(known, m.Release(()), PATIENCE_S)
    answer(puppet, client)
    assert collect(client, 1) == {token: m.Released()}
    with socket.create_server(("", 0)) as silent:  # dead addresses, as many as one likes
        dead = [endpoint(f"127.0.0.{host}", silent.getsockname()[1]) for host in range(2, 9)]
        tokens = [client.send(one, m.Release(()), PATIENCE_S) for one in dead]
        late = collect(client, 5)
        assert list(late) == tokens[:5] and all(isinstance(outcome, Unreachable) for outcome in late.values())
        renewal = client.send(known, m.Release(()), PATIENCE_S)  # it was not asked for longest
        answer(puppet, client)
        assert collect(client, 1) == {renewal: m.Released()}
        assert set(client._links) == {known, *dead[-2:]}


def test_servers_that_are_asked_at_once_do_not_push_out_each_other_while_others_owe_nothing(
    puppet, client, monkeypatch
):
    monkeypatch.setattr("vllm_pd_connector.sidechannel.client.MAX_SERVERS", 2)
    monkeypatch.setattr("vllm_pd_connector.sidechannel.client.NEW_S", 3600.0)
    known = endpoint("127.0.0.1", puppet.port)
    client.send(known, m.Release(()), PATIENCE_S)
    answer(puppet, client)
    collect(client, 1)
    with socket.create_server(("", 0)) as silent:
        new = [endpoint(f"127.0.0.{host}", silent.getsockname()[1]) for host in (2, 3)]
        for one in new:
            client.send(one, m.Release(()), PATIENCE_S)
        assert set(client._links) == set(new), "the known one is dialled anew when it is asked again"
        renewal = client.send(known, m.Release(()), PATIENCE_S)
        answer(puppet, client)
        assert renewal in collect(client, 2)
        assert set(client._links) == {known, new[1]}


def test_servers_that_answer_and_owe_answers_displace_nobody(puppet, client, monkeypatch):
    monkeypatch.setattr("vllm_pd_connector.sidechannel.client.MAX_SERVERS", 1)
    known = endpoint("127.0.0.1", puppet.port)
    client.send(known, m.Release(()), PATIENCE_S)
    answer(puppet, client)
    collect(client, 1)
    client.send(known, m.Release(()), PATIENCE_S)
    with pytest.raises(ProtocolError, match="1 other servers owe answers"):
        client.send(endpoint("127.0.0.1", 9), m.Release(()), PATIENCE_S)
    answer(puppet, client)
    collect(client, 1)
    client.send(endpoint("127.0.0.1", 9), m.Release(()), PATIENCE_S)
    assert set(client._links) == {endpoint("127.0.0.1", 9)}


def test_a_socket_that_cannot_be_had_is_an_error_of_those_who_need_it(client):
    client._context.set(zmq.MAX_SOCKETS, 4)  # a server's, two of its monitor, and zmq's own
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        token = client.send(endpoint("127.0.0.1", port), m.Release(()), 0.05)
        with pytest.raises(ProtocolError, match="limit of open files"):
            client.send(endpoint("127.0.0.2", port), m.Release(()), PATIENCE_S)
        assert isinstance(collect(client, 1)[token], DeadlineExceeded)


def test_who_waits_hears_at_once_that_a_server_ended(client):
    puppet = Puppet()
    token = client.send(endpoint("127.0.0.1", puppet.port), m.Release(()), 3600.0)
    puppet.take(client)
    puppet.context.destroy(linger=0)
    assert isinstance(collect(client, 1)[token], Unreachable)


def test_what_was_asked_of_a_server_that_was_restarted_is_asked_again(client):
    first = Puppet(free_port())
    token = client.send(endpoint("127.0.0.1", first.port), m.Release(()), 3600.0)
    wait_for(lambda: bool(client.receive() or first.socket.poll(0)))
    first.context.destroy(linger=0)
    second = Puppet(first.port)
    try:
        wait_for(lambda: not client.receive() and bool(second.socket.poll(0)))
        answer(second, client)
        assert collect(client, 1) == {token: m.Released()}
    finally:
        second.context.destroy(linger=0)


def test_closing_twice_is_closing_once():
    client = SideChannelClient()
    client.close()
    with socket.create_server(("127.0.0.1", 0)) as later:  # it has a number of what was closed
        client.close()
        assert later.getsockname()


# -- names ------------------------------------------------------------------------------------------------------------


def resolve(monkeypatch: pytest.MonkeyPatch, names: dict[str, Callable[[], list[str]]]) -> None:
    """Have names stand for addresses (IPv4), whatever the host's resolver says."""
    real = socket.getaddrinfo

    def known(host: str, port: int, *args: Any, **kwargs: Any) -> list[Any]:
        if host not in names or kwargs.get("flags"):
            return real(host, port, *args, **kwargs)
        return [entry for address in names[host]() for entry in real(address, port, type=socket.SOCK_STREAM)]

    monkeypatch.setattr(socket, "getaddrinfo", known)


def unknown() -> list[str]:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_name_that_nobody_knows_is_told_at_once(client, monkeypatch):
    resolve(monkeypatch, {"prefill.example": unknown})
    token = client.send(endpoint("prefill.example", 9), m.Release(()), 3600.0)
    outcome = collect(client, 1)[token]
    assert isinstance(outcome, Unreachable)
    assert str(outcome) == "the name prefill.example is not known here: Name or service not known"


@pytest.mark.parametrize("host", ["a..b", ".", f"{'x' * 64}.example", "::1%a..b"])
def test_what_can_be_no_name_fails_who_asked_there_and_nobody_else(server, client, host):
    """Requests name servers, and one name must not end what a whole instance asks of others."""
    known = client.send(endpoint("127.0.0.1", server.port), m.GetManifests(ENGINE), PATIENCE_S)
    bad = client.send(endpoint(host, 9), m.Release(()), PATIENCE_S)
    outcomes = collect(client, 2)
    assert isinstance(outcomes[known], m.Manifests)
    assert isinstance(outcomes[bad], Unreachable) and f"the name {host} is not known here" in str(outcomes[bad])


@pytest.mark.parametrize("fails_at", ["__init__", "result"])
def test_a_defect_that_one_server_meets_is_told_to_those_who_asked_it(server, client, monkeypatch, caplog, fails_at):
    real = getattr(Dial, fails_at)

    def defect(dial: Dial, *args: Any) -> Any:
        if (args[0] if args else dial._host) == "127.0.0.9":
            raise RuntimeError("out of order")
        return real(dial, *args)

    monkeypatch.setattr(Dial, fails_at, defect)
    bad = client.send(endpoint("127.0.0.9", 9), m.Release(()), 3600.0)
    known = client.send(endpoint("127.0.0.1", server.port), m.GetManifests(ENGINE), PATIENCE_S)
    outcomes = collect(client, 2)
    assert isinstance(outcomes[known], m.Manifests)
    assert isinstance(outcomes[bad], ProtocolError) and "RuntimeError: out of order" in str(outcomes[bad])
    assert "out of order" in caplog.text, "a defect leaves its trace"
    assert_serves(client, server)


def test_every_address_of_a_name_is_tried(server, client, monkeypatch):
    resolve(monkeypatch, {"prefill.example": lambda: ["127.0.0.2", "127.0.0.3", "127.0.0.1"]})
    token = client.send(endpoint("prefill.example", server.port), m.GetManifests(ENGINE), 3600.0)
    assert isinstance(collect(client, 1)[token], m.Manifests)


def test_each_address_that_nobody_listens_at_is_named(client, monkeypatch):
    resolve(monkeypatch, {"prefill.example": lambda: ["127.0.0.2", "127.0.0.3"]})
    token = client.send(endpoint("prefill.example", free_port()), m.GetManifests(ENGINE), 3600.0)
    assert str(collect(client, 1)[token]) == "127.0.0.2: connection refused; 127.0.0.3: connection refused"


def test_a_name_that_is_not_resolved_holds_nobody_else(server, client, monkeypatch):
    told = threading.Event()

    def slow() -> list[str]:
        assert told.wait(PATIENCE_S)
        return ["127.0.0.1"]

    resolve(monkeypatch, {"slow.example": slow})
    late = client.send(endpoint("slow.example", server.port), m.GetManifests(ENGINE), 3600.0)
    hasty = client.send(endpoint("slow.example", server.port), m.GetManifests(ENGINE), 0.05)
    assert "no connection within 0.05 s" in str(collect(client, 1)[hasty])
    assert_serves(client, server)
    told.set()
    assert isinstance(collect(client, 1)[late], m.Manifests)


def test_names_that_are_looked_up_are_bounded(client, monkeypatch):
    monkeypatch.setattr("vllm_pd_connector.sidechannel.net.dial._lookups", threading.BoundedSemaphore(1))
    told = threading.Event()

    def slow() -> list[str]:
        assert told.wait(PATIENCE_S)
        return unknown()

    resolve(monkeypatch, {"one.example": slow, "another.example": slow})
    client.send(endpoint("one.example", 9), m.Release(()), PATIENCE_S)
    token = client.send(endpoint("another.example", 9), m.Release(()), PATIENCE_S)
    assert "other names are being looked up" in str(collect(client, 1)[token])
    told.set()
    collect(client, 1)


@pytest.mark.parametrize("lacking", ["Wake", "threading.Thread"])
def test_a_look_up_that_cannot_begin_takes_no_place_for_ever(server, client, monkeypatch, lacking):
    """No descriptor or no thread is left: names are looked up again when there are some."""
    monkeypatch.setattr("vllm_pd_connector.sidechannel.net.dial._lookups", threading.BoundedSemaphore(1))
    resolve(monkeypatch, {"prefill.example": lambda: ["127.0.0.1"]})
    assert_serves(client, server)
    with monkeypatch.context() as none_left:
        none_left.setattr(f"vllm_pd_connector.sidechannel.net.dial.{lacking}", lack)
        files = []
        for _ in range(2):
            token = client.send(endpoint("prefill.example", server.port), m.GetManifests(ENGINE), PATIENCE_S)
            assert "none is left" in str(collect(client, 1)[token])
            files.append(len(os.listdir("/proc/self/fd")))
        assert files[1] <= files[0]
    token = client.send(endpoint("prefill.example", server.port), m.GetManifests(ENGINE), PATIENCE_S)
    assert isinstance(collect(client, 1)[token], m.Manifests)


def lack(*_: object, **__: object) -> None:
    raise OSError("none is left")
