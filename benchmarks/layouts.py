"""How many runs a request is in each cache layout, between equal and unequal tensor-parallel sizes.

    python benchmarks/layouts.py [--tokens 4001] [--json results.json]

The model has 8 layers of 8 KV heads of 128 channels in bfloat16, in blocks of 16 tokens, of which a request's do not
follow each other: the figures are counts, and the same on every machine. They are those of one decode rank and all the
ranks that it reads from. `straight` are the runs between the two caches; `way` is what the connector does with them,
with the price of a run that `--run-cost` gives: where they are short, it reads whole pages and converts.
The second table is that of docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.bind import make_worker  # noqa: E402
from vllm_pd_connector.geometry.explain import Movement, explain_pair  # noqa: E402
from vllm_pd_connector.geometry.manifest import Manifest  # noqa: E402
from vllm_pd_connector.geometry.staging.chunks import CHUNKS_PER_BUFFER, RUN_COST_BYTES  # noqa: E402

LAYERS, TOKENS_PER_BLOCK = 8, 16
STAGING_BYTES = 64 << 20
LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC")
SIZES = ((4, 4), (4, 8), (8, 4))


def instance(layout: str, tp_size: int, tokens: int) -> list[Manifest]:
    blocks = -(-tokens // TOKENS_PER_BLOCK) + 2
    return [make_worker(rank, tp_size, layout, TOKENS_PER_BLOCK, blocks, LAYERS) for rank in range(tp_size)]


def row(layout: str, sizes: tuple[int, int], tokens: int, run_cost: int) -> dict[str, object]:
    """The first decode rank's request: counts of runs, bytes and what conversion makes of them."""
    prefill, decode = (instance(layout, size, tokens) for size in sizes)
    straight = _first_rank(explain_pair(prefill, decode, tokens, 0).movements)
    found = explain_pair(prefill, decode, tokens, STAGING_BYTES // CHUNKS_PER_BUFFER, run_cost=run_cost)
    done = _first_rank(found.movements)
    runs, size = sum(m.runs for m in straight), sum(m.bytes for m in straight)
    return {
        "layout": layout,
        "tp": f"{sizes[0]} -> {sizes[1]}",
        "straight runs": runs,
        "mean bytes": size // runs,
        "way": "converted" if any(m.converted for m in done) else "direct",
        "runs": sum(m.runs for m in done),
        "bytes read / needed": round(sum(m.read_bytes for m in done) / size, 2),
    }


def _first_rank(movements: Sequence[Movement]) -> list[Movement]:
    return [movement for movement in movements if movement.destination == movements[0].destination]


def table(tokens: int, run_cost: int) -> list[dict[str, object]]:
    return [row(layout, sizes, tokens, run_cost) for sizes in SIZES for layout in LAYOUTS]


NAMES = {
    "LBNHC": "LBNHC (NHD, vLLM's choice on most GPUs)",
    "LBHNC": "LBHNC (HND, what this connector asks for)",
}


def page(rows: Sequence[dict[str, object]]) -> list[str]:
    """The table of docs/performance.md, a line per layout."""
    heads = [f"TP {p} → {d}" for p, d in SIZES]
    lines = [f"| layout | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for layout in LAYOUTS:
        cells = [_cell(one) for one in rows if one["layout"] == layout]
        lines.append(f"| {NAMES.get(layout, layout)} | {' | '.join(cells)} |")
    return lines


def _cell(one: dict[str, object]) -> str:
    size = int(str(one["mean bytes"]))
    text = f"{one['straight runs']:,} of {f'{size >> 10} KiB' if size >= 1 << 10 else f'{size} B'}"
    if one["way"] == "converted":
        text += f"; converted: {one['runs']:,}"
        text += f", reading {read} times the bytes" if (read := one["bytes read / needed"]) != 1.0 else ""
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4001, help="length of the request (default: 4001)")
    parser.add_argument(
        "--run-cost", type=int, default=RUN_COST_BYTES, help="what one run costs the transport, in bytes"
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    rows = table(options.tokens, options.run_cost)
    names = list(rows[0])
    print("| " + " | ".join(names) + " |")
    print("| --- " * len(names) + "|")
    for one in rows:
        print("| " + " | ".join(str(one[name]) for name in names) + " |")
    print("", *page(rows), sep="\n")
    if options.json:
        given = {"tokens": options.tokens, "run_cost": options.run_cost}
        options.json.write_text(json.dumps({"options": given, "results": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
