"""Reads and writes of device memory between two processes, per transport: every byte, and GB/s.

The peer's memory is on the last GPU, this process's on the first; on a machine with one both are there. NIXL must work;
another transport that is not installed, or that refuses device memory by its own word, is noted.
"""

from __future__ import annotations

import time
from typing import Any

from tests.gpu.section import SMALL, Findings, gpu_count, run
from tests.support.transport.ends import End, GpuEnd, ProcessPeer, SecondGpuEnd, runs, whole
from tests.support.transport.variants import VARIANTS, scattered
from vllm_pd_connector.errors import InvalidConfig, TransferError
from vllm_pd_connector.geometry.runs import Runs
from vllm_pd_connector.transport import registry

SIZE = (4 if SMALL else 256) << 20
RUN_BYTES = (4 << 10, 16 << 10, 64 << 10)
ROUNDS = 3
REQUIRED = {"nixl"}


def main(findings: Findings) -> None:
    for name in registry.names():
        if name == "loopback":
            continue
        options = VARIANTS[name].options if name in VARIANTS else {}
        try:
            registry.check(name, options)
            here: End = GpuEnd(name, options, SIZE)
        except (InvalidConfig, TransferError) as error:
            findings.remark(f"{name}: {' '.join(str(error).split())}")
            findings.require(name not in REQUIRED, f"{name} must move device memory")
            continue
        peers: list[tuple[str, type[End]]] = [("GPU, GPU", SecondGpuEnd if gpu_count() > 1 else GpuEnd)]
        peers.append(("GPU, host", End))
        try:
            for between, kind in peers:
                measure(findings, name, options, between, here, kind)
        finally:
            here.transport.close()


def arranged(content: bytes, rows: Runs, source: int, destination: int) -> bytes:
    """What `content`, which lies at `source`, looks like at `destination` when it was moved there."""
    moved = bytearray(len(content))
    for begin, end, size in zip(rows.source.tolist(), rows.destination.tolist(), rows.length.tolist(), strict=True):
        moved[end - destination : end - destination + size] = content[begin - source : begin - source + size]
    return bytes(moved)


def measure(findings: Findings, name: str, options: dict[str, Any], between: str, here: End, kind: type[End]) -> None:
    peer = ProcessPeer(name, options, SIZE, kind)
    try:
        connection = here.peer(peer.endpoint, peer.segments)
        for operation in ("read", "write"):
            for length in (SIZE, *RUN_BYTES):
                reads = operation == "read"
                ends = (peer.address, here.address) if reads else (here.address, peer.address)
                here.fill(1 if reads else 2)
                peer.call("fill", 2 if reads else 1)
                rows = whole(*ends, SIZE) if length == SIZE else runs(scattered(SIZE // length, length, *ends, SIZE))
                seconds = []
                for _ in range(ROUNDS):
                    began = time.perf_counter()
                    here.finish(getattr(here.transport, operation)(connection, rows))
                    seconds.append(time.perf_counter() - began)
                what = f"{name}, {between}, {operation} in runs of {length} bytes"
                source, destination = here.content(0, SIZE), peer.call("content", 0, SIZE)
                source, destination = (destination, source) if reads else (source, destination)
                right = arranged(source, rows, *ends) == destination
                findings.require(right, f"{what}: bytes differ")
                findings.row(
                    transport=name,
                    between=between,
                    operation=operation,
                    run_bytes=length,
                    bytes="equal" if right else "DIFFERENT",
                    GBps=round(SIZE / min(seconds) / 1e9, 3),
                    us_per_run=round(min(seconds) / len(rows) * 1e6, 2),
                )
    finally:
        peer.stop()


if __name__ == "__main__":
    run(main)
