"""A message of more parts than any of ours has: little of it is kept, and who sends others is understood."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from tests.support.sidechannel.ends import wait_for
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.net.sockets import endpoint, take
from vllm_pd_connector.sidechannel.server import SideChannelServer

MANY = [b""] * 10_000


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as here, context.socket(zmq.PAIR) as there:
        here.bind("inproc://parts")
        there.connect("inproc://parts")
        there.send_multipart(MANY)
        there.send(b"next")
        yield here, there


def test_a_socket_that_others_use_is_drained(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    here, _ = pair
    assert len(take(here, drain=True)) == 3
    assert [part.bytes for part in take(here, drain=True)] == [b"next"]


def test_another_is_given_up_at_the_first_part_too_many(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    here, _ = pair
    with pytest.raises(ProtocolError, match="message parts: more than 3 there"):
        take(here)


def test_a_client_fails_what_it_asked_there_and_asks_anew(client: SideChannelClient) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as puppet:
        address = endpoint("127.0.0.1", puppet.bind_to_random_port("tcp://127.0.0.1"))
        outcomes = {}

        def come(token: int) -> bool:
            outcomes.update(client.receive())
            return token in outcomes

        def asked() -> bytes:
            wait_for(lambda: bool(outcomes.update(client.receive())) or bool(puppet.poll(0)))
            return puppet.recv_multipart()[0]

        first = client.send(address, m.Release(()), 60.0)
        puppet.send_multipart([asked(), *MANY])
        wait_for(lambda: come(first))
        assert isinstance(outcomes[first], ProtocolError) and "message parts" in str(outcomes[first])
        second = client.send(address, m.Release(()), 60.0)
        puppet.send_multipart([asked(), m.encode(second, m.Released())])
        wait_for(lambda: come(second))
        assert outcomes[second] == m.Released()


def test_a_server_answers_others_behind_one(server: SideChannelServer, client: SideChannelClient) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(endpoint("127.0.0.1", server.port))
        stranger.send_multipart(MANY)
        assert stranger.poll(30_000)
        assert b"message parts: 2 or more there" in stranger.recv()
        stranger.close(0)
    outcomes = {}
    token = client.send(endpoint("127.0.0.1", server.port), m.Release(()), 60.0)
    wait_for(lambda: bool(outcomes.update(client.receive())) or token in outcomes)
    assert outcomes[token] == m.Released()
