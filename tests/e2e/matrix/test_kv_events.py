"""What arrived is announced as what was computed: under the same hashes, and not before it is there.

Routers that route by prefixes subscribe to these events. Both sides hash alike here, so a decode instance's
announcements of a prompt are compared with those of the prefill instance that computed it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.servers.cluster import Cluster, until
from tests.support.servers.events import Event, Subscriber, chains, stored
from tests.support.servers.legs import legs
from tests.support.servers.matrix import EVENT_ROWS, Row
from tests.support.servers.over import over
from tests.support.servers.workload import ask, prompts

PUSH_ROWS: list[Row] = [row for row in EVENT_ROWS if row.mode == "push"]
QUIET_S = 0.5
"""After so long, what an engine step told has come."""


@contextmanager
def subscribed(pair: Cluster, side: str) -> Iterator[Subscriber]:
    """A subscriber that hears an instance whose prefix cache is empty."""
    subscriber = Subscriber(pair.events_endpoint(side))
    server = pair.prefill if side == "p" else pair.decode

    def hears() -> list[Event]:
        pair.forget_prefixes(server)
        pair.is_settled(server)  # a step, which publishes that the cache was emptied
        return subscriber.told(QUIET_S)

    try:
        until(hears, f"{server.spec.name} to be heard")
        yield subscriber
    finally:
        subscriber.close()


@over(EVENT_ROWS)
def test_what_arrived_is_announced_under_the_hashes_of_what_was_computed(pair: Cluster) -> None:
    with subscribed(pair, "p") as prefill, subscribed(pair, "d") as decode:
        for prompt in prompts(f"announced, {pair.row.id}", [700, 1900, 330]):
            params = pair.prefill_only(prompt)
            computed = prefill.told(QUIET_S)
            before = decode.told(QUIET_S)
            assert not stored(before), "announced before it was asked for"
            ask(pair.decode.url, pair.body(prompt, max_tokens=1, kv_transfer_params=params))
            arrived = decode.told(QUIET_S)
            assert stored(arrived), "nothing was announced"
            assert stored(arrived) <= stored(computed)
            known = {name for _, name in stored(computed)} | {None}  # a parent may be what a window has lost
            assert all(parent in known for _, parent, *_ in chains(arrived))
            if pair.row.family == "gqa":  # full attention keeps everything
                assert len(stored(arrived)) == len(prompt) // pair.block_tokens
                assert stored(arrived) == stored(computed)


@over(PUSH_ROWS)
def test_nothing_is_announced_before_it_arrived(pair: Cluster) -> None:
    with legs(pair, scenario="orders") as both, subscribed(pair, "d") as decode:
        answer = both.decode()
        both.registered()
        assert not stored(decode.told(QUIET_S))
        both.prefill()
        both.right(answer)
        assert len(stored(decode.told(QUIET_S))) >= len(both.prompt) // pair.block_tokens


@over(PUSH_ROWS)
def test_what_never_arrived_is_never_announced(pair: Cluster) -> None:
    [prompt] = prompts("given up, announced never", [700])
    with subscribed(pair, "d") as decode, legs(pair) as both:
        both.prompt = prompt
        answer = both.decode()
        both.registered()
        another = [*prompt[:-1], prompt[-1] ^ 1]  # which decode refuses
        ask(pair.prefill.url, both.prefill_body | {"prompt": another})
        assert answer.exception() is not None
        assert not stored(decode.told(QUIET_S))
