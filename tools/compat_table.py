"""Render docs/compatibility.md from the results of the end-to-end matrix.

The end-to-end tests write one record per test and row; a cell of the table counts those that passed. Nothing here is
written by hand, so the page never promises more than what ran. Run after `make test-full` (which does it).
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
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
disconnects once more in mode push. Those of gqa, mla and kimi count a run on kernels for AVX2, too. Most rows over
Mooncake are those of a second run of the whole matrix. "CPU" is the layout of vLLM's CPU backend (head-major, K
transposed); others are those of GPU backends, served by a reference backend of the tests. "States" is the layout of
convolution states. Qwen3-Next runs in bfloat16, and its log-probabilities are compared too. See
[CONTRIBUTING](../CONTRIBUTING.md#the-end-to-end-matrix) for how to run them.

"""

Record = dict[str, Any]


def versions(record: Record) -> str:
    return ", ".join(f"{name} {version}" for name, version in record["versions"].items())


def cells(row: Record) -> tuple[str, ...]:
    """The columns that describe a pair."""
    blocks = f"{row['p_block']} → {row['d_block']}" if row["p_block"] != row["d_block"] else "equal"
    layouts = row["p_layout"] or "CPU", row["d_layout"] or "CPU"
    return (
        row["family"],
        f"{row['transport']}, {row['mode']}",
        f"{row['p_tp']} → {row['d_tp']}",
        f"{row['p_pp']} → {row['d_pp']}",
        blocks,
        f"{layouts[0]} → {layouts[1]}" if layouts[0] != layouts[1] else "equal",
        f"{row['p_conv']} → {row['d_conv']}" if row["p_conv"] or row["d_conv"] else "default",
        "yes" if row["chunked"] else "no",
        "yes" if row["prefix_caching"] else "no",
    )


def render(results: dict[str, Any]) -> str:
    """The page for one run of the matrix."""
    outcomes: defaultdict[tuple[str, ...], list[bool]] = defaultdict(list)
    for record in results["records"]:
        outcomes[cells(record["row"])].append(record["passed"])
    head = ("model", "transport, mode", "TP, P → D", "PP, P → D", "block size", "layout", "states")
    head = (*head, "chunked prefill", "prefix caching", "passed")
    lines = [head, tuple("---" for _ in head)]
    lines += [(*pair, f"{sum(passed)} of {len(passed)}") for pair, passed in outcomes.items()]
    return HEAD + f"Run with {versions(results)}.\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", nargs="*", type=Path, default=[RESULTS], help="of one run, or of a run in parts")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in options.results]
    assert all(run["versions"] == runs[0]["versions"] for run in runs), "these are runs of different versions"
    whole = runs[0] | {"records": [record for run in runs for record in run["records"]]}
    options.page.write_text(render(whole), encoding="utf-8")
    print(f"wrote {options.page}")


if __name__ == "__main__":
    main()
