"""Leases and pushes of one prefill instance, as its side channel brings them together."""

from __future__ import annotations

import contextlib

from tests.support.worker.decode_instance import until
from tests.support.worker.writer import SOURCE
from vllm_pd_connector.protocol.lease import End, Freed
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.protocol.wire import push_messages as pm
from vllm_pd_connector.protocol.wire.fields import Reading
from vllm_pd_connector.sidechannel.client import Outcome, SideChannelClient
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.sidechannel.server import SideChannelServer

NONCE, TOKEN = b"n" * 16, b"t" * 16
HOME = pm.InstanceAddress("decode-1", "cd" * 16, "127.0.0.1", 5600)


def into(attempt: bytes, reading: bytes) -> pm.PushInto:
    ref = pm.PrefillRef("p-a", NONCE)
    return pm.PushInto(ref, HOME, 0, 0, 0, 0, 1, attempt, SOURCE, 0, 10, "0" * 16, reading=reading)


def test_a_second_request_of_the_same_parameters_ends_nothing_that_is_written_for_the_first() -> None:
    """It is refused, and gives back what it came for, before the first one has renewed its lease."""
    server, outcomes = SideChannelServer("127.0.0.1", 0, "p-0", "ab" * 16), dict[int, Outcome]()
    with contextlib.closing(server), contextlib.closing(SideChannelClient()) as client:
        address = endpoint("127.0.0.1", server.port)

        def answer(token: int) -> Outcome:
            until(lambda: bool(outcomes.update(client.receive())) or token in outcomes, "the answer")
            return outcomes[token]

        server.pushes.enable([TOKEN], 60.0)
        server.pushes.started("p-a", "a", 10, "0" * 16)
        server.hold("p-a", NONCE, 60.0, SOURCE)
        server.pushes.finished("p-a", NONCE, SOURCE, 0)
        first = client.send(address, into(b"a" * 16, b"1" * 16), 60.0)
        refused = answer(client.send(address, into(b"b" * 16, b"2" * 16), 60.0))
        assert isinstance(refused, pm.Pushed) and "registered already" in refused.reason
        assert answer(client.send(address, m.Release((Reading("p-a", NONCE, b"2" * 16),)), 60.0)) == m.Released()
        assert not server.take_freed()
        client.send(address, pm.PushEnded(TOKEN, 0, b"a" * 16, True, "", True), 60.0)
        done = answer(first)
        assert isinstance(done, pm.Pushed) and done.state is pm.PushState.DONE
        freed: list[Freed] = []
        until(lambda: bool(freed.extend(server.take_freed()) or freed), "the lease to end")
        assert freed == [Freed("p-a", End.READ)]
