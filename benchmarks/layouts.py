"""How many runs a request is in each cache layout, between equal and unequal tensor-parallel sizes and block sizes.

    python benchmarks/layouts.py [--tokens 4001] [--json results.json]

The model has 8 layers of 8 KV heads of 128 channels in bfloat16, in blocks of which a request's do not follow each
other on either side: the figures are counts, and the same on every machine. They are those of one decode rank and all
the ranks that it reads from. `straight runs` are those between the two caches, `mean bytes` their mean length; `way` is
what the connector does with them, with the price of a run that `--run-cost` gives, and `runs` what that takes: where
they are short, it reads whole pages and converts. `bytes read / needed` is what it reads for each byte that it wants.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.bind import make_worker  # noqa: E402
from benchmarks.report import markdown, write  # noqa: E402
from vllm_pd_connector.geometry.blocks import BlockTable, BlockTables  # noqa: E402
from vllm_pd_connector.geometry.explain import explain_request  # noqa: E402
from vllm_pd_connector.geometry.manifest import Manifest  # noqa: E402
from vllm_pd_connector.geometry.staging.chunks import CHUNKS_PER_BUFFER, RUN_COST_BYTES  # noqa: E402

LAYERS, BLOCK_TOKENS = 8, 16
STAGING_BYTES = 64 << 20
LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC")
SIZES = ((4, 4), (4, 8), (8, 4))
BLOCKS = ((16, 64), (64, 16))
"""Block sizes of both sides besides equal ones, between equal tensor-parallel sizes."""


def instance(layout: str, tp_size: int, block_tokens: int, tokens: int) -> list[Manifest]:
    blocks = -(-tokens // block_tokens) + 2
    return [make_worker(rank, tp_size, layout, block_tokens, blocks, LAYERS) for rank in range(tp_size)]


def apart(block_tokens: int, tokens: int) -> BlockTables:
    """A request's blocks, each of which stands before its neighbour."""
    return (BlockTable.of(0, range(-(-tokens // block_tokens), 0, -1)),)


def row(layout: str, sizes: tuple[int, int], blocks: tuple[int, int], tokens: int, run_cost: int) -> dict[str, object]:
    """The first decode rank's request: counts of runs, bytes and what conversion makes of them."""
    prefill, (decode, *_) = (instance(layout, *side, tokens) for side in zip(sizes, blocks, strict=True))
    theirs, ours = (apart(side, tokens) for side in blocks)
    asked = prefill, decode, theirs, ours, range(tokens)
    straight = explain_request(*asked, 0).movements
    done = explain_request(*asked, STAGING_BYTES // CHUNKS_PER_BUFFER, run_cost=run_cost).movements
    runs, size = sum(m.runs for m in straight), sum(m.bytes for m in straight)
    return {
        "layout": layout,
        "tp": f"{sizes[0]} → {sizes[1]}",
        "block tokens": f"{blocks[0]} → {blocks[1]}",
        "straight runs": runs,
        "mean bytes": size // runs,
        "way": "converted" if any(m.converted for m in done) else "direct",
        "runs": sum(m.runs for m in done),
        "bytes read / needed": round(sum(m.read_bytes for m in done) / size, 2),
    }


def table(tokens: int, run_cost: int) -> list[dict[str, object]]:
    """All rows; `run_cost` is in bytes."""
    pairs = [(sizes, (BLOCK_TOKENS, BLOCK_TOKENS)) for sizes in SIZES] + [(SIZES[0], blocks) for blocks in BLOCKS]
    return [row(layout, *pair, tokens, run_cost) for pair in pairs for layout in LAYOUTS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4001, help="length of the request (default: 4001)")
    parser.add_argument(
        "--run-cost", type=int, default=RUN_COST_BYTES, help="what one run costs the transport, in bytes"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "bench" / "layouts.json")
    options = parser.parse_args()
    rows = table(options.tokens, options.run_cost)
    print(markdown(rows))
    write(options.json, {"tokens": options.tokens, "run_cost": options.run_cost, "rows": rows})


if __name__ == "__main__":
    main()
