"""Context parallelism on either side: every byte of every rank comes from one rank that holds it, none twice.

The oracle says by vLLM's slot mapping where each token of each rank lies (`world.write`); it knows no shares, no
intersections and no cuts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.effort import FULL, examples
from tests.support.geometry.request import bind, make_move
from tests.support.geometry.world import Model, Side, instance, shares_heads
from vllm_pd_connector.geometry.bind import Tail
from vllm_pd_connector.geometry.interleave import cut, held_before, holds, local_position, meet, token_at
from vllm_pd_connector.geometry.manifest import WHOLE, TokenShare
from vllm_pd_connector.geometry.plan import make_plan
from vllm_pd_connector.geometry.topology import check_pd_topology
from vllm_pd_connector.geometry.validate import validate

shares = st.integers(1, 6).flatmap(
    lambda size: st.builds(TokenShare, st.integers(0, size - 1), st.just(size), st.integers(1, 7))
)


@settings(max_examples=examples(900), deadline=None)
@given(shares, st.integers(0, 60), st.integers(0, 200))
def test_a_share_numbers_what_it_holds_without_gaps(share: TokenShare, token: int, more: int) -> None:
    tokens = np.arange(token + more)
    held = tokens[holds(share, tokens)]
    assert (local_position(share, held) == np.arange(len(held))).all()
    assert (token_at(share, np.arange(len(held))) == held).all()
    assert held_before(share, token) == np.count_nonzero(held < token)


@settings(max_examples=examples(900), deadline=None)
@given(shares, shares)
def test_shares_meet_where_some_token_is_in_both(one: TokenShare, other: TokenShare) -> None:
    tokens = np.arange(np.lcm(one.size * one.interleave, other.size * other.interleave))
    assert meet(one, other) is bool((holds(one, tokens) & holds(other, tokens)).any())


@settings(max_examples=examples(900), deadline=None)
@given(shares, shares, st.integers(1, 9), st.integers(1, 9), st.integers(0, 90), st.integers(0, 90))
def test_a_cut_has_each_common_token_once_and_no_page_boundary_or_gap_inside(
    one: TokenShare, other: TokenShare, page: int, its_page: int, start: int, length: int
) -> None:
    first, tokens = cut(start, start + length, (one, page), (other, its_page))
    found = []
    for begin, count in zip(first.tolist(), tokens.tolist(), strict=True):
        part = token_at(one, np.arange(count) + local_position(one, begin))
        assert (token_at(other, np.arange(count) + local_position(other, begin)) == part).all()
        assert count and len(set((local_position(one, part) // page).tolist())) == 1
        assert len(set((local_position(other, part) // its_page).tolist())) == 1
        found += part.tolist()
    span = np.arange(start, start + length)
    assert found == span[holds(one, span) & holds(other, span)].tolist()


# (tensor, prefill-context, decode-context) parallel sizes that vLLM runs: a group of DCP has one KV head.
SIZES = {
    0: [(1, 1, 1), (2, 1, 1), (2, 1, 2), (4, 1, 2), (4, 1, 4), (8, 1, 8), (6, 1, 3), (1, 2, 1), (1, 2, 2), (2, 2, 4)],
    1: [(1, 1, 1), (2, 1, 2), (4, 1, 2), (4, 1, 4), (6, 1, 3), (1, 2, 2), (2, 2, 2)],
    2: [(1, 1, 1), (2, 1, 1), (4, 1, 2), (8, 1, 2), (8, 1, 4), (2, 2, 2), (6, 1, 3)],
}
# (slots of a block on one rank, pages in a block, interleave)
BLOCKS = [(4, 1, 1), (4, 2, 4), (6, 1, 2), (6, 2, 6), (6, 2, 2), (2, 1, 2)]


def context_sides(heads: int) -> Iterator[Side]:
    for (tp, pcp, dcp), (slots, ratio, interleave) in product(SIZES[heads], BLOCKS):
        assert shares_heads(heads, tp, pcp, dcp)
        if dcp > 1 or interleave == 1 or slots == 6:  # without DCP the interleave means nothing
            yield Side(tp=tp, pcp=pcp, dcp=dcp, block_tokens=slots * dcp, ratio=ratio, interleave=interleave)


def pairs(heads: int) -> list[tuple[Side, Side]]:
    return list(product(context_sides(heads), repeat=2))


@pytest.mark.parametrize("heads", SIZES)
def test_every_byte_has_one_writer_for_all_pairs_of_context_parallel_sizes(heads: int) -> None:
    """All 5960 pairs with `PD_TEST_EFFORT=full`, every 23rd otherwise."""
    model = Model(layers=1, heads=heads, key=1, value=1)
    every = pairs(heads)
    stride = 1 if FULL else 23
    for number, (source, destination) in enumerate(every[::stride]):
        stop = 9 + number % 60
        make_move(model, source, replace(destination, layout=("NHD", "HND")[number % 2]), number % 5, stop).run()


def test_manifests_under_context_parallelism_are_sound_and_may_be_paired() -> None:
    for heads in SIZES:
        model = Model(layers=1, heads=heads, key=1, value=1)
        sides = [[w.manifest for w in instance(model, side)] for side in list(context_sides(heads))[::3]]
        for manifests in sides:
            for manifest in manifests:
                validate(manifest)
            for others in sides[::4]:
                assert check_pd_topology(manifests, others).allowed


def test_an_equal_pair_is_bound_as_if_nothing_were_interleaved() -> None:
    """Each rank reads from one peer, whole pages, in as many runs as a pair without context parallelism of its size."""
    for interleave in (1, 4, 16):
        side = Side(tp=8, dcp=8, block_tokens=16 * 8, num_blocks=9, interleave=interleave)
        move = make_move(Model(layers=1, heads=0, key=2), side, side, 0, 1000)
        sources = [w.manifest for w in instance(move.model, move.source)]
        for worker in instance(move.model, move.destination, "decode-1"):
            [edge] = make_plan(worker.manifest, sources).edges
            assert edge.source == worker.manifest.parallel.rank
            runs = bind(edge, move.source_tables, move.destination_tables, 0, 1000, tail=Tail.PAGE)
            assert len(runs) <= 8 and set((runs.length % (16 * 4)).tolist()) == {0}


def test_only_ranks_that_hold_a_token_in_common_are_read_from() -> None:
    """Whole blocks in turn: a rank of two reads from every second one of four, and each of four from one of two."""
    two, four = (Side(tp=n, dcp=n, block_tokens=4 * n, interleave=4) for n in (2, 4))
    model = Model(layers=1, heads=0)
    for here, there, sources in ((two, four, [[0, 2], [1, 3]]), (four, two, [[0], [1], [0], [1]])):
        remote = [w.manifest for w in instance(model, there)]
        plans = [make_plan(w.manifest, remote) for w in instance(model, here, "decode-1")]
        assert [[edge.source[2] for edge in plan.edges] for plan in plans] == sources


def test_replicas_of_a_share_take_turns() -> None:
    """Shares 0 and 1 lie on four ranks each: a decode instance of eight ranks reads from all eight."""
    side = Side(tp=8, dcp=2, block_tokens=8, interleave=4)
    model = Model(layers=1, heads=0)
    remote = [w.manifest for w in instance(model, side)]
    plans = [make_plan(w.manifest, remote) for w in instance(model, side, "decode-1")]
    assert sorted(edge.source[2] for plan in plans for edge in plan.edges) == list(range(8))


def test_whole_shares_are_what_they_were() -> None:
    tokens = np.arange(9)
    assert (local_position(WHOLE, tokens) == tokens).all() and (token_at(WHOLE, tokens) == tokens).all()
    assert held_before(WHOLE, 7) == 7
