"""The table of end-to-end cases: one row is one pair of prefill and decode instances.

A row names everything that distinguishes a pair; tests take a row and never build servers themselves. `ROWS` is what
`make test-full` runs. `pairwise(QUICK_ROWS)` is the choice of `make test`: every two values of two columns that meet
in some quick row meet in a chosen one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from examples.make_models import MODELS, make
from tests.support.servers.releases import python_path

CHUNK_TOKENS = 128
"""Tokens per prefill step in rows that chunk; most prompts of the workload are longer."""

PIPELINE_WORKER = "pd_test_plugins.pipeline.PipelineWorker"


HYBRIDS = ("kimi", "kimi16", "qwen3next", "granite")
"""Families with recurrent states beside attention; their states' sizes differ by tensor-parallel size, and so do their
logical blocks."""

DRAFTS = {"method": "draft_model", "num_speculative_tokens": 2}
DRAFT_FAMILY = "gqa"

HYBRID_BLOCKS = 256
"""Blocks of each side of a hybrid pair: a few dozen requests use every one of them again."""


@dataclass(frozen=True, slots=True)
class Row:
    """One pair. Block sizes are tokens; 0 is the model's own (see `make_models`). `p_conv` and `d_conv` are the layouts
    of convolution states, DS or SD; empty is vLLM's choice.

    A side with a layout (vLLM's name for it) runs the reference backend, whose pages are those of a GPU in that
    layout; without one it runs the platform's backend, for attention on the CPU head-major with K transposed.

    `beside` is a connector that both sides have beside this project's, in a MultiConnector. With `drafts` both
    sides speculate with a draft model, which has caches of its own.
    `p_dcp` and `d_dcp` are decode-context parallel sizes, which tensor-parallel ranks make up; `interleave` is how many
    tokens in a row one of them holds, 0 for the connector's choice, a block.
    `kernels` "avx2": both sides compute as on a processor that has nothing newer, vLLM's kernels and torch's.
    `p_vllm` and `d_vllm` are releases of vLLM ("0.33"); empty is the one that the tests run on.
    With `events` both sides publish their KV-cache events. With `by_layer` a push is written layer by layer.
    """

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
    p_pp: int = 1
    d_pp: int = 1
    p_layout: str = ""
    d_layout: str = ""
    beside: str = ""
    drafts: bool = False
    kernels: str = ""
    p_vllm: str = ""
    d_vllm: str = ""
    events: bool = False
    p_dcp: int = 1
    d_dcp: int = 1
    interleave: int = 0
    by_layer: bool = False

    @property
    def id(self) -> str:
        """Readable and unique; what differs from the plainest row of the family is named."""
        parts = [self.family, f"{self.transport}-{self.mode}", f"tp{self.p_tp}to{self.d_tp}"]
        parts += [f"block{self.p_block}to{self.d_block}"] if (self.p_block, self.d_block) != (0, 0) else []
        parts += [f"conv{self.p_conv}to{self.d_conv}"] if self.p_conv or self.d_conv else []
        parts += [f"pp{self.p_pp}to{self.d_pp}"] if (self.p_pp, self.d_pp) != (1, 1) else []
        layouts = self.p_layout or "CPU", self.d_layout or "CPU"
        parts += ["to".join(layouts)] if layouts != ("CPU", "CPU") else []
        parts += [f"beside{self.beside}"] if self.beside else []
        parts += ["drafts"] if self.drafts else []
        parts += ["events"] if self.events else []
        parts += [self.kernels] if self.kernels else []
        parts += [f"vllm{self.p_vllm}to{self.d_vllm}"] if self.p_vllm or self.d_vllm else []
        parts += [f"dcp{self.p_dcp}to{self.d_dcp}"] if (self.p_dcp, self.d_dcp) != (1, 1) else []
        parts += [f"interleave{self.interleave}"] if self.interleave else []
        parts += ["bylayer"] if self.by_layer else []
        parts += ["chunked"] if self.chunked else []
        parts += [] if self.prefix_caching else ["nocache"]
        return "-".join(parts)

    def flags(self, side: str) -> tuple[str, ...]:
        """`vllm serve` flags of side "p" or "d", beyond those of the model."""
        model = MODELS[self.family]
        block = (self.p_block if side == "p" else self.d_block) or model.block_size
        flags = ["--block-size", str(block)]
        if (stages := self.p_pp if side == "p" else self.d_pp) > 1:
            flags += ["--pipeline-parallel-size", str(stages), "--worker-cls", PIPELINE_WORKER]
        if (contexts := self.p_dcp if side == "p" else self.d_dcp) > 1:
            flags += ["--decode-context-parallel-size", str(contexts)]
            flags += ["--cp-kv-cache-interleave-size", str(self.interleave)] if self.interleave else []
        if side == "p" and self.chunked:
            flags += ["--max-num-batched-tokens", str(CHUNK_TOKENS)]
        if model.prefix_caching:
            flags.append("--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching")
        if self.drafts:
            flags += ["--speculative-config", json.dumps(DRAFTS | {"model": str(make(MODELS[DRAFT_FAMILY]))})]
        if self.family in HYBRIDS:
            flags += ["--num-gpu-blocks-override", str(HYBRID_BLOCKS)]
        return tuple(flags)

    def environment(self, side: str) -> dict[str, str]:
        """Variables of side "p" or "d", beyond those of the model."""
        conv, layout = (self.p_conv, self.p_layout) if side == "p" else (self.d_conv, self.d_layout)
        release = self.p_vllm if side == "p" else self.d_vllm
        reference = {"PD_TEST_REFERENCE_ATTENTION": "1", "VLLM_KV_CACHE_LAYOUT": layout} if layout else {}
        kernels = {"ATEN_CPU_CAPABILITY": "avx2", "PD_TEST_AVX2": "1"} if self.kernels else {}
        path = {"PYTHONPATH": python_path(release)} if release else {}
        return reference | kernels | path | ({"VLLM_SSM_CONV_STATE_LAYOUT": conv} if conv else {})

    @property
    def unequal(self) -> bool:
        """Whether the two sides differ in more than their tensor-parallel sizes."""
        return (self.p_block, self.p_pp, self.p_layout) != (self.d_block, self.d_pp, self.d_layout)

    @property
    def workers(self) -> int:
        return self.p_tp * self.p_pp + self.d_tp * self.d_pp


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
    for family in HYBRIDS:
        caching = MODELS[family].prefix_caching
        rows += [Row(family, *sizes, prefix_caching=caching) for sizes in ((1, 1), (2, 1), (1, 2))]
    # Equal sizes above one: each rank has a share of the states' heads, and the attention's latent whole or not.
    rows += [Row(family, 2, 2, prefix_caching=MODELS[family].prefix_caching) for family in ("kimi", "qwen3next")]
    # The same of every family: states by mode none, and a prefill in steps.
    rows += [Row("kimi", prefix_caching=False), Row("kimi", chunked=True)]
    rows += [Row("kimi", p_conv="DS", d_conv="DS"), Row("kimi16", 1, 2, p_conv="SD", d_conv="DS")]
    rows += [Row("granite", prefix_caching=False, p_conv="DS", d_conv="SD"), Row("qwen3next", p_conv="DS", d_conv="SD")]
    return rows


def _layouts(family: str, p_tp: int, d_tp: int, p: tuple[str, int], d: tuple[str, int]) -> Row:
    """A row from (layout, tokens per block) of each side."""
    return Row(family, p_tp, d_tp, p_block=p[1], d_block=d[1], p_layout=p[0], d_layout=d[0])


QUICK_UNEQUAL_ROW = _layouts("gqa", 1, 2, ("HND", 48), ("NHD", 32))

UNEQUAL_ROWS: list[Row] = [
    QUICK_UNEQUAL_ROW,
    _layouts("gqa", 1, 1, ("NHD", 32), ("HND", 64)),
    Row("gqa", p_pp=2),
    # The platform's backend takes multiples of 32. 32 and 96 meet only every third block.
    *(Row("gqa", p_tp, 1, p_block, d_block) for p_tp in (1, 2) for p_block, d_block in ((128, 32), (32, 128))),
    Row("gqa", p_block=32, d_block=96),
    Row("swa", p_block=128, d_block=32),
    Row("swa", p_block=32, d_block=128),
    Row("swa", 2, 1, p_block=32, d_block=96),
    _layouts("gqa", 1, 1, ("HND", 32), ("NHD", 32)),
    _layouts("gqa", 2, 1, ("NHD", 32), ("HND", 32)),
    _layouts("gqa", 1, 2, ("HND", 32), ("NHD", 32)),
    _layouts("gqa", 1, 1, ("NHD", 64), ("HND", 16)),
    _layouts("gqa", 1, 1, ("HND", 16), ("NHD", 64)),
    _layouts("gqa", 2, 1, ("NHD", 48), ("HND", 32)),
    replace(_layouts("gqa", 2, 1, ("HND", 48), ("NHD", 32)), chunked=True),
    _layouts("gqa", 1, 2, ("NHD", 128), ("HND", 32)),
    _layouts("gqa", 2, 1, ("HND", 32), ("NHD", 128)),
    _layouts("gqa", 1, 1, ("BLNHC", 64), ("BHLNC", 16)),
    _layouts("gqa", 2, 1, ("", 64), ("NHD", 16)),
    _layouts("gqa", 1, 2, ("NHD", 16), ("", 64)),
    _layouts("swa", 1, 1, ("NHD", 16), ("HND", 48)),
    Row("gqa6", 3, 2),
    Row("gqa6", 2, 3),
    _layouts("gqa6", 3, 1, ("HND", 48), ("NHD", 32)),
    _layouts("mqa", 2, 1, ("NHD", 32), ("HND", 32)),
    _layouts("mqa", 1, 2, ("HND", 32), ("NHD", 16)),
    Row("gqa", d_pp=2),
    Row("gqa", p_pp=2, d_pp=2),
    Row("gqa", 2, 1, p_pp=2),
    Row("gqa", 2, 1, d_pp=2),
    Row("swa", p_pp=2),
    replace(_layouts("gqa", 1, 1, ("HND", 48), ("NHD", 32)), p_pp=2),
    Row("kimi", p_pp=2),
    Row("kimi", d_pp=2),
]
"""Pairs whose sides differ in block size, layout or pipeline stages, or that need another number of heads, with prefix
caching where the model has it."""

LARGER_WINDOW_ROWS: list[Row] = [row for row in UNEQUAL_ROWS if row.family == "swa" and row.p_block < row.d_block]
"""Windows whose first block on the decode side may reach back to tokens that the prefill side has let go of."""

PLAIN_MOONCAKE_ROW = Row("gqa", transport="mooncake")
QUICK_MOONCAKE_ROW = replace(PLAIN_MOONCAKE_ROW, p_pp=2)

MOONCAKE_ROWS: list[Row] = [
    PLAIN_MOONCAKE_ROW,
    QUICK_MOONCAKE_ROW,
    Row("gqa", 2, 1, chunked=True, transport="mooncake"),
    Row("gqa", 1, 2, transport="mooncake"),
    Row("swa", transport="mooncake"),
    Row("mla", prefix_caching=False, transport="mooncake"),
    Row("kimi", prefix_caching=MODELS["kimi"].prefix_caching, transport="mooncake"),
    replace(_layouts("gqa", 1, 1, ("NHD", 32), ("HND", 64)), transport="mooncake"),
    *(Row("gqa", *sizes, chunked=True, mode="push", transport="mooncake") for sizes in ((1, 1), (2, 1), (1, 2))),
    Row("swa", mode="push", transport="mooncake"),
    Row("mla", prefix_caching=False, mode="push", transport="mooncake"),
    Row("kimi", prefix_caching=MODELS["kimi"].prefix_caching, mode="push", transport="mooncake"),
    Row("gqa6", 3, 2, p_block=64, d_block=32, chunked=True, mode="push", transport="mooncake"),
]
"""Every kind of cache and of plan once, as no transport knows what it moves; last: five workers on two cores."""

PUSHED_UNEQUAL_ROWS: list[Row] = [
    Row("gqa", p_block=128, d_block=32),
    Row("gqa", 2, 1, p_block=32, d_block=128),
    Row("swa", p_block=128, d_block=32),
    Row("swa", 2, 1, p_block=32, d_block=96),
    _layouts("gqa", 1, 1, ("NHD", 32), ("HND", 64)),
    _layouts("gqa", 2, 1, ("NHD", 32), ("HND", 32)),
    _layouts("gqa", 1, 2, ("HND", 48), ("NHD", 32)),
    _layouts("gqa", 2, 1, ("", 64), ("NHD", 16)),
    _layouts("mqa", 1, 2, ("HND", 32), ("NHD", 16)),
    Row("gqa6", 2, 3),
    Row("gqa", p_pp=2),
    Row("gqa", d_pp=2),
    Row("kimi", p_pp=2),
]
"""Every kind of difference once, in the direction that is harder to write than to read where there is one: the plans
are the ones that reading has, of which `UNEQUAL_ROWS` has more."""


LAYER_ROWS: list[Row] = [
    Row("gqa", mode="push", by_layer=True),
    Row("gqa", 2, 1, chunked=True, mode="push", transport="mooncake", by_layer=True),
    Row("mla", prefix_caching=False, mode="push", by_layer=True),
    Row("kimi", prefix_caching=MODELS["kimi"].prefix_caching, mode="push", by_layer=True),
]
"""Pushes of prompts that take one step, and of chunks between unequal sides; MLA's operator; states, of the last step
of a prompt with the layers behind them."""


def _push_rows() -> list[Row]:
    rows = []
    for family in ("gqa", "swa", "mla"):
        caching = MODELS[family].prefix_caching
        rows.append(Row(family, prefix_caching=caching, mode="push"))
        for p_tp, d_tp in ((2, 1), (1, 2), (2, 2)):
            rows.append(Row(family, p_tp, d_tp, chunked=caching, prefix_caching=caching, mode="push"))
    rows += [Row("gqa", chunked=True, prefix_caching=caching, mode="push") for caching in (True, False)]
    for family in HYBRIDS:
        rows.append(Row(family, prefix_caching=MODELS[family].prefix_caching, mode="push"))
    rows += [Row("kimi16", 1, 2, mode="push"), Row("kimi", 2, 1, mode="push")]
    return rows + [replace(row, chunked=True, mode="push") for row in PUSHED_UNEQUAL_ROWS] + LAYER_ROWS


QUICK_PUSH_ROWS: list[Row] = [Row("gqa", chunked=True, mode="push")]

ORDER_ROWS: list[Row] = QUICK_PUSH_ROWS
"""Where the two legs of a hand-off are sent in every dangerous order."""

PUSH_ROWS: list[Row] = _push_rows()
"""Pairs in which the prefill side writes. Steps matter here, so pairs with unequal sides compute in chunks."""

OTHER_WAY_ROWS: list[Row] = [
    *QUICK_PUSH_ROWS,
    Row("swa", mode="push"),
    Row("kimi", mode="push"),
    PLAIN_MOONCAKE_ROW,
    Row("gqa", chunked=True, mode="push", transport="mooncake"),
]
"""The other mode once per kind of cache, and both modes over the other transport: prefix hits and clients that leave
are tested there as on the plain rows."""

OTHER_HITS_ROWS: list[Row] = [
    *OTHER_WAY_ROWS,
    *(row for row in PUSH_ROWS if row.workers == 2 and row.p_block != row.d_block and row.family not in HYBRIDS),
]
"""Where a push, or a pull over the other transport, starts behind hits of every length: pages that the cursor of a push
meets, and pages that it rounds to."""

STORED_ROWS: list[Row] = [
    Row("gqa", mode=mode, beside=beside)
    for beside in ("ExampleConnector", "StoringConnector")
    for mode in ("push", "pull")
]
"""Beside a connector that loads synchronously and knows one KV-cache group only, and one that loads and saves between
steps."""

BESIDE_ROWS: list[Row] = [*STORED_ROWS, Row("gqa", beside="KeepingConnector")]
"""And beside one that has every finished request's blocks kept."""

EVENT_ROWS: list[Row] = [Row("gqa", mode="push", events=True), Row("swa", events=True), Row("kimi", events=True)]
"""Whose sides tell what their prefix caches have: a kind of group each, and the mode in which decode is asked first."""

DRAFT_ROWS: list[Row] = [Row("gqa", chunked=True, mode=mode, drafts=True) for mode in ("push", "pull")]

CONTEXT_ROWS: list[Row] = [
    replace(_layouts("mqa", 1, 2, ("NHD", 16), ("NHD", 16)), d_dcp=2, interleave=16),
    replace(_layouts("mqa", 2, 1, ("NHD", 16), ("HND", 48)), p_dcp=2),
    replace(_layouts("mqa", 2, 2, ("HND", 16), ("NHD", 32)), p_dcp=2, d_dcp=2, interleave=4),
    replace(_layouts("mqa", 2, 2, ("NHD", 16), ("NHD", 16)), p_dcp=2, d_dcp=2, mode="push", chunked=True),
]
"""Decode context parallelism. vLLM's CPU backends have none: the reference backend does, for attention with heads."""

AVX2_ROWS: list[Row] = [
    Row(family, prefix_caching=MODELS[family].prefix_caching, kernels="avx2") for family in ("gqa", "mla", "kimi")
]
"""As on processors without AVX-512. Answers are compared with a plain run's on the processor as it is."""

AUTO_ROW = Row("gqa", chunked=True, mode="auto")
"""Where the decode side finds the faster way itself."""

MIXED_ROWS: list[Row] = [
    Row("gqa", p_vllm="0.32", d_vllm="0.33"),
    Row("gqa", chunked=True, mode="push", p_vllm="0.33", d_vllm="0.32"),
    Row("kimi", prefix_caching=MODELS["kimi"].prefix_caching, p_vllm="0.32", d_vllm="0.33"),
]
"""A fleet that goes from one release of vLLM to the next, which of its roles first is its operator's choice."""

ROWS: list[Row] = [
    *_rows(), *UNEQUAL_ROWS, *MOONCAKE_ROWS, *PUSH_ROWS, *AVX2_ROWS, *CONTEXT_ROWS, AUTO_ROW, *MIXED_ROWS,
]  # fmt: skip

UNEQUAL_HYBRID_ROWS = [row for row in ROWS if row.family in HYBRIDS and row.prefix_caching and row.p_tp != row.d_tp]
"""Hybrids whose logical blocks differ because their states do, with prefix caching on."""


FAMILIES = ("gqa", "swa", "mla", *HYBRIDS)
PLAIN_ROWS: list[Row] = [Row(family, prefix_caching=MODELS[family].prefix_caching) for family in FAMILIES]
"""One row per family: equal sides, everything at its default. What does not depend on geometry is tested on these."""

PLAINEST: list[Row] = PLAIN_ROWS[:1]
"""Where `make test` runs what does not depend on the kind of cache either."""


QUICK_ROWS: list[Row] = [
    row
    for row in ROWS
    if row in (QUICK_MOONCAKE_ROW, QUICK_UNEQUAL_ROW, *QUICK_PUSH_ROWS)
    or (row in PLAIN_ROWS and row.family in ("gqa", "kimi"))
    or row == Row("swa", 2, 1, chunked=True, prefix_caching=False)
]
"""What `make test` chooses from: what only real servers show, once. A pair takes a minute to start, one with three
workers a minute and a half, so a row differs in several things at once. Kinds of caches, unequal sides and other
connectors are tested without servers too, by the geometry's property tests, with vLLM's own cache manager and in its
MultiConnector; kernels for AVX2 by `make test-kernels`. Kimi has recurrent states beside MLA, so it stands for both."""


def _values(row: Row) -> tuple[object, ...]:
    """The columns whose pairs must meet; the two sides' sizes count as one value, since it is their pair that acts."""
    geometry = (
        (row.p_tp, row.d_tp),
        (row.p_pp, row.d_pp),
        (row.p_block, row.d_block),
        (row.p_layout, row.d_layout),
        (row.p_conv, row.d_conv),
        (row.p_dcp, row.d_dcp),
    )
    return (
        row.family, *geometry, row.chunked, row.prefix_caching, row.mode, row.transport, row.beside, row.drafts,
        row.kernels, (row.p_vllm, row.d_vllm), row.events, row.by_layer,
    )  # fmt: skip


def pairwise(rows: Sequence[Row]) -> list[Row]:
    """The plain rows and a small choice of the others, so that every pair of column values of `rows` occurs.

    Greedy in a fixed order. Of two rows that cover as much, the one with fewer processes is taken.
    """

    def pairs(row: Row) -> set[tuple[tuple[int, object], tuple[int, object]]]:
        return set(combinations(enumerate(_values(row)), 2))

    chosen = [row for row in rows if row in PLAIN_ROWS]
    missing = set().union(*map(pairs, rows)) - set().union(*map(pairs, chosen))
    while missing:
        best = max(rows, key=lambda row: (len(pairs(row) & missing), -row.workers))
        chosen.append(best)
        missing -= pairs(best)
    return [row for row in rows if row in chosen]
