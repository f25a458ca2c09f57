"""Clients may leave at any moment: others are served as before, and no block stays behind on either side.

That every block is free again is checked by the `pair` fixture after each test.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.servers.cluster import SHORT_LEASE_S, Cluster, until
from tests.support.servers.matrix import OTHER_WAY_ROWS, PLAIN_ROWS, PLAINEST
from tests.support.servers.over import over
from tests.support.servers.workload import SCENARIOS, Prompt, Refused, Stream, prompts

LEFT_ROWS = [*PLAIN_ROWS, *OTHER_WAY_ROWS]
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}


def abandoned(name: str) -> list[Prompt]:
    """Long prompts, so that their requests are under way when the client leaves."""
    return prompts(f"abandoned {name}", [1900, 1200, 1900, 700, 1900, 300])


@over(LEFT_ROWS, quick=PLAINEST)
def test_clients_of_the_router_may_leave_while_others_are_served(pair: Cluster) -> None:
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(pair.check, SCENARIOS["beside abandoned"], at_once=4)
        for prompt in abandoned("at once"):
            with Stream(pair.router.url, pair.body(prompt)):
                pass
        for prompt in abandoned("while streaming"):
            with Stream(pair.router.url, pair.body(prompt)) as stream:
                next(stream.events())
        others.result()
    pair.check(SCENARIOS["after abandoned"])


@over(LEFT_ROWS, quick=PLAINEST)
def test_a_prefill_whose_client_leaves_keeps_nothing(pair: Cluster) -> None:
    for prompt in abandoned("on the prefill side"):
        with Stream(pair.prefill.url, pair.body(prompt, max_tokens=1, kv_transfer_params=KEEP)):
            pass


@over(LEFT_ROWS, quick=PLAINEST)
def test_a_decode_whose_client_leaves_before_its_cache_is_there_keeps_nothing(pair: Cluster) -> None:
    handed_over = [(prompt, pair.prefill_only(prompt)) for prompt in abandoned("on the decode side")]
    streams = [Stream(pair.decode.url, pair.body(p, kv_transfer_params=params)) for p, params in handed_over]
    for stream in streams:
        with stream:
            pass


@pytest.mark.unfetched
@over(LEFT_ROWS, quick=PLAINEST)
def test_a_cache_that_nobody_fetches_is_given_up_and_never_read_afterwards(pair: Cluster) -> None:
    [prompt] = prompts("not fetched", [400])
    params = pair.prefill_only(prompt)
    until(lambda: pair.is_settled(pair.prefill), "the lease ends", seconds=4 * SHORT_LEASE_S)
    with pytest.raises(Refused) as refused:
        pair.decode_with(prompt, params)
    assert refused.value.status >= 400
