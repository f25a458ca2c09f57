"""Push: whatever comes first, each side ends with the right tokens or an error, and holds nothing afterwards.

That every block is free again, and every byte right, is checked by the `pair` fixture after each test. The legs are
sent by hand, in orders in which no router would send them.
"""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request

import pytest

from tests.support.servers.cluster import SHORT_LEASE_S, Cluster, until
from tests.support.servers.legs import LONG, Legs, legs, paused, refused_within
from tests.support.servers.matrix import LAYER_ROWS, ORDER_ROWS, STORED_ROWS
from tests.support.servers.over import over
from tests.support.servers.workload import AT_ONCE_S, Refused, Stream, ask, prompts
from vllm_pd_connector.config import Config
from vllm_pd_connector.protocol.push.table import ANSWER_S

assert AT_ONCE_S <= ANSWER_S - 1, "who is told only when the time for an answer has come is not told at once"
SILENCE_S = Config().handshake_timeout + ANSWER_S
"""After which a decode instance gives up a prefill instance that says nothing."""

LEAVING_ROWS = [*ORDER_ROWS, *(row for row in STORED_ROWS if row.mode == "push")]
"""Also beside another connector."""


@over(ORDER_ROWS)
def test_the_decode_leg_may_come_long_before_the_prefill(pair: Cluster) -> None:
    with legs(pair) as both:
        answer = both.decode()
        both.registered()
        both.prefill()
        both.right(answer)


@over(ORDER_ROWS)
def test_the_prefill_may_have_finished_long_before_the_decode_leg(pair: Cluster) -> None:
    with legs(pair) as both:
        both.prefill().result()
        both.right(both.decode())


@over(ORDER_ROWS)
def test_a_decode_leg_that_queues_for_longer_than_the_lease_keeps_its_prefill(pair: Cluster) -> None:
    with legs(pair) as both:
        with paused(pair.decode):
            answer = both.decode()
            both.prefill().result()
            time.sleep(1.5 * SHORT_LEASE_S)
            assert not pair.is_settled(pair.prefill), "the lease ended while the decode leg queued"
        both.right(answer)


@over(LAYER_ROWS)
def test_layers_are_announced_and_none_of_them_is_written_too_early(pair: Cluster) -> None:
    """The decode leg waits already when the prefill begins, so that there is something to write in its only step."""
    said = pair.prefill.log.read_text()
    assert "pushes are written layer by layer" in said
    for tokens in (400, LONG):
        with legs(pair, tokens) as both:
            answer = both.decode()
            both.registered()
            both.prefill()
            both.right(answer)
    assert pair.prefill.log.read_text().count("announced no layers") == 0


@over(ORDER_ROWS)
def test_a_serial_router_gets_the_right_tokens_too(pair: Cluster) -> None:
    with legs(pair, 400) as both:
        params = pair.prefill_only(both.prompt)
        assert params["transfer_mode"] == "push"
        assert pair.decode_with(both.prompt, params).tokens == pair.baselines.tokens(pair.model, both.prompt)


@over(ORDER_ROWS)
def test_a_proxy_of_the_in_tree_mooncake_connector_is_served(pair: Cluster) -> None:
    """It asks the prefill instance who it is, and sends both legs at once with what it was told and a common name."""
    address = f"http://127.0.0.1:{pair.prefill.spec.environment['VLLM_MOONCAKE_BOOTSTRAP_PORT']}"
    with urllib.request.urlopen(f"{address}/query", timeout=10) as response:
        engines = json.load(response)
    told = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_bootstrap_addr": address,
        "remote_engine_id": engines["0"]["engine_id"],
    }
    with legs(pair) as both:
        body = pair.body(both.prompt, kv_transfer_params=told | {"transfer_id": both.name})
        prefill, decode = both.prefill(), both._pool.submit(ask, pair.decode.url, body)
        both.right(decode)
        prefill.result()


@over(ORDER_ROWS)
def test_a_prompt_that_the_decode_side_mostly_has_frees_the_prefill_at_once(pair: Cluster) -> None:
    with legs(pair, 400) as both:
        both.prefill()
        both.right(both.decode())
        again = Legs(pair, both.prompt, both._pool)
        first = again.prefill()
        again.right(again.decode())
        first.result()
        until(lambda: pair.is_settled(pair.prefill), "the prefill to be freed", seconds=AT_ONCE_S)


