"""Requests go where instances announce to hold their beginning; who announces nothing is not used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.caches import FULL, batch, removed, stored
from tests.support.proxy.publisher import Publisher
from tests.support.proxy.stand_ins import DONE, HANDS_OVER, Instance, info
from vllm_pd_connector.instance_info import EngineInfo
from vllm_pd_connector.proxy.fleet import GONE_FAILURES
from vllm_pd_connector.proxy.instance import InstanceRole

HELD = [1, 2, 3, 4]
OF_A = [batch(stored([b"a", b"b"], None, HELD, 2, **FULL))]


def says(publisher: Publisher, **changes: object) -> EngineInfo:
    """What a prefill instance that publishes there says: the port alone."""
    endpoints = (f"tcp://*:{publisher.events.rpartition(':')[2]}", f"tcp://*:{publisher.replay.rpartition(':')[2]}")
    return info(mode="pull", kv_events=endpoints[0], kv_events_replay=endpoints[1], **changes)


@asynccontextmanager
async def publishing(count: int) -> AsyncIterator[list[Publisher]]:
    publishers = [Publisher() for _ in range(count)]
    try:
        yield publishers
    finally:
        for publisher in publishers:
            await publisher.close()


async def until_told(bench: Bench, text: str) -> None:
    while text not in (await bench.get("/metrics"))[1]:
        await asyncio.sleep(0.01)


def known(instance: Instance, count: int) -> str:
    return f'vllm_pd_proxy_known_blocks{{instance="{instance.url}"}} {count}.0'


@over_bench
async def test_a_request_goes_where_its_beginning_is_held_and_elsewhere_when_it_is_gone(bench: Bench) -> None:
    async with publishing(3) as publishers:
        first, second = [await bench.instance(HANDS_OVER, says(p)) for p in publishers[:2]]
        decode = await bench.instance(DONE, says(publishers[2], role="kv_consumer"))
        publishers[1].log += OF_A
        await bench.route([first.url, second.url], [decode.url], policy="kv-events")
        await until_told(bench, known(second, 2))
        for _ in range(3):
            assert (await bench.ask({"prompt": [*HELD, 9]}))[0] == 200
        assert (len(first.asked), len(second.asked)) == (0, 3)
        assert 'affinity_choices_total{role="prefill"} 3.0' in (await bench.get("/metrics"))[1]
        await publishers[1].publish(batch(removed([b"a", b"b"], group_idx=0)))
        await publishers[0].publish(OF_A[0])
        await until_told(bench, known(second, 0))
        await until_told(bench, known(first, 2))
        await bench.ask({"prompt": [*HELD, 9]})
        assert (len(first.asked), len(second.asked)) == (1, 3)


@over_bench
async def test_a_text_goes_where_one_like_it_was_sent(bench: Bench) -> None:
    async with publishing(3) as publishers:
        first, second = [await bench.instance(HANDS_OVER, says(p)) for p in publishers[:2]]
        decode = await bench.instance(DONE, says(publishers[2], role="kv_consumer"))
        publishers[1].log += OF_A
        await bench.route([first.url, second.url], [decode.url], policy="kv-events")
        await until_told(bench, known(second, 2))
        for _ in range(3):
            await bench.ask({"prompt": "x" * 300})
        assert sorted((len(first.asked), len(second.asked))) == [0, 3]


@over_bench
async def test_instances_whose_caches_cannot_be_known_are_not_used_and_why_is_told(bench: Bench) -> None:
    async with publishing(1) as [publisher]:
        silent = await bench.instance(HANDS_OVER, info(mode="pull"))
        several = await bench.instance(HANDS_OVER, says(publisher), engines=2)
        await bench.route([silent.url, several.url], [], policy="kv-events")
        why = bench.router.fleet.reasons(InstanceRole.PREFILL)
        assert f"{silent.url}: wrong, it announces no KV-cache events" in why
        assert f"{several.url}: wrong, it has 2 data-parallel engines" in why


@over_bench
async def test_an_operator_says_where_an_instance_of_another_connector_publishes(bench: Bench) -> None:
    async with publishing(1) as [publisher]:
        instance = await bench.instance(HANDS_OVER)
        publisher.log += OF_A
        where = {instance.url: (publisher.events, publisher.replay)}
        await bench.route([instance.url], [], policy="kv-events", kv_events=where)
        await until_told(bench, known(instance, 2))


@over_bench
async def test_nothing_is_known_any_more_of_an_instance_that_was_away_for_long(bench: Bench) -> None:
    """Its machine may be lost: then nobody says that nothing listens there, and it never comes back."""
    async with publishing(1) as [publisher]:
        instance = await bench.instance(HANDS_OVER, says(publisher))
        publisher.log += OF_A
        await bench.route([instance.url], [], policy="kv-events")
        await until_told(bench, known(instance, 2))
        instance.health = 503
        for _ in range(GONE_FAILURES):
            assert known(instance, 2) in (await bench.get("/metrics"))[1]
            await bench.check()
        assert "known_blocks{" not in (await bench.get("/metrics"))[1]
        instance.health = 200
        await bench.check()
        await until_told(bench, known(instance, 2))


@over_bench
async def test_nothing_is_known_any_more_of_an_instance_that_is_another_process_or_removed(bench: Bench) -> None:
    async with publishing(1) as [publisher]:
        instance = await bench.instance(HANDS_OVER, says(publisher))
        publisher.log += OF_A
        await bench.route([instance.url], [], policy="kv-events", facts_interval=0.0)
        await until_told(bench, known(instance, 2))
        instance.says = says(publisher, engine_id="another")
        publisher.log.clear()
        await bench.check()
        await publisher.publish(batch(removed([b"a"], group_idx=0)))
        await until_told(bench, known(instance, 0))
        bench.router.fleet.remove(instance.url)
        assert "known_blocks{" not in (await bench.get("/metrics"))[1]
