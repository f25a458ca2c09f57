"""Write down what vLLM hands over for every model and setup of the table: `python -m tests.recorded.record`.

The release is that of the vLLM in this environment (PYTHONPATH with `tools/vllm_overlay.py` for another one). A release
that hands over what another one does shares its file, which names both.
vLLM groups the layers, sizes the allocation and cuts the views; backends are imported with stand-ins for CUDA. With
`--check` nothing is written, and what differs is named.

A recording is small: specs and views are written once and named by number, and all of a model's layers that are alike
were left out of it before.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
BLOCKS = 4
"""Blocks of each recorded cache; strides along them are what counts."""


def release() -> str:
    from importlib.metadata import version

    return ".".join(version("vllm").split("+")[0].split(".")[:2])


def stored() -> dict[Path, dict[str, Any]]:
    return {path: json.loads(path.read_text()) for path in sorted(HERE.glob("vllm-*.json"))}


class Pool:
    """Values that are written once; `number` names one."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._known: dict[str, int] = {}

    def number(self, item: Any) -> int:
        key = json.dumps(item)
        if key not in self._known:
            self._known[key] = len(self.items)
            self.items.append(item)
        return self._known[key]


def spec_fields(spec: Any) -> dict[str, Any]:
    """The class of a spec and all of its fields that are not at their default, as JSON."""
    found: dict[str, Any] = {"class": type(spec).__name__}
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.init and value != field.default:
            found[field.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    import torch
    from vllm.v1.attention.backend import MultipleOf

    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, MultipleOf):
        return {"multiple_of": value.base}
    if isinstance(value, Fraction):
        return {"fraction": [value.numerator, value.denominator]}
    if hasattr(value, "name"):  # an enum
        return {"enum": f"{type(value).__name__}.{value.name}"}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value


def record_one(model: Any, setup: Any, tp: int, specs: Pool, views: Pool) -> dict[str, Any]:
    """One fixture; `error` is what vLLM says where it cannot serve this."""
    import torch
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache, prepare_kernel_block_sizes

    from tests.recorded.specs import caches_of

    found: dict[str, Any] = {"model": model.name, "setup": setup.name, "tp": tp}
    try:
        caches, config = caches_of(model, setup, tp)
        by_name = {cache.layer: cache for cache in caches}
        planning = _planning()
        groups = planning.get_kv_cache_groups(config, {cache.layer: cache.spec for cache in caches})
        config.cache_config.num_gpu_blocks_override = BLOCKS
        made = planning.get_kv_cache_config_from_groups(config, groups, 1 << 40)
        layers_of = [group.layer_names for group in groups]

        def spec_of(group: Any, layer: str) -> Any:
            spec = group.kv_cache_spec
            return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec

        attention = [
            [SimpleNamespace(backend=by_name[n].backend, kv_cache_spec=spec_of(group, n)) for n in group.layer_names]
            for group in groups
        ]
        kernel = prepare_kernel_block_sizes(made, attention)
        memory = allocate_kv_cache(made, torch.device("cpu"), KVCacheLayout[setup.layout], kernel)
    except (ValueError, AssertionError, NotImplementedError) as error:
        return found | {"error": f"{type(error).__name__}: {error}"[:300]}
    found["bytes"] = next(iter(memory.values())).untyped_storage().nbytes()
    found["groups"] = [
        [
            [
                name,
                specs.number(spec_fields(spec_of(group, name))),
                views.number(_view(memory[name])),
                by_name[name].backend.get_name() if by_name[name].backend else "",
                by_name[name].heads,
                by_name[name].groups,
                memory[name].storage_offset() * memory[name].element_size(),
            ]
            for name in names
        ]
        for group, names in zip(groups, layers_of, strict=True)
    ]
    return found


def _planning() -> Any:
    """Where vLLM groups layers and sizes the allocation: 0.33 moved it."""
    try:
        return importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ImportError:
        return importlib.import_module("vllm.v1.core.kv_cache_utils")


def _view(tensor: Any) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride())]


def import_backends(names: Iterable[str]) -> None:
    """Import what is asked later, while vLLM's platform still is what it is."""
    import vllm.models.deepseek_v4.attention
    import vllm.models.deepseek_v4.compressor
    import vllm.models.glm5next.common.attention
    import vllm.models.minimax_m3.common.indexer  # noqa: F401
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    import tests.recorded.specs  # noqa: F401
    from tests.recorded import standins

    with standins.no_device():
        for name in sorted(names):
            AttentionBackendEnum[name].get_class()


def recording() -> dict[str, Any]:
    from tests.recorded import standins
    from tests.recorded.models import MODELS

    standins.install()
    import_backends({setup.backend for model in MODELS for setup in model.setups})
    specs, views = Pool(), Pool()
    fixtures = []
    for model in MODELS:
        for setup in model.setups:
            with standins.device(setup.capability):
                fixtures += [record_one(model, setup, tp, specs, views) for tp in setup.tp]
    return {"releases": [release()], "specs": specs.items, "views": views.items, "fixtures": fixtures}


def written(record: dict[str, Any]) -> str:
    """A recording as text, a line for each of its parts, so that changes can be read."""
    lines = [f'{{"releases": {json.dumps(record["releases"])}']
    for part in ("specs", "views", "fixtures"):
        rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in record[part])
        lines.append(f'"{part}": [\n{rows}\n]')
    return ",\n".join(lines) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--check", action="store_true", help="say what differs, write nothing")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    made = json.loads(written(recording()))
    here = release()
    for path, record in stored().items():
        same = all(record[part] == made[part] for part in ("specs", "views", "fixtures"))
        if here in record["releases"] and (same or given.check):
            print(f"{path.name} {'is' if same else 'is not'} what vLLM {here} hands over")
            return int(not same)
        others = [name for name in record["releases"] if name != here]
        if same:
            path.write_text(written(record | {"releases": sorted([*others, here])}))
            print(f"{path.name}: {here} hands over what {', '.join(others)} does")
            return 0
        if here in record["releases"]:
            path.write_text(written(record | {"releases": others})) if others else path.unlink()
    if given.check:
        print(f"nothing is recorded of vLLM {here}; run python -m tests.recorded.record")
        return 1
    path = HERE / f"vllm-{here}.json"
    path.write_text(written(made))
    print(f"{path.name}: {len(made['fixtures'])} fixtures, {path.stat().st_size} bytes")
    for reason, count in Counter(one["error"] for one in made["fixtures"] if "error" in one).most_common():
        print(f"  {count} refused by vLLM: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