@over(ORDER_ROWS)
@pytest.mark.parametrize("router", ["concurrent", "serial"])
def test_a_prompt_that_the_decode_side_has_is_not_written_and_frees_the_prefill_at_once(
    pair: Cluster, router: str
) -> None:
    """Whole blocks and the one token that decode computes in any case."""
    with legs(pair, 129, "serial") as both:
        assert len(both.prompt) % pair.block_tokens == 1
        ask(pair.decode.url, pair.body(both.prompt, max_tokens=1))
        if router == "serial":
            answer = pair.decode_with(both.prompt, pair.prefill_only(both.prompt))
            assert answer.tokens == pair.baselines.tokens(pair.model, both.prompt)
        else:
            first, second = both.prefill(), both.decode()
            both.right(second)
            first.result()
        until(lambda: pair.is_settled(pair.prefill), "the prefill to be freed", seconds=AT_ONCE_S)
        assert not pair.received()


@over(ORDER_ROWS)
def test_a_prefill_that_ends_by_a_stop_token_is_written_whole(pair: Cluster) -> None:
    """Its first token is one of its own stop tokens; the decode leg has none, so that it computes all of its own."""
    with legs(pair) as both:
        stop = pair.baselines.tokens(pair.model, both.prompt)[0]
        answer = both.decode()
        both.registered()
        body = both.prefill_body | {"max_tokens": 16, "ignore_eos": False, "stop_token_ids": [stop]}
        assert ask(pair.prefill.url, body).tokens == (stop,)
        both.right(answer)
        assert pair.received()


@over(LEAVING_ROWS)
def test_a_decode_client_that_leaves_before_the_prefill_came_keeps_nothing(pair: Cluster) -> None:
    with legs(pair) as both:
        with Stream(pair.decode.url, both.decode_body):
            both.registered()
        until(lambda: pair.is_settled(pair.decode), "the decode instance to give up", seconds=AT_ONCE_S)
        both.prefill().result()


@over(ORDER_ROWS)
def test_a_decode_client_that_leaves_while_chunks_are_written_keeps_nothing(pair: Cluster) -> None:
    with legs(pair) as both:
        with Stream(pair.decode.url, both.decode_body):
            both.registered()
            answer = both.prefill()
            # A short one may be over between two looks: its blocks come back at once.
            until(lambda: pair.holds_blocks(pair.prefill) or answer.done(), "the prefill to compute")
        answer.result()


@over(LEAVING_ROWS)
def test_a_prefill_client_that_leaves_fails_the_decode_at_once(pair: Cluster) -> None:
    with legs(pair) as both:
        answer = both.decode()
        both.registered()
        # As many tokens as the context takes: a prefill is not finished before its request is.
        with Stream(pair.prefill.url, both.prefill_body | {"max_tokens": 2048 - LONG}):
            until(lambda: pair.holds_blocks(pair.prefill), "the prefill to compute")
        with refused_within(AT_ONCE_S):
            answer.result()


@over(ORDER_ROWS)
def test_a_prefill_that_never_comes_fails_the_decode_in_time(pair: Cluster) -> None:
    with legs(pair) as both, refused_within(SHORT_LEASE_S + AT_ONCE_S):
        both.decode().result()


@pytest.mark.unfetched
@over(ORDER_ROWS)
def test_a_lease_that_ended_is_not_written_from(pair: Cluster) -> None:
    with legs(pair, 400) as both:
        params = pair.prefill_only(both.prompt)
        until(lambda: pair.is_settled(pair.prefill), "the lease to end", seconds=4 * SHORT_LEASE_S)
        with refused_within(AT_ONCE_S):
            pair.decode_with(both.prompt, params)


@over(ORDER_ROWS)
def test_two_decode_legs_with_one_name_never_share_a_prefill(pair: Cluster) -> None:
    with legs(pair) as both:
        answers = [both.decode(), both.decode()]
        both.registered()
        both.prefill().result()
        right = 0
        for answer in answers:
            try:
                both.right(answer)
                right += 1
            except Refused:
                pass
        assert right == 1


@pytest.mark.unfetched
@over(ORDER_ROWS)
def test_another_prompt_under_the_same_name_is_refused(pair: Cluster) -> None:
    with legs(pair, 400) as both:
        [other] = prompts("another prompt", [400])
        answer = both.decode()
        body = pair.body(other, max_tokens=1, kv_transfer_params=both.prefill_body["kv_transfer_params"])
        both.registered()
        ask(pair.prefill.url, body)
        with refused_within(AT_ONCE_S):
            answer.result()


@over(ORDER_ROWS)
def test_a_prefill_instance_that_freezes_fails_the_decode_in_time(pair: Cluster) -> None:
    with legs(pair) as both:
        answer = both.decode()
        both.registered()
        group = pair.prefill.process.pid
        os.killpg(group, signal.SIGSTOP)
        try:
            with refused_within(SILENCE_S + AT_ONCE_S):
                answer.result()
        finally:
            os.killpg(group, signal.SIGCONT)
    pair.check([both.prompt])
