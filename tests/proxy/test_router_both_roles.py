"""The router among instances that each prefill and decode (kv_both): the legs of a request part."""

from __future__ import annotations

import pytest
from aiohttp import web

from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import DONE, HANDS_OVER, Instance, info
from vllm_pd_connector.proxy.choice import PIECE_TOKENS


async def both_roles(request: web.Request) -> web.StreamResponse:
    """An instance of role kv_both."""
    params = (await request.json())["kv_transfer_params"]
    return await (HANDS_OVER if params.get("do_remote_decode") else DONE)(request)


def legs_at(instance: Instance) -> list[str]:
    return ["prefill" if body["kv_transfer_params"].get("do_remote_decode") else "decode" for body in instance.asked]


@pytest.mark.parametrize("handoff", ["serial", "concurrent"])
@over_bench
async def test_the_legs_of_a_request_go_to_two_instances_where_there_are_two(bench: Bench, handoff: str) -> None:
    """An instance that gets both loads nothing, so that its partner is idle and the prompt perhaps computed twice."""
    both = [await bench.instance(both_roles, info(role="kv_both", engine_id=f"b-{number}")) for number in range(2)]
    await bench.route(instances=[one.url for one in both], handoff=handoff)
    for number in range(1, 5):
        assert (await bench.ask())[:2] == (200, {"choices": [{"text": "abc"}]})
        legs = [legs_at(one) for one in both]
        assert [len(at) for at in legs] == [number, number]
        assert {at[-1] for at in legs} == {"prefill", "decode"}


@pytest.mark.parametrize("handoff", ["serial", "concurrent"])
@over_bench
async def test_the_legs_part_also_where_one_instance_is_known_for_the_prompt_in_both_roles(
    bench: Bench, handoff: str
) -> None:
    prompt = {"prompt": list(range(PIECE_TOKENS))}
    both = [await bench.instance(both_roles, info(role="kv_both", engine_id=f"b-{number}")) for number in range(2)]
    both[1].health = 503
    await bench.route(instances=[one.url for one in both], handoff=handoff)
    await bench.ask(prompt)
    assert len(both[0].asked) == 2
    both[1].health = 200
    await bench.check()
    await bench.ask(prompt)
    assert legs_at(both[0])[2:] == ["prefill"] and legs_at(both[1]) == ["decode"]


@pytest.mark.parametrize("handoff", ["serial", "concurrent"])
@over_bench
async def test_both_legs_go_to_one_instance_where_there_is_no_other(bench: Bench, handoff: str) -> None:
    alone, gone = [await bench.instance(both_roles, info(role="kv_both", engine_id=f"b-{n}")) for n in range(2)]
    await bench.route(instances=[alone.url, gone.url], handoff=handoff)
    await gone.server.close()
    for _ in range(2):
        assert (await bench.ask())[:2] == (200, {"choices": [{"text": "abc"}]})
    assert sorted(legs_at(alone)) == ["decode"] * 2 + ["prefill"] * 2
