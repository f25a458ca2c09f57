"""What tests of the side channel's two ends share."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import msgspec
import zmq

from tests.support.patience import PATIENCE_S
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.protocol.wire.fields import LeaseRef, Reading
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.sidechannel.server import SideChannelServer

ENGINE, INCARNATION = "engine-0", "ab" * 16
A, B = b"a" * 16, b"b" * 16
REF = LeaseRef("req", A)
READING = Reading("req", A, B)


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
        poller.poll(int(max(0.0, min(client.next_deadline() or limit, limit) - time.monotonic()) * 1000))
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
