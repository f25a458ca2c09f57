"""The table of end-to-end cases: one row is one pair of prefill and decode instances.

A row names everything that distinguishes a pair; tests take a row and never build servers themselves. `ROWS` is what
`make test-full` runs. `pairwise(QUICK_ROWS)` is the choice of `make test`: every two values of two columns that meet
in some quick row meet in a chosen one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

from make_models import MODELS

CHUNK_TOKENS = 128
"""Tokens per prefill step in rows that chunk; most prompts of the workload are longer."""


UNEQUAL_BLOCKS = (("gqa", 32, 128), ("gqa", 128, 32), ("gqa", 32, 96), ("swa", 128, 32))
"""Families with block sizes of the prefill and the decode side, in tokens; 32 and 96 meet only every third block.

Sliding windows with larger blocks on the decode side are refused: the first block in the window may reach back to
tokens whose blocks the prefill side has freed (docs/design/geometry.md).
"""


HYBRIDS = ("kimi", "kimi16", "qwen3next", "granite")
"""Families with recurrent states beside attention; their states' sizes differ by tensor-parallel size, and so do their
logical blocks."""

HYBRID_BLOCKS = 256
"""Blocks of each side of a hybrid pair: a few dozen requests use every one of them again."""


@dataclass(frozen=True, slots=True)
class Row:
    """One pair. Block sizes are tokens; 0 is the model's own (see `make_models`). `p_conv` and `d_conv` are the layouts
    of convolution states, DS or SD; empty is vLLM's choice."""

    family: str
    p_tp: int = 1
    d_tp: int = 1
    p_block: int = 0
    d_block: int = 0
    chunked: bool = False
    prefix_caching: bool = True
    mode: str = "pull"
    transport: str = "nixl"
    p_conv: str = ""
    d_conv: str = ""

    @property
    def id(self) -> str:
        """Readable and unique; what differs from the plainest row of the family is named."""
        parts = [self.family, f"{self.transport}-{self.mode}", f"tp{self.p_tp}to{self.d_tp}"]
        parts += [f"block{self.p_block}to{self.d_block}"] if (self.p_block, self.d_block) != (0, 0) else []
        parts += [f"conv{self.p_conv}to{self.d_conv}"] if self.p_conv or self.d_conv else []
        parts += ["chunked"] if self.chunked else []
        parts += [] if self.prefix_caching else ["nocache"]
        return "-".join(parts)

    def flags(self, side: str) -> tuple[str, ...]:
        """`vllm serve` flags of side "p" or "d", beyond those of the model."""
        model = MODELS[self.family]
        block = (self.p_block if side == "p" else self.d_block) or model.block_size
        flags = ["--block-size", str(block)]
        if side == "p" and self.chunked:
            flags += ["--max-num-batched-tokens", str(CHUNK_TOKENS)]
        if model.prefix_caching:
            flags.append("--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching")
        if self.family in HYBRIDS:
            flags += ["--num-gpu-blocks-override", str(HYBRID_BLOCKS)]
        return tuple(flags)

    def environment(self, side: str) -> dict[str, str]:
        """Variables of side "p" or "d", beyond those of the model."""
        layout = self.p_conv if side == "p" else self.d_conv
        return {"VLLM_SSM_CONV_STATE_LAYOUT": layout} if layout else {}


def _rows() -> list[Row]:
    rows = []
    for family in ("gqa", "swa", "mla"):
        # vLLM's CPU platform turns chunked prefill and prefix caching off for MLA.
        caching = MODELS[family].prefix_caching
        for p_tp, d_tp in product((1, 2), (1, 2)):
            rows.append(Row(family, p_tp, d_tp, prefix_caching=caching))
            # How a prefill is cut into steps acts on the producer alone, a local hit on the consumer alone: their
            # product with every pair of sizes would show nothing that these do not.
            if caching and p_tp == d_tp:
                rows.append(Row(family, p_tp, d_tp, chunked=True))
            if caching and d_tp == 1:
                rows.append(Row(family, p_tp, d_tp, chunked=p_tp > d_tp, prefix_caching=False))
    for family, p_block, d_block in UNEQUAL_BLOCKS:
        rows += [Row(family, p_tp, d_tp, p_block, d_block) for p_tp, d_tp in ((1, 1), (2, 1))]
    for family in HYBRIDS:
        for caching in (True, False) if MODELS[family].prefix_caching else (False,):
            rows += [Row(family, *sizes, prefix_caching=caching) for sizes in ((1, 1), (2, 1), (1, 2))]
    rows += [Row(family, chunked=True) for family in HYBRIDS if MODELS[family].prefix_caching]
    rows += [Row("kimi", p_conv="DS", d_conv="DS"), Row("kimi16", 1, 2, p_conv="SD", d_conv="DS")]
    rows += [Row("granite", prefix_caching=False, p_conv="DS", d_conv="SD"), Row("qwen3next", p_conv="DS", d_conv="SD")]
    return rows


ROWS: list[Row] = _rows()


FAMILIES = ("gqa", "swa", "mla", *HYBRIDS)
PLAIN_ROWS: list[Row] = [Row(family, prefix_caching=MODELS[family].prefix_caching) for family in FAMILIES]
"""One row per family: equal sides, everything at its default. What does not depend on geometry is tested on these."""


QUICK_HYBRIDS = [row for row in PLAIN_ROWS if row.family in ("kimi", "granite")]
QUICK_ROWS: list[Row] = [
    row
    for row in ROWS
    if row in QUICK_HYBRIDS or (row.family not in HYBRIDS and row.p_block == row.d_block and row.p_tp + row.d_tp < 4)
]
"""What `make test` chooses from. A pair with four workers takes minutes on two cores, and unequal blocks are tested
without servers by the geometry's property tests: both are rows of `make test-full`. So are most hybrids: what differs
between them is how large their states are."""


def _values(row: Row) -> tuple[object, ...]:
    """The columns whose pairs must meet; the two sides' sizes count as one value, since it is their pair that acts."""
    geometry = ((row.p_tp, row.d_tp), (row.p_block, row.d_block), (row.p_conv, row.d_conv))
    return (row.family, *geometry, row.chunked, row.prefix_caching, row.mode, row.transport)


def pairwise(rows: Sequence[Row]) -> list[Row]:
    """The plain rows and a small choice of the others, so that every pair of column values of `rows` occurs.

    Greedy in a fixed order. Of two rows that cover as much, the one with fewer processes is taken.
    """

    def pairs(row: Row) -> set[tuple[tuple[int, object], tuple[int, object]]]:
        return set(combinations(enumerate(_values(row)), 2))

    chosen = [row for row in rows if row in PLAIN_ROWS]
    missing = set().union(*map(pairs, rows)) - set().union(*map(pairs, chosen))
    while missing:
        best = max(rows, key=lambda row: (len(pairs(row) & missing), -row.p_tp - row.d_tp))
        chosen.append(best)
        missing -= pairs(best)
    return [row for row in rows if row in chosen]
