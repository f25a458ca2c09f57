"""Throughput of every transport, read and write, against the size of a message and the length of its runs.

    python benchmarks/transports.py [--variants nixl nixl-tcp mooncake loopback] [--into out/bench/transports]

Two processes on one host (loopback: one), scattered runs that nothing can merge. For each point, in one round one after
another: the transport as the connector uses it (the port, polled as often as the transfer loop does), the library
alone, called directly over the same connection with the same descriptors (`bare`), and a plain copy of the same bytes
inside one process. Medians over several rounds (more where they are short), and the ratio of the best ones beside
theirs: with two processes on two cores, over TCP, a library's best round may be half as long as its median. Writes
JSON, a table in Markdown and a plot.

All of it is done with several pairs of processes, each started anew: on two cores one connection over TCP is faster
than another for as long as it lives, which is why both use the same. What is told of a point is the median of the
pairs' figures, and the least and the greatest ratio that one of them had.

- bare NIXL: one request with all descriptors through the bindings, asked for its state all the time.
- bare Mooncake: its blocking batched calls, 1000 descriptors each, which wait without sleeping.
- `batches`: beside it the library alone as the port has to use it, looked at all the time. Over Mooncake that is in
  batches of one, whose state can be asked for; over NIXL, for long messages, in batches as large as what a turn of the
  transfer thread may copy. What that is below the other is the bound that the library sets.
- bare loopback is the plain copy, here between the same places: both its ends are in this process.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from other_process import PATIENCE_S, OtherProcess, done, moved, obey
from report import markdown, write
from transports_bare import BARE, Bare, Memory
from transports_plot import plot, size

from vllm_pd_connector.geometry.runs import Runs
from vllm_pd_connector.sidechannel.waiting import sleep
from vllm_pd_connector.transport.base import TransferStatus, Transport, TransportPeer, Use
from vllm_pd_connector.transport.registry import create
from vllm_pd_connector.worker.poll_interval import FIRST_S, pause

ROOT = Path(__file__).resolve().parent.parent
KIB, MIB = 1 << 10, 1 << 20
MESSAGES_MIB = (1, 4, 16, 128)
RUN_BYTES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 8 * MIB)
SPREAD = 2
"""Memory per byte of a message, so that scattered runs have gaps and cannot be merged."""

SERVES = {"read": False, "write": True}
"""Whether peers may use the memory of who does this: a decode instance in mode pull reads and is nobody's target, a
prefill instance that writes is read from by others."""

WRITTEN = 100
"""With what the pattern begins that is written, when it is looked whether it came."""

STARTS = {"nixl": 3, "nixl-tcp": 7, "mooncake": 5, "loopback": 3}
"""Pairs of processes. Over TCP one has up to 0.4 of the library's speed more than another: of seven, any three had
medians of 0.93 to 0.97 where 16 MiB are written, and of 0.83 to 1.09 where 128 MiB are read."""

SHORT_S, SHORT_ROUNDS = 0.8, 12
"""Rounds that are over in less than this together are made so many times."""

SOON_S = {TransferStatus.POSTING: 0.0, TransferStatus.MOVING: FIRST_S}
"""So long the transfer thread sleeps before the next look, whatever a transfer's age; of 0 s the kernel makes 20 us."""

GOAL, GOAL_MESSAGE, SHORT_GOAL, GOAL_RUN_BYTES = 0.95, 4 * MIB, 0.85, 64 * KIB
LOCAL = {"protocol": "tcp", "address": "127.0.0.1"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "nixl": ("nixl", {}),
    "nixl-tcp": ("nixl", {"ucx": {"TLS": "tcp"}}),
    "mooncake": ("mooncake", LOCAL),
    "loopback": ("loopback", {}),
}


Case = tuple[str, str, int, int]
"""Transport, operation, bytes of a message and of a run."""


@dataclass(frozen=True, slots=True)
class Point:
    """GB/s (1e9 bytes) of one message, medians; `ratio` is connector / bare, `of_lowest` and `of_highest` that of one
    pair of processes, `best` the same of their best rounds, `batches` the bare library's in batches / bare, None where
    that is no case."""

    transport: str
    operation: str
    message_bytes: int
    run_bytes: int
    connector: float
    bare: float
    copy: float
    ratio: float
    of_lowest: float
    of_highest: float
    best: float
    batches: float | None


def serve(pipe: Connection, name: str, length: int) -> None:
    """The peer: registered memory, and patience."""
    transport_name, options = VARIANTS[name]
    memory = Memory(length)
    transport = create(transport_name, options)
    transport.register((memory.segment,))
    pipe.send((memory.segment, transport.describe()))
    obey(pipe, memory.bytes)
    transport.close()


