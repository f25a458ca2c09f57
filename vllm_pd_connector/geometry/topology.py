"""May these two instances be paired, and if not, which fields differ?

The check is made of two questions, each answered completely before the next is asked:

1. Is each side sound? Every manifest is valid, and a set of manifests is one whole instance: one worker for every
   (pipeline, prefill-context, tensor) rank, all telling the same story, their shards and shares of tokens tiling every
   logical tensor.
2. Do the cached numbers mean the same? Model facts, dtypes, roles, extents, windows: compared by name.

One side may draft alone, or have its drafter's caches in a group of another kind: they are then nobody's to give or to
want (`drafted_alone`).

Block sizes, layouts, tensor, pipeline and context parallel sizes, the interleaving of tokens and capacities may differ:
the planner converts between them. A result that nobody computed denies.

Source: xLLM, `check_pd_topo` (statuses, order of evaluation).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, islice, product
from typing import TYPE_CHECKING

from vllm_pd_connector.bounded import Pieces, at_once
from vllm_pd_connector.errors import Difference, IncompatiblePeer, InvalidManifest, InvalidTopology
from vllm_pd_connector.geometry.manifest import Axis, Group, Manifest, ModelFacts, Tensor, TokenShare
from vllm_pd_connector.geometry.sharding import (
    Interval,
    box_of,
    describe_rank,
    extents_of,
    require_one_writer,
    share_box,
    shares_of,
)
from vllm_pd_connector.geometry.validate import validate

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


MAX_UNLIKE = 8
"""A tensor is compared until so many forms of it at the peer differ: a peer may claim one for each rank."""


class TopologyStatus(StrEnum):
    """Verdict on a pair of instances."""

    ALLOW_HOMOGENEOUS = "allow_homogeneous"
    ALLOW_HETEROGENEOUS = "allow_heterogeneous"
    DENY = "deny"
    INVALID_LOCAL = "invalid_local"
    INVALID_REMOTE = "invalid_remote"


@dataclass(frozen=True, slots=True)
class TopologyCheck:
    """A verdict with its reason; `differences` is not empty only when the status is DENY."""

    status: TopologyStatus = TopologyStatus.DENY
    reason: str = "the topology was not checked"
    differences: tuple[Difference, ...] = ()

    @property
    def allowed(self) -> bool:
        return self.status in (TopologyStatus.ALLOW_HOMOGENEOUS, TopologyStatus.ALLOW_HETEROGENEOUS)


def check_pd_topology(
    local: Manifest | Sequence[Manifest],
    remote: Sequence[Manifest],
) -> TopologyCheck:
    """`checking`, with nothing done in between."""
    return at_once(checking(local, remote))


def checking(
    local: Manifest | Sequence[Manifest],
    remote: Sequence[Manifest],
) -> Pieces[TopologyCheck]:
    """Compare this worker (one manifest) or this instance (all of them) with a whole remote instance.

    Never raises for what a manifest contains. All differences are collected, not only the first: of each tensor with
    MAX_UNLIKE forms of it.
    """
    ours = (local,) if isinstance(local, Manifest) else tuple(local)
    versions = sorted({m.version for m in remote} - {m.version for m in ours})
    if ours and versions:
        advice = "install the same release of vllm_pd_connector on both sides"
        return _deny([Difference("manifest version", str(ours[0].version), str(versions[0]), advice)])
    proven: set[object] = set()
    try:
        if isinstance(local, Manifest):
            validate(local, proven)
        else:
            yield from _checking_instance(ours, proven)
    except (InvalidManifest, InvalidTopology, IncompatiblePeer) as error:
        return TopologyCheck(TopologyStatus.INVALID_LOCAL, f"invalid local topology: {error}")
    try:
        yield
        yield from _checking_instance(remote, proven)
    except (InvalidManifest, InvalidTopology, IncompatiblePeer) as error:
        return TopologyCheck(TopologyStatus.INVALID_REMOTE, f"invalid remote topology: {error}")
    yield
    if found := instance_differences(ours, remote):
        return _deny(found)
    yield
    there = [_geometry(manifest) for manifest in remote]
    if all(_geometry(manifest) in there for manifest in ours):
        return TopologyCheck(TopologyStatus.ALLOW_HOMOGENEOUS, "")
    return TopologyCheck(TopologyStatus.ALLOW_HETEROGENEOUS, "")


def _deny(differences: Sequence[Difference]) -> TopologyCheck:
    reason = "incompatible: " + "; ".join(map(str, differences[:3]))
    more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
    return TopologyCheck(TopologyStatus.DENY, reason + more, tuple(differences))


def check_instance(manifests: Sequence[Manifest]) -> None:
    """Are these manifests exactly the workers of one instance?

    Raises:
        InvalidManifest: one of them contradicts itself.
        InvalidTopology: none, some rank missing or twice, or ranks that disagree about a common fact.
        IncompatiblePeer: the ranks' shards of a tensor do not tile it.
    """
    at_once(_checking_instance(manifests, set()))


def _checking_instance(manifests: Sequence[Manifest], proven: set[object]) -> Pieces[None]:
    if not manifests:
        raise InvalidTopology("no worker manifests; every rank of an instance must publish one")
    for manifest in manifests:
        validate(manifest, proven)
        yield
    for name, values in _common_facts(manifests).items():
        if len(set(values)) > 1:
            a, b = sorted(set(values))[:2]
            raise InvalidTopology(f"workers disagree about {name}: {a} and {b}; restart all ranks of the instance")
    parallel = manifests[0].parallel
    present = Counter(m.parallel.rank for m in manifests)
    for rank in product(range(parallel.pp_size), range(parallel.pcp_size), range(parallel.tp_size)):
        if present[rank] != 1:
            problem = "incomplete set of workers" if not present[rank] else "duplicate rank"
            raise InvalidTopology(
                f"{problem}: {present[rank]} manifests for {describe_rank(rank)}, expected 1 "
                f"(sizes pp {parallel.pp_size}, pcp {parallel.pcp_size}, tp {parallel.tp_size})"
            )
    yield
    yield from _checking_tiling(manifests)


def _common_facts(manifests: Sequence[Manifest]) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for manifest in manifests:
        for name, digest in manifest.configuration.items():
            files.setdefault(f"configuration {name}", []).append(digest)
    return {
        "engine_id": [m.engine_id for m in manifests],
        "transport": [m.transport for m in manifests],
        "dp_rank": [str(m.parallel.dp_rank) for m in manifests],
        **{
            name: [str(getattr(m.parallel, name)) for m in manifests]
            for name in ("tp_size", "pp_size", "dp_size", "dcp_size", "pcp_size", "interleave")
        },
        **{name: [str(getattr(m.model, name)) for m in manifests] for name in ModelFacts.__struct_fields__},
        # Nodes of one instance that each read their own files; where one lacks them nothing is known.
        **files,
        # One scheduler gives all ranks the same block ids, by which each then finds its own pages.
        "groups": [
            ", ".join(
                f"{g.kind} of {g.block_tokens} tokens per block, window {g.window}"
                + (f", {_describe_shares(g.share)}" if g.share.size > 1 else "")
                for g in m.groups
            )
            for m in manifests
        ],
    }


def _describe_shares(share: TokenShare) -> str:
    return f"tokens over {share.size} ranks by {share.interleave}" if share.size > 1 else "all tokens"


def _checking_tiling(manifests: Sequence[Manifest]) -> Pieces[None]:
    holders: dict[tuple[str, str], list[tuple[tuple[Axis, ...], TokenShare]]] = {}
    stages: dict[str, int] = {}
    for manifest in manifests:
        stage = manifest.parallel.pp_rank
        for tensor in manifest.tensors:
            if (other := stages.setdefault(tensor.layer, stage)) != stage:
                # vLLM's EAGLE numbers its layer behind those of its own stage: two caches under one name.
                raise InvalidTopology(
                    f"pipeline stages {other} and {stage} both have a layer {tensor.layer}: a drafter has the name of "
                    "another stage's layer; let this instance draft without pipeline stages, or not at all"
                )
            share = manifest.groups[tensor.group].share
            holders.setdefault((tensor.layer, tensor.role), []).append((tensor.axes, share))
    proven: set[tuple[object, ...]] = set()
    for (layer, role), shapes in holders.items():
        distinct = tuple(dict.fromkeys(shapes))
        if distinct in proven:
            continue
        extents = {(*extents_of(axes), *shares_of(share)) for axes, share in distinct}
        if len(extents) > 1:
            a, b = sorted(map(str, extents))[:2]
            raise InvalidTopology(f"workers disagree about the extents of {layer} {role}: {a} and {b}")
        whole = tuple(Interval(0, total) for _, total in next(iter(extents)))
        boxes = {(*box_of(axes), *share_box(share)) for axes, share in distinct}
        require_one_writer(f"{layer} {role}", whole, sorted(boxes))
        proven.add(distinct)
        yield


_SAME_REVISION = "serve the same model and --revision on both sides"
_SAME_CONFIGURATION = (
    "serve with the same config.json (--hf-config-path) and processor configuration on both sides; where they say the "
    "same in other words, name the weights alike with weights_version"
)
_ADVICE = {
    "model": "serve the same model on both sides",
    "architecture": (
        "serve the same model on both sides, with the same --hf-overrides and other options that it names (release "
        "0.1.0rc1 tells none)"
    ),
    **dict.fromkeys(("num_layers", "hidden_size", "num_kv_heads", "head_size"), _SAME_REVISION),
    "dtype": "start both with the same --dtype",
    "kv_cache_dtype": "start both with the same --kv-cache-dtype",
    "rope": "start both with the same --rope-scaling, --max-model-len, --hf-overrides and --override-generation-config",
    "speculative": (
        "start both with the same method and model in --speculative-config, or one without; how many tokens they draft "
        "may differ, but of models with convolution states it may not"
    ),
    "weights": "load the same weights on both sides; where these are the same, name them alike with weights_version",
    "quantization": (
        "start both with the same --quantization, or set allow_mixed_quantization on both (K2-Horizon with rope in a "
        "part of each head needs the same in any case)"
    ),
}


def drafted_alone(own: Sequence[Manifest], peer: Sequence[Manifest]) -> frozenset[str]:
    """Layers of a drafter whose like the peer, which serves the same model, does not have: it does not draft, or its
    group of them is of another kind. vLLM keeps all tokens of a drafter's window where its pages fit no other group's,
    which depends on the ranks' heads."""
    drafted = {(t.layer, m.groups[t.group].kind) for m in own for t in m.tensors if t.layer in m.draft_layers}
    there = {t.layer: m.groups[t.group].kind for m in peer for t in m.tensors} if drafted else {}
    drafts = bool(peer[0].model.speculative)  # a layer that it then lacks is another drafter's
    return frozenset(layer for layer, kind in drafted if there.get(layer, kind if drafts else None) is not kind)


