"""One row of `long_prompts`: the receives of a prompt by a decode worker in this process, which has done nothing else.

What the transfer thread does is timed by calls of its own that are wrapped: its turns, the binding of a request and the
making of runs, and the taking of slots of the staging buffer.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from benchmarks.long_pairs import (
    BYTES_PER_TOKEN,
    CHANNELS,
    FILLED,
    PAIRS,
    PATIENCE_S,
    TRANSPORTS,
    Place,
    beginning,
    describe,
    make_memory,
    scattered,
)
from benchmarks.witness import Moment
from vllm_pd_connector.config import Config
from vllm_pd_connector.metadata import ReadFrom, ReceiveRequest
from vllm_pd_connector.protocol.peer import PeerKey
from vllm_pd_connector.protocol.wire.fields import LeaseRef
from vllm_pd_connector.transport.registry import create
from vllm_pd_connector.worker.in_flight import InFlight
from vllm_pd_connector.worker.outbox import Outbox
from vllm_pd_connector.worker.staging.stager import Stager
from vllm_pd_connector.worker.transfer_loop import TransferLoop

TURN_GOAL_MS = 5.0
OPERATORS, STEP_PAUSE_S, STEPS_ALONE = 200, 0.003, 100
LEAST_ROUNDS, ROUNDS_S, LONG_S = 3, 2.0, 20.0
"""Receives of a prompt: these at least, and more while all took less; fewer where they take so long."""
COPIES = 5


class Turns:
    """Times the turns of a loop's thread, in seconds: of its processor time, and of the clock for the longest. Counts
    them, and keeps when those were that are longer than the goal."""

    def __init__(self, loop: TransferLoop) -> None:
        self._turn = loop._turn
        self.begin()
        loop._turn = self._timed  # type: ignore[method-assign]

    def begin(self) -> None:
        """Forget what was."""
        self.longest = self.longest_wall = self.in_all = 0.0
        self.count = 0
        self.over: list[Moment] = []

    def _timed(self, now: float) -> None:
        began, at = time.thread_time(), time.monotonic()
        self._turn(now)
        took, ended = time.thread_time() - began, time.monotonic()
        wall = ended - at
        self.longest, self.longest_wall = max(self.longest, took), max(self.longest_wall, wall)
        self.in_all += took
        self.count += 1
        if took > TURN_GOAL_MS / 1e3:
            self.over.append((at, ended))


class Binding:
    """Times what makes runs of a request, in processor seconds: the longest piece of its binding, and all of it with
    what makes the runs of what is bound, some thousands at a time."""

    def __init__(self, loop: TransferLoop) -> None:
        self.begin()
        loop._receives._bind = self._timed(loop._receives._bind, whole=True)  # type: ignore[method-assign]
        InFlight._next_slice = self._timed(InFlight._next_slice)  # type: ignore[method-assign]
        loop._stager._make = self._timed(loop._stager._make)  # type: ignore[method-assign]

    def begin(self) -> None:
        """Forget what was."""
        self.call = self.in_all = 0.0

    def _timed(self, action: Callable[..., Any], *, whole: bool = False) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            began = time.thread_time()
            try:
                return action(*given)
            finally:
                took = time.thread_time() - began
                self.in_all += took
                if whole:
                    self.call = max(self.call, took)

        return timed


class Staged:
    """Keeps how many bytes of the staging buffer were taken at most."""

    def __init__(self, stager: Stager) -> None:
        self.most = 0
        self._buffer, self._take = stager.staging, stager.staging.take
        stager.staging.take = self._taken  # type: ignore[method-assign]

    @property
    def reserved(self) -> int:
        """Bytes of the staging buffer."""
        return self._buffer.length

    def _taken(self, size: int, holder: int) -> int | None:
        slot = self._take(size, holder)
        self.most = max(self.most, self._buffer.length - self._buffer.free)
        return slot


class Steps:
    """Launches steps in the calling thread; `took` has the milliseconds of each, `ready` those without what it waited
    for a core."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.took: list[float] = []
        self.ready: list[float] = []
        self._matrix, self._product = torch.ones(64, 64), torch.empty(64, 64)

    def launch(self) -> None:
        began, waited = time.perf_counter(), waited_for_core_s()
        for _ in range(OPERATORS):
            torch.mm(self._matrix, self._matrix, out=self._product)
        took, waited = time.perf_counter() - began, waited_for_core_s() - waited
        self.took.append(1e3 * took)
        self.ready.append(1e3 * (took - waited))
        time.sleep(STEP_PAUSE_S)

    def alone(self) -> float:
        """The median of the next STEPS_ALONE, in milliseconds; they are not kept."""
        for _ in range(STEPS_ALONE):
            self.launch()
        median = float(np.median(self.took[-STEPS_ALONE:]))
        self.took.clear()
        self.ready.clear()
        return median


