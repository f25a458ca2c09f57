"""What geometry costs per request (bind, blanks) and per handshake (check, plan).

    python benchmarks/bind.py [--reps 200] [--json results.json]

The model is 80 layers of 8 KV heads of 128 channels in bfloat16, with 128 tokens per block: the size of a 70B
Llama. Context parallelism is that of an MLA model of 61 layers, with blocks of 64 slots a rank, and counts all peers of
one decode rank. Addresses are made up and no byte moves, but for the blanks: of 28 layers, what 37 tokens leave of a
block is zeroed. Times are milliseconds of one thread, beside what a memcpy of the bytes that would move takes it; run
it on an idle core.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.report import write  # noqa: E402
from vllm_pd_connector.geometry.bind import Tail, pair  # noqa: E402
from vllm_pd_connector.geometry.blocks import BlockTable, BlockTables  # noqa: E402
from vllm_pd_connector.geometry.checksums.digest import digests  # noqa: E402
from vllm_pd_connector.geometry.layouts.attention import PageView, cpu_attention, key_value, latent  # noqa: E402
from vllm_pd_connector.geometry.manifest import (  # noqa: E402
    MANIFEST_VERSION,
    Coordinates,
    Group,
    GroupKind,
    Manifest,
    ModelFacts,
    Segment,
    Tensor,
)
from vllm_pd_connector.geometry.plan import Edge, Plan, make_plan  # noqa: E402
from vllm_pd_connector.geometry.runs import Runs  # noqa: E402
from vllm_pd_connector.geometry.sharding import Interval, shard  # noqa: E402
from vllm_pd_connector.geometry.spans import runs_of  # noqa: E402
from vllm_pd_connector.geometry.staging.blanks import blanks  # noqa: E402
from vllm_pd_connector.geometry.topology import check_pd_topology  # noqa: E402
from vllm_pd_connector.geometry.validate import validate  # noqa: E402
from vllm_pd_connector.worker.staging.copiers import CpuCopier  # noqa: E402

HEADS, CHANNELS, ITEM, LATENT = 8, 128, 2, 576
FACTS = ModelFacts(
    "bench", "LlamaForCausalLM", 80, 8192, HEADS, CHANNELS, "bfloat16", "auto", "default", "none", "content 0", ""
)


def bind(edge: Edge, *tokens: Any, tail: Tail = Tail.EXACT) -> Runs:
    """What a worker does of a request: all of its runs along an edge."""
    return runs_of(pair(edge, *tokens, tail=tail))


def make_worker(
    tp_rank: int, tp_size: int, layout: str = "LBNHC", tokens: int = 128, blocks: int = 2048, layers: int = 80,
    heads: int = HEADS, channels: int = CHANNELS,
) -> Manifest:  # fmt: skip
    """One rank with `blocks` blocks; `layout` is vLLM's name, or CPU for a transposed K."""
    own = shard(heads, tp_size, tp_rank)
    order = "LBHNC" if layout == "CPU" else layout
    sizes = {"L": layers, "B": blocks, "H": len(own), "N": tokens, "C": 2 * channels * ITEM}
    strides, step = {}, 1
    for axis in reversed(order):
        strides[axis] = step
        step *= sizes[axis]
    tensors: list[Tensor] = []
    for i in range(layers):
        view = PageView(
            layer=f"model.layers.{i}.self_attn.attn",
            group=0,
            segment=0,
            offset=i * strides["L"],
            shape=(blocks, len(own), tokens, sizes["C"]),
            strides=(strides["B"], strides["H"], strides["N"], 1),
            dtype="bfloat16",
            itemsize=ITEM,
            pages_per_block=1,
            heads=own,
            total_heads=heads,
        )
        tensors += cpu_attention(view, channels) if layout == "CPU" else key_value(view, channels, channels)
    place = Coordinates(tp_rank, tp_size, 0, 1, 0, 1, 1, 1)
    return manifest(tensors, step, Group(GroupKind.FULL, tokens, blocks), place)


def manifest(tensors: Sequence[Tensor], length: int, group: Group, place: Coordinates) -> Manifest:
    """A worker whose caches are one segment of `length` bytes."""
    return Manifest(
        version=MANIFEST_VERSION,
        engine_id="bench",
        incarnation="0" * 32,
        software="bench",
        model=FACTS,
        parallel=place,
        segments=(Segment(1 << 44, length, "cuda", 0),),
        groups=(group,),
        tensors=tuple(tensors),
        transport="loopback",
        endpoint=b"",
    )


def scattered(blocks: int, seed: int) -> tuple[BlockTable]:
    ids = np.random.default_rng(seed).permutation(np.arange(1, 2048))[:blocks]
    return (BlockTable.of(0, ids.tolist()),)