def not_moved(layers: Collection[str], source: Manifest) -> str:
    """What people are told of the layers that a plan from this instance leaves unfilled, "" of none: answers are right
    without them, and a drafter that begins without its past guesses less well."""
    if not layers:
        return ""
    number = f"{len(layers)} layers of the drafter are" if len(layers) > 1 else "1 layer of the drafter is"
    why = "has their caches in groups of another kind" if source.model.speculative else "does not draft"
    return f"{number} not moved: engine {source.engine_id} {why}"


def instance_differences(local: Sequence[Manifest], remote: Sequence[Manifest]) -> list[Difference]:
    """Every field in which two sound sides differ although it must be equal."""
    mine, theirs = local[0], remote[0]
    found = [
        Difference(name, repr(here), repr(there), _ADVICE[name])
        for name in ModelFacts.__struct_fields__
        if (here := getattr(mine.model, name)) != (there := getattr(theirs.model, name))
        and not (name == "speculative" and "" in (here, there))
    ]
    # Of files that one side lacks nothing is known: another release of transformers has others, 0.1.0rc1 tells none.
    mine_told, theirs_told = ({n: d for m in side for n, d in m.configuration.items()} for side in (local, remote))
    found += [
        Difference("configuration", f"{name} {mine_told[name]}", f"{name} {theirs_told[name]}", _SAME_CONFIGURATION)
        for name in sorted(mine_told.keys() & theirs_told.keys())
        if mine_told[name] != theirs_told[name]
    ]
    if mine.transport != theirs.transport:
        advice = "set the same transport in kv_connector_extra_config"
        found.append(Difference("transport", mine.transport, theirs.transport, advice))
    return found + _role_differences(local, remote) + _tensor_differences(local, remote)