def waited_for_core_s() -> float:
    """How long the calling thread has been ready to run and had no core, in all."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def resident_bytes(which: str) -> int:
    """Memory of this process: VmRSS is what it has, VmHWM the most it had since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{which}:"))


def forget_peak() -> None:
    """VmHWM counts from now on. Where the kernel does not do this it counts from the start of the process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def copy_s(memory: np.ndarray, size: int) -> float:
    """What as many bytes take as one copy within this process: the median of COPIES, in seconds."""
    source, took = np.full(size, 1, dtype=np.uint8), []
    for _ in range(COPIES):
        began = time.perf_counter()
        np.copyto(memory[:size], source)
        took.append(time.perf_counter() - began)
    return float(np.median(took))


class Decode:
    """A decode worker's transfer loop, and what is timed of it; `Place` is where the prompt is read from."""

    def __init__(self, name: str, tokens: int, transport: str, place: Place) -> None:
        self._pair, self._place = PAIRS[name], place
        theirs, ours = self._pair.theirs, self._pair.ours
        self.memory = make_memory(ours, tokens, 0)
        heads = self._pair.heads
        manifest = describe(ours, tokens, "d-0", self.memory, channels=CHANNELS // heads, heads=heads)
        manifest = msgspec.structs.replace(manifest, transport=transport)
        options = TRANSPORTS[transport]
        self._outbox = Outbox()
        config = Config(transport=transport, transport_options=options)
        self.loop = TransferLoop(config, manifest, lambda: create(transport, options), self._outbox, 0, 1)
        self.loop.start()
        self.turns, self.binding = Turns(self.loop), Binding(self.loop)
        self.staged = Staged(self.loop._stager)
        self.steps = Steps()
        self._tables = scattered(theirs, tokens, 1), scattered(ours, tokens, 2)

    def request(self, lease: LeaseRef, stop: int) -> ReceiveRequest:
        """A receive of the prompt's first tokens."""
        peer = PeerKey("127.0.0.1", self._place.port, self._place.incarnation)
        theirs, ours = self._pair.theirs, self._pair.ours
        source = ReadFrom(peer, "p-0", lease, (beginning(self._tables[0], theirs, stop),))
        return ReceiveRequest(lease.request_id, source, (beginning(self._tables[1], ours, stop),), 0, stop)

    def receive(self, request: ReceiveRequest) -> Mapping[str, Any]:
        """Order it and launch steps until it is over; what was counted."""
        self.turns.begin()
        self.binding.begin()
        self.loop.submit([request], [])
        deadline = time.monotonic() + PATIENCE_S
        while request.request_id not in (results := self._outbox.take_results()).finished_recving:
            assert time.monotonic() < deadline, "the receive does not end"
            self.steps.launch()
        assert request.request_id not in results.failed_recving, "the receive failed"
        report = self._outbox.take_stats()
        assert report is not None
        return dict(report.data)


class Round(NamedTuple):
    """One receive, in milliseconds: on the clock, and of the thread as `Turns` and `Binding` have it."""

    took: float
    worked: float
    longest: float
    longest_wall: float
    bound: float
    call: float
    turns: int


def rounds(decode: Decode, asked: Iterable[ReceiveRequest]) -> tuple[list[Round], list[Moment], Mapping[str, Any]]:
    """As many of these receives as are wanted, when their turns were longer than the goal, and what was counted of the
    last."""
    turns, binding, made, over = decode.turns, decode.binding, [], []
    for request in asked:
        began = time.perf_counter()
        counted = decode.receive(request)
        took = time.perf_counter() - began
        of_thread = turns.in_all, turns.longest, turns.longest_wall, binding.in_all, binding.call
        made.append(Round(*(1e3 * seconds for seconds in (took, *of_thread)), turns.count))
        over += turns.over
        if enough([one.took / 1e3 for one in made]):
            break
    return made, over, counted


def measure(name: str, tokens: int, transport: str, place: Place) -> tuple[dict[str, Any], dict[str, Any]]:
    """The receives of a prompt over a link that was made before: what one costs, and how the thread's turns are, with
    the moments (`over_goal`) at which one was longer than the goal."""
    gc.collect()
    gc.freeze()  # as vLLM's workers do when they have started
    decode = Decode(name, tokens, transport, place)
    first = max(side.block_tokens for side in PAIRS[name][:2])
    connecting, asked = place.leases[0], [decode.request(lease, tokens) for lease in place.leases[1:]]
    try:
        decode.receive(decode.request(connecting, first))
        contact, contact_wall = 1e3 * decode.turns.longest, 1e3 * decode.turns.longest_wall
        alone = decode.steps.alone()
        decode.staged.most = 0
        forget_peak()
        before = resident_bytes("VmRSS")
        made, over, counted = rounds(decode, asked)
        grown = max(resident_bytes("VmHWM") - before, 0)
        assert np.count_nonzero(decode.memory == FILLED) >= tokens * BYTES_PER_TOKEN, "not all of it arrived"
        copied = copy_s(decode.memory, tokens * BYTES_PER_TOKEN)
    finally:
        decode.loop.close()
    median = Round(*(float(np.median(one)) for one in zip(*made, strict=True)))
    about = {"pair": name, "transport": transport, "prompt": f"{tokens} tokens"}
    row = about | {
        "MiB": counted["bytes"] >> 20,
        "runs": counted["runs"],
        "descriptors": counted["descriptors"],
        "receives": len(made),
        "memcpy_ms": round(1e3 * copied, 1),
        "ms": round(median.took, 1),
        "thread_ms": round(median.worked, 1),
        "bind_ms": round(median.bound, 3),
        "staging_MiB": round(decode.staged.most / 2**20, 1),
        "staging_reserved_MiB": decode.staged.reserved >> 20,
        "memory_MiB": round(grown / 2**20, 1),
    }
    turn = about | {
        "contact_ms": round(contact, 2),
        "contact_wall_ms": round(contact_wall, 2),
        "bind_call_ms": round(median.call, 2),
        "longest_turn_ms": round(median.longest, 2),
        "longest_of_all_ms": round(max(one.longest for one in made), 2),
        "goal_ms": TURN_GOAL_MS,
        "turns": sum(one.turns for one in made),
        "over_goal": over,
        "longest_turn_wall_ms": round(median.longest_wall, 2),
    }
    return row, turn | beside(decode.steps, alone)


def beside(steps: Steps, alone: float) -> dict[str, float]:
    """What became of steps that take `alone` milliseconds where nothing is received."""
    return {
        "step_alone_ms": round(alone, 2),
        "step_ms": round(float(np.median(steps.took)), 2),
        "step_factor": round(float(np.median(steps.took)) / alone, 2),
        "step_p90_ms": round(float(np.percentile(steps.took, 90)), 2),
        "step_ready_p90_ms": round(float(np.percentile(steps.ready, 90)), 2),
    }


def enough(took: Sequence[float]) -> bool:
    """Whether receives that took so many seconds are as many as are wanted."""
    least = LEAST_ROUNDS if sum(took) < LONG_S else LEAST_ROUNDS - 1
    return len(took) >= least and sum(took) >= ROUNDS_S
