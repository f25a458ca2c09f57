"""Which instances may be paired; every difference is found and says what to change."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.effort import examples
from tests.support.geometry.opaque import opaque_worker
from tests.support.geometry.request import bind
from tests.support.geometry.world import LAYOUTS, Model, Side, instance, table
from vllm_pd_connector.errors import BindError, Difference, IncompatiblePeer, InvalidTopology
from vllm_pd_connector.geometry.manifest import Manifest, ModelFacts, Role, TokenShare
from vllm_pd_connector.geometry.plan import make_plan
from vllm_pd_connector.geometry.topology import TopologyCheck, TopologyStatus, check_instance, check_pd_topology

change = msgspec.structs.replace
MODEL = Model(layers=2, heads=4)


def manifests(model: Model = MODEL, engine: str = "p-0", **side: object) -> list[Manifest]:
    return [worker.manifest for worker in instance(model, Side(**side), engine)]


def with_model(given: Sequence[Manifest], **fields: object) -> list[Manifest]:
    return [change(m, model=change(m.model, **fields)) for m in given]


def with_parallel(given: Sequence[Manifest], **fields: object) -> list[Manifest]:
    return [change(m, parallel=change(m.parallel, **fields)) for m in given]


def with_tensors(given: Sequence[Manifest], role: Role, **fields: object) -> list[Manifest]:
    return [change(m, tensors=tuple(change(t, **fields) if t.role is role else t for t in m.tensors)) for m in given]


def fields(result: TopologyCheck) -> list[str]:
    assert result.status is TopologyStatus.DENY and not result.allowed
    return [difference.field for difference in result.differences]


def test_a_result_that_nobody_computed_denies() -> None:
    assert TopologyCheck().status is TopologyStatus.DENY and not TopologyCheck().allowed and TopologyCheck().reason


@pytest.mark.parametrize("side", [{}, {"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 2}, {"layout": "CPU"}, {"layout": "BLHNC"}])
def test_equal_sides_are_homogeneous_even_with_other_capacity(side: dict) -> None:
    local, remote = manifests(engine="d-1", **side), manifests(num_blocks=13, **side)
    for mine in (local, local[-1]):
        assert check_pd_topology(mine, remote) == TopologyCheck(TopologyStatus.ALLOW_HOMOGENEOUS, "")


@pytest.mark.parametrize(
    "side",
    [{"tp": t} for t in (2, 4, 8)] + [{"pp": 2}, {"block_tokens": 6}, {"ratio": 2}, {"layout": "CPU"}, {"padding": 6}]
    + [{"layout": layout} for layout in LAYOUTS if layout != "LBNHC"],
)  # fmt: skip
def test_sizes_and_layouts_may_differ(side: dict) -> None:
    for a, b in (({}, side), (side, {})):
        local = manifests(engine="d-1", **a)
        for mine in (local, *local):
            status = check_pd_topology(mine, manifests(**b)).status
            assert status is TopologyStatus.ALLOW_HETEROGENEOUS


@pytest.mark.parametrize(("dp", "tp"), [(1, 4), (1, 1), (2, 4), (2, 1)])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_data_parallel_rank_is_an_instance_of_its_own(dp: int, tp: int, rank: int) -> None:
    """Two data-parallel ranks of two workers each beside other sizes: which of them it is changes no plan."""
    two = with_parallel(manifests(engine=f"p-{rank}", tp=2), dp_size=2, dp_rank=rank)
    other = with_parallel(manifests(engine="d-0", tp=tp), dp_size=dp, dp_rank=dp - 1)
    for local, remote in ((two, other), (other, two)):
        assert check_pd_topology(local, remote) == TopologyCheck(TopologyStatus.ALLOW_HETEROGENEOUS, "")
    sources = [{edge.source for edge in make_plan(destination, two).edges} for destination in other]
    assert sources == {4: [{(0, 0, 0)}, {(0, 0, 0)}, {(0, 0, 1)}, {(0, 0, 1)}], 1: [{(0, 0, 0), (0, 0, 1)}]}[tp]
    same = with_parallel(manifests(engine="d-0", tp=2), dp_size=dp, dp_rank=dp - 1)
    assert check_pd_topology(same, two) == TopologyCheck(TopologyStatus.ALLOW_HOMOGENEOUS, "")


@pytest.mark.parametrize("model", [MODEL, Model(heads=0, key=4)], ids=["heads", "latents"])
@pytest.mark.parametrize(("here", "there"), [(2, 4), (2, 1), (4, 1)])
def test_heads_and_latents_are_given_to_any_number_of_ranks(model: Model, here: int, there: int) -> None:
    for local, remote in ((here, there), (there, here)):
        check = check_pd_topology(manifests(model, "d-1", tp=local), manifests(model, tp=remote))
        assert check == TopologyCheck(TopologyStatus.ALLOW_HETEROGENEOUS, "")


@pytest.mark.parametrize("size", ["tp_size", "pp_size", "dp_size", "dcp_size", "pcp_size"])
def test_a_size_that_is_not_told_is_not_guessed(size: str) -> None:
    tree = msgspec.to_builtins(manifests()[0])
    del tree["parallel"][size]
    with pytest.raises(msgspec.ValidationError, match=f"missing required field `{size}`"):
        msgspec.convert(tree, Manifest)


@pytest.mark.parametrize("fact", ["weights", "quantization"])
def test_what_a_former_release_does_not_tell_of_its_weights_is_not_guessed(fact: str) -> None:
    tree = msgspec.to_builtins(manifests()[0])
    del tree["model"][fact]
    with pytest.raises(msgspec.ValidationError, match=f"missing required field `{fact}`"):
        msgspec.convert(tree, Manifest)


def test_two_and_three_ranks_of_six_heads_may_be_paired() -> None:
    model = Model(heads=6)
    for here, there in ((2, 3), (3, 2)):
        check = check_pd_topology(manifests(model, "d-1", tp=here), manifests(model, tp=there))
        assert check == TopologyCheck(TopologyStatus.ALLOW_HETEROGENEOUS, "")


@pytest.mark.parametrize("field", ModelFacts.__struct_fields__)
def test_every_model_fact_must_be_equal(field: str) -> None:
    local = manifests()
    value = 99 if isinstance(getattr(local[0].model, field), int) else "other"
    result = check_pd_topology(local, with_model(manifests(tp=2), **{field: value}))
    assert fields(result) == [field]
    (difference,) = result.differences
    assert difference.local == repr(getattr(local[0].model, field)) and difference.remote == repr(value)
    assert difference.advice and field in result.reason and repr(value) in result.reason


def test_the_advice_names_the_flag() -> None:
    result = check_pd_topology(manifests(), with_model(manifests(), kv_cache_dtype="fp8_e4m3"))
    assert "--kv-cache-dtype" in result.differences[0].advice


def test_all_differences_are_collected() -> None:
    remote = [change(m, transport="mooncake") for m in with_model(manifests(tp=2), dtype="float16", rope="yarn")]
    remote = with_tensors(remote, Role.VALUE, dtype="float16")
    result = check_pd_topology(manifests(), remote)
    found = fields(result)
    assert found == ["dtype", "rope", "transport", "dtype of layers.0.attn value and 1 more"]
    assert "and 1 more" in result.reason


def test_however_much_differs_a_refusal_can_be_read() -> None:
    """A peer's manifests may name thousands of differences, and each of its requests tells the reason."""
    found = [Difference(f"dtype of layers.{i}", "a", "b") for i in range(70)]
    error = IncompatiblePeer("no", found)
    assert len(error.differences) == 70
    assert str(error).splitlines()[-2:] == ["  dtype of layers.63: a here, b there", "  and 6 more"]
    assert str(IncompatiblePeer("no", found[:64])).endswith("layers.63: a here, b there")