def _role_differences(local: Sequence[Manifest], remote: Sequence[Manifest]) -> list[Difference]:
    here, there = _roles(local), _roles(remote)
    # One worker of a pipeline holds some of the layers; what only the other side has is then no difference.
    whole = len({m.parallel.pp_rank for m in local}) == local[0].parallel.pp_size
    found: dict[tuple[str, str], list[str]] = {}
    layers = here.keys() | (there.keys() - drafted_alone(remote, local) if whole else set())
    for layer in sorted(layers - drafted_alone(local, remote)):
        sides = here.get(layer, frozenset()), there.get(layer, frozenset())
        if sides[0] != sides[1]:
            printed = [", ".join(sorted(roles)) or "absent" for roles in sides]
            found.setdefault((printed[0], printed[1]), []).append(layer)
    advice = "serve the same model with the same attention backend and --speculative-config on both sides"
    return [Difference(f"caches of {_several(layers)}", *sides, advice) for sides, layers in found.items()]


def _roles(manifests: Sequence[Manifest]) -> dict[str, frozenset[str]]:
    roles: dict[str, set[str]] = {}
    for tensor in (t for m in manifests for t in m.tensors):
        roles.setdefault(tensor.layer, set()).add(str(tensor.role))
    return {layer: frozenset(names) for layer, names in roles.items()}


