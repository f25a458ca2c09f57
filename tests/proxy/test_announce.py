"""What a router's registry is told, and of whom."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import zmq
from router_stand_ins import Instance, answers, info

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.proxy.announce import announce, ask, registration


@pytest.mark.parametrize(("role", "letter"), [("kv_producer", "P"), ("kv_consumer", "D")])
def test_a_message_says_role_and_addresses(role: str, letter: str) -> None:
    message = msgspec.msgpack.decode(registration("http://10.0.0.7:8100", info(role=role)))
    assert message == {"type": letter, "http_address": "10.0.0.7:8100", "zmq_address": "h:5600"}


def test_an_instance_of_both_roles_cannot_be_registered() -> None:
    with pytest.raises(ProtocolError, match="kv_both"):
        registration("http://h:1", info(role="kv_both"))


def test_only_healthy_instances_that_say_their_role_are_registered() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    registry = context.socket(zmq.ROUTER)
    port = registry.bind_to_random_port("tcp://127.0.0.1")

    async def main() -> None:
        well, sick, silent = Instance(answers({}), info()), Instance(answers({}), info()), Instance(answers({}))
        sick.health = 503
        for instance in (well, sick, silent):
            await instance.server.start_server()
        urls = [instance.url for instance in (sick, silent, well)]
        await asyncio.to_thread(announce, f"127.0.0.1:{port}", urls, 1)
        assert registry.poll(10_000)
        _, message = registry.recv_multipart()
        assert msgspec.msgpack.decode(message)["http_address"] == well.url.removeprefix("http://")
        assert not registry.poll(0)
        for url in (sick.url, silent.url):
            with pytest.raises(ProtocolError, match=url):
                await asyncio.to_thread(ask, url)
        for instance in (well, sick, silent):
            await instance.server.close()

    try:
        asyncio.run(main())
    finally:
        registry.close()
        context.term()