def test_context_parallel_sizes_and_interleaving_may_differ() -> None:
    model = Model(heads=1)
    one, two, both = (manifests(model, tp=tp, pcp=pcp, dcp=dcp, block_tokens=4 * dcp, interleave=interleave)
                      for tp, pcp, dcp, interleave in ((1, 1, 1, 1), (2, 1, 2, 2), (2, 2, 4, 4)))  # fmt: skip
    for here, there in product((one, two, both), repeat=2):
        same = here is there
        status = TopologyStatus.ALLOW_HOMOGENEOUS if same else TopologyStatus.ALLOW_HETEROGENEOUS
        assert check_pd_topology(here, there).status is status


def test_a_group_that_lacks_a_share_of_a_head_s_tokens_is_no_instance() -> None:
    """Two heads on two ranks that take turns with the tokens: half of each head's tokens are nowhere."""
    ranks = manifests(Model(heads=2), tp=2, dcp=2, block_tokens=8, interleave=2)
    check = check_pd_topology(manifests(Model(heads=2)), ranks)
    assert check.status is TopologyStatus.INVALID_REMOTE and "no source writer" in check.reason


def test_opaque_pages_need_the_same_turns() -> None:
    def ranks(interleave: int, engine: str) -> list[Manifest]:
        workers = [opaque_worker("x", 4, 2, rank, engine).manifest for rank in range(2)]
        return [
            change(
                worker,
                parallel=change(worker.parallel, dcp_size=2, dcp_rank=rank, interleave=interleave),
                groups=(change(worker.groups[0], block_tokens=8, share=TokenShare(rank, 2, interleave)),),
                tensors=tuple(
                    change(tensor, axes=tuple(change(axis, start=0, total=axis.size) for axis in tensor.axes))
                    for tensor in worker.tensors
                ),
            )
            for rank, worker in enumerate(workers)
        ]

    assert check_pd_topology(ranks(2, "d-1"), ranks(2, "p-0")).status is TopologyStatus.ALLOW_HOMOGENEOUS
    [difference] = check_pd_topology(ranks(2, "d-1"), ranks(4, "p-0")).differences
    assert (difference.local, difference.remote) == ("tokens over 2 ranks by 2", "tokens over 2 ranks by 4")
    assert "--cp-kv-cache-interleave-size" in difference.advice
    for manifest in ranks(2, "d-1"):
        [edge] = make_plan(manifest, ranks(2, "p-0")).edges
        assert edge.source == manifest.parallel.rank