def _several(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _tensor_differences(local: Sequence[Manifest], remote: Sequence[Manifest]) -> list[Difference]:
    theirs: dict[tuple[str, str], dict[object, dict[object, tuple[Tensor, Group]]]] = {}
    for manifest in remote:
        for tensor in manifest.tensors:
            read, group = tensor.as_written(local), manifest.groups[tensor.group]
            forms = theirs.setdefault((tensor.layer, tensor.role), {})
            forms.setdefault(_page(read, group), {})[_meaning(read, group)] = read, group
    found: dict[Difference, list[str]] = {}
    alone = drafted_alone(local, remote)
    for manifest in local:
        for tensor in (t for t in manifest.tensors if t.layer not in alone):
            read, group = tensor.as_written(remote), manifest.groups[tensor.group]
            forms = theirs.get((tensor.layer, tensor.role), {})
            page = forms.get(_page(tensor, group)) if tensor.opaque else None
            peers = chain.from_iterable(form.values() for form in ([page] if page else forms.values()))
            unlike = (some for peer in peers if (some := pair_differences(read, group, *peer)))
            for difference in chain.from_iterable(islice(unlike, MAX_UNLIKE)):
                names = found.setdefault(difference, [])
                if (name := f"{tensor.layer} {tensor.role}") not in names[-1:]:
                    names.append(name)
    return [
        Difference(f"{d.field} of {_several(list(dict.fromkeys(names)))}", d.local, d.remote, d.advice)
        for d, names in found.items()
    ]


def _page(tensor: Tensor, group: Group) -> tuple[object, ...]:
    """Which part of an opaque tensor this is, which only moves whole."""
    return (box_of(tensor.axes), group.share) if tensor.opaque else ()


def _meaning(tensor: Tensor, group: Group) -> tuple[object, ...]:
    """What `pair_differences` looks at, of tensors of one `_page`; ranks that share it need only one comparison."""
    pages = tensor.page_tokens if tensor.opaque else bool(tensor.page_tokens)
    extents = extents_of(tensor.axes)
    return tensor.dtype, tensor.itemsize, tensor.opaque, pages, extents, group.kind, group.window


_SAME_DTYPES = (
    "start both with the same --dtype, --kv-cache-dtype (of a drafter: in --speculative-config) and mamba "
    "dtypes, weights with the same k_scale and v_scale, and fp8_e5m2 with the same --attention-backend; what reads "
    "scales as powers of two needs a prefill without --prefill-context-parallel-size"
)


def pair_differences(local: Tensor, local_group: Group, remote: Tensor, remote_group: Group) -> list[Difference]:
    """Why the bytes of one tensor would not mean the same on the other side; empty if they would."""
    fields: list[tuple[str, object, object, str]] = [
        ("dtype", local.dtype, remote.dtype, _SAME_DTYPES),
        ("item size", local.itemsize, remote.itemsize, "start both with the same dtypes"),
        ("group kind", local_group.kind, remote_group.kind, "use the same hybrid KV cache manager setting on both"),
        ("window", local_group.window, remote_group.window, _SAME_REVISION),
        (
            "inner form",
            local.opaque or "affine",
            remote.opaque or "affine",
            "use the same attention backend and kind of device on both",
        ),
    ]
    if local.opaque and remote.opaque:
        advice = "this attention backend's pages only move whole: use the same {} on both sides"
        here, there = (f"{box_of(axes)[0]} of {axes[0].total}" for axes in (local.axes, remote.axes))
        fields.append(("page tokens", local.page_tokens, remote.page_tokens, advice.format("--block-size")))
        fields.append(("page bytes", here, there, advice.format("--tensor-parallel-size")))
        ours, theirs = (_describe_shares(group.share) for group in (local_group, remote_group))
        options = "--decode-context-parallel-size and --cp-kv-cache-interleave-size"
        fields.append(("tokens", ours, theirs, advice.format(options)))
    else:
        here_extents, there_extents = _print(local.axes), _print(remote.axes)
        advice = "serve the same model, --revision and number of speculative tokens on both sides"
        fields.append(("extents", here_extents, there_extents, advice))
    return [Difference(name, str(a), str(b), advice) for name, a, b, advice in fields if a != b]


def _print(axes: tuple[Axis, ...]) -> str:
    return " x ".join(f"{name} {total}" for name, total in extents_of(axes))


def _geometry(manifest: Manifest) -> tuple[object, ...]:
    """Coordinates and pages: where they are equal, blocks map one to one. Capacity and addresses may differ."""
    place, groups = manifest.parallel, manifest.groups
    pages = {
        (t.layer, t.role): (t.page_tokens, t.pages_per_block, t.page_stride, t.axes, groups[t.group].share)
        for t in manifest.tensors
    }
    return place.rank, place.tp_size, place.pp_size, place.pcp_size, pages