def contiguous(blocks: int) -> tuple[BlockTable]:
    return (BlockTable.of(0, range(1, blocks + 1)),)


def measure(name: str, action: Callable[[], object], reps: int, **more: object) -> dict[str, object]:
    action()  # patterns are computed by the first request of a shape; `cold` cases build their plan inside
    times = []
    for _ in range(reps):
        start = time.perf_counter()
        action()
        times.append((time.perf_counter() - start) * 1e3)
    p50, p95, p99 = (float(np.percentile(times, q)) for q in (50, 95, 99))
    return {"case": name, "median_ms": p50, "p95_ms": p95, "p99_ms": p99, "min_ms": min(times), "reps": reps, **more}


@cache
def copied_ms_per_byte() -> float:
    """What one memcpy of 64 MiB takes, the median of nine, by its bytes: a bare copy beside what is measured."""
    source, into = np.ones(64 << 20, dtype=np.uint8), np.zeros(64 << 20, dtype=np.uint8)
    took = []
    for _ in range(9):
        began = time.perf_counter()
        np.copyto(into, source)
        took.append(time.perf_counter() - began)
    return 1e3 * float(np.median(took)) / source.nbytes


def bind_cases(reps: int) -> list[dict[str, object]]:
    rows = []

    def case(name: str, source: Manifest, destination: Manifest, blocks: int, stop: int, *, random: bool, tail: Tail):
        edge = make_plan(destination, [source]).edges[0]
        theirs = scattered(blocks, 1) if random else contiguous(blocks)
        tokens = destination.groups[0].block_tokens
        needed = -(-stop // tokens)
        ours = scattered(needed, 2) if random else contiguous(needed)
        runs = bind(edge, theirs, ours, 0, stop, tail=tail)
        copied = {"megabytes": runs.total_bytes / 1e6, "memcpy_ms": runs.total_bytes * copied_ms_per_byte()}
        action = partial(bind, edge, theirs, ours, 0, stop, tail=tail)
        rows.append(measure(name, action, reps, runs=len(runs), **copied))

    full, part = 1024 * 128, 1023 * 128 + 37
    nhd, hnd, cpu = (make_worker(0, 1, layout) for layout in ("LBNHC", "LBHNC", "CPU"))
    case("1024 scattered blocks", nhd, nhd, 1024, full, random=True, tail=Tail.EXACT)
    case("1024 contiguous blocks", nhd, nhd, 1024, full, random=False, tail=Tail.EXACT)
    case("1024 scattered, exact tail, NHD", nhd, nhd, 1024, part, random=True, tail=Tail.EXACT)
    case("1024 scattered, exact tail, HND", hnd, hnd, 1024, part, random=True, tail=Tail.EXACT)
    case("1024 scattered, page tail, HND", hnd, hnd, 1024, part, random=True, tail=Tail.PAGE)
    case("64 scattered, exact tail, transposed K", cpu, cpu, 64, 63 * 128 + 37, random=True, tail=Tail.EXACT)
    case("64 scattered, page tail, transposed K", cpu, cpu, 64, 63 * 128 + 37, random=True, tail=Tail.PAGE)
    packed = make_worker(0, 1, "BLNHC")
    case("1024 scattered, block-outermost", packed, packed, 1024, full, random=True, tail=Tail.EXACT)
    half = make_worker(1, 2, "LBHNC")
    case("1024 scattered, HND, tp 1 to 2", hnd, half, 1024, full, random=True, tail=Tail.EXACT)
    small = make_worker(0, 1, tokens=48, blocks=4096)
    case("256 scattered 128-token to 48-token blocks", nhd, small, 256, 256 * 128, random=True, tail=Tail.EXACT)
    return rows


def make_latent(rank: int, dcp: int, interleave: int = 1, slots: int = 64, blocks: int = 2049) -> Manifest:
    """A rank of an MLA model whose decode-context parallel group has `dcp` ranks with `slots` slots a block each."""
    page, layers = slots * LATENT * ITEM, 61
    tensors: list[Tensor] = []
    for i in range(layers):
        shape, strides = (blocks, 1, slots, LATENT * ITEM), (page, page, LATENT * ITEM, 1)
        name = f"model.layers.{i}.self_attn.attn"
        view = PageView(name, 0, 0, i * blocks * page, shape, strides, "bfloat16", ITEM, 1, Interval(0, 1), 1)
        tensors += latent(view, LATENT)
    place = Coordinates(rank, dcp, 0, 1, 0, 1, dcp, 1, rank, 0, interleave)
    group = Group(GroupKind.FULL, slots * dcp, blocks, share=place.share)
    return manifest(tensors, layers * blocks * page, group, place)


def context_cases(reps: int) -> list[dict[str, object]]:
    """All edges of one decode rank, for a request of 64 Ki tokens."""
    rows: list[dict[str, object]] = []
    tokens = 1 << 16
    for there, here, interleave in (
        (1, 1, 1), (8, 8, 64), (8, 8, 1), (1, 8, 64), (8, 1, 64), (1, 8, 1), (8, 1, 1), (2, 8, 64), (2, 8, 1),
    ):  # fmt: skip
        sources = [make_latent(rank, there, interleave) for rank in range(there)]
        edges = make_plan(make_latent(0, here, interleave), sources).edges
        tables = scattered(tokens // (64 * there), 1), scattered(tokens // (64 * here), 2)

        def every(edges: Sequence[Edge] = edges, tables: tuple[BlockTables, BlockTables] = tables) -> int:
            return sum(len(bind(edge, *tables, 0, tokens)) for edge in edges)

        name = f"MLA, dcp {there} to {here}, interleave {interleave}"
        rows.append(measure(name, every, reps, runs=every(), edges=len(edges)))
    return rows


def plan_cases(reps: int) -> list[dict[str, object]]:
    rows = []
    for source_tp, destination_tp in ((1, 1), (1, 8), (8, 1), (4, 2), (2, 4), (8, 8), (16, 8), (16, 1)):
        sources = [make_worker(rank, source_tp) for rank in range(source_tp)]
        destination = make_worker(destination_tp - 1, destination_tp)
        edges = len(make_plan(destination, sources).edges)
        name = f"tp {source_tp} to {destination_tp}"
        rows.append(measure(f"plan, {name}", lambda d=destination, s=sources: make_plan(d, s), reps, edges=edges))
    one, eight = make_worker(0, 1), [make_worker(rank, 8) for rank in range(8)]
    rows.append(measure("validate one manifest", lambda: validate(one), reps))
    rows.append(measure("check_pd_topology, tp 8 to 1", lambda: check_pd_topology(one, eight), reps))

    def cold() -> None:
        edge = make_plan(one, [one]).edges[0]
        bind(edge, scattered(64, 1), scattered(64, 2), 0, 63 * 128 + 37)

    rows.append(measure("plan and first bind, 64 scattered blocks and a tail", cold, reps))
    return rows


def blank_cases(reps: int) -> list[dict[str, object]]:
    rows = []
    table = (BlockTable.of(0, [1]),)
    for name, there, here in (
        ("like pages", "LBHNC", "LBHNC"),
        ("NHD to HND", "LBNHC", "LBHNC"),
        ("HND to NHD", "LBHNC", "LBNHC"),
    ):
        source, destination = (make_worker(0, 1, layout, blocks=2, layers=28) for layout in (there, here))
        memory = np.ones(destination.segments[0].length, dtype=np.uint8)
        segment = Segment(memory.ctypes.data, len(memory), "cpu", 0)
        plan = make_plan(msgspec.structs.replace(destination, segments=(segment,)), [source])
        copier = CpuCopier()

        def zero(plan: Plan = plan, copier: CpuCopier = copier) -> None:
            copier.blank(blanks(plan, table, 0, 37, {}))

        zero()
        zeroed = float(memory.size - np.count_nonzero(memory)) / 1e6
        memset = zeroed * 1e6 * copied_ms_per_byte()
        rows.append(measure(f"blanks, {name}", zero, reps, megabytes=zeroed, memcpy_ms=memset))
    return rows


def digest_cases(reps: int) -> list[dict[str, object]]:
    worker = make_worker(0, 1, tokens=128, blocks=20, layers=2)
    memory = [np.random.default_rng(0).integers(0, 256, worker.segments[0].length, dtype=np.uint8)]
    tables = (BlockTable.of(0, range(1, 17)),)
    size = 16 * 128 * HEADS * 2 * CHANNELS * ITEM * 2
    copied = {"megabytes": size / 1e6, "memcpy_ms": size * copied_ms_per_byte()}
    return [measure("digest, 2 layers", lambda: digests(worker, memory, tables, 0, 2048), reps, **copied)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=100)
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    rows = [*bind_cases(options.reps), *plan_cases(max(50, options.reps // 2))]
    rows += [*context_cases(max(10, options.reps // 10)), *blank_cases(50), *digest_cases(50)]
    print(f"{'case':<52} {'median':>8} {'p95':>8} {'p99':>8}   ms")
    for row in rows:
        extra = ", ".join(f"{row[key]:g} {key}" for key in ("runs", "edges", "megabytes", "memcpy_ms") if key in row)
        print(f"{row['case']:<52} {row['median_ms']:8.3f} {row['p95_ms']:8.3f} {row['p99_ms']:8.3f}   {extra}")
    if options.json:
        write(options.json, {"numpy": np.__version__, "results": rows})


if __name__ == "__main__":
    main()
