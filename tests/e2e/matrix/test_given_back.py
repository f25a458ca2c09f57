"""Several answers to one prompt, several prompts of one request, and requests that decode refuses: what becomes of the
prefill's blocks and of the log.

`n` > 1 is sent as a plain proxy does, which passes everything on: vLLM makes `n` requests of it on either side, and
those on the decode side share what one of the prefill side's handed over.
"""

from __future__ import annotations

import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from examples.launch import Server
from tests.support.servers.cluster import Cluster, extras, until
from tests.support.servers.matrix import ORDER_ROWS, PLAIN_ROWS, PLAINEST
from tests.support.servers.over import over
from tests.support.servers.workload import AT_ONCE_S, SCENARIOS, Answer, Prompt, Refused, ask, ask_for_choices
from vllm_pd_connector.instance_info import parse
from vllm_pd_connector.protocol.wire.messages import GetLeaseCount, LeaseCount
from vllm_pd_connector.routing.handoff import decode_body_beside, prefill_body
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.sidechannel.waiting import ask as ask_side_channel
from vllm_pd_connector.wake import Wake

CHOICES = 4
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
GREEDY = {"temperature": 1.0, "top_k": 1}
"""Greedy sampling by a name under which vLLM allows `n` > 1."""
SAID = re.compile(r" (ERROR|WARNING|INFO) \S+ \S+ \[[^\]]*\] (request .*)")


def leases(params: dict[str, Any]) -> int:
    """How many leases the prefill instance holds, by its own word and without an engine step."""
    with closing(SideChannelClient()) as client, closing(Wake()) as wake:
        where = endpoint(params["remote_host"], params["remote_port"])
        standing = ask_side_channel(client, wake, where, GetLeaseCount(), 10.0)
    assert isinstance(standing, LeaseCount), standing
    return standing.leases


def through_a_plain_proxy(pair: Cluster, prompt: Prompt, asked_of_prefill: int) -> list[Answer]:
    body = pair.body(prompt, **GREEDY, **extras(pair.model))
    first = {**body, "n": asked_of_prefill, "max_tokens": 1, "kv_transfer_params": ASK}
    params = ask_for_choices(pair.prefill.url, first)[0].kv_transfer_params
    assert params, "the prefill instance handed nothing over"
    answers = ask_for_choices(pair.decode.url, {**body, "n": CHOICES, "kv_transfer_params": params})
    if not leaves_some(pair, asked_of_prefill):
        until(lambda: leases(params) == 0, "the lease ended with its last reader", 2 * AT_ONCE_S)
    return answers


def check_choices(pair: Cluster, prompt: Prompt, answers: list[Answer]) -> None:
    assert len(answers) == CHOICES
    wrong = [found for answer in answers if (found := pair.disagreement(prompt, answer))]
    assert not wrong, wrong


def leaves_some(pair: Cluster, asked_of_prefill: int) -> bool:
    """In mode push a decode leg may come for each of the prefill's choices, so those of no use end with their time."""
    return asked_of_prefill > 1 and pair.row.mode != "pull"


@over([*PLAIN_ROWS, *ORDER_ROWS], quick=PLAINEST)
@pytest.mark.parametrize("asked_of_prefill", [1, CHOICES])
def test_every_choice_of_a_request_is_right_and_leaves_nothing_behind(pair: Cluster, asked_of_prefill: int) -> None:
    said = Said(pair.prefill)
    for prompt in SCENARIOS["bad input"]:
        pair.forget_prefixes()
        for _ in range(2):  # cold, and with the prompt in the decode side's prefix cache
            check_choices(pair, prompt, through_a_plain_proxy(pair, prompt, asked_of_prefill))
    if not leaves_some(pair, asked_of_prefill):
        assert "its blocks are freed" not in said.text(), "a lease ran out"


@over(ORDER_ROWS)
def test_every_choice_of_a_request_whose_legs_are_sent_at_once_is_right(pair: Cluster) -> None:
    engine = parse(pair.metrics(pair.prefill))[0]
    for number, prompt in enumerate(SCENARIOS["bad input"]):
        body = pair.body(prompt, **GREEDY, n=CHOICES)
        name = f"choices-{number}"
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(
                ask_for_choices, pair.prefill.url, prefill_body(body, name) | {"return_token_ids": True}
            )
            check_choices(pair, prompt, ask_for_choices(pair.decode.url, decode_body_beside(body, engine, name)))
            first.result()


@over(PLAIN_ROWS, quick=PLAINEST)
def test_the_prompts_of_a_completion_are_all_right_and_nothing_is_held_for_them(pair: Cluster) -> None:
    """A plain proxy passes it on whole, and gets the parameters of the first prompt alone."""
    asked = SCENARIOS["bad input"]
    pair.forget_prefixes()
    said = Said(pair.decode)
    body = {**pair.body(asked[0], **extras(pair.model)), "prompt": [list(prompt) for prompt in asked]}
    first = ask_for_choices(pair.prefill.url, {**body, "max_tokens": 1, "kv_transfer_params": ASK})
    params = first[0].kv_transfer_params
    assert params and leases(params) == 1, "of the others nobody is told"
    answers = ask_for_choices(pair.decode.url, {**body, "kv_transfer_params": params})
    wrong = [
        found for prompt, answer in zip(asked, answers, strict=True) if (found := pair.disagreement(prompt, answer))
    ]
    assert not wrong, wrong
    until(lambda: leases(params) == 0, "the lease ended with its reader", AT_ONCE_S)
    assert said.text().count("its completion has several prompts") == len(asked) - 1 and not said.errors()


