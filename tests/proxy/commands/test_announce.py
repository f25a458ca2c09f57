"""What a router's registry is told, and of whom."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from tests.support.proxy.stand_ins import Instance, answers, info
from vllm_pd_connector.cli import main
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.proxy.commands import announce as module
from vllm_pd_connector.proxy.commands.announce import announce, ask_instance, registration


@pytest.fixture
def registry() -> Iterator[zmq.Socket[bytes]]:
    """A router's end of the announcements."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.ROUTER) as taking:
        taking.bind("tcp://127.0.0.1:*")
        yield taking
    context.term()


def address_of(registry: zmq.Socket[bytes]) -> str:
    endpoint = registry.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode().removeprefix("tcp://")


def test_a_router_with_an_ipv6_address_hears_of_them() -> None:
    async def main(taking: zmq.Socket[bytes]) -> None:
        instance = Instance(answers({}), info())
        await instance.server.start_server()
        await asyncio.to_thread(announce, address_of(taking), [instance.url], 1)
        assert taking.poll(10_000)
        await instance.server.close()

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.ROUTER) as taking:
        taking.setsockopt(zmq.IPV6, 1)
        taking.bind("tcp://[::1]:*")
        asyncio.run(main(taking))
    context.term()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["router", "http://10.0.0.7:8100"], "'router' is not an address; give host:port"),
        (["router:x", "http://10.0.0.7:8100"], "'router:x' is not an address"),
        (["router:30001", "10.0.0.7:8100"], "'10.0.0.7:8100' is not a base URL; give http://host:port"),
        (["router:30001", "https://10.0.0.7:8100"], "'https://10.0.0.7:8100': vLLM's router takes host:port of plain"),
        (["router:30001", "http://10.0.0.7:8100/v1"], "'http://10.0.0.7:8100/v1': vLLM's router takes host:port of"),
        (["router:30001", "http://10.0.0.7"], "'http://10.0.0.7': vLLM's router takes host:port of plain HTTP alone"),
    ],
)
def test_an_address_that_is_none_is_told_and_one_that_a_message_would_cut(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["announce", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("role", "letter"), [("kv_producer", "P"), ("kv_consumer", "D")])
def test_a_message_says_role_and_addresses(role: str, letter: str) -> None:
    message = msgspec.msgpack.decode(registration("http://10.0.0.7:8100", info(role=role)))
    assert message == {"type": letter, "http_address": "10.0.0.7:8100", "zmq_address": "h:5600"}


def test_an_instance_of_both_roles_cannot_be_registered() -> None:
    with pytest.raises(ProtocolError, match="kv_both"):
        registration("http://h:1", info(role="kv_both"))


def test_only_healthy_instances_that_say_their_role_are_registered(registry: zmq.Socket[bytes]) -> None:
    async def main() -> None:
        well, sick, silent = Instance(answers({}), info()), Instance(answers({}), info()), Instance(answers({}))
        sick.health = 503
        for instance in (well, sick, silent):
            await instance.server.start_server()
        urls = [instance.url for instance in (sick, silent, well)]
        await asyncio.to_thread(announce, address_of(registry), urls, 1)
        assert registry.poll(10_000)
        _, message = registry.recv_multipart()
        assert msgspec.msgpack.decode(message)["http_address"] == well.url.removeprefix("http://")
        assert not registry.poll(0)
        for url in (sick.url, silent.url):
            with pytest.raises(ProtocolError, match=url):
                await asyncio.to_thread(ask_instance, url)
        for instance in (well, sick, silent):
            await instance.server.close()

    asyncio.run(main())


def test_an_instance_that_does_not_answer_holds_up_no_other(
    registry: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ASK_TIMEOUT", 60.0)
    monkeypatch.setattr(module, "INTERVAL", 0.1)
    silent = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]

    async def main() -> None:
        well = Instance(answers({}), info())
        await well.server.start_server()
        urls = [*(f"http://127.0.0.1:{one.getsockname()[1]}" for one in silent), well.url]
        announcing = asyncio.create_task(asyncio.to_thread(announce, address_of(registry), urls, 2))
        try:
            for _ in range(2):
                assert await asyncio.to_thread(registry.poll, 10_000)
                _, message = registry.recv_multipart()
                assert msgspec.msgpack.decode(message)["http_address"] == well.url.removeprefix("http://")
        finally:
            for one in silent:
                one.close()  # those who wait for an answer are reset
            await announcing
            await well.server.close()

    asyncio.run(main())


def test_who_has_no_time_to_answer_stays_for_a_while_and_who_refuses_does_not(
    registry: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy API server answers late, and its load would fall on the rest."""
    known, sent = module.Registration(), []

    async def main() -> None:
        busy = Instance(answers({}), info())
        await busy.server.start_server()
        assert await asyncio.to_thread(module._register, busy.url, sent.append, known) == "registered as kv_producer"
        monkeypatch.setattr(module, "ASK_TIMEOUT", 0.2)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            assert await asyncio.to_thread(module._register, url, sent.append, known) == "registered as kv_producer"
            assert len(sent) == 2 and sent[0] == sent[1]
            known.good_at -= module.PATIENCE
            assert "timed out" in await asyncio.to_thread(module._register, url, sent.append, known)
            assert "timed out" in await asyncio.to_thread(module._register, url, sent.append, module.Registration())
        known.good_at += module.PATIENCE
        assert "refused" in await asyncio.to_thread(module._register, url, sent.append, known)
        assert len(sent) == 2
        await busy.server.close()

    asyncio.run(main())


def test_an_answer_that_breaks_off_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer_half() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")

        answering = threading.Thread(target=answer_half)
        answering.start()
        with pytest.raises(ProtocolError, match="IncompleteRead"):
            ask_instance(f"http://127.0.0.1:{server.getsockname()[1]}")
        answering.join()