class Pair:
    """This process and a peer, or for loopback two ends in this process."""

    def __init__(self, name: str, length: int) -> None:
        transport_name, options = VARIANTS[name]
        self.name, self.memory = name, Memory(length)
        self.bare: dict[str, Bare] = {}
        self._other: Transport | None = None
        if transport_name == "loopback":
            self._far = Memory(length)
            self._other = create(transport_name, options)
            self._other.register((self._far.segment,))
            self.theirs, endpoint = self._far.segment, self._other.describe()
        else:
            self._process = OtherProcess(serve, name, length)
            self.theirs, endpoint = self._process.answer()
        self.ends: dict[str, tuple[Transport, TransportPeer]] = {}
        for operation, serves in SERVES.items():
            transport = create(transport_name, options, Use(serves=serves))
            transport.register((self.memory.segment,))
            self.ends[operation] = transport, transport.connect(endpoint, (self.theirs,))
            if transport_name in BARE:
                self.bare[operation] = BARE[transport_name](*self.ends[operation])

    def runs(self, operation: str, message: int, length: int) -> Runs:
        """`message` bytes in scattered runs, between this process and the peer."""
        random = np.random.default_rng(message + length)
        slots = message * SPREAD // length
        ours, theirs = (
            segment.address + random.permutation(slots)[: message // length].astype(np.int64) * length
            for segment in (self.memory.segment, self.theirs)
        )
        lengths = np.full(message // length, length, dtype=np.int64)
        return Runs(theirs, ours, lengths) if operation == "read" else Runs(ours, theirs, lengths)

    def through_the_port(self, operation: str, runs: Runs) -> None:
        """What the transfer loop does with one transfer. It sleeps between any two turns
        (`sidechannel.waiting`), exactly: no forward is launched beside it."""
        transport, peer = self.ends[operation]
        began = time.monotonic()
        transfer = transport.read(peer, runs) if operation == "read" else transport.write(peer, runs)
        while (status := transport.poll(transfer)) is not TransferStatus.DONE:
            elapsed = time.monotonic() - began
            assert elapsed < PATIENCE_S, f"{self.name}: a {operation} that does not end"
            seconds = SOON_S[status] if status in SOON_S else pause(elapsed, runs.total_bytes)
            sleep(seconds, exact=True)

    def _tell(self, order: str, *args: Any) -> bool:
        """What the peer does with its memory, see `done`."""
        return bool(done(self._far.bytes, order, *args) if self._other else self._process.ask(order, *args))

    def verify(self, message: int, length: int) -> None:
        """That reads and writes, through the port and bare, bring what the other side has: where it goes is cleared
        before, and what is written is not what was read. Afterwards both sides are as they were."""
        size, here = message * SPREAD, self.memory
        for operation in ("read", "write"):
            runs = self.runs(operation, message, length)
            bare = self.bare.get(operation)
            ways = [self.through_the_port, *((bare.move, bare.in_batches) if bare is not None else ())]
            ends = (self.theirs, here.segment) if operation == "read" else (here.segment, self.theirs)
            what = moved(runs, *(end.address for end in ends))
            if operation == "write":
                done(here.bytes, "fill", size, WRITTEN)
            for way in ways:
                if operation == "read":
                    done(here.bytes, "clear", size)
                    way(operation, runs)
                    came = done(here.bytes, "holds", what, 0)
                else:
                    self._tell("clear", size)
                    way(operation, runs)
                    came = self._tell("holds", what, WRITTEN)
                assert came, f"{self.name}, {operation} by {way.__qualname__}: a run is not what the other side has"
        done(here.bytes, "fill", size)
        self._tell("fill", size)

    def close(self) -> None:
        if self._other is None:
            self._process.close()
        else:
            self._other.close()
        for transport, _ in self.ends.values():
            transport.close()


def plain_copy(runs: Runs, source: int, destination: int) -> None:
    """The same bytes inside this process: addresses moved by so much."""
    starts, ends = (runs.source + source).tolist(), (runs.destination + destination).tolist()
    for start, end, length in zip(starts, ends, runs.length.tolist(), strict=True):
        ctypes.memmove(end, start, length)


def seconds(rounds: int, actions: Sequence[Callable[[], None]]) -> NDArray[np.float64]:
    """How long each action took, over rounds that make each once, more of them where they are short; one more round
    warms up. Shape (rounds, actions).

    Each round has an order of its own, by chance: what ran before leaves caches and idle cores that help or hinder.
    """
    found: list[list[float]] = []
    random = np.random.default_rng(0)
    until = time.perf_counter() + SHORT_S
    while len(found) <= rounds or (len(found) <= rounds * SHORT_ROUNDS and time.perf_counter() < until):
        took = [0.0] * len(actions)
        for j in random.permutation(len(actions)).tolist():
            began = time.perf_counter()
            actions[j]()
            took[j] = time.perf_counter() - began
        found.append(took)
    return np.array(found[1:])


def measure(
    pair: Pair, other: Memory, messages: Sequence[int], lengths: Sequence[int], rounds: int
) -> Iterator[tuple[Case, NDArray[np.float64]]]:
    """What `seconds` says of every case: of the port, a plain copy and, if there is one, the bare library, also in
    batches."""
    for message in messages:
        for length in (length for length in lengths if length <= message):
            pair.verify(message, length)
            for operation in ("read", "write"):
                runs = pair.runs(operation, message, length)
                to_other = other.segment.address - pair.theirs.address if pair.bare else 0
                moved = (to_other, 0) if operation == "read" else (0, to_other)
                actions = [
                    lambda: pair.through_the_port(operation, runs),  # noqa: B023
                    lambda: plain_copy(runs, *moved),  # noqa: B023
                ]
                if (bare := pair.bare.get(operation)) is not None:
                    actions.append(lambda: bare.move(operation, runs))  # noqa: B023
                    if message > bare.at_once:
                        actions.append(lambda: bare.in_batches(operation, runs))  # noqa: B023
                yield (pair.name, operation, message, length), seconds(rounds, actions)


def point(case: Case, pairs: Sequence[NDArray[np.float64]]) -> Point:
    """What one case's rounds say, an array of each pair of processes."""
    middle, shortest = (np.array([f(took, axis=0) for took in pairs]) for f in (np.median, np.min))
    base = min(2, middle.shape[1] - 1)
    connector, copy, bare = (round(float(case[2] / np.median(middle[:, i]) / 1e9), 3) for i in (0, 1, base))
    ratios, best = (some[:, base] / some[:, 0] for some in (middle, shortest))
    batches = round(float(np.median(middle[:, 2] / middle[:, 3])), 2) if middle.shape[1] > 3 else None
    told = (round(float(f(ratios)), 2) for f in (np.median, np.min, np.max))
    return Point(*case, connector, bare, copy, *told, round(float(np.median(best)), 2), batches)


def table(points: Sequence[Point]) -> str:
    """Markdown, one line per transport, operation and message size and run length."""
    head = (
        *("transport", "operation", "message", "runs", "connector GB/s", "bare GB/s", "ratio"),
        *("of the lowest pair", "of the highest", "of the best rounds", "copy GB/s"),
    )
    rows = [
        (
            *(p.transport, p.operation, size(p.message_bytes), size(p.run_bytes)),
            *(p.connector, p.bare, p.ratio, p.of_lowest, p.of_highest, p.best, p.copy),
        )
        for p in points
    ]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, ("---",) * len(head), *rows)) + "\n"