REFUSED_BY_VLLM = ({"temperature": -3}, {"max_tokens": 100000})


@over(PLAIN_ROWS, quick=PLAINEST)
def test_what_decode_s_vllm_refuses_is_given_back_at_once(pair: Cluster) -> None:
    prompt = SCENARIOS["bad input"][0]
    for fields in REFUSED_BY_VLLM:
        params = pair.prefill_only(prompt)
        assert leases(params) == 1
        said = Said(pair.decode)
        with pytest.raises(Refused) as refused:
            ask(pair.decode.url, pair.body(prompt, kv_transfer_params=params, **fields))
        assert refused.value.status == 400
        until(lambda params=params: leases(params) == 0, "the blocks were given back", AT_ONCE_S)
        until(lambda: pair.is_settled(pair.prefill), "the prefill side's pool is whole", AT_ONCE_S)
        until(lambda said=said: len(said.of_ours()) == 1, "one line says so", AT_ONCE_S)
        assert params["remote_request_id"] in said.of_ours()[0][1] and not said.errors()


@over(PLAIN_ROWS, quick=PLAINEST)
def test_a_stream_that_decode_s_vllm_refuses_is_given_back_at_once(pair: Cluster) -> None:
    """Its answer has begun with status 200 before vLLM looks at it, and vLLM tells its connector of none of these."""
    prompt = SCENARIOS["bad input"][0]
    for fields in ({"logprobs": 100000}, {"logit_bias": {"99999999": 1.0}}):
        params = pair.prefill_only(prompt)
        assert leases(params) == 1
        said = Said(pair.decode)
        text = raw(pair.decode.url, pair.body(prompt, kv_transfer_params=params, stream=True, **fields))
        assert '"error"' in text and '"code":400' in text.replace(" ", ""), text
        until(lambda params=params: leases(params) == 0, "the blocks were given back", AT_ONCE_S)
        until(lambda: pair.is_settled(pair.prefill), "the prefill side's pool is whole", AT_ONCE_S)
        until(lambda said=said: len(said.of_ours()) == 1, "one line says so", AT_ONCE_S)
        assert params["remote_request_id"] in said.of_ours()[0][1] and not said.errors()


def raw(url: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60.0) as answer:
        return answer.read().decode()


REFUSED_BEHIND_A_PREFILL = (
    {"max_tokens": 100000},
    {"logprobs": 100000},
    {"logprobs": 100000, "stream": True},
    {"min_tokens": "many"},  # by the form of its JSON: of these vLLM tells nobody
    {"structured_outputs": {"regex": "a", "json": {}}},
)


@over(PLAIN_ROWS, quick=PLAINEST)
def test_what_decode_refuses_behind_the_router_is_given_back_at_once(pair: Cluster) -> None:
    prompt = SCENARIOS["bad input"][0]
    params = pair.prefill_only(prompt)
    pair.decode_with(prompt, params)
    for number, fields in enumerate(REFUSED_BEHIND_A_PREFILL):
        said = Said(pair.decode)
        with pytest.raises(Refused) as refused:
            ask(pair.router.url, pair.body(prompt, **fields), request_id=f"refused-{number}")
        assert refused.value.status == 400, refused.value
        until(lambda: leases(params) == 0, "the blocks were given back", AT_ONCE_S)
        until(lambda said=said: "its prefill is given back" in said.text(), "decode says so", AT_ONCE_S)
        assert not said.errors()


@over(PLAIN_ROWS, quick=PLAINEST)
@pytest.mark.parametrize("fields", [{"stream_options": {"include_usage": True}}, {"temperature": -3}])
def test_what_prefill_can_see_to_be_wrong_is_not_computed(pair: Cluster, fields: dict[str, Any]) -> None:
    said = Said(pair.decode)
    with pytest.raises(Refused) as refused:
        ask(pair.router.url, pair.body(SCENARIOS["bad input"][0], **fields))
    assert refused.value.status == 400 and "prefill instance" in pair.router.log.read_text().splitlines()[-1]
    assert not said.of_ours()


@over(PLAIN_ROWS, quick=PLAINEST)
def test_a_refusal_is_one_line_under_one_id(pair: Cluster) -> None:
    prompt, other = SCENARIOS["bad input"]
    params = pair.prefill_only(prompt)
    said = Said(pair.decode)
    with pytest.raises(Refused):
        pair.decode_with(other, params)
    until(lambda: leases(params) == 0, "the blocks were given back", AT_ONCE_S)
    pair.check(SCENARIOS["bad input"][1:])  # whatever comes late has come
    assert len(said.errors()) == len(said.of_ours()) == 1, said.of_ours()
    assert "is not this request's" in said.errors()[0]


class Said:
    """What an instance logs from now on."""

    def __init__(self, server: Server):
        self._log = server.log
        self._began = self._log.stat().st_size

    def of_ours(self) -> list[tuple[str, str]]:
        """Level and text of the connector's lines about requests; vLLM's own begin otherwise."""
        return SAID.findall(self.text())

    def text(self) -> str:
        return self._log.read_bytes()[self._began :].decode(errors="replace")

    def errors(self) -> list[str]:
        return [text for level, text in self.of_ours() if level == "ERROR"]
