"""What other people's routers send, recorded, is what the connector understands.

`routers.json` holds, for each router, what it changes in a client's request for the prefill instance and what it tells
the decode instance: "answer" is the prefill instance's `kv_transfer_params` as they are, anything else is the router's
own. `sets` names what it puts into the answer, `leaves` what it should have taken out of the first leg. `order` says
whether the second leg waits for the first. A router that first asks a prefill instance who it is has
the question and the answer under `bootstrap`. `learns` are fields that it remembers of an answer, for the next request.
Each record names the file that it was read from or how it was seen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from tests.support.handed_over import handed_over, kept
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.instance_info import EngineInfo
from vllm_pd_connector.protocol.params.answer import require_signature
from vllm_pd_connector.protocol.params.bootstrap import HostPort, encode_answer, parse_answer, parse_bootstrap_address
from vllm_pd_connector.protocol.params.conversation import is_named_alone, names_conversation, parse_conversation
from vllm_pd_connector.protocol.params.parse import (
    Kind,
    is_answer,
    kind_of,
    names_bootstrap,
    pairing_name,
    parse_remote_bootstrap,
    parse_remote_decode,
    parse_remote_prefill,
    parse_remote_push,
)
from vllm_pd_connector.routing.handoff import computes_prompt, decode_body, decode_body_beside, prefill_body

ROUTERS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("routers.json").read_text())
SERIAL = [name for name, router in ROUTERS.items() if router["order"] == "serial"]
FORWARDING = [name for name, router in ROUTERS.items() if router["decode"] == "answer"]
ASKING = [name for name, router in ROUTERS.items() if "bootstrap" in router]
NAMING = ["push demo proxy", "llm-d sidecar, nixlv2 in push mode"]
SECRET = b"s" * 32
CLIENT = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 50, "min_tokens": 4, "stream": True, "stream_options": {}}


def answer() -> dict[str, Any]:
    """What a prefill instance answers, signed, as it comes out of JSON."""
    return json.loads(json.dumps(handed_over(SECRET)))


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
    # One token, which a minimum of tokens above it would make vLLM refuse; some leave that to clients.
    left = ROUTERS[name].get("leaves", ["min_tokens"] if "demo" in name else [])
    assert leg["max_tokens"] == 1 and (leg.get("min_tokens", 0) <= 1) is ("min_tokens" not in left)


def second_leg(router: dict[str, Any], handed: dict[str, Any]) -> dict[str, Any]:
    """`kv_transfer_params` as a router sends them to the decode instance after the prefill instance's answer."""
    return handed if router["decode"] == "answer" else router["decode"]


def test_every_second_leg_is_of_one_of_the_known_forms() -> None:
    assert set(FORWARDING) | set(ASKING) | set(NAMING) == set(ROUTERS)
    assert not set(FORWARDING) & set(ASKING)


@pytest.mark.parametrize("name", SERIAL)
def test_a_first_leg_that_is_waited_for_is_answered_in_one_piece(name: str) -> None:
    leg = first_leg(ROUTERS[name], CLIENT)
    assert leg["stream"] is False and "stream_options" not in leg


@pytest.mark.parametrize("name", FORWARDING)
def test_a_forwarded_answer_is_read_as_it_was_written(name: str) -> None:
    router = ROUTERS[name]
    assert router["order"] == "serial"  # there is no answer before
    second = second_leg(router, answer())
    assert is_answer(second) and not names_bootstrap(second)
    told = parse_remote_prefill(second)
    require_signature(told, SECRET)
    assert told == parse_remote_prefill(handed_over(SECRET))
    assert told == parse_remote_prefill(second | {"remote_block_size": 16})
    assert told.remote_engine_id == "p-0"


REWRITING = [name for name, router in ROUTERS.items() if "sets" in router]


@pytest.mark.parametrize("name", REWRITING)
def test_a_router_may_say_where_the_prefill_instance_is(name: str) -> None:
    """It must be right: where the answer is signed, another host than the instance's own is refused."""
    assert ROUTERS[name]["sets"].keys() == {"remote_host"}
    handed = answer()
    same = parse_remote_prefill({**handed, "remote_host": handed["remote_host"]})
    require_signature(same, SECRET)
    other = parse_remote_prefill({**handed, "remote_host": "prefill.example"})
    assert other.lease == same.lease and other.peer != same.peer
    require_signature(other, None)
    with pytest.raises(ProtocolError, match="changed on the way"):
        require_signature(other, SECRET)


TALKING = [name for name, router in ROUTERS.items() if "next_turn" in router]


@pytest.mark.parametrize("name", TALKING)
def test_a_next_turn_is_read_as_decode_told_it(name: str) -> None:
    """What a decode instance has answered, with the flags of a prefill and a host of the router's."""
    answered = json.loads(json.dumps(kept()))
    sent = {**answered, **ROUTERS[name]["next_turn"]}
    assert kind_of(sent) is Kind.REMOTE_DECODE and names_conversation(sent) and not is_named_alone(sent)
    found, told = parse_conversation(sent), parse_conversation(answered)
    assert found.lease == told.lease and found.tables == told.tables
    assert found.remote_host == ROUTERS[name]["next_turn"]["remote_host"]


