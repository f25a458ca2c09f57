"""The router hears what instances publish over real sockets: late, with losses, from another life of an instance."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tests.support.ports import probes_due
from tests.support.proxy.caches import FULL, batch, removed, stored
from tests.support.proxy.publisher import Publisher
from tests.support.proxy.stand_ins import LIMIT
from vllm_pd_connector.errors import InvalidConfig
from vllm_pd_connector.proxy.kv_events.block_keys import PromptBlocks
from vllm_pd_connector.proxy.kv_events.known_prefixes import Announcements, KnownPrefixes, Loss
from vllm_pd_connector.proxy.kv_events.subscriber import EventSource, Subscriptions, source_of

URL = "http://instance"
A, B = (batch(stored([name], None, [token, token], 2, **FULL)) for name, token in ((b"a", 1), (b"b", 2)))
A_GONE = batch(removed([b"a"], group_idx=0))


class Heard:
    """What came of a subscription."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.subscriptions = Subscriptions(KnownPrefixes(), lambda _url: self.changed.set())

    @property
    def known(self) -> Announcements:
        return self.subscriptions.known.of(URL)

    def holds(self, token: int) -> bool:
        return self.known.held.length(PromptBlocks([token, token], "m", ""), adapter=False) == 2

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


@asynccontextmanager
async def following(*log: bytes, replays: bool) -> AsyncIterator[tuple[Publisher, Heard]]:
    """A publisher that has published `log`, and who follows it."""
    publisher, heard = Publisher(log=list(log)), Heard()
    try:
        heard.subscriptions.follow(URL, EventSource(publisher.events, publisher.replay if replays else ""))
        await publisher.heard()
        yield publisher, heard
    finally:
        await heard.subscriptions.close()
        await publisher.close()


def within_limit(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    async def main() -> None:
        async with asyncio.timeout(3 * LIMIT):
            await test()

    def run() -> None:
        asyncio.run(main())

    run.__name__ = test.__name__
    return run


@within_limit
async def test_what_is_published_is_known_and_then_gone() -> None:
    async with following(replays=False) as (publisher, heard):
        await publisher.publish(A)
        await heard.until(lambda: heard.holds(1))
        await publisher.publish(A_GONE)
        await heard.until(lambda: not heard.holds(1))
        assert heard.known.losses == {}


@within_limit
async def test_a_router_that_comes_late_asks_for_what_was_before() -> None:
    async with following(A, replays=True) as (publisher, heard):
        await heard.until(lambda: heard.holds(1))
        assert publisher.replays == [0]


@within_limit
async def test_what_was_lost_is_asked_for() -> None:
    async with following(replays=True) as (publisher, heard):
        await publisher.publish(A)
        await heard.until(lambda: heard.holds(1))
        await publisher.publish(A_GONE, comes=False)
        await publisher.publish(B)
        await heard.until(lambda: heard.holds(2))
        assert not heard.holds(1) and heard.known.losses == {}
        assert publisher.replays[-1] == 1


@within_limit
async def test_without_a_replay_a_gap_makes_all_forgotten() -> None:
    async with following(replays=False) as (publisher, heard):
        await publisher.publish(A)
        await publisher.publish(A_GONE, comes=False)
        await publisher.publish(B)
        await heard.until(lambda: heard.holds(2))
        assert not heard.holds(1) and heard.known.losses == {Loss.GAP: 1}


@within_limit
async def test_an_instance_that_was_started_anew_is_heard_again_and_known_by_what_it_says_then() -> None:
    async with following(replays=True) as (publisher, heard):
        await publisher.publish(A)
        await publisher.publish(A)
        await heard.until(lambda: heard.known.due == 2)
        await publisher.close()
        again = Publisher(publisher.events, publisher.replay)
        try:
            await again.heard()
            await again.publish(B)
            await heard.until(lambda: heard.holds(2))
        finally:
            await again.close()
        assert not heard.holds(1) and heard.known.losses == {Loss.RESTART: 1}


@within_limit
async def test_messages_of_another_form_are_passed_over() -> None:
    async with following(replays=False) as (publisher, heard):
        await publisher.send(b"12345678")
        await publisher.send(b"1234567", A)
        await publisher.send((-2).to_bytes(8, "big", signed=True), A)
        await publisher.publish(A)
        await heard.until(lambda: heard.holds(1))
        assert heard.known.losses == {}


@within_limit
async def test_an_instance_that_is_left_is_known_no_more() -> None:
    async with following(replays=False) as (publisher, heard):
        await publisher.publish(A)
        await heard.until(lambda: heard.holds(1))
        heard.subscriptions.leave(URL)
        assert heard.subscriptions.known.lengths(PromptBlocks([1, 1], "m", ""), [URL]) == {}


def test_an_endpoint_that_no_socket_takes_is_told_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        subscriptions = Subscriptions(KnownPrefixes())
        for failures in (1, 2):
            subscriptions.follow(URL, EventSource("tcp://no such host"))
            async with asyncio.timeout(LIMIT):
                while len(caplog.records) < failures:
                    await asyncio.sleep(0)
                while not subscriptions._tasks[URL][1].done():
                    await asyncio.sleep(0)
        await subscriptions.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert "is taken for one that holds nothing" in caplog.text


@pytest.mark.parametrize(
    ("url", "told", "connects"),
    [
        ("http://10.0.0.7:8100", "tcp://*:5557", "tcp://10.0.0.7:5557"),
        ("http://10.0.0.7:8100", "tcp://0.0.0.0:5557", "tcp://10.0.0.7:5557"),
        ("http://[fe80::1]:8100", "tcp://[::]:5557", "tcp://[fe80::1]:5557"),
        ("http://10.0.0.7:8100", "tcp://10.0.0.8:5557", "tcp://10.0.0.8:5557"),
        ("http://10.0.0.7:8100", "ipc:///run/events", "ipc:///run/events"),
    ],
)
def test_a_port_without_a_host_is_one_of_the_instance(url: str, told: str, connects: str) -> None:
    assert source_of(url, told, told) == EventSource(connects, connects)


@pytest.mark.parametrize(
    "told",
    ["", "x", "tcp://*", "tcp://*:", "tcp://*:x", "tcp://:5", "inproc://x", "tcp://*:0", "tcp://*:65536", "ipc://"],
)
def test_what_is_no_endpoint_is_refused(told: str) -> None:
    with pytest.raises(InvalidConfig, match=r"announces no KV-cache events|no endpoint|port"):
        source_of("http://h", told, "")


@within_limit
async def test_a_connection_over_which_nothing_comes_is_probed() -> None:
    async with following(replays=False) as (publisher, _):
        port = int(publisher.events.rpartition(":")[2])
        while not (due := probes_due(port)):  # until what was sent has been acknowledged
            await asyncio.sleep(0.01)
        assert all(0 < ticks <= 30 * os.sysconf("SC_CLK_TCK") for ticks in due)
