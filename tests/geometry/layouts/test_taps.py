"""Sides that draft unequal numbers of tokens: of convolution states that moves which a prefill writes."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.effort import examples
from tests.support.geometry.moves import sides
from tests.support.geometry.request import make_move
from tests.support.geometry.world import CAN_PAD, DK, DV, ITEM, PER_HEAD, TAPS, Model, Side, instance
from tests.support.geometry.written import written
from vllm_pd_connector.errors import IncompatiblePeer
from vllm_pd_connector.geometry.checksums.sums import checksums, difference
from vllm_pd_connector.geometry.explain import explain_pair
from vllm_pd_connector.geometry.layouts.taps import cut_taps
from vllm_pd_connector.geometry.manifest import CONFIGURATION, DRAFT_TAPS, Manifest
from vllm_pd_connector.geometry.plan import make_plan
from vllm_pd_connector.geometry.topology import TopologyStatus, check_pd_topology

MODEL = Model(3, 4, 20, 20, states=2)
ANY = sides(CAN_PAD, 4)


def manifests(engine: str, drafts: int | None, *told: str, tp: int = 1) -> list[Manifest]:
    """An instance with taps for so many draft tokens; its ranks tell this instead, if it is given."""
    made = [worker.manifest for worker in instance(MODEL, Side(tp=tp, drafts=drafts), engine)]
    said = told or [manifest.software for manifest in made]
    return [msgspec.structs.replace(manifest, software=one) for manifest, one in zip(made, said, strict=True)]


@settings(max_examples=examples(300), deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(ANY, ANY, st.lists(st.integers(0, 3), min_size=2, max_size=2), st.integers(1, 40))
def test_the_taps_of_prefill_arrive_and_what_decode_has_behind_them_stays(
    source: Side, destination: Side, drafts: list[int], stop: int
) -> None:
    """`Move.run` compares every byte of the destination."""
    few, many = sorted(drafts)
    move = make_move(MODEL, replace(source, drafts=few), replace(destination, drafts=many), 0, stop)
    theirs = [worker.manifest for worker in instance(MODEL, move.source)]
    ours = [worker.manifest for worker in instance(MODEL, move.destination, "decode-1")]
    for here, there in ((ours, theirs), (theirs, ours), (ours[:1], theirs)):
        assert check_pd_topology(here if len(here) > 1 else here[0], there).allowed
    move.run()


@pytest.mark.parametrize("conv", ["DS", "SD"])
def test_what_both_sides_have_sums_up_to_the_same(conv: str) -> None:
    move = make_move(MODEL, Side(tp=2, conv="SD", drafts=1), Side(conv=conv, drafts=3, block_tokens=6), 0, 11)
    theirs = written(move, move.source, move.source_tables, "p-0")
    sums = [one for w in theirs for one in checksums(w.manifest, [w.memory], move.source_tables, [0, 0], 11)]
    [worker] = written(move, move.destination, move.destination_tables, "d-1")
    [filled] = cut_taps([worker.manifest], [w.manifest for w in theirs])
    mine, whole = (
        checksums(manifest, [worker.memory], move.destination_tables, [0, 0], 11)
        for manifest in (filled, worker.manifest)
    )
    assert difference(mine, sums) == "" and "conv_" in difference(whole, sums)


def test_what_is_explained_is_what_moves() -> None:
    prefill, decode = manifests("p-0", 0, tp=2), manifests("d-1", 2)
    found = explain_pair(prefill, decode, 8, 1 << 16)
    assert found.check.status is TopologyStatus.ALLOW_HETEROGENEOUS
    convolutions, recurrent = 3 * 4 * PER_HEAD * TAPS * ITEM, 4 * DK * DV * 4
    assert sum(one.bytes for one in found.movements if one.kind == "state") == 2 * (convolutions + recurrent)


def test_equal_taps_move_whole_whatever_is_told_of_them() -> None:
    """So releases that do not tell how many are for drafts pair as they did."""
    ours = manifests("d-1", 2)
    for theirs in (manifests("p-0", 2), manifests("p-0", 2, "0.1.0rc1")):
        assert cut_taps(ours, theirs) is ours and cut_taps(theirs, ours) is theirs
        assert check_pd_topology(ours, theirs).status is TopologyStatus.ALLOW_HOMOGENEOUS
        assert check_pd_topology(theirs, ours).allowed and make_plan(ours[0], theirs).edges


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ((None,), (2,)),  # a release that does not tell how many taps are for drafts; it has none
        ((0,), (2, "0.1.0rc1")),
        ((0,), (2, f"x{DRAFT_TAPS}1")),  # another kernel: four taps are written, and three
        ((1, f"x{DRAFT_TAPS}0"), (2,)),
        ((0,), (2, f"x{DRAFT_TAPS}5")),  # more than there are
    ],
)
def test_other_taps_that_are_not_known_to_be_for_drafts_alone_are_refused(prefill: tuple, decode: tuple) -> None:
    ours, theirs = manifests("d-1", *decode), manifests("p-0", *prefill)
    for here, there in ((ours, theirs), (theirs, ours)):
        check = check_pd_topology(here, there)
        assert check.status is TopologyStatus.DENY
        assert {f"tap {TAPS + (side[0] or 0)}" in check.reason for side in (prefill, decode)} == {True}
        assert all("fewer on prefill than on decode" in one.advice for one in check.differences)
    with pytest.raises(IncompatiblePeer, match="extents"):
        make_plan(ours[0], theirs)


def test_all_ranks_must_tell_the_same() -> None:
    theirs = manifests("p-0", 0, f"x{DRAFT_TAPS}0", "x", tp=2)
    assert check_pd_topology(manifests("d-1", 2), theirs).status is TopologyStatus.DENY
    assert check_pd_topology(manifests("d-1", 0), theirs).allowed


def test_nothing_moves_into_fewer_taps() -> None:
    """The prefill side sums all of its own, and nobody could compare them. The check has no direction: a plan has."""
    prefill, decode = manifests("p-0", 2), manifests("d-1", 1)
    assert check_pd_topology(decode, prefill).allowed and check_pd_topology(prefill, decode).allowed
    with pytest.raises(IncompatiblePeer, match="fewer on prefill than on decode") as refused:
        make_plan(decode[0], prefill)
    assert f"tap {TAPS + 1} here" in str(refused.value) and f"tap {TAPS + 2} there" in str(refused.value)
    found = explain_pair(prefill, decode, 8, 0)
    assert found.check.status is TopologyStatus.DENY and found.check.differences and not found.movements


@pytest.mark.parametrize(
    ("software", "taps"),
    [
        ("vllm 0.32.0, vllm_pd_connector 0.1.0rc1", None),
        (f"x{DRAFT_TAPS}2", 2),
        (f"x{DRAFT_TAPS}0{CONFIGURATION}config=0a", 0),
        (f"x{CONFIGURATION}config=0a{DRAFT_TAPS}2", None),
        (f"x{DRAFT_TAPS}", None),
        (f"x{DRAFT_TAPS}-1", None),
        (f"x{DRAFT_TAPS}\u00b2", None),
        (f"x{DRAFT_TAPS}2\n", None),
        (f"x{DRAFT_TAPS}{'9' * 5000}", None),
    ],
)
def test_a_number_of_taps_is_read_only_where_it_is_one(software: str, taps: int | None) -> None:
    [manifest] = manifests("p-0", None, software)
    assert manifest.draft_taps == taps
