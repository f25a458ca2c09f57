"""From a recording to the manifests of an instance, by way of what vLLM would hand to its workers.

Specs are made from the installed vLLM's classes; a field that only the recorded release has is left out, so that
recordings of either release are read with either. Memory is allocated and never touched.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, UniformTypeKVCacheSpecs

from tests.recorded.models import MODELS, Model, Setup
from vllm_pd_connector.compat.model import caches, facts, layers
from vllm_pd_connector.config import Config
from vllm_pd_connector.geometry.manifest import Coordinates, Manifest, ModelFacts
from vllm_pd_connector.worker.build_manifest import build_manifest

HERE = Path(__file__).resolve().parent
BLOCKS = 4


@dataclass(frozen=True, slots=True)
class CacheRow:
    """One layer of a fixture, as `record` wrote it down."""

    layer: str
    spec: int
    view: int
    backend: str
    heads: int
    groups: int
    offset: int


@dataclass(frozen=True)
class Fixture:
    """One model on one setup and tensor-parallel size, as one release of vLLM serves it."""

    recording: str
    model: Model
    setup: Setup
    tp: int
    bytes: int
    groups: tuple[tuple[CacheRow, ...], ...]

    def __str__(self) -> str:
        return f"{self.model.name}, {self.setup.name}, TP {self.tp} ({self.recording})"

    @property
    def rows(self) -> tuple[CacheRow, ...]:
        return tuple(row for group in self.groups for row in group)


RECORDINGS = tuple(path.stem for path in sorted(HERE.glob("vllm-*.json")))
"""One for all releases that hand over the same."""


@cache
def recording(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text())
    return found


@cache
def fixtures(name: str) -> tuple[Fixture, ...]:
    models = {model.name: model for model in MODELS}
    found = []
    for one in recording(name)["fixtures"]:
        model = models[one["model"]]
        setup = next(setup for setup in model.setups if setup.name == one["setup"])
        groups = tuple(tuple(CacheRow(*row) for row in group) for group in one["groups"])
        found.append(Fixture(name, model, setup, one["tp"], one["bytes"], groups))
    return tuple(found)


def of_model(model: Model, name: str = RECORDINGS[-1]) -> tuple[Fixture, ...]:
    return tuple(fixture for fixture in fixtures(name) if fixture.model is model)


@cache
def spec_of(name: str, number: int) -> KVCacheSpec:
    given = dict(recording(name)["specs"][number])
    kind = getattr(kv_cache_interface, given.pop("class"))
    known = {field.name for field in fields(kind) if field.init}
    spec: KVCacheSpec = kind(**{name: _value(value) for name, value in given.items() if name in known})
    return spec


def _value(value: Any) -> Any:
    match value:
        case {"dtype": name}:
            return getattr(torch, name)
        case {"multiple_of": base}:
            return MultipleOf(base)
        case {"fraction": [a, b]}:
            return Fraction(a, b)
        case {"enum": name}:
            kind, _, member = name.partition(".")
            return getattr(getattr(kv_cache_interface, kind, MambaAttentionBackendEnum), member)
        case list():
            return tuple(map(_value, value))
    return value


def kv_cache_config(fixture: Fixture) -> KVCacheConfig:
    groups = []
    for rows in fixture.groups:
        specs = {row.layer: spec_of(fixture.recording, row.spec) for row in rows}
        first = next(iter(specs.values()))
        if any(spec != first for spec in specs.values()):
            first = UniformTypeKVCacheSpecs(block_size=first.block_size, kv_cache_specs=specs)
        groups.append(KVCacheGroupSpec([row.layer for row in rows], first))
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def kv_caches(fixture: Fixture) -> dict[str, torch.Tensor]:
    """The views that vLLM registers, over memory that nobody has written."""
    memory = torch.empty(fixture.bytes, dtype=torch.int8)
    found = {}
    for row in fixture.rows:
        dtype, shape, strides = recording(fixture.recording)["views"][row.view]
        typed = memory.view(getattr(torch, dtype))
        found[row.layer] = torch.as_strided(typed, shape, strides, row.offset // typed.element_size())
    return found


def layer_facts(fixture: Fixture) -> dict[str, layers.LayerFacts]:
    """What the worker knows of each layer beside its spec."""
    found = {}
    for row in fixture.rows:
        stated = row.heads if fixture.model.per_layer else fixture.model.heads
        found[row.layer] = layers.LayerFacts(row.backend, stated)
    return found


def manifests(fixture: Fixture) -> tuple[Manifest, ...]:
    """Of every rank of the instance.

    Raises:
        UnsupportedCache: this version refuses the model, by name.
    """
    config, views = kv_cache_config(fixture), kv_caches(fixture)
    model = fixture.model
    modules = {
        row.layer: SimpleNamespace(norm=SimpleNamespace(n_groups=row.groups)) for row in fixture.rows if row.groups
    }
    compilation = SimpleNamespace(static_forward_context=modules)
    vllm_config: Any = SimpleNamespace(compilation_config=compilation, speculative_config=None)
    told = ModelFacts(
        model.name, model.architecture, model.layers, 4096, model.heads, 128, "bfloat16", fixture.setup.dtype, "", "",
        "content 0", "",
    )  # fmt: skip
    found = []
    for rank in range(fixture.tp):
        place = Coordinates(rank, fixture.tp, 0, 1, 0, 1, 1, 1)
        with (
            patch.object(facts, "model_facts", lambda *_: told),
            patch.object(facts, "engine_id", lambda _: str(fixture)),
            patch.object(facts, "software", lambda *_: "test"),
            patch.object(facts, "coordinates", lambda _, place=place: place),
            patch.object(caches, "layer_facts", lambda *_: layer_facts(fixture)),
            patch.object(caches, "nvfp4_in_order", lambda: fixture.setup.capability // 10 in (8, 9, 12)),
            patch.object(caches, "surroundings", lambda: str(fixture.setup.capability)),
        ):
            found.append(
                build_manifest(
                    vllm_config,
                    config,
                    views,
                    incarnation="0" * 32,
                    config=Config(),
                    transport="nixl",
                )
            )
    return tuple(found)
