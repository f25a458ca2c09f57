"""Layers of a drafter beside an instance that has no like of them: nothing is moved for them, nothing else stays."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.geometry.test_topology import MODEL, change, fields, manifests, with_model
from tests.support.geometry.world import Model
from vllm_pd_connector.errors import IncompatiblePeer
from vllm_pd_connector.geometry.explain import explain_pair
from vllm_pd_connector.geometry.manifest import GroupKind, Manifest
from vllm_pd_connector.geometry.plan import Plan, make_plan
from vllm_pd_connector.geometry.topology import check_pd_topology, not_moved

DRAFTED = f"layers.{MODEL.layers}.attn"


def drafting(engine: str = "d-1", **side: object) -> list[Manifest]:
    """An instance of MODEL whose drafter has a layer behind its own."""
    made = with_model(manifests(Model(layers=3, heads=4), engine=engine, **side), speculative="eagle")
    return [change(m, draft_layers=(DRAFTED,)) for m in made]


def windowed(given: Sequence[Manifest], layer: str = DRAFTED) -> list[Manifest]:
    """The same with this layer in a group of its own, which looks back 8 tokens."""
    return [
        change(
            m,
            groups=(*m.groups, change(m.groups[0], kind=GroupKind.SLIDING_WINDOW, window=8)),
            tensors=tuple(change(t, group=1) if t.layer == layer else t for t in m.tensors),
        )
        for m in given
    ]


def moved(plan: Plan) -> set[str]:
    return {name for edge in plan.edges for p in edge.pairings for b in p.batches for name in b.layers}


def test_one_side_may_draft_alone_and_nothing_is_moved_for_its_drafter() -> None:
    plain = with_model(manifests(tp=2), speculative="")
    [destination] = drafts = drafting()
    for one, other in ((drafts, plain), (plain, drafts)):
        assert check_pd_topology(one, other).allowed and check_pd_topology(one[0], other).allowed
    plan = make_plan(destination, plain)
    assert moved(plan) == {"layers.0.attn", "layers.1.attn"} and plan.unfilled == {DRAFTED}
    assert not make_plan(plain[0], drafts).absent


@pytest.mark.parametrize("tp", [1, 2])
def test_a_drafter_s_window_of_which_one_side_keeps_all_tokens_is_not_moved_either(tp: int) -> None:
    """vLLM does so where the pages of a drafter's window fit those of no other group, which the ranks' heads decide."""
    whole, windows = drafting("p-0", tp=tp), windowed(drafting())
    for here, there in ((whole, windows), (windows, whole)):
        assert check_pd_topology(here, there).allowed and check_pd_topology(here[0], there).allowed
        plan = make_plan(here[0], there)
        assert moved(plan) == {"layers.0.attn", "layers.1.attn"} and plan.unfilled == {DRAFTED}
    assert not make_plan(drafting()[0], whole).absent and not make_plan(windows[0], windowed(whole)).absent


def test_a_group_of_another_kind_is_refused_for_the_model_s_own_layers() -> None:
    whole, windows = drafting("p-0"), windowed(drafting(), "layers.1.attn")
    assert "group kind of layers.1.attn key and 1 more" in fields(check_pd_topology(windows, whole))
    with pytest.raises(IncompatiblePeer, match="group kind"):
        make_plan(windows[0], whole)


@pytest.mark.parametrize(
    ("layers", "here", "there"),
    [
        ((DRAFTED,), "eagle", "mtp"),
        ((), "eagle", ""),  # the layer is the model's
        ((), "", ""),
        ((), "", "eagle"),  # it is the other that drafts
    ],
)
def test_a_layer_that_is_no_drafter_s_or_another_drafter_s_is_not_left_out(
    layers: tuple[str, ...], here: str, there: str
) -> None:
    local = [change(m, draft_layers=layers) for m in with_model(drafting(), speculative=here)]
    remote = with_model(manifests(), speculative=there)
    assert f"caches of {DRAFTED}" in fields(check_pd_topology(local, remote))
    with pytest.raises(IncompatiblePeer, match=r"layers\.2\.attn"):
        make_plan(local[0], remote)


def test_it_is_told_which_layers_are_not_moved_and_why() -> None:
    plain, whole = with_model(manifests(engine="p-0"), speculative=""), drafting("p-0")
    assert not_moved((), plain[0]) == ""
    assert not_moved({"a"}, plain[0]) == "1 layer of the drafter is not moved: engine p-0 does not draft"
    two = "2 layers of the drafter are not moved: engine p-0 has their caches in groups of another kind"
    assert not_moved({"a", "b"}, whole[0]) == two
    for source, destination, told in (
        (plain, drafting(), not_moved({DRAFTED}, plain[0])),
        (whole, windowed(drafting()), not_moved({DRAFTED}, whole[0])),
        (whole, drafting(), ""),
        (drafting("p-0"), with_model(manifests(tp=2), speculative=""), ""),  # it is prefill that drafts
    ):
        assert explain_pair(source, destination, 16, 0).not_moved == told
    refused = explain_pair(with_model(plain, dtype="float16"), drafting(), 16, 0)
    assert not refused.check.allowed and refused.not_moved == ""
