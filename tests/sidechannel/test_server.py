"""The server over real sockets: what it answers, what it survives, and what it costs when nothing happens."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from tests.support.patience import PATIENCE_S
from tests.support.processor_time import seconds_of
from tests.support.push.asked import asked_for
from tests.support.sidechannel.ends import (
    ENGINE,
    INCARNATION,
    READING,
    REF,
    A,
    B,
    address,
    ask,
    assert_serves,
    collect,
    frame,
    wait_for,
)
from vllm_pd_connector.errors import InvalidConfig, ProtocolError
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.protocol.lease import End, Freed
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.protocol.wire import push_messages as pm
from vllm_pd_connector.protocol.wire.fields import MAX_LEASES, MAX_REQUEST_FRAME, LeaseRef, Reading
from vllm_pd_connector.sidechannel import unsent
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.sidechannel.server import SideChannelServer


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


def test_another_life_does_not_answer_for_what_the_last_one_was_asked(server, client):
    server.pushes.enable([b"t" * 16], 30.0)
    prefill, home = pm.PrefillRef("cmpl-1", None), pm.InstanceAddress("d", "d" * 32, "127.0.0.1", 1)
    for life, refused in (("a" * 32, True), (server._incarnation, False), ("", False)):
        message = pm.WithdrawPush(prefill, secrets.token_bytes(16), life)
        reply = ask(client, server, message)
        assert isinstance(reply, m.Failure if refused else pm.Pushed), "its word would end a quarantine"
        assert not refused or (reply.code is m.FailureCode.FOREIGN_ENGINE and life in reply.message)
    asked = pm.PushInto(prefill, home, 0, 0, 0, 0, 1, B, (), 0, 1, "0" * 16, incarnation="a" * 32)
    assert ask(client, server, asked).code is m.FailureCode.FOREIGN_ENGINE


def test_a_decode_instance_that_asks_one_in_mode_pull_to_write_is_told_what_to_set(server, client):
    home = pm.InstanceAddress("d", "d" * 32, "127.0.0.1", 1)
    asked = pm.PushInto(pm.PrefillRef("cmpl-1", None), home, 0, 0, 0, 0, 1, B, (), 0, 1, "0" * 16)
    reply = ask(client, server, asked)
    assert reply.state is pm.PushState.FAILED and reply.terminal, "nothing was begun that could still write"
    assert "mode: pull on the prefill instance" in reply.reason and "on this decode instance" in reply.reason
    assert "set mode push or auto there, or pull here" in reply.reason


def test_a_lease_is_renewed_read_confirmed_and_freed(server, client):
    server.hold("req", A, 60.0)
    assert ask(client, server, m.Renew((READING, Reading("other", A, B)))) == m.Renewed(("other",))
    for reader in (0, 1):
        assert server.take_freed() == []
        assert ask(client, server, m.ReadDone(REF, reader, 2, B)) == m.ReadVerdict(held=True, reason="")
    assert server.take_freed() == [Freed("req", End.READ)]


def test_no_reply_of_a_burst_is_lost(server, client):
    """A lost reply is asked for again only after its time-out, which stalls a receive for seconds."""
    server.hold("req", A, 60.0)
    for _ in range(40):
        tokens = {client.send(address(server), m.Renew((READING,)), PATIENCE_S) for _ in range(100)}
        outcomes = collect(client, len(tokens))
        assert set(outcomes.values()) == {m.Renewed(())}
    assert server.counts()["Renew"] == 4000, "a request was sent again"


def test_duplicates_and_replays_are_answered_alike_and_free_nothing_twice(server, client):
    server.hold("req", A, 60.0)
    verdicts = [ask(client, server, m.ReadDone(REF, 0, 1, B)) for _ in range(3)]
    assert all(verdict.held for verdict in verdicts)
    assert ask(client, server, m.Release((READING, READING))) == m.Released()
    assert server.take_freed() == [Freed("req", End.READ)] and server.take_freed() == []


def test_a_stale_nonce_neither_confirms_nor_releases(server, client):
    server.hold("req", B, 60.0)
    assert ask(client, server, m.Release((READING,))) == m.Released()
    verdict = ask(client, server, m.ReadDone(REF, 0, 1, A))
    assert not verdict.held and "nonce" in verdict.reason
    assert server.take_freed() == []


def test_a_read_after_the_lease_expired_is_not_vouched_for(server, client):
    server.hold("req", A, 0.05)
    wait_for(lambda: server.take_freed() == [Freed("req", End.UNCLAIMED)])
    verdict = ask(client, server, m.ReadDone(REF, 0, 1, A))
    assert not verdict.held and "expired" in verdict.reason


def test_a_sleeping_server_expires_leases_by_itself(server):
    server.hold("req", A, 0.05)
    wait_for(lambda: len(server._leases) == 0)
    assert server.take_freed() == [Freed("req", End.UNCLAIMED)]


def test_a_dropped_lease_comes_out_once(server, client):
    server.hold("req", A, 60.0)
    server.drop("req")
    assert server.take_freed() == [Freed("req", End.DROPPED)]
    assert not ask(client, server, m.ReadDone(REF, 0, 1, A)).held


def test_it_is_news_once_that_something_may_have_ended(server, client):
    now = [0.0]
    server._clock = server.pushes._clock = lambda: now[0]
    server.hold("req", A, 60.0)
    wait_for(lambda: not server.has_news())
    server.drop("req")
    assert server.has_news() and server.take_freed() == [Freed("req", End.DROPPED)]
    server.hold("req", A, 60.0)
    wait_for(lambda: not server.has_news())
    assert ask(client, server, m.ReadDone(REF, 0, 1, B)).held
    assert server.has_news() and server.take_freed() == [Freed("req", End.READ)]
    server.hold("req", A, 60.0)
    wait_for(lambda: not server.has_news())
    now[0] = 60.0
    server._wake.set()  # as when it has slept until then
    wait_for(server.has_news)
    assert server.take_freed() == [Freed("req", End.UNCLAIMED)]


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
    "nested without end": (
        struct.pack("!4sHQ", m.MAGIC, m.PROTOCOL_VERSION, 7) + b"\x91" * 60000,
        m.FailureCode.MALFORMED,
        7,
    ),
    "huge array": (
        struct.pack("!4sHQ", m.MAGIC, m.PROTOCOL_VERSION, 7) + b"\xdd\xff\xff\xff\xff",
        m.FailureCode.MALFORMED,
        7,
    ),
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


@pytest.mark.parametrize(
    "size",
    # Of the larger one, whoever watches the connections may be the first who is alarmed.
    [pytest.param(MAX_REQUEST_FRAME + 1, id="a byte"), pytest.param(10 << 20, id="megabytes")],
)
def test_a_message_above_the_limit_never_reaches_the_server(server, client, raw, size: int):
    with raw.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        raw.send(b"\xff" * size)
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


@pytest.mark.parametrize("reply", [None, m.FoundConversation(bytes(8 << 20))], ids=["manifests", "others"])
def test_a_client_that_takes_no_replies_cannot_make_the_server_hoard_them(server, client, monkeypatch, reply):
    server.set_manifests([bytes(8 << 20) if reply is None else b"rank 0"])
    describe = server._describe
    monkeypatch.setattr(server, "_describe", lambda engine_id: reply or describe(engine_id))
    monkeypatch.setattr(unsent, "MAX_PER_CLIENT", 2)
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
        monkeypatch.setattr(server, "_describe", describe)
        assert_serves(client, server)
        assert len(server._unsent._replies) <= 3
    finally:
        context.destroy(linger=0)


def test_an_answer_that_cannot_be_sent_is_a_failure_for_its_client_and_the_others_get_theirs(
    server, client, monkeypatch
):
    server.pushes.enable([A, B], 30.0)
    workers = [client.send(address(server), pm.AwaitCommands(t, n, 0), PATIENCE_S) for n, t in enumerate((A, B))]
    wait_for(lambda: server.counts().get("AwaitCommands") == 2)
    unlucky, encode = iter(workers[:1]), m.encode

    def encode_most(seq: int, message: m.Reply) -> bytes:
        if isinstance(message, pm.Commands) and seq == next(unlucky, 0):
            raise ProtocolError("too large")
        return encode(seq, message)

    monkeypatch.setattr(m, "encode", encode_most)
    blocks = (BlockTable(0, b"\1\0\0\0"),)
    home = pm.InstanceAddress("decode-0", INCARNATION, "127.0.0.1", 5600)
    assert server.pushes.started("req", "name", 16, "0" * 16)
    client.send(
        address(server), pm.PushInto(pm.PrefillRef("name", None), home, 0, 0, 0, 0, 1, A, blocks, 0, 16, "0" * 16), 60.0
    )
    wait_for(lambda: asked_for(server.pushes, "req"))
    server.pushes.progressed([("req", blocks, 16)], 1)
    outcomes = collect(client, 2)
    failure = outcomes[workers[0]]
    assert isinstance(failure, m.Failure) and failure.code is m.FailureCode.INTERNAL and "too large" in failure.message
    assert isinstance(outcomes[workers[1]], pm.Commands)


def test_a_server_remembers_no_large_answers_that_were_taken(server, client):
    server.pushes.enable([A], 30.0)
    blocks = (BlockTable(0, bytes(4 * 65536)),)
    home = pm.InstanceAddress("decode-0", INCARNATION, "127.0.0.1", 5600)
    tokens = 1 << 20
    into = pm.PushInto(pm.PrefillRef("name", None), home, 0, 0, 0, 0, 1, A, blocks, 0, tokens, "0" * 16)
    assert server.pushes.started("req", "name", tokens, "0" * 16)
    decode = SideChannelClient()  # of its own: it is told how far the push is whenever that takes long
    decode.send(address(server), into, 60.0)
    wait_for(lambda: asked_for(server.pushes, "req"))
    seen = 0

    def take_order() -> None:
        nonlocal seen
        server.pushes.progressed([("req", blocks, seen + 1)], seen + 1)
        orders = ask(client, server, pm.AwaitCommands(A, 0, seen))
        assert isinstance(orders, pm.Commands)
        assert [type(order) for order in orders.orders if not isinstance(order, pm.BeginCommand)] == [pm.WriteCommand]
        seen = orders.last

    for _ in range(30):
        take_order()
    wait_for(
        lambda: take_order() or len(server._unsent._replies) <= 2
    )  # zmq tells some time later that an answer is sent
    decode.close()


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
    threads = server._thread, threading.current_thread()
    used, began = seconds_of(*threads), time.monotonic()
    poller = zmq.Poller()
    for waited in client.sockets():
        poller.register(waited, zmq.POLLIN)
    assert poller.poll(1000) == []
    assert seconds_of(*threads) - used < 0.1 * (time.monotonic() - began)