def test_another_manifest_version_is_a_difference_and_not_a_broken_peer() -> None:
    remote = [change(m, version=m.version + 1) for m in manifests()]
    assert fields(check_pd_topology(manifests(), remote)) == ["manifest version"]


@pytest.mark.parametrize(
    ("field", "role", "values"),
    [
        ("dtype", Role.KEY, {"dtype": "float16"}),
        ("item size", Role.VALUE, {"itemsize": 1}),
    ],
)
def test_tensors_must_mean_the_same(field: str, role: Role, values: dict) -> None:
    result = check_pd_topology(manifests(), with_tensors(manifests(tp=4), role, **values))
    assert fields(result) == [f"{field} of layers.0.attn {role} and 1 more"]


def test_channel_extents_and_head_counts_must_be_equal() -> None:
    result = check_pd_topology(manifests(), manifests(Model(heads=4, key=1)))
    assert fields(result) == ["extents of layers.0.attn key and 1 more"]
    assert result.differences[0].local == "channel 2 x head 4" and result.differences[0].remote == "channel 1 x head 4"
    assert "head 8" in check_pd_topology(manifests(), manifests(Model(heads=8), tp=2)).reason


def test_windows_must_match() -> None:
    result = check_pd_topology(manifests(Model(window=8)), manifests(Model(window=16)))
    assert fields(result) == ["window of layers.0.attn key and 3 more"]
    assert "group kind of layers.0.attn key and 3 more" in fields(
        check_pd_topology(manifests(), manifests(Model(window=8)))
    )


def test_roles_of_a_layer_must_match() -> None:
    """An index only on one side, a layer only on one side."""
    mla = manifests(Model(heads=0, key=4))
    result = check_pd_topology(manifests(), mla)
    assert fields(result) == ["caches of layers.0.attn and 1 more"]
    assert (result.differences[0].local, result.differences[0].remote) == ("key, value", "latent")
    more = manifests(Model(layers=3))
    for local, remote, sides in (
        (manifests(), more, ("absent", "key, value")),
        (more, manifests(), ("key, value", "absent")),
    ):
        result = check_pd_topology(local, remote)
        assert fields(result) == ["caches of layers.2.attn"]
        assert (result.differences[0].local, result.differences[0].remote) == sides


