"""What it costs to change a cache's layout on its way: the strided copies alone, whole transfers, and the threshold.

    python benchmarks/convert.py [--parts copies pulls pushes threshold] [--into out/bench/convert.json]

The request has 4096 tokens of 28 layers with 8 KV heads of 128 channels in bfloat16 (448 MiB), in scattered blocks.

- copies: the conversion's strided copies from a staging buffer into a cache, as a ratio to plain copies of as many
  bytes from the same staging buffer into the same cache. One thread, as in the transfer thread.
- pulls: a read over NIXL from another process into a cache of another layout, against a read of the same bytes into
  a cache of the same layout.
- pushes: the same with writes, of a request whose prefill has finished.
- threshold: the same bytes directly and by way of the staging buffer, for runs of different lengths. Where the two take
  equally long is what `geometry.staging.chunks.RUN_COST_BYTES` should be.

Times are medians of several rounds, after one in which it is looked whether all bytes come. The variants of a round run
one after another, and a ratio is the median of the rounds' own ratios: a machine that is twice as fast for a second,
which TCP on two cores is, must not give its best moment to one of the two.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import bind as bench_bind
import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from other_process import OtherProcess, done, obey  # noqa: E402

from benchmarks.report import write  # noqa: E402
from vllm_pd_connector.geometry.bind import pair  # noqa: E402
from vllm_pd_connector.geometry.blocks import BlockTable  # noqa: E402
from vllm_pd_connector.geometry.manifest import Manifest, Segment  # noqa: E402
from vllm_pd_connector.geometry.plan import Edge, make_plan  # noqa: E402
from vllm_pd_connector.geometry.spans import runs_of  # noqa: E402
from vllm_pd_connector.geometry.staging import chunks as chunking  # noqa: E402
from vllm_pd_connector.transport.base import TransferStatus, Transport, TransportPeer  # noqa: E402
from vllm_pd_connector.transport.nixl.bindings import NixlOptions  # noqa: E402
from vllm_pd_connector.transport.nixl.transport import NixlTransport  # noqa: E402
from vllm_pd_connector.worker.staging.stager import Stager  # noqa: E402

LAYERS, TOKENS = 28, 4096
TOKEN_BYTES = 8 * 2 * 128 * 2
SLAB_BYTES = 64 << 20
LENGTH = (TOKENS + 128) * LAYERS * TOKEN_BYTES  # every layout of blocks up to 128 tokens, and the null block
LAYOUTS = {"NHD": "LBNHC", "HND": "LBHNC"}
POLL_S = 0.001

Form = tuple[str, int]
"""Layout and tokens per block."""

UNEQUAL: tuple[tuple[Form, Form], ...] = (
    (("NHD", 128), ("HND", 128)),
    (("HND", 128), ("NHD", 128)),
    (("NHD", 16), ("HND", 16)),
    (("HND", 16), ("NHD", 16)),
    (("NHD", 128), ("NHD", 16)),
    (("NHD", 16), ("NHD", 128)),
    (("HND", 128), ("HND", 16)),
    (("HND", 16), ("HND", 128)),
    (("NHD", 128), ("HND", 16)),
    (("HND", 16), ("NHD", 128)),
)


@dataclass(frozen=True, slots=True)
class Copies:
    """Milliseconds for all bytes of the request; 1 of `plain_by_converted` is as fast as a plain copy."""

    source: str
    destination: str
    plain_ms: float
    converted_ms: float
    plain_by_converted: float


@dataclass(frozen=True, slots=True)
class Whole:
    """Milliseconds from binding to the last byte in place; of `unequal_by_equal` 1 is as fast as between equal layouts,
    more is slower."""

    transport: str
    source: str
    destination: str
    way: str
    runs: int
    equal_ms: float
    unequal_ms: float
    unequal_by_equal: float


@dataclass(frozen=True, slots=True)
class Crossing:
    """Milliseconds for runs of `run_bytes`, direct and staged."""

    transport: str
    run_bytes: int
    direct_ms: float
    staged_ms: float


class Memory:
    """As many bytes as the request needs, not zero."""

    def __init__(self) -> None:
        self.bytes = np.resize(np.arange(251, dtype=np.uint8), LENGTH)
        self.segment = Segment(self.bytes.ctypes.data, LENGTH, "cpu", 0)


def serve(pipe: Connection, options: dict[str, Any]) -> None:
    """The prefill process: registered memory, and patience."""
    memory = Memory()
    transport = NixlTransport(NixlOptions(**options))
    transport.register((memory.segment,))
    pipe.send((memory.segment, transport.describe()))
    obey(pipe, memory.bytes)
    transport.close()


def worker(form: Form, segment: Segment, tokens: int) -> Manifest:
    layout, page = form
    made = bench_bind.make_worker(0, 1, LAYOUTS[layout], page, tokens // page + 1, LAYERS)
    return msgspec.structs.replace(made, segments=(segment,))


@dataclass(frozen=True)
class Request:
    """One request between two forms."""

    edge: Edge
    source: list[BlockTable]
    destination: list[BlockTable]
    tokens: int

    @classmethod
    def make(cls, source: Form, destination: Form, theirs: Segment, ours: Segment, tokens: int = TOKENS) -> Request:
        [edge] = make_plan(worker(destination, ours, tokens), [worker(source, theirs, tokens)]).edges
        random = np.random.default_rng(7)
        tables = [
            [BlockTable.of(0, (random.permutation(tokens // page) + 1).tolist())] for _, page in (source, destination)
        ]
        return cls(edge, *tables, tokens)

    def move(
        self, transport: Transport, stager: Stager, peer: TransportPeer, direct: Edge, staged: Edge, *, writes: bool
    ) -> int:
        """What the transfer loop does with one receive or push; returns the number of runs that were moved."""
        args = self.source, self.destination, 0, self.tokens
        runs = runs_of(pair(direct, *args))
        count = len(runs)
        start = transport.write if writes else transport.read
        transfers = [start(peer, runs)] if count else []
        paired = pair(staged, *args)
        if paired:
            stager.start(self, 0, self, peer, chunking.chunks(paired, stager.chunk_bytes, writes=writes))
        while transfers or stager.pause() is not None:
            transfers = [transfer for transfer in transfers if transport.poll(transfer) is not TransferStatus.DONE]
            for stream, failure in stager.poll():
                assert failure is None, failure
                count += stream.runs
            if (transfers or stager.pause() is not None) and not stager.converting:
                time.sleep(POLL_S)
        return count


def compare(rounds: int, *actions: Callable[[], object]) -> tuple[list[float], float]:
    """The median time of each of two actions in milliseconds, over rounds that make each once, and the median over
    rounds of what the second takes in multiples of the first. One more round warms up."""
    seconds = np.zeros((rounds, len(actions)))
    for i in range(-1, rounds):
        for j, action in enumerate(actions):
            began = time.perf_counter()
            action()
            if i >= 0:
                seconds[i, j] = time.perf_counter() - began
    ratio = float(np.median(seconds[:, 1] / seconds[:, 0]))
    return [round(float(value) * 1e3, 2) for value in np.median(seconds, axis=0)], ratio


def name(form: Form) -> str:
    return f"{form[0]} {form[1]}"


def measure_copies(rounds: int) -> list[Copies]:
    from vllm_pd_connector.worker.staging.copiers import CpuCopier

    copier = CpuCopier()
    staging, memory = copier.allocate(SLAB_BYTES, "the staging buffer"), Memory()
    limit, results = SLAB_BYTES // chunking.CHUNKS_PER_BUFFER, []
    bytes_of = np.asarray(staging.owner)[staging.segment.address - staging.owner.ctypes.data :]
    for source, destination in UNEQUAL:
        request = Request.make(source, destination, memory.segment, memory.segment)
        paired = pair(request.edge, request.source, request.destination, 0, TOKENS)
        work = list(chunking.chunks(paired, limit))

        def convert(work: Sequence[chunking.Chunk] = work) -> None:
            for i, chunk in enumerate(work):
                for copy in chunk.copies:
                    copier.copy(staging.segment.address + i % 2 * limit, copy)

        def plain(work: Sequence[chunking.Chunk] = work) -> None:
            at = 0
            for i, chunk in enumerate(work):
                for copy in chunk.copies:
                    size, from_ = copy.total_bytes, i % 2 * limit
                    memory.bytes[at : at + size] = bytes_of[from_ : from_ + size]
                    at += size

        (plain_ms, converted_ms), times = compare(rounds, plain, convert)
        results.append(Copies(name(source), name(destination), plain_ms, converted_ms, round(1 / times, 2)))
        print(results[-1], flush=True)
    return results


class Pair:
    """Two processes with one transport between them."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._process = OtherProcess(serve, options)
        self.memory = Memory()
        self.transport = NixlTransport(NixlOptions(**options))
        self.stager: Stager = Stager(self.transport, (self.memory.segment,), SLAB_BYTES)
        self.transport.register((self.memory.segment, *self.stager.segments))
        self.theirs, endpoint = self._process.answer()
        self.peer = self.transport.connect(endpoint, (self.theirs,))

    def request(self, source: Form, destination: Form, tokens: int = TOKENS, *, writes: bool = False) -> Request:
        theirs, ours = self.theirs, self.memory.segment
        return Request.make(source, destination, *((ours, theirs) if writes else (theirs, ours)), tokens)

    def move(self, request: Request, direct: Edge, staged: Edge, *, writes: bool = False) -> int:
        return request.move(self.transport, self.stager, self.peer, direct, staged, writes=writes)

    def clear(self, *, writes: bool) -> None:
        """What is read or written into; where it comes from is filled."""
        done(self.memory.bytes, "fill" if writes else "clear", LENGTH)
        self._process.ask("clear" if writes else "fill", LENGTH)

    def require_whole(self, request: Request, *, writes: bool) -> None:
        """That all bytes of a request came, since that was cleared; which they are is for tests."""
        came = self._process.ask("came") if writes else done(self.memory.bytes, "came")
        assert came == request.tokens * LAYERS * TOKEN_BYTES, f"{came} bytes of {request.tokens} tokens came"

    def close(self) -> None:
        self._process.close()
        self.transport.close()


