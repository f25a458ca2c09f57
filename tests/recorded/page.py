"""docs/models.md, from the recorded fixtures: `python -m tests.recorded.page`."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

from tests.recorded import read
from tests.recorded.models import MODELS, Model, Setup
from tests.recorded.read import Fixture
from tests.recorded.verdicts import Verdict, manifests_of, pairs
from vllm_pd_connector.geometry.manifest import Role

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"

HEAD = """# Models

<!-- Made by `python -m tests.recorded.page`; do not edit. -->

What this version makes of the caches that vLLM {releases} lay out on GPUs: which pages it can cut, which move whole
between equal instances only, and which pairs of prefill and decode it refuses, by the field that differs. No GPU took
part. The caches are made by vLLM's own code, from its specs to the strided views, with the figures of the models'
`config.json`; each pair of a table was checked and planned, for every decode rank, and the runs of a short request were
proven to write each byte once. What ran on real servers is in [compatibility](compatibility.md).

A model's table has prefill setups as rows and decode setups as columns, by number.

| in a table | means |
| --- | --- |
| ● | works between all tensor-parallel sizes listed for the two |
| = *a letter* | works only where both have the same tensor-parallel size; why other sizes are refused |
| *a letter* | refused; the letters are explained below each table |

"Affine" pages are cut by token, head and channel: block sizes, layouts and tensor-parallel sizes may differ. "Opaque"
pages move whole. "Replicated" caches are on every rank, so the tensor-parallel size does not matter to them, opaque
ones included.

Three things are in no table, since the same options give other caches. vLLM 0.33 keeps the scales of sparse-attention
indexers in another form on NVIDIA's 10.x than elsewhere, and than 0.32 does: such pairs are refused. MI300's fp8 is not
that of other GPUs. Opaque pages whose form is not known at all, DeepSeek-V4.1's among them, move between equal kinds
of device and equal releases of vLLM only.
"""

FIELDS = {
    "kv_cache_dtype": "another --kv-cache-dtype",
    "dtype": "another cache dtype",
    "item size": "other elements",
    "inner form": "opaque pages of another backend, layout or form",
    "page bytes": "opaque pages of another share of the heads",
    "page tokens": "opaque pages of another block size",
    "caches": "one side's pages are opaque, or layers have other caches",
    "extents": "other extents",
    "window": "another window",
    "group kind": "another kind of group",
}


def page() -> str:
    releases = " and ".join(name for one in read.RECORDINGS for name in read.recording(one)["releases"])
    parts = [HEAD.format(releases=releases)]
    parts += [_model(model, read.of_model(model)) for model in MODELS]
    return "\n".join(parts)


def _model(model: Model, fixtures: tuple[Fixture, ...]) -> str:
    lines = [f"## {model.name}", "", f"{model.layers} layers; {_sizes(model)}.", ""]
    judged = pairs(fixtures)
    numbers = {setup.name: number for number, setup in enumerate(model.setups, 1)}
    lines += ["| | setup | backend | layout | block | cache dtype | TP | pages |", "| --- " * 8 + "|"]
    for setup in model.setups:
        forms = _forms(next(one for one in fixtures if one.setup == setup))
        sizes = ", ".join(map(str, setup.tp))
        lines.append(
            f"| {numbers[setup.name]} | {setup.name} | {setup.backend} | {setup.layout} | {_block(fixtures, setup)} "
            f"| {setup.dtype} | {sizes} | {forms} |"
        )
    lines += ["", "| P ↓ D → |" + "".join(f" {n} |" for n in numbers.values()), "| --- " * (len(numbers) + 1) + "|"]
    letters: dict[tuple[str, ...], str] = {}
    for prefill in model.setups:
        cells = [_cell([v for v in judged if v[0].setup == prefill and v[1].setup == d], letters) for d in model.setups]
        lines.append(f"| {numbers[prefill.name]} | " + " | ".join(cells) + " |")
    if letters:
        lines += ["", *(f"- {letter}: {_explained(fields)}" for fields, letter in letters.items())]
    if (runs := _runs(judged)) is not None:
        lines += ["", runs]
    return "\n".join([*lines, ""])


def _sizes(model: Model) -> str:
    parts = []
    for layers in dict.fromkeys(model.pattern):
        parts.append(" + ".join(_of_layer(layer) for layer in layers))
    return "; ".join(parts)


def _of_layer(layer: object) -> str:
    text = re.sub(r"(\w+)\((.*)\)", r"\1 \2", repr(layer))
    return re.sub(r", (value_size|window|chunk|groups)=0|(, )?pool=1$", "", text).replace("=", " ").replace("'", "")


def _block(fixtures: tuple[Fixture, ...], setup: Setup) -> str:
    """The block sizes of the first group, which vLLM chooses itself for hybrids."""
    found = {
        manifests[0].groups[0].block_tokens
        for one in fixtures
        if one.setup == setup and not isinstance(manifests := manifests_of(one), str)
    }
    return " / ".join(map(str, sorted(found)))


def _forms(fixture: Fixture) -> str:
    manifests = manifests_of(fixture)
    if isinstance(manifests, str):
        return f"refused at start: {manifests}"
    tensors = manifests[0].tensors
    roles = sorted({str(tensor.role) for tensor in tensors if tensor.role is not Role.OPAQUE})
    opaque = sorted({tensor.opaque.split(" ")[0] for tensor in tensors if tensor.opaque})
    text = f"affine: {', '.join(roles)}" if roles else ""
    return "; ".join(filter(None, [text, f"opaque: {', '.join(opaque)}" if opaque else ""]))


def _cell(judged: list[tuple[Fixture, Fixture, Verdict]], letters: dict[tuple[str, ...], str]) -> str:
    if not judged:
        return "-"
    if all(verdict.allowed for _, _, verdict in judged):
        return "●"
    equal = [verdict for prefill, decode, verdict in judged if prefill.tp == decode.tp]
    refused = _cause(next(verdict.fields for _, _, verdict in judged if not verdict.allowed))
    letter = letters.setdefault(refused, chr(ord("a") + len(letters)))
    return f"= {letter}" if equal and all(verdict.allowed for verdict in equal) else letter


def _cause(fields: tuple[str, ...]) -> tuple[str, ...]:
    """What an operator would change: another dtype of the cache explains all that follows from it."""
    return ("kv_cache_dtype",) if "kv_cache_dtype" in fields else fields


def _explained(fields: tuple[str, ...]) -> str:
    return "; ".join(dict.fromkeys(FIELDS.get(field, field) for field in fields))


def _runs(judged: list[tuple[Fixture, Fixture, Verdict]]) -> str | None:
    """Runs and their mean size into one decode rank, for the pairs of the first setup that work."""
    first = judged[0][0].setup if judged else None
    found = [
        f"TP {prefill.tp} → {decode.tp} {verdict.runs} of {verdict.bytes // verdict.runs} B"
        for prefill, decode, verdict in judged
        if prefill.setup == decode.setup == first and verdict.allowed and {prefill.tp, decode.tp} & {4}
    ]
    return f"Runs into one rank, setup 1, recorded layers and two blocks: {'; '.join(found)}." if found else None


def main() -> int:
    logging.disable(logging.WARNING)
    PAGE.write_text(page())
    print(PAGE.name, len(PAGE.read_text().splitlines()), "lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
