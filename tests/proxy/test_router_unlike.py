"""Instances that do not go together though each is as it says: modes that are unlike, a role that nobody has."""

from __future__ import annotations

import pytest

from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import DONE, HANDS_OVER, info


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name.endswith("fleet") and one.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("prefill", "decode", "told"),
    [("pull", "push", True), ("pull", "pull", False), ("push", "pull", False), ("push", "push", False),
     ("auto", "push", False), ("pull", "auto", False)],
)  # fmt: skip
@over_bench
async def test_a_decode_instance_in_push_beside_a_prefill_instance_in_pull_is_told_once(
    bench: Bench, caplog: pytest.LogCaptureFixture, prefill: str, decode: str, told: bool
) -> None:
    says = info(mode=prefill), info(role="kv_consumer", mode=decode, engine_id="d-0")
    first, second = await bench.pair(says=says, facts_interval=1e-9)
    await bench.check()
    found = warned(caplog)
    assert len(found) == told
    for line in found:
        assert f"pull on prefill instance {first.url}" in line and f"push on decode instance {second.url}" in line


@over_bench
async def test_modes_that_were_mended_and_are_unlike_again_are_told_again(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    pull, push = info(mode="pull"), info(role="kv_consumer", engine_id="d-0")
    prefill, _ = await bench.pair(says=(pull, push), facts_interval=1e-9)
    for mode in ("push", "pull"):
        prefill.says = info(mode=mode)
        await bench.check()
    assert len(warned(caplog)) == 2


@pytest.mark.parametrize(
    ("role", "lacks", "start"),
    [("kv_producer", "decode", "kv_both or kv_consumer"), ("kv_consumer", "prefill", "kv_both or kv_producer")],
)
@over_bench
async def test_instances_of_one_role_alone_are_told_to_clients_and_once_in_the_log(
    bench: Bench, caplog: pytest.LogCaptureFixture, role: str, lacks: str, start: str
) -> None:
    instances = [await bench.instance(h, info(role=role, engine_id=f"e-{i}")) for i, h in enumerate((HANDS_OVER, DONE))]
    await bench.route(instances=[one.url for one in instances], facts_interval=1e-9)
    await bench.check()
    why = f"those that are there are {role}; start one with kv_role {start}"
    assert warned(caplog) == [f"no {lacks} instance: {why}"]
    status, answer, _ = await bench.ask()
    assert status == 503
    assert f"no {lacks} instance can be reached: there is none: {why}" in answer["error"]["message"]
    assert f"there is none: {why}" in (await bench.get("/health"))[1]


@over_bench
async def test_an_instance_that_may_do_both_and_was_added_for_one_role_is_told_so(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    both = await bench.instance(HANDS_OVER, info(role="kv_both"))
    await bench.route(prefill=[both.url], facts_interval=1e-9)
    await bench.check()
    [told] = warned(caplog)
    assert told.startswith(f"no decode instance: {both.url} is kv_both and was added as prefill alone; add it")


@over_bench
async def test_a_role_of_an_instance_that_is_not_known_yet_is_not_missed(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, late = await bench.instance(HANDS_OVER, info()), await bench.instance(DONE)
    late.health = 503
    await bench.route(instances=[prefill.url, late.url])
    assert not any("those that are there" in line for line in warned(caplog))
