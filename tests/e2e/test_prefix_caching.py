"""What the decode side has already is not fetched again, and what either side has already does no harm."""

from __future__ import annotations

from e2e.cluster import Cluster
from e2e.digests import received
from e2e.matrix import PLAIN_ROWS
from e2e.over import over
from e2e.workload import SCENARIOS, Prompt, ask

CACHING_ROWS = [row for row in PLAIN_ROWS if row.prefix_caching]
WARM_TOKENS = 100
"""Three whole blocks of 32 and a part of a fourth."""


def warm(pair: Cluster, url: str, prompt: Prompt) -> None:
    """Let one instance compute and cache a prompt by itself."""
    ask(url, pair.body(prompt, max_tokens=1))


def fetched(pair: Cluster) -> list[tuple[int, int]]:
    """Token ranges that the decode side fetched since the last look, shortest request first."""
    return sorted(((record.start, record.stop) for record in received(pair.take_digests())), key=lambda r: r[1])


@over(CACHING_ROWS)
def test_cold_prompts_are_fetched_whole(pair: Cluster) -> None:
    pair.check(SCENARIOS["cold"])
    assert fetched(pair) == [(0, len(prompt)) for prompt in SCENARIOS["cold"]]


@over(CACHING_ROWS)
def test_only_the_missing_rest_is_fetched_after_a_partial_hit(pair: Cluster) -> None:
    asked = SCENARIOS["partly on the decode side"]
    for prompt in asked:
        warm(pair, pair.decode.url, prompt[:WARM_TOKENS])
    pair.check(asked)
    assert fetched(pair) == [(96, len(prompt)) for prompt in asked]


@over(CACHING_ROWS)
def test_a_full_hit_fetches_less_than_a_block_and_frees_the_prefill_side(pair: Cluster) -> None:
    asked = SCENARIOS["all on the decode side"]
    for prompt in asked:
        warm(pair, pair.decode.url, prompt)
    pair.check(asked)
    assert all(stop - start <= 32 for start, stop in fetched(pair))


@over(CACHING_ROWS)
def test_blocks_that_the_prefill_side_found_in_its_cache_are_fetched_like_others(pair: Cluster) -> None:
    asked = SCENARIOS["partly on the prefill side"]
    for prompt in asked:
        warm(pair, pair.prefill.url, prompt[:WARM_TOKENS])
    pair.check(asked)
    assert fetched(pair) == [(0, len(prompt)) for prompt in asked]
