"""Conversion on the GPU: the kernel's and torch's bytes are numpy's, of the whole cache, and how fast each is.

The chunks are those of a request between two layouts, in both directions: out of the staging buffer, as in a pull, and
into it, as in a push. GB/s counts the bytes that were converted once, on a device that does nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from benchmarks.bind import make_worker
from tests.gpu.section import SMALL, Findings, run
from vllm_pd_connector.geometry.bind import pair
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.manifest import Manifest, Segment
from vllm_pd_connector.geometry.plan import make_plan
from vllm_pd_connector.geometry.staging.chunks import Chunk, chunks, split
from vllm_pd_connector.worker.staging.base import Copier
from vllm_pd_connector.worker.staging.copiers import CpuCopier
from vllm_pd_connector.worker.staging.cuda import CudaCopier, by_torch

Form = tuple[str, int]
"""Layout and tokens per block; CPU has a transposed K."""

FORMS: tuple[tuple[Form, Form], ...] = (
    (("LBNHC", 16), ("LBHNC", 16)),
    (("LBHNC", 16), ("LBNHC", 64)),
    (("LBNHC", 128), ("BLHNC", 48)),
    (("LBNHC", 128), ("CPU", 128)),
)
LAYERS, TOKENS, CHUNK_BYTES = (1, 70, 1 << 20) if SMALL else (28, 4001, 8 << 20)
ROUNDS = 1 if SMALL else 5


def worker(form: Form, segment: Segment | None = None) -> Manifest:
    layout, page = form
    made = make_worker(0, 1, layout, page, TOKENS // page + 3, LAYERS)
    return made if segment is None else msgspec.structs.replace(made, segments=(segment,))


def work(source: Form, destination: Form, at: Segment, *, writes: bool) -> list[Chunk]:
    """The chunks of a request whose own cache, in `destination` or with `writes` in `source`, lies `at`."""
    here, there = (source, destination) if writes else (destination, source)
    own, peer = worker(here, at), worker(there)
    [edge] = make_plan(*((peer, [own]) if writes else (own, [peer]))).edges
    order = np.random.default_rng(7).permutation
    tables = [[BlockTable.of(0, (order(TOKENS // page + 1) + 1).tolist())] for _, page in (source, destination)]
    _, staged = split(edge, CHUNK_BYTES, writes=writes, run_cost=1 << 20)
    return list(chunks(pair(staged, *tables, 0, TOKENS), CHUNK_BYTES, writes=writes))


def convert(copier: Copier, base: int, chunk: Chunk) -> None:
    copying = copier.begin(base, chunk.copies, gather=chunk.writes)
    while not copying.advance(time.monotonic() + 1):
        pass


class Place:
    """A cache and a staging buffer of noise, on the host or on a GPU."""

    def __init__(self, device: str, cache: int, copier: Callable[[], Copier]) -> None:
        import torch

        generator = np.random.default_rng(1)
        noise = [generator.integers(0, 256, size, dtype=np.uint8) for size in (CHUNK_BYTES, cache)]
        self.staging, self.cache = (torch.from_numpy(one).to(device).clone() for one in noise)
        self._synchronize = torch.cuda.synchronize if device != "cpu" else lambda: None
        self._synchronize()
        kind, _, number = device.partition(":")
        self.segment = Segment(self.cache.data_ptr(), cache, kind, int(number or 0))
        self.copier = copier()

    def contents(self) -> list[Any]:
        self._synchronize()
        return [one.cpu().numpy() for one in (self.staging, self.cache)]

    def run(self, chunks: Sequence[Chunk]) -> float:
        """Seconds for all chunks, one after another."""
        began = time.perf_counter()
        for chunk in chunks:
            convert(self.copier, self.staging.data_ptr(), chunk)
        return time.perf_counter() - began


def kernel() -> CudaCopier:
    """The copier, which must have been able to compile its kernel."""
    made = CudaCopier(0)
    assert made._launch is not by_torch, "the kernel cannot be compiled here; the log has the reason"
    return made


def main(findings: Findings) -> None:
    kinds: dict[str, tuple[str, Callable[[], Copier]]] = {
        "numpy": ("cpu", CpuCopier),
        "kernel": ("cuda:0", kernel),
        "torch": ("cuda:0", lambda: CudaCopier(0, by_torch)),
    }
    for source, destination in FORMS:
        for writes in (False, True):
            size = worker(source if writes else destination).segments[0].length
            expected = None
            for name, (device, make) in kinds.items():
                place = Place(device, size, make)
                todo = work(source, destination, place.segment, writes=writes)
                what = f"{source} to {destination}, {'push' if writes else 'pull'}, {name}"
                findings.require(bool(todo), f"{what}: nothing is converted")
                place.run(todo)
                found = place.contents()
                expected = expected or found
                same = all(bool((a == b).all()) for a, b in zip(expected, found, strict=True))
                findings.require(same, f"{what}: the bytes are not numpy's")
                moved = sum(copy.total_bytes for chunk in todo for copy in chunk.copies)
                seconds = min(place.run(todo) for _ in range(ROUNDS))
                findings.row(
                    source="{} {}".format(*source),
                    destination="{} {}".format(*destination),
                    way="push" if writes else "pull",
                    by=name,
                    bytes="equal" if same else "DIFFERENT",
                    MiB=round(moved / (1 << 20), 1),
                    chunks=len(todo),
                    copies=sum(1 for chunk in todo for _ in chunk.copies),
                    GBps=round(moved / seconds / 1e9, 2),
                )


if __name__ == "__main__":
    run(main)
