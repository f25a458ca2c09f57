"""Cost of the two ways to hand runs to NIXL; not a test, run it by hand: `python benchmarks/descriptors.py [tls]`.

Two processes on one host, READ, n pages of one size. `direct` is createXferReq on (n, 3) arrays, `prepared` is one
prepared list per side over all pages and makeXferReq with int32 indices. `merged` means contiguous pages: `direct`
then gets the one run that the binder made of them, `prepared` all indices. The figures that we relied on are in
docs/design/transports.md.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np

SEGMENTS = 32
REPETITIONS = 15


def agent(name: str, tls: str) -> tuple[Any, Any]:
    nixl = importlib.import_module("nixl")._bindings
    config = nixl.nixlAgentConfig()
    config.useProgThread, config.pthrDelay, config.syncMode = True, 1000, nixl.NIXL_THREAD_SYNC_STRICT
    made = nixl.nixlAgent(name, config)
    engine = "TCP_TX_SEG_SIZE=256k,TCP_RX_SEG_SIZE=256k" + (f",TLS={tls}" if tls else "")
    made.createBackend("UCX", {"engine_config": engine})
    return nixl, made


def registered(nixl: Any, made: Any, total: int) -> tuple[Any, int]:
    memory = np.ones(total, dtype=np.uint8)
    address = memory.ctypes.data
    rows = [(address + i * (total // SEGMENTS), total // SEGMENTS, 0, b"") for i in range(SEGMENTS)]
    made.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, rows), [])
    return memory, address


def serve(pipe: Connection, tls: str, total: int) -> None:
    nixl, made = agent("bench-peer", tls)
    memory, address = registered(nixl, made, total)
    pipe.send((made.getLocalMD(), address))
    pipe.recv()
    del memory


def timed(made: Any, busy: Any, build: Callable[[], int]) -> tuple[float, float]:
    """Median (build, move) in microseconds."""
    builds, moves = [], []
    for _ in range(REPETITIONS):
        begin = time.perf_counter()
        handle = build()
        built = time.perf_counter()
        status = made.postXferReq(handle, b"")
        while status == busy:
            status = made.getXferStatus(handle)
        moves.append(time.perf_counter() - built)
        builds.append(built - begin)
        made.releaseXferReq(handle)
    return median(builds) * 1e6, median(moves) * 1e6


def main(tls: str) -> None:
    rng = np.random.default_rng(0)
    print("microseconds: page, n, order, build and move of `direct`, build and move of `prepared`")
    for page, count in ((64, 1024), (64, 16384), (16384, 1024), (16384, 16384)):
        pages = count * 2
        total = page * pages
        here, there = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(there, tls, total))
        process.start()
        nixl, made = agent("bench-local", tls)
        _memory, local = registered(nixl, made, total)
        metadata, remote = here.recv()
        made.loadRemoteMD(metadata)

        def rows(base: int, offset: Any, length: Any) -> Any:
            table = np.zeros((len(offset), 3), dtype=np.int64)
            table[:, 0], table[:, 1] = base + offset, length
            return nixl.nixlXferDList(nixl.DRAM_SEG, table)  # noqa: B023

        everything = np.arange(pages, dtype=np.int64) * page
        prepared_local = made.prepXferDlist(nixl.NIXL_INIT_AGENT, rows(local, everything, page), [])
        prepared_remote = made.prepXferDlist("bench-peer", rows(remote, everything, page), [])
        per_segment = pages // SEGMENTS
        for order in ("scattered", "merged"):
            if order == "scattered":
                mine = np.sort(rng.permutation(pages)[:count]).astype(np.int32)
                theirs = rng.permutation(pages)[:count].astype(np.int32)
                offsets, sources, length = mine.astype(np.int64) * page, theirs.astype(np.int64) * page, page
            else:
                mine = theirs = np.arange(count, dtype=np.int32)
                offsets = sources = np.arange(0, count, per_segment, dtype=np.int64) * page
                length = per_segment * page

            def direct(o: Any = offsets, s: Any = sources, n: int = length) -> int:
                return made.createXferReq(nixl.NIXL_READ, rows(local, o, n), rows(remote, s, n), "bench-peer", b"", [])  # noqa: B023

            def prepared(m: Any = mine, t: Any = theirs) -> int:
                return made.makeXferReq(nixl.NIXL_READ, prepared_local, m, prepared_remote, t, b"", [], False)  # noqa: B023

            one, two = timed(made, nixl.NIXL_IN_PROG, direct), timed(made, nixl.NIXL_IN_PROG, prepared)
            print(f"{page:6} {count:6} {order:>10}", *(f"{figure:9.0f}" for figure in one + two), flush=True)
        here.send(None)
        process.join()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