def summary(points: Sequence[Point]) -> list[dict[str, Any]]:
    """How far the goal is reached with runs of GOAL_RUN_BYTES and more, by transport, operation and message."""
    cases: dict[tuple[str, str, int], list[Point]] = {}
    for p in points:
        if p.run_bytes >= GOAL_RUN_BYTES:
            cases.setdefault((p.transport, p.operation, p.message_bytes), []).append(p)
    rows = []
    for (transport, operation, message), some in cases.items():
        lowest = min(some, key=lambda p: p.ratio)
        rows.append(
            {
                "transport": transport,
                "operation": operation,
                "message": size(message),
                "connector / bare, median": round(float(np.median([p.ratio for p in some])), 2),
                "lowest": lowest.ratio,
                "its runs, KiB": lowest.run_bytes // KIB,
                "of the lowest pair": round(float(np.median([p.of_lowest for p in some])), 2),
                "of the highest": round(float(np.median([p.of_highest for p in some])), 2),
                "of the best rounds": round(float(np.median([p.best for p in some])), 2),
                "bare in batches": median_or_none([p.batches for p in some]),
                "goal": GOAL if message >= GOAL_MESSAGE else SHORT_GOAL,
            }
        )
    return rows


def median_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(float(np.median(known)), 2) if known else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--messages", nargs="+", type=int, default=list(MESSAGES_MIB), help="MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, help="pairs of processes of each variant, one after another")
    parser.add_argument("--into", type=Path, default=ROOT / "out" / "bench" / "transports", help="without suffix")
    options = parser.parse_args()
    messages = [count * MIB for count in options.messages]
    length = max(messages) * SPREAD
    other, load = Memory(length), [os.getloadavg()[0]]
    found: dict[Case, list[NDArray[np.float64]]] = {}
    starts = {name: options.starts or STARTS[name] for name in options.variants}
    for start in range(max(starts.values())):
        for name in (name for name in options.variants if start < starts[name]):
            pair = Pair(name, length)
            try:
                for case, took in measure(pair, other, messages, RUN_BYTES, options.rounds):
                    found.setdefault(case, []).append(took)
                    print(f"start {start}:", point(case, (took,)), flush=True)
            finally:
                pair.close()
    points = [point(case, pairs) for case, pairs in found.items()]
    load.append(os.getloadavg()[0])
    versions = {name: importlib.metadata.version(name) for name in ("nixl", "mooncake-transfer-engine-non-cuda")}
    facts = {"cores": os.cpu_count(), "starts": starts, "versions": versions, "load_before_and_after": load}
    content = facts | {"summary": summary(points), "points": [asdict(point) for point in points]}
    write(options.into.with_suffix(".json"), content)
    options.into.with_suffix(".md").write_text(f"{table(points)}\n{markdown(summary(points))}\n")
    plot(points, options.into.with_suffix(".png"))
    print(f"\n{table(points)}\n{markdown(summary(points))}\n")
    print(f"load {load[0]:.1f} to {load[1]:.1f}; wrote .md and .png beside it")


if __name__ == "__main__":
    main()
