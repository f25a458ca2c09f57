"""Render docs/compatibility.md from the results of the end-to-end matrix.

The end-to-end tests write one record per test and row; a cell of a table counts those that passed. Nothing here is
written by hand, so the page never promises more than what ran. Run after `make test-full` (which does it). The page has
a section for each vLLM that was run, and for each pair of two; a run renews its own and leaves the others.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "out" / "e2e-results.json"
PAGE = ROOT / "docs" / "compatibility.md"

HEAD = """\
# Compatibility

<!-- Made by tools/compat_table.py from the results of the end-to-end tests; do not edit. -->

Each row is a pair of real vLLM servers on CPUs in float32. "Passed" counts the tests that ran on that pair: tokens
equal to a plain run for prompts of 1 to 1900 tokens, one by one and 16 at once, equal bytes on both sides, and no block
left behind; where the sides differ in block size, layout or stages also prefix hits of every length on the decode side;
on the plainest pair of each family also streaming, prefix hits, disconnects and bad input, of which prefix hits and
disconnects once more in mode push. Most rows over Mooncake are those of a second run of the whole matrix. "CPU" is the
layout of vLLM's CPU backend (head-major, K transposed); others are those of GPU backends, served by a reference backend
of the tests. "States" is the layout of convolution states. Qwen3-Next runs in bfloat16, and its log-probabilities are
compared too. See [CONTRIBUTING](../CONTRIBUTING.md#the-end-to-end-matrix) for how to run them.

There is a section for each release of vLLM, and for prefill on one and decode on another. A release without a build for
CPUs is its Python over the compiled operators of the one before (`tools/vllm_overlay.py`). What has no line was not run
there.

"""

SECTION = "## vLLM "

Record = dict[str, Any]


def release(version: str) -> str:
    """ "0.32" of "0.32.0+cpu"."""
    return ".".join(version.split(".")[:2])


def title(row: Record, versions: Mapping[str, str]) -> str:
    """The section that a row belongs to: "0.32", or "0.32 → 0.33" where the sides differ; rows of context parallelism,
    which are no part of the matrix, have one of their own."""
    tests = release(versions["vllm"])
    p, d = row.get("p_vllm") or tests, row.get("d_vllm") or tests
    contexts = ", context parallelism" if (row.get("p_dcp", 1), row.get("d_dcp", 1)) != (1, 1) else ""
    return (p if p == d else f"{p} → {d}") + contexts


def ran_with(name: str, versions: Mapping[str, str]) -> str:
    """The versions that a section's title does not tell: those of the tests' own vLLM say nothing of a mixed pair."""
    return ", ".join(
        f"{package} {version}" for package, version in versions.items() if package != "vllm" or "→" not in name
    )


def cells(row: Record) -> tuple[str, ...]:
    """The columns that describe a pair."""
    blocks = f"{row['p_block']} → {row['d_block']}" if row["p_block"] != row["d_block"] else "equal"
    layouts = row["p_layout"] or "CPU", row["d_layout"] or "CPU"
    dcp = row.get("p_dcp", 1), row.get("d_dcp", 1)  # results of former releases have none
    return (
        row["family"],
        f"{row['transport']}, {row['mode']}" + (" by layer" if row.get("by_layer") else ""),
        f"{row['p_tp']} → {row['d_tp']}" + (f" (DCP {' → '.join(map(str, dcp))})" if dcp != (1, 1) else ""),
        f"{row['p_pp']} → {row['d_pp']}",
        blocks,
        f"{layouts[0]} → {layouts[1]}" if layouts[0] != layouts[1] else "equal",
        f"{row['p_conv']} → {row['d_conv']}" if row["p_conv"] or row["d_conv"] else "default",
        "yes" if row["chunked"] else "no",
        "yes" if row["prefix_caching"] else "no",
    )


def table(records: Sequence[Record], kept: str = "") -> str:
    """The lines of these results; of a table that was `kept` those of other pairs stay, as far as they come."""
    outcomes: defaultdict[tuple[str, ...], list[bool]] = defaultdict(list)
    for record in records:
        outcomes[cells(record["row"])].append(record["passed"])
    head = ("model", "transport, mode", "TP, P → D", "PP, P → D", "block size", "layout", "states")
    head = (*head, "chunked prefill", "prefix caching", "passed")
    lines = [head, tuple("---" for _ in head)]
    counted = {pair: f"{sum(passed)} of {len(passed)}" for pair, passed in outcomes.items()}
    rows = [line.strip("| ").split(" | ") for line in kept.splitlines() if line.startswith("|")]
    counted = {tuple(pair): passed for *pair, passed in rows[2:]} | counted
    lines += [(*pair, passed) for pair, passed in counted.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sections_of(page: str) -> dict[str, str]:
    """The text of each section of a page, by what follows "vLLM" in its title."""
    parts = (part.partition("\n") for part in page.split(f"\n{SECTION}")[1:])
    return {name.strip(): text.strip() for name, _, text in parts}


def render(runs: Sequence[dict[str, Any]], page: str = "", *, add: bool = False) -> str:
    """A page with the sections that these runs of the matrix make, and the others that it had. `add`: the runs are of a
    part of the matrix, so other lines of their sections stay, too."""
    records: defaultdict[str, list[Record]] = defaultdict(list)
    said: dict[str, str] = {}
    for run in runs:
        for record in run["records"]:
            name = title(record["row"], run["versions"])
            said.setdefault(name, ran_with(name, run["versions"]))
            assert said[name] == ran_with(name, run["versions"]), f"runs of different versions make section {name}"
            records[name].append(record)
    before = sections_of(page)
    kept = {name: before.get(name, "") if add else "" for name in records}
    changed = [name for name, text in kept.items() if text and not text.startswith(f"Run with {said[name]}.")]
    assert not changed, f"lines of other versions stand in sections {changed}: run the whole matrix"
    made = {name: f"Run with {said[name]}.\n\n{table(found, kept[name])}" for name, found in records.items()}
    whole = before | made
    order = sorted(whole, key=lambda name: ("→" in name, [int(part) for part in re.findall(r"\d+", name)], name))
    return HEAD + "\n\n".join(f"{SECTION}{name}\n\n{whole[name]}" for name in order) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", nargs="*", type=Path, default=[RESULTS], help="of one run, or of a run in parts")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--add", action="store_true", help="keep the lines of pairs that these runs did not run")
    options = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in options.results]
    before = options.page.read_text(encoding="utf-8") if options.page.exists() else ""
    options.page.write_text(render(runs, before, add=options.add), encoding="utf-8")
    print(f"wrote {options.page}")


if __name__ == "__main__":
    main()
