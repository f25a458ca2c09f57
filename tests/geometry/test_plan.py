"""Who writes what: any pair of tensor sizes, fair owners, and exactly one writer for every element."""

from collections import Counter
from itertools import product

import msgspec
import pytest

from tests.support.geometry.opaque import opaque_worker
from tests.support.geometry.world import Model, Side, instance, legal
from vllm_pd_connector.errors import IncompatiblePeer
from vllm_pd_connector.geometry.manifest import Manifest, Role, Tensor
from vllm_pd_connector.geometry.patterns import pattern
from vllm_pd_connector.geometry.plan import Plan, make_plan, planning
from vllm_pd_connector.geometry.topology import TopologyStatus, check_pd_topology

change = msgspec.structs.replace


def manifests(model: Model, engine: str = "p-0", **side: object) -> list[Manifest]:
    return [worker.manifest for worker in instance(model, Side(**side), engine)]


def plans(model: Model, source: dict, destination: dict) -> list[Plan]:
    sources = manifests(model, **source)
    return [make_plan(mine, sources) for mine in manifests(model, "d-1", **destination)]


def load(plan: Plan) -> Counter:
    """Layers and bytes per page that each source rank gives to this destination."""
    given: Counter = Counter()
    for edge in plan.edges:
        for pairing in edge.pairings:
            tokens = (
                (0, 0, 1) if pairing.whole else (0, 0, min(pairing.source.page_tokens, pairing.destination.page_tokens))
            )
            given[edge.source] += pattern(pairing, *tokens).total_bytes
    return given


def sources_of(plan: Plan) -> list[int]:
    return [edge.source[2] for edge in plan.edges]


@pytest.mark.parametrize(
    ("heads", "source", "destination", "expected"),
    [
        (6, 2, 3, [[0], [0, 1], [1]]),
        (6, 3, 2, [[0, 1], [1, 2]]),
        (4, 1, 4, [[0], [0], [0], [0]]),
        (4, 4, 1, [[0, 1, 2, 3]]),
        (4, 2, 2, [[0], [1]]),
        (4, 4, 2, [[0, 1], [2, 3]]),
        (2, 4, 4, [[0], [1], [2], [3]]),
        (1, 2, 4, [[0], [0], [1], [1]]),
        (1, 4, 2, [[0, 1], [2, 3]]),
        (1, 2, 3, [[0], [0, 1], [1]]),
    ],
)
def test_who_gives_to_whom(heads: int, source: int, destination: int, expected: list[list[int]]) -> None:
    model = Model(layers=8, heads=heads)
    assert [sources_of(plan) for plan in plans(model, {"tp": source}, {"tp": destination})] == expected