def test_a_pipeline_stage_needs_its_own_layers_only() -> None:
    stage = manifests(Model(layers=4), engine="d-1", pp=2)[1]
    assert check_pd_topology(stage, manifests(Model(layers=4), tp=2)).allowed
    assert fields(check_pd_topology(stage, manifests(Model(layers=3), tp=2))) == ["caches of layers.3.attn"]


def test_opaque_pages_pair_only_with_equal_pages() -> None:
    local = opaque_manifests("amx v1")
    assert check_pd_topology(local, opaque_manifests("amx v1")).allowed
    assert fields(check_pd_topology(local, opaque_manifests("amx v2"))) == ["inner form of layers.0.attn opaque"]
    assert "page tokens of layers.0.attn opaque" in fields(
        check_pd_topology(local, opaque_manifests("amx v1", tokens=8))
    )
    assert "page bytes of layers.0.attn opaque" in fields(check_pd_topology(local, opaque_manifests("amx v1", tp=1)))
    assert check_pd_topology(local[1], opaque_manifests("amx v1")).status is TopologyStatus.ALLOW_HOMOGENEOUS


def test_an_opaque_page_never_meets_an_affine_one() -> None:
    """AMX-packed K on one side, strides on the other."""
    affine = [change(m, tensors=tuple(t for t in m.tensors if "layers.0" in t.layer)) for m in manifests(tp=2)]
    for local, remote, sides in (
        (affine, opaque_manifests("amx v1"), ("key, value", "opaque")),
        (opaque_manifests("amx v1"), affine, ("opaque", "key, value")),
    ):
        result = check_pd_topology(local, remote)
        found = next(d for d in result.differences if d.field == "caches of layers.0.attn")
        assert not result.allowed and (found.local, found.remote) == sides and "attention backend" in found.advice


def opaque_manifests(description: str, tokens: int = 4, tp: int = 2) -> list[Manifest]:
    return [opaque_worker(description, tokens, tp, rank).manifest for rank in range(tp)]


EMPTY: list[Manifest] = []


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (EMPTY, "no worker manifests"),
        (manifests(tp=2)[:1], "incomplete set of workers: 0 manifests for pp0 tp1"),
        (manifests(pp=2)[1:], "incomplete set of workers: 0 manifests for pp0 tp0"),
        (manifests(tp=2) + manifests(tp=2)[1:], "duplicate rank: 2 manifests for pp0 tp1"),
        (manifests(tp=2)[:1] + manifests(tp=2, engine="p-1")[1:], "disagree about engine_id: p-0 and p-1"),
        (manifests(tp=2)[:1] + manifests(tp=4)[1:2], "disagree about tp_size: 2 and 4"),
        (manifests(tp=2)[:1] + with_model(manifests(tp=2)[1:], rope="yarn"), "disagree about rope"),
        (manifests(tp=2)[:1] + with_parallel(manifests(tp=2)[1:], dp_size=2, dp_rank=1), "disagree about dp"),
        (
            manifests(tp=2)[:1] + manifests(tp=2, block_tokens=8)[1:],
            "disagree about groups: full of 4 tokens per block, window 0 and full of 8 tokens per block, window 0",
        ),
        (
            manifests(tp=2)[:1] + [change(m, groups=m.groups * 2) for m in manifests(tp=2)[1:]],
            "disagree about groups: full of 4 tokens per block, window 0 and full of 4 tokens per block, window 0, f",
        ),
        (with_parallel(manifests(), dp_size=0), "dp_size is 0: must be 1 to"),
        (with_parallel(manifests(), tp_rank=1), "tp_rank is 1: must be below tp_size 1"),
        (with_parallel(manifests(tp=2)[:1], tp_size=1), "no source writer"),
        (
            manifests(tp=2)[:1] + with_parallel(manifests(tp=4)[:1], tp_size=2, tp_rank=1),
            "multiple writers",
        ),
        (manifests(tp=2)[:1] + manifests(Model(heads=8), tp=2)[1:], "disagree about the extents of layers.0.attn key"),
    ],
)
def test_an_unsound_side_is_told_from_an_incompatible_one(bad: list[Manifest], text: str) -> None:
    remote = check_pd_topology(manifests(), bad)
    assert remote.status is TopologyStatus.INVALID_REMOTE and not remote.allowed
    assert remote.reason.startswith("invalid remote topology: ") and text in remote.reason
    local = check_pd_topology(bad, manifests())
    assert local.status is TopologyStatus.INVALID_LOCAL
    assert local.reason.startswith("invalid local topology: ") and text in local.reason
    assert check_pd_topology(bad, bad).status is TopologyStatus.INVALID_LOCAL


