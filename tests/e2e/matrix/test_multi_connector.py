"""Beside another connector, in vLLM's MultiConnector: everything holds that holds alone.

ExampleConnector loads synchronously, before the forward of the step, and knows one KV-cache group only, so that vLLM
calls other methods in another order than it does alone. StoringConnector (of the tests) loads and saves between steps,
as OffloadingConnector does where there is a GPU. KeepingConnector (of the tests) has vLLM keep the blocks of
every finished request, and says in the next step that it is done with them. That every block is free again, and every
byte right, is checked by the `pair` fixture after each test. Clients of a push that leave are in `test_push_orders`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from examples.launch import Server
from tests.support.servers.cluster import SHORT_LEASE_S, Cluster, until
from tests.support.servers.legs import legs, paused
from tests.support.servers.matrix import BESIDE_ROWS, STORED_ROWS, Row
from tests.support.servers.over import over
from tests.support.servers.workload import AT_ONCE_S, SCENARIOS, Stream, ask, by_length, prompts

PUSH_ROWS: list[Row] = [row for row in STORED_ROWS if row.mode == "push"]
PULL_ROWS: list[Row] = [row for row in STORED_ROWS if row.mode == "pull"]
EXTERNAL_HITS = re.compile(r"^vllm:external_prefix_cache_hits_total\{[^}]*\} (\S+)$", re.MULTILINE)
RECEIVES = re.compile(r"^vllm:pd_receives_total\{[^}]*\} (\S+)$", re.MULTILINE)


def total(pair: Cluster, server: Server, series: re.Pattern[str]) -> float:
    return sum(map(float, series.findall(pair.metrics(server))))


@contextmanager
def loading(pair: Cluster, server: Server) -> Iterator[None]:
    """What runs meanwhile has an instance take tokens from a connector."""
    before = total(pair, server, EXTERNAL_HITS)
    yield
    until(lambda: total(pair, server, EXTERNAL_HITS) > before, f"{server.spec.name} to load tokens")


@over(BESIDE_ROWS)
def test_answers_are_the_plain_runs_and_counted(pair: Cluster) -> None:
    asked = SCENARIOS["serial"]
    before = total(pair, pair.decode, RECEIVES)
    pair.check(asked)
    until(lambda: total(pair, pair.decode, RECEIVES) - before >= len(asked) - 1, "every receive to be counted")


@over(PUSH_ROWS)
def test_what_the_other_connector_loads_for_a_prefill_is_written_after_it_was_computed(pair: Cluster) -> None:
    """The second prefill takes its prefix from the store in the step that computes the rest; decode asked before."""
    with legs(pair) as both:
        both.prefill()
        both.right(both.decode())
    with legs(pair) as both:
        pair.forget_prefixes(pair.prefill)
        answer = both.decode()
        both.registered()
        with loading(pair, pair.prefill):
            both.prefill()
            both.right(answer)


@over(PULL_ROWS)
def test_what_the_other_connector_loads_for_a_prefill_is_handed_over(pair: Cluster) -> None:
    prompt = by_length("orders", 400)
    pair.check([prompt])
    pair.forget_prefixes()
    pair.forget_prefixes(pair.prefill)
    with loading(pair, pair.prefill):
        pair.check([prompt])


@over(BESIDE_ROWS)
def test_a_prefill_whose_client_leaves_keeps_nothing(pair: Cluster) -> None:
    [prompt] = prompts("leaving beside another connector", [1900])
    keep = {"do_remote_decode": True, "do_remote_prefill": False}
    with Stream(pair.prefill.url, pair.body(prompt, max_tokens=100, kv_transfer_params=keep)) as stream:
        next(stream.events())
    until(lambda: pair.is_settled(pair.prefill), "the prefill to be freed", seconds=AT_ONCE_S)


@over(BESIDE_ROWS)
def test_a_decode_whose_client_leaves_while_it_queues_gives_the_prefill_up(pair: Cluster) -> None:
    [prompt] = prompts(f"queueing beside another connector, {pair.row.mode}", [700])
    params = pair.prefill_only(prompt)
    with paused(pair.decode), Stream(pair.decode.url, pair.body(prompt, kv_transfer_params=params)):
        time.sleep(1.5 * SHORT_LEASE_S)
        assert not pair.is_settled(pair.prefill), "the lease ended while the decode leg queued"
    until(lambda: pair.is_settled(pair.prefill), "the prefill to be freed", seconds=SHORT_LEASE_S / 2)


@over(BESIDE_ROWS)
def test_a_decode_whose_client_leaves_while_it_loads_keeps_nothing(pair: Cluster) -> None:
    for prompt in prompts(f"loading beside another connector, {pair.row.mode}", [1900, 1200, 1900]):
        with Stream(pair.decode.url, pair.body(prompt, kv_transfer_params=pair.prefill_only(prompt))):
            pass
    until(lambda: pair.is_settled(pair.prefill), "the prefills to be freed", seconds=SHORT_LEASE_S / 2)


@over(PULL_ROWS)
def test_a_sibling_that_comes_first_and_has_the_prompt_gives_the_lease_back(pair: Cluster) -> None:
    """A decode instance that names the other connector first, over the store that the first decode instance filled."""
    prompt = by_length("orders", 400)
    pair.check([prompt])
    [other] = pair._servers.start(pair.spec(f"{pair.row.id}-sibling-first", "d", "kv_consumer", 1, sibling_first=True))
    try:
        params = pair.prefill_only(prompt)
        assert not pair.is_settled(pair.prefill)
        with loading(pair, other):
            answer = ask(other.url, pair.body(prompt, kv_transfer_params=params))
        assert answer.tokens == pair.baselines.tokens(pair.model, prompt)
        assert not total(pair, other, RECEIVES)
        until(lambda: pair.is_settled(pair.prefill), "the prefill to be freed", seconds=SHORT_LEASE_S / 2)
    finally:
        pair._servers.stop(other)