@pytest.mark.parametrize(
    ("source", "destination", "expected"),
    [
        (1, 4, [[0], [0], [0], [0]]),
        (2, 4, [[0], [0], [1], [1]]),
        (4, 4, [[0], [1], [2], [3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (4, 1, [[0, 1, 2, 3]]),
        (2, 1, [[0, 1]]),
        (8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (4, 8, [[0], [0], [1], [1], [2], [2], [3], [3]]),
        (2, 8, [[0]] * 4 + [[1]] * 4),
        (8, 3, [[0, 1, 2], [2, 3, 4, 5], [5, 6, 7]]),
        (6, 4, [[0, 1], [1, 2], [3, 4], [4, 5]]),
        (2, 3, [[0], [0, 1], [1]]),
    ],
)
def test_latents_are_spread_over_all_replicas(source: int, destination: int, expected: list[list[int]]) -> None:
    """The sizes of another engine's table of routes, which go by remainders and leave source ranks idle, or, where the
    sizes do not divide, destinations without a writer. Here replicas are neighbours, and share the layers."""
    found = [sources_of(p) for p in plans(Model(layers=8, heads=0), {"tp": source}, {"tp": destination})]
    assert found == expected


@pytest.mark.parametrize("heads", range(9))
def test_the_load_of_the_owners_is_balanced(heads: int) -> None:
    """Over all destinations, no used source gives more than twice what another one gives, and every one is used."""
    for source, destination in product(range(1, 9), repeat=2):
        if heads and not (legal(heads, source) and legal(heads, destination)):
            continue
        for pp in (1, 2):
            given: Counter = Counter()
            for plan in plans(Model(layers=16, heads=heads), {"tp": source, "pp": pp}, {"tp": destination}):
                given += load(plan)
            used = len(given)
            assert used == source * pp, (heads, source, destination, pp)
            assert max(given.values()) <= 2 * min(given.values()), (heads, source, destination, pp, given)


def test_neighbouring_layers_come_from_one_owner() -> None:
    (plan,) = plans(Model(layers=8, heads=0), {"tp": 4, "layout": "BLHNC"}, {"layout": "BLHNC"})
    for edge in plan.edges:
        (pairing,) = edge.pairings
        assert len(pattern(pairing, 0, 0, 4)) == 1


def test_layers_pair_by_name_over_pipeline_stages() -> None:
    model = Model(layers=6)
    for a, b in ((1, 2), (2, 3), (3, 2), (3, 1)):
        for stage, plan in enumerate(plans(model, {"pp": a}, {"pp": b})):
            layers = sorted(name for e in plan.edges for f in e.pairings for n in f.batches for name in n.layers)
            assert layers == [f"layers.{i}.attn" for i in range(6) if i * b // 6 == stage]


def test_equal_pages_become_one_run_per_page_and_all_layers_of_a_packed_block_become_one() -> None:
    for layout, runs in (("NHD", 3), ("HND", 3), ("CPU", 3), ("LHBNC", 12), ("BLHNC", 1), ("BLNHC", 1), ("BHLNC", 1)):
        (plan,) = plans(Model(layers=3), {"layout": layout}, {"layout": layout})
        assert len(pattern(plan.edges[0].pairings[0], 0, 0, 4)) == runs, layout


def test_patterns_are_computed_once_per_shape_and_kept_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    (plan,) = plans(Model(layers=3), {"layout": "NHD"}, {"layout": "HND"})
    pairing = plan.edges[0].pairings[0]
    first = pattern(pairing, 0, 0, 4)
    assert pattern(pairing, 0, 0, 4) is first
    monkeypatch.setattr("vllm_pd_connector.geometry.patterns.MAX_CACHED_RUNS", len(first) + 1)
    pattern(pairing, 0, 0, 3)
    assert list(pairing.patterns) == [(0, 0, 3)]


MODEL = Model(layers=2, heads=4)
MINE = manifests(MODEL, "d-1")[0]
PEERS = manifests(MODEL, tp=2)


def without(manifest: Manifest, role: Role) -> Manifest:
    return change(manifest, tensors=tuple(t for t in manifest.tensors if t.role is not role))


def moved_heads(manifest: Manifest, start: int) -> Manifest:
    """The same tensors, declared to begin at another head."""

    def moved(tensor: Tensor) -> Tensor:
        return change(tensor, axes=tuple(change(a, start=start) if a.name == "head" else a for a in tensor.axes))

    return change(manifest, tensors=tuple(map(moved, manifest.tensors)))


@pytest.mark.parametrize(
    ("peers", "text"),
    [
        ([PEERS[0], moved_heads(PEERS[1], 1)], r"layers\.0\.attn key: multiple writers for \[0, 2\) x \[1, 2\)"),
        (PEERS[:1], r"layers\.0\.attn key: no source writer for a part of \[0, 2\) x \[0, 4\)"),
        ([], "no source writer .* hold nothing"),
        ([without(p, Role.VALUE) for p in PEERS], r"layers\.0\.attn value: no source writer"),
        ([PEERS[0], PEERS[0]], "duplicate rank: pp0 tp0"),
        (
            [PEERS[0], change(PEERS[1], tensors=tuple(change(t, dtype="float16") for t in PEERS[1].tensors))],
            r"incompatible with p-0 pp0 tp1:\n  dtype: bfloat16 here, float16 there",
        ),
        (manifests(Model(layers=2, heads=8), tp=2), "extents: channel 2 x head 4 here, channel 2 x head 8 there"),
    ],
)
def test_a_plan_without_exactly_one_writer_is_refused(peers: list[Manifest], text: str) -> None:
    with pytest.raises(IncompatiblePeer, match=text):
        make_plan(MINE, peers)


def test_opaque_pages_come_from_the_rank_with_the_same_heads() -> None:
    sources = [opaque_worker("x", 4, 4, rank).manifest for rank in range(4)]
    for rank in range(4):
        assert sources_of(make_plan(opaque_worker("x", 4, 4, rank, "d-1").manifest, sources)) == [rank]


@pytest.mark.parametrize(
    ("description", "tokens", "tp", "text"),
    [
        ("y", 4, 2, "inner form: x here, y there"),
        ("x", 8, 2, "page tokens: 4 here, 8 there"),
        ("x", 4, 1, "page bytes"),
    ],
)
def test_opaque_pages_never_move_between_unequal_forms(description: str, tokens: int, tp: int, text: str) -> None:
    sources = [opaque_worker(description, tokens, tp, rank).manifest for rank in range(tp)]
    with pytest.raises(IncompatiblePeer, match=text):
        make_plan(opaque_worker("x", 4, 2, 0, "d-1").manifest, sources)


def test_unused_replicas_have_no_edge() -> None:
    plan = plans(Model(layers=2, heads=2), {"tp": 8}, {"tp": 8})[5]
    assert sources_of(plan) == [5]
    assert plan.edge((0, 0, 5)) is plan.edges[0] and plan.edge((0, 0, 4)) is None


def test_a_plan_is_made_a_tensor_and_a_source_at_a_time() -> None:
    """Whoever has other work does it in between: of 80 layers and many ranks a plan takes milliseconds."""
    model = Model(layers=8, heads=4)
    sources, [mine] = manifests(model, tp=4), manifests(model, "d-1", tp=1)
    pieces, count = planning(mine, sources), 0
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            plan = end.value
            break
        count += 1
    tensors = len(mine.tensors)
    assert count >= len(sources) + tensors + len(sources) * tensors + len(sources)  # read, cut, placed, paired
    assert load(plan) == load(make_plan(mine, sources)) and sources_of(plan) == [0, 1, 2, 3]


def test_a_layer_of_two_pipeline_stages_is_no_instance() -> None:
    """vLLM's EAGLE counts its stage's layers alone: with three stages, or uneven ones, its layer has another
    stage's name, and both passed for copies of one cache."""
    model = Model(layers=8, heads=2)
    stages = manifests(model, pp=4)
    [taken, *_] = (tensor.layer for tensor in stages[1].tensors)
    [own, *_] = (tensor.layer for tensor in stages[3].tensors)
    as_named = tuple(change(one, layer=taken) if one.layer == own else one for one in stages[3].tensors)
    check = check_pd_topology(manifests(model, "d-1"), [*stages[:3], change(stages[3], tensors=as_named)])
    assert check.status is TopologyStatus.INVALID_REMOTE
    assert f"pipeline stages 1 and 3 both have a layer {taken}" in check.reason and "draft" in check.reason
    assert check_pd_topology(manifests(model, "d-1"), stages).allowed