def measure_whole(transport: str, pair_: Pair, rounds: int, *, writes: bool) -> list[Whole]:
    results = []
    for source, destination in UNEQUAL:
        equal, unequal = (pair_.request(source, form, writes=writes) for form in (source, destination))
        same, edges = (chunking.split(r.edge, pair_.stager.chunk_bytes, writes=writes) for r in (equal, unequal))
        pair_.clear(writes=writes)
        runs = pair_.move(unequal, *edges, writes=writes)
        pair_.require_whole(unequal, writes=writes)
        (equal_ms, unequal_ms), ratio = compare(
            rounds,
            lambda: pair_.move(equal, *same, writes=writes),  # noqa: B023
            lambda: pair_.move(unequal, *edges, writes=writes),  # noqa: B023
        )
        way = "converted" if edges[1].pairings else "direct"
        row = Whole(transport, name(source), name(destination), way, runs, equal_ms, unequal_ms, round(ratio, 2))
        results.append(row)
        print(results[-1], flush=True)
    return results


def measure_threshold(transport: str, pair_: Pair, rounds: int) -> list[Crossing]:
    """Blocks of 128 tokens, head-major, to blocks of fewer: a run is as many tokens of one head as a small block."""
    results = []
    for tokens in (2, 4, 8, 16, 32, 64, 128):
        request = pair_.request(("HND", 128), ("HND", tokens), tokens=TOKENS // 8)
        nothing = without_families(request.edge)
        pair_.clear(writes=False)
        pair_.move(request, nothing, request.edge)
        pair_.require_whole(request, writes=False)
        staged = pair_.memory.bytes.copy()
        pair_.clear(writes=False)
        pair_.move(request, request.edge, nothing)
        assert np.array_equal(staged, pair_.memory.bytes), "staged and direct differ"
        (direct_ms, staged_ms), _ = compare(
            rounds,
            lambda: pair_.move(request, request.edge, nothing),  # noqa: B023
            lambda: pair_.move(request, nothing, request.edge),  # noqa: B023
        )
        results.append(Crossing(transport, tokens * 512, direct_ms, staged_ms))
        print(results[-1], flush=True)
    return results


def without_families(edge: Edge) -> Edge:
    """The edge without pairings."""
    return Edge(edge.source, edge.destination, edge.source_groups, edge.destination_groups, ())


def table(rows: Sequence[Any]) -> str:
    """Markdown."""
    dicts = [asdict(row) for row in rows]
    lines = [list(dicts[0]), ["---"] * len(dicts[0]), *[[str(value) for value in row.values()] for row in dicts]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = ("copies", "pulls", "pushes", "threshold")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--transports", nargs="+", choices=("cma", "tcp"), default=["cma", "tcp"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--into", type=Path, default=ROOT / "out" / "bench" / "convert.json")
    options = parser.parse_args()
    results: dict[str, list[Any]] = {}
    load = [os.getloadavg()[0]]
    if "copies" in options.parts:
        results["copies"] = measure_copies(options.rounds)
    for transport in options.transports if set(options.parts) - {"copies"} else ():
        between = Pair({"ucx": {"TLS": "tcp"}} if transport == "tcp" else {})
        try:
            for part in ("pulls", "pushes"):
                if part in options.parts:
                    found = measure_whole(transport, between, options.rounds, writes=part == "pushes")
                    results.setdefault(part, []).extend(found)
            if "threshold" in options.parts:
                results.setdefault("threshold", []).extend(measure_threshold(transport, between, options.rounds))
        finally:
            between.close()
    load.append(os.getloadavg()[0])
    for part, rows in results.items():
        print(f"\n{part}\n\n{table(rows)}")
    facts = {"layers": LAYERS, "tokens": TOKENS, "bytes": TOKENS * LAYERS * TOKEN_BYTES, "cores": os.cpu_count()}
    content = facts | {"load_before_and_after": load} | {k: [asdict(row) for row in v] for k, v in results.items()}
    print(f"\nload {load[0]:.1f} to {load[1]:.1f}")
    write(options.into, content)


if __name__ == "__main__":
    main()
