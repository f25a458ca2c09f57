"""What the decode side has already is not fetched again, and what either side has already does no harm."""

from __future__ import annotations

from tests.support.servers.cluster import Cluster, until
from tests.support.servers.matrix import (
    HYBRIDS,
    LARGER_WINDOW_ROWS,
    OTHER_HITS_ROWS,
    OTHER_WAY_ROWS,
    PLAIN_ROWS,
    UNEQUAL_HYBRID_ROWS,
    UNEQUAL_ROWS,
)
from tests.support.servers.over import over
from tests.support.servers.workload import AT_ONCE_S, SCENARIOS, Prompt, ask, ask_many, by_length

CACHING_ROWS = [row for row in (*PLAIN_ROWS, *OTHER_WAY_ROWS) if row.prefix_caching]
HITS_ROWS = [*(row for row in UNEQUAL_ROWS if row.family not in HYBRIDS), *UNEQUAL_HYBRID_ROWS, *OTHER_HITS_ROWS]


def warm_tokens(pair: Cluster) -> int:
    """Prompt tokens to warm: some whole blocks and a part of another."""
    return max(100, pair.block_tokens + 44)


def warm(pair: Cluster, url: str, prompt: Prompt) -> None:
    """Let one instance compute and cache a prompt by itself."""
    ask(url, pair.body(prompt, max_tokens=1))


def fetched_from(pair: Cluster, asked: list[Prompt]) -> list[int]:
    """First fetched position of each prompt, shortest prompt first; each is fetched to its end."""
    records = sorted(pair.received(), key=lambda record: record.stop)
    # The last prompt token may be left to the decode side, which computes it in any case.
    assert all(len(prompt) - record.stop in (0, 1) for prompt, record in zip(asked, records, strict=True))
    return [record.start for record in records]


@over(CACHING_ROWS)
def test_cold_prompts_are_fetched_whole(pair: Cluster) -> None:
    asked = SCENARIOS["cold"]
    pair.check(asked)
    assert fetched_from(pair, asked) == [0] * len(asked)


@over(CACHING_ROWS)
def test_only_the_missing_rest_is_fetched_after_a_partial_hit(pair: Cluster) -> None:
    asked = SCENARIOS["partly on the decode side"]
    known, block = warm_tokens(pair), pair.block_tokens
    for prompt in asked:
        warm(pair, pair.decode.url, prompt[:known])
    pair.check(asked)
    assert fetched_from(pair, asked) == [min(known, len(prompt)) // block * block for prompt in asked]


@over(CACHING_ROWS)
def test_a_full_hit_fetches_less_than_a_block_and_frees_the_prefill_side(pair: Cluster) -> None:
    asked = SCENARIOS["all on the decode side"]
    for prompt in asked:
        warm(pair, pair.decode.url, prompt)
    pair.check(asked)
    assert all(record.stop - record.start <= pair.block_tokens for record in pair.received())


@over([row for row in CACHING_ROWS if row.family == "gqa"])
def test_a_full_hit_moves_nothing_and_frees_the_prefill_side_at_once(pair: Cluster) -> None:
    """Whole blocks and the one token that decode computes in any case."""
    prompt = by_length("serial", 129)
    assert len(prompt) % pair.block_tokens == 1
    warm(pair, pair.decode.url, prompt)
    pair.check([prompt])
    until(lambda: pair.is_settled(pair.prefill), "the prefill to be freed", seconds=AT_ONCE_S)
    assert not pair.received()


@over(CACHING_ROWS)
def test_blocks_that_the_prefill_side_found_in_its_cache_are_fetched_like_others(pair: Cluster) -> None:
    asked = SCENARIOS["partly on the prefill side"]
    for prompt in asked:
        warm(pair, pair.prefill.url, prompt[: warm_tokens(pair)])
    pair.check(asked)
    assert fetched_from(pair, asked) == [0] * len(asked)


@over(HITS_ROWS)
def test_hits_of_every_length_are_continued_from_the_other_side(pair: Cluster) -> None:
    """Each prompt finds another part of itself on the decode side: nothing, a block, … all but the last twentieth."""
    asked = SCENARIOS["hits of every length"]
    warmed = [prompt[: len(prompt) * i // len(asked)] for i, prompt in enumerate(asked)]
    # A few at a time, so that a small cache still has them when they are asked for.
    for i in range(0, len(asked), 5):
        some = [prefix for prefix in warmed[i : i + 5] if prefix]
        ask_many(pair.decode.url, [pair.body(prefix, max_tokens=1) for prefix in some], at_once=5)
        pair.check(asked[i : i + 5], at_once=4)
    block = pair.block_tokens
    expected = {len(p): len(prefix) // block * block for p, prefix in zip(asked, warmed, strict=True)}
    # The last prompt token may be left to the decode side, which computes it in any case.
    found = [(r.stop + (r.stop not in expected), r.start) for r in pair.received()]
    assert set(found) == set(expected.items())
    assert len(found) == len(asked) * pair.row.d_tp * pair.row.d_pp, "one record per decode worker"


@over(LARGER_WINDOW_ROWS)
def test_a_block_that_came_in_part_is_never_found_by_another_prompt(pair: Cluster) -> None:
    """The decode side answers prompts with the same beginning by itself, from what its prefix cache finds."""
    pair.check(SCENARIOS["received in part"], at_once=4)
    for prompt in SCENARIOS["beginning alike"]:
        assert ask(pair.decode.url, pair.body(prompt)).tokens == pair.baselines.tokens(pair.model, prompt)
