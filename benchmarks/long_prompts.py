"""What long prompts cost the transfer thread of a decode instance: between real halves, over real transports.

A prefill instance in a process of its own holds prompts of 32 k, 128 k and 512 k tokens, in blocks that do not follow
each other; a decode worker's transfer loop reads each of them into blocks that do not either. Each row has processes of
its own, so that no row's memory or first contact is another's. Each prompt is received several times, short ones more
often; times are medians.

`rows` has of a receive: bytes, runs, descriptors, the time until it is over (`ms`) and that of one copy of as many
bytes within the process (`memcpy_ms`), the processor time of the thread and of what makes runs of the request, from the
order to the last run (`bind_ms`, part of the thread's; what makes descriptors of them is the transport's), what was
taken of the staging buffer at most and what it has, and what the process had of memory at most beyond what it had
before the first of these receives: the caches and the staging buffer were touched before. Whether times grow with the
bytes and no faster is the ratio of the time for a byte to the shortest prompt's: of the thread, of `ms` and of the
binding.

`turns` has the first contact (the longest turn of the receive that makes the link), the longest piece of a binding,
and the longest turn, in which nothing else is begun, ended or answered: the median of the receives and the longest of
all, how many of all receives' turns were over the goal, and in how many of these another process, which only copies
within its own memory, was slowed at that moment, too (`witness`). These are processor time, with what a hypervisor
took meanwhile; `wall` is time on the clock, in which the thread may wait for a core or for the interpreter. Meanwhile
the process's first thread launches steps, a stand-in of a worker's that decodes other requests: OPERATORS small
operators one after the other, every STEP_PAUSE_S. Of these the time alone and beside the receive, its factor, and what
of it is no waiting for a core (`ready`): here three busy threads share two, where one is left over only waiting for
the interpreter counts.

The model has LAYERS layers of CHANNELS channels in 16 bits: in one KV head, as a rank of a tensor-parallel instance
has, or, where two workers are read from and where the order of heads and tokens counts, in two. That is 1 KiB a token.
Its runs are shorter than those of most models, and so more.

    python benchmarks/long_prompts.py [--tokens 32768 …] [--transports nixl mooncake] [--json results.json]
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.long_pairs import (  # noqa: E402
    CHANNELS,
    LAYERS,
    ON_EVERY_TRANSPORT,
    PAIRS,
    PATIENCE_S,
    TRANSPORTS,
    Place,
    prefill,
)
from benchmarks.long_receive import measure  # noqa: E402
from benchmarks.report import write  # noqa: E402
from benchmarks.witness import Witness  # noqa: E402

TOKENS = (32_768, 131_072, 524_288)
RATIOS = {"thread_ms": "per_byte_ratio", "ms": "ms_per_byte_ratio", "bind_ms": "bind_per_byte_ratio"}
"""By the time that it is the ratio of."""
CONTEXT = multiprocessing.get_context("forkserver")
"""Processes begin with what they need imported, and with nothing else done."""

Rows = tuple[dict[str, Any], dict[str, Any]]


def receive(pair: str, tokens: int, transport: str, witness: Witness) -> Rows:
    """A row of both tables, from two processes that end with it."""
    witness.saw(())
    pipe, theirs = CONTEXT.Pipe()
    source = CONTEXT.Process(target=prefill, args=(theirs, pair, tokens, transport, TRANSPORTS[transport]), daemon=True)
    source.start()
    theirs.close()
    try:
        place = answer(pipe, source)
        results, ours = CONTEXT.Pipe(duplex=False)
        decode = CONTEXT.Process(target=tell, args=(ours, pair, tokens, transport, place), daemon=True)
        decode.start()
        ours.close()
        row, turns = answer(results, decode)
        turns = witness.judged(turns)
        decode.join(10.0)
        decode.kill()
    finally:
        pipe.close()
        source.join(10.0)
        source.kill()
    return row, turns


def answer(pipe: Connection, process: Any) -> Any:
    """What a process sends.

    Raises:
        EOFError: it has ended before.
    """
    assert pipe.poll(PATIENCE_S), f"{process.name} says nothing"
    return pipe.recv()


def tell(pipe: Connection, pair: str, tokens: int, transport: str, place: Place) -> None:
    """Main of the process that decodes."""
    pipe.send(measure(pair, tokens, transport, place))


def series(pair: str, lengths: Sequence[int], transport: str, witness: Witness) -> Iterator[Rows]:
    """The rows of a pair, from the shortest prompt on, with the ratios to it."""
    shortest: dict[str, Any] = {}
    for tokens in sorted(lengths):
        row, turns = receive(pair, tokens, transport, witness)
        shortest = shortest or row
        for time, ratio in RATIOS.items():
            row[ratio] = round(row[time] / row["MiB"] / (shortest[time] / shortest["MiB"]), 2)
        print(", ".join(f"{name} {value}" for name, value in (row | turns).items()), flush=True)
        yield row, turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=tuple(TRANSPORTS))
    parser.add_argument(
        "--pairs", nargs="+", choices=PAIRS, help="default: all over NIXL, those of one head over others"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "bench" / "long_prompts.json")
    options = parser.parse_args()
    CONTEXT.set_forkserver_preload(["benchmarks.long_receive"])
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), *filter(None, (os.environ.get("PYTHONPATH"),))))
    found: list[Rows] = []
    with contextlib.closing(Witness()) as witness:
        for transport in options.transports:
            every = PAIRS if transport == next(iter(TRANSPORTS)) else ON_EVERY_TRANSPORT
            for pair in options.pairs or every:
                found += series(pair, options.tokens, transport, witness)
    rows, turns = (list(table) for table in zip(*found, strict=True))
    about = {"layers": LAYERS, "channels": CHANNELS, "witness_slow": witness.slow}
    write(options.json, about | {"rows": rows, "turns": turns})


if __name__ == "__main__":
    main()
