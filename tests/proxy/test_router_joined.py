"""Instances that were added while the router ran and are never there."""

from __future__ import annotations

import time

import pytest

from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import DONE, HANDS_OVER
from vllm_pd_connector.proxy.fleet import LOADS_S, MAX_REASONS, Fleet
from vllm_pd_connector.proxy.instance import InstanceRole, InstanceState
from vllm_pd_connector.proxy.metrics import ProxyMetrics

NOWHERE = "http://127.0.0.1:9"


def age(fleet: Fleet, url: str, seconds: float) -> None:
    """It was added so long ago."""
    fleet._instances[url].added_at = time.monotonic() - seconds


@over_bench
async def test_one_that_ended_while_it_loaded_is_removed_in_the_end(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, _ = await bench.pair()
    fleet = bench.router.fleet
    fleet.add(NOWHERE, None, joined=True)
    fleet.add("http://127.0.0.1:11", None)  # of the router's own list
    for url in (NOWHERE, "http://127.0.0.1:11"):
        age(fleet, url, LOADS_S - 60.0)
    for _ in range(2):
        await bench.check()
    assert NOWHERE in fleet._instances, "it may be loading"
    for url in (NOWHERE, "http://127.0.0.1:11"):
        age(fleet, url, LOADS_S + 60.0)
    for _ in range(2):
        await bench.check()
    assert NOWHERE not in fleet._instances and "http://127.0.0.1:11" in fleet._instances
    assert NOWHERE not in (await bench.get("/metrics"))[1]
    assert f"{NOWHERE}: no good check since it was added" in caplog.text
    assert prefill.url in fleet._instances


@pytest.mark.parametrize("was", ["new", "up", "down", "lost", "leaving"])
@over_bench
async def test_one_that_is_added_again_has_its_time_again(bench: Bench, was: str) -> None:
    """As a pod that begins again under its address: it loads until long after its router would have removed it."""
    await bench.pair()
    fleet = bench.router.fleet
    instance = fleet.add(NOWHERE, None, joined=True)
    for _ in range(2 if was in ("down", "lost") else 0):
        await bench.check()
    age(fleet, NOWHERE, LOADS_S + 60.0)
    if was in ("up", "lost"):  # it has been there
        instance.seen_at = instance.added_at
    if was == "up":  # and the router has not noticed yet that it is gone
        instance.state = InstanceState.UP
    if was == "leaving":
        instance.in_flight = 1  # else it would be gone at once
        fleet.remove(NOWHERE)
    assert fleet.add(NOWHERE, None, joined=True) is instance
    for _ in range(2):
        await bench.check()
    assert NOWHERE in fleet._instances
    age(fleet, NOWHERE, LOADS_S + 60.0)
    instance.in_flight = 0
    await bench.check()
    assert NOWHERE not in fleet._instances


@over_bench
async def test_nobody_is_removed_while_nobody_passes_a_check(bench: Bench) -> None:
    """It may be the router that is cut off."""
    prefill = await bench.instance(HANDS_OVER)
    await bench.route([prefill.url], [])
    prefill.health = 503
    bench.router.fleet.add(NOWHERE, None, joined=True)
    age(bench.router.fleet, NOWHERE, LOADS_S + 60.0)
    bench.router.fleet._instances[prefill.url].seen_at -= 120.0
    for _ in range(2):
        await bench.check()
    assert NOWHERE in bench.router.fleet._instances


@pytest.mark.parametrize(("drop_after", "removed"), [(60.0, True), (2 * LOADS_S, False)])
def test_a_longer_time_is_the_operators_and_a_shorter_one_is_not(drop_after: float, removed: bool) -> None:
    fleet = Fleet(ProxyMetrics(), check_interval=1.0, facts_interval=1.0, slack=0, drop_after=drop_after)
    loading = fleet.add(NOWHERE, None, joined=True)
    other = fleet.add("http://127.0.0.1:11", None)
    other.seen_at = loading.added_at + 61.0
    assert not fleet._is_lost(loading)
    other.seen_at = loading.added_at + LOADS_S + 1.0
    assert fleet._is_lost(loading) is removed


@over_bench
async def test_a_refusal_names_few_of_many_and_those_that_were_there_first(bench: Bench) -> None:
    prefill, decode = [await bench.instance(handler) for handler in (HANDS_OVER, DONE)]
    await bench.route([prefill.url], [])
    for number in range(30):
        bench.router.fleet.add(f"http://127.0.0.1:{number + 9}", InstanceRole.DECODE, joined=True)
    bench.router.fleet.add(decode.url, InstanceRole.DECODE)
    await bench.check()
    decode.health = 503
    for _ in range(2):
        await bench.check()
    status, *answer = await bench.ask()
    assert status == 503
    text = str(answer)
    assert text.count("http://") == MAX_REASONS, "the prefill instance, which says no role, is one of them"
    assert f"and {32 - MAX_REASONS} more" in text and decode.url in text