@pytest.mark.parametrize("name", TALKING)
def test_a_next_turn_of_the_in_tree_connector_s_is_refused_by_name(name: str) -> None:
    in_tree = {key: value for key, value in kept().items() if key != "pd_connector"} | ROUTERS[name]["next_turn"]
    assert names_conversation(in_tree)
    with pytest.raises(ProtocolError, match="does not run PDConnector"):
        parse_conversation(in_tree)


@pytest.mark.parametrize("name", sorted(set(ROUTERS) - set(TALKING)))
def test_who_knows_nothing_of_conversations_names_none(name: str) -> None:
    assert not names_conversation(ROUTERS[name]["prefill"]["kv_transfer_params"])


@pytest.mark.parametrize("name", ASKING)
def test_who_asked_for_the_prefill_instances_engine_leads_the_decode_instance_to_it(name: str) -> None:
    router = ROUTERS[name]
    first, second = router["prefill"]["kv_transfer_params"], second_leg(router, answer())
    assert names_bootstrap(second) and not is_answer(second)
    told = parse_remote_bootstrap(second)
    # What an instance on two ranks answers is what the router was answered, and asked at the address that it tells.
    place = HostPort("10.0.0.7", 5600)
    assert json.loads(encode_answer(0, "p-0", place, 2, 1)) == router["bootstrap"]["answer"]
    assert parse_answer(json.dumps(router["bootstrap"]["answer"]).encode()) == {told.remote_engine_id: place}
    assert router["bootstrap"]["asks"] == f"GET {told.remote_bootstrap_addr}/query"
    assert parse_bootstrap_address(told.remote_bootstrap_addr) == HostPort("10.0.0.7", 8998)
    # vLLM puts random digits of its own behind the request id; these legs are paired by their own name.
    names = {pairing_name(first, "cmpl-x-0-1a2b3c4d"), pairing_name(second, "cmpl-x-0-5e6f7a8b")}
    assert names == {told.transfer_id}


@pytest.mark.parametrize("name", [name for name, router in ROUTERS.items() if "learns" in router])
def test_a_router_finds_in_an_answer_what_it_remembers_of_it(name: str) -> None:
    assert set(ROUTERS[name]["learns"]) <= answer().keys() & ROUTERS[name]["decode"].keys()


@pytest.mark.parametrize("name", NAMING)
def test_the_legs_of_a_push_find_each_other(name: str) -> None:
    push = ROUTERS[name]
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
    engine = EngineInfo("kv_producer", "push", "concurrent", "nixl", "p-0", "10.0.0.7", 5600, 1, 1, 1, 1)
    request_id = push["decode"]["remote_request_id"]
    second = decode_body_beside(CLIENT, engine, request_id)["kv_transfer_params"]
    assert {key: second[key] for key in push["decode"]} == push["decode"]
    assert set(second) - set(push["decode"]) == {"dcp_size", "transfer_id"}
    first = prefill_body(CLIENT, request_id)["kv_transfer_params"]
    parse_remote_decode(first)
    parse_remote_push(second)
    assert pairing_name(first, "cmpl-x-0-1a2b3c4d") == pairing_name(second, "cmpl-x-0-5e6f7a8b") == request_id


ASKS: dict[str, Any] = {
    "model": "m",
    "max_tokens": 50,
    "min_tokens": 4,
    "stop": ["."],
    "logprob_token_ids": [5, 6],
    "thinking_token_budget": 9,
    "return_token_ids": True,
    "routed_experts_prompt_start": 2,
}
"""What a client may ask for of an answer."""


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [1, 2, 3], "logprobs": 2, "stream": True, "stream_options": {}}),
        (CompletionRequest, {"prompt": "x", "logprobs": 0, "echo": True, "prompt_logprobs": 1}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 3}),
    ],
)
def test_what_vllm_takes_from_a_client_it_takes_as_a_first_leg(kind: Any, body: dict[str, Any]) -> None:
    kind.model_validate(ASKS | body)
    leg = kind.model_validate(prefill_body(ASKS | body)).to_sampling_params(1, {})
    assert (leg.max_tokens, leg.min_tokens, leg.ignore_eos, leg.stop) == (1, 0, True, [])
    assert (leg.logprobs, leg.prompt_logprobs, leg.logprob_token_ids) == (None, None, None), "nobody reads them"
    assert leg.thinking_token_budget is None, "a prefill instance may have no reasoning configured, and refuse it"


CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("kind", "body", "whole"),
    [
        (CompletionRequest, {"prompt": "x", "prompt_logprobs": 0}, True),
        (CompletionRequest, {"prompt": "x", "logprobs": 0, "echo": True}, True),
        (CompletionRequest, {"prompt": "x", "logprobs": 2, "echo": False}, False),
        (CompletionRequest, {"prompt": "x", "echo": True}, False),
        (CompletionRequest, {"prompt": "x"}, False),
        (ChatCompletionRequest, CHAT | {"prompt_logprobs": 1}, True),
        (ChatCompletionRequest, CHAT | {"echo": True}, True),
        (ChatCompletionRequest, CHAT | {"echo": True, "top_logprobs": None}, True),
        (ChatCompletionRequest, CHAT | {"logprobs": True, "top_logprobs": 3}, False),
    ],
)
def test_the_router_knows_of_which_prompts_vllm_loads_nothing(kind: Any, body: dict[str, Any], whole: bool) -> None:
    sampling = kind.model_validate({"model": "m"} | body).to_sampling_params(1, {})
    assert bool(sampling.skip_reading_prefix_cache) is whole
    assert computes_prompt(body) is whole
