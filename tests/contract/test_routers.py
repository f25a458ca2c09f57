"""What other people's routers send, recorded, is what the connector understands.

`routers.json` holds, for each router, what it changes in a client's request for the prefill instance and what it tells
the decode instance: "answer" is the prefill instance's `kv_transfer_params` as they are, anything else is the router's
own. Each record names the file that it was read from or how it was seen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from handed_over import handed_over
from vllm_pd_connector.observability.instance import EngineInfo
from vllm_pd_connector.protocol.params import (
    Kind,
    kind_of,
    pairing_name,
    parse_remote_decode,
    parse_remote_prefill,
    parse_remote_push,
)
from vllm_pd_connector.proxy.handoff import decode_body, decode_body_beside, prefill_body

ROUTERS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("routers.json").read_text())
SERIAL = [name for name, router in ROUTERS.items() if router["order"] == "serial"]
CONCURRENT = [name for name, router in ROUTERS.items() if router["order"] == "concurrent"]
CLIENT = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 50, "min_tokens": 4, "stream": True, "stream_options": {}}


def answer() -> dict[str, Any]:
    """What a prefill instance answers, as it comes out of JSON."""
    return json.loads(json.dumps(handed_over()))


def first_leg(router: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """A client's body as a router sends it to the prefill instance."""
    change = router["prefill"]
    kept = {key: value for key, value in body.items() if key not in change["remove"]}
    present = {key: value for key, value in change["set_if_present"].items() if key in body}
    return {**kept, **present, **change["set"], "kv_transfer_params": change["kv_transfer_params"]}


@pytest.mark.parametrize("name", ROUTERS)
def test_the_first_leg_asks_for_a_cache_to_be_kept(name: str) -> None:
    leg = first_leg(ROUTERS[name], CLIENT)
    assert kind_of(leg["kv_transfer_params"]) is Kind.REMOTE_DECODE
    parse_remote_decode(leg["kv_transfer_params"])
    # One token, which a minimum of tokens above it would make vLLM refuse.
    assert leg["max_tokens"] == 1 and ("min_tokens" not in leg or leg["min_tokens"] <= 1 or name == "push demo proxy")


@pytest.mark.parametrize("name", SERIAL)
def test_a_forwarded_answer_is_read_as_it_was_written(name: str) -> None:
    assert ROUTERS[name]["decode"] == "answer"
    assert parse_remote_prefill(answer()) == parse_remote_prefill(answer() | {"remote_block_size": 16})
    assert parse_remote_prefill(answer()).remote_engine_id == "p-0"


@pytest.mark.parametrize("name", CONCURRENT)
def test_a_concurrent_routers_second_leg_asks_for_a_cache(name: str) -> None:
    assert kind_of(ROUTERS[name]["decode"]) is Kind.REMOTE_PREFILL


def test_the_legs_of_a_push_find_each_other() -> None:
    push = ROUTERS["push demo proxy"]
    parse_remote_push(push["decode"])
    request_id = push["decode"]["remote_request_id"]
    legs = (push["prefill"]["kv_transfer_params"], "1a2b3c4d"), (push["decode"], "5e6f7a8b")
    # vLLM puts random digits of its own behind the id that both legs carry.
    names = {pairing_name(params, f"cmpl-{request_id}-0-{digits}") for params, digits in legs}
    assert len(names) == 1


def test_this_projects_router_sends_what_the_others_send() -> None:
    serial, push = ROUTERS["toy_proxy"], ROUTERS["push demo proxy"]
    assert prefill_body(CLIENT)["kv_transfer_params"] == serial["prefill"]["kv_transfer_params"]
    assert decode_body(CLIENT, {"kv_transfer_params": answer()})["kv_transfer_params"] == answer()
    engine = EngineInfo("kv_producer", "push", "nixl", "p-0", "10.0.0.7", 5600, 1, 1, 1, 1)
    request_id = push["decode"]["remote_request_id"]
    second = decode_body_beside(CLIENT, engine, request_id)["kv_transfer_params"]
    assert {key: second[key] for key in push["decode"]} == push["decode"]
    assert set(second) - set(push["decode"]) == {"dcp_size", "transfer_id"}
    first = prefill_body(CLIENT, request_id)["kv_transfer_params"]
    parse_remote_decode(first)
    parse_remote_push(second)
    assert pairing_name(first, "cmpl-x-0-1a2b3c4d") == pairing_name(second, "cmpl-x-0-5e6f7a8b") == request_id