def test_a_single_local_worker_needs_no_siblings_but_must_be_valid() -> None:
    worker = manifests(tp=2, engine="d-1")[0]
    assert check_pd_topology(worker, manifests()).allowed
    broken = change(worker, incarnation="")
    assert check_pd_topology(broken, manifests()).status is TopologyStatus.INVALID_LOCAL


def test_an_instance_of_any_size_is_sound() -> None:
    for tp in (1, 2, 4, 8):
        check_instance(manifests(Model(layers=3, heads=0, key=64, states=3), tp=tp, pp=3))
    with pytest.raises(InvalidTopology):
        check_instance([])


NUMBERS = st.one_of(st.integers(-2, 20), st.sampled_from([1 << 31, 1 << 61, 1 << 63, (1 << 64) - 1]))


SIDES: list[dict[str, Any]] = [{}, {"tp": 2}, {"tp": 2, "pp": 2, "ratio": 2}, {"tp": 8, "layout": "BLHNC"}]


def given_by(side: dict[str, Any], engine: str = "p-0") -> list[Manifest]:
    return manifests(Model(layers=2, heads=4, key=20, value=20, states=2), engine=engine, **side)


@st.composite
def damaged(draw: st.DrawFn) -> list[Manifest]:
    """An instance in which some numbers of one worker are other numbers."""
    given = given_by(draw(st.sampled_from(SIDES)))
    victim = draw(st.integers(0, len(given) - 1))
    tree = msgspec.to_builtins(given[victim])
    for _ in range(draw(st.integers(1, 3))):
        node = draw(st.sampled_from([tree["parallel"], *tree["segments"], *tree["groups"], *tree["tensors"]]))
        if "axes" in node and draw(st.booleans()):
            node = draw(st.sampled_from(node["axes"]))
        name = draw(st.sampled_from([key for key, value in node.items() if isinstance(value, int)]))
        node[name] = draw(NUMBERS)
    given[victim] = msgspec.convert(tree, Manifest)
    return given


def moved(remote: list[Manifest]) -> int:
    """From how many ranks something can be moved; all of it lies inside the segments of both."""
    local, found = given_by({}, "d-1"), 0
    if not check_pd_topology(local, remote).allowed:
        return found
    by_rank = {m.parallel.rank: m for m in remote}
    for edge in make_plan(local[0], remote).edges:
        tables = [[table(*range(2, 2 + -(-8 // group.block_tokens))), table(1)] for group in (
            edge.source_groups[0], edge.destination_groups[0])]  # fmt: skip
        try:
            runs = bind(edge, *tables, 0, 8)
        except BindError:
            continue
        for start, manifest in ((runs.source, by_rank[edge.source]), (runs.destination, local[0])):
            segment = manifest.segments[0]
            assert (start >= segment.address).all()
            assert (start + runs.length <= segment.address + segment.length).all()
        found += len(runs) > 0
    return found


@settings(max_examples=examples(600), deadline=None)
@given(damaged())
def test_whatever_a_peer_sends_is_judged_and_what_is_allowed_can_be_moved(remote: list[Manifest]) -> None:
    moved(remote)


@pytest.mark.parametrize("side", SIDES, ids=str)
@pytest.mark.parametrize("address", [None, 1 << 61], ids=["sound", "anywhere"])
def test_what_does_no_harm_is_allowed_and_moved(side: dict[str, Any], address: int | None) -> None:
    """Of whatever else a peer sends the test above may refuse all."""
    remote = given_by(side)
    if address is not None:
        remote[0] = change(remote[0], segments=(change(remote[0].segments[0], address=address),))
    assert moved(remote) == len(remote), "replicas take turns with the layers"
