"""A fleet without sockets and without time: the instances of `scale.py`, and the messages between them."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.bind import ITEM, make_worker  # noqa: E402
from vllm_pd_connector.config import Config  # noqa: E402
from vllm_pd_connector.errors import DeadlineExceeded  # noqa: E402
from vllm_pd_connector.geometry.blocks import BlockTable  # noqa: E402
from vllm_pd_connector.geometry.manifest import Manifest, Segment  # noqa: E402
from vllm_pd_connector.metadata import ReadFrom, ReceiveRequest  # noqa: E402
from vllm_pd_connector.protocol.lease import LeaseTable  # noqa: E402
from vllm_pd_connector.protocol.peer import PeerKey  # noqa: E402
from vllm_pd_connector.protocol.wire import messages as m  # noqa: E402
from vllm_pd_connector.protocol.wire.fields import MAX_LEASES, LeaseRef, Reading  # noqa: E402
from vllm_pd_connector.transport.base import TransferStatus  # noqa: E402
from vllm_pd_connector.transport.loopback import LoopbackTransport  # noqa: E402
from vllm_pd_connector.worker.outbox import Outbox  # noqa: E402
from vllm_pd_connector.worker.peers.event_queue import EventQueue  # noqa: E402
from vllm_pd_connector.worker.receive.driver import Receives  # noqa: E402
from vllm_pd_connector.worker.staging.stager import Stager  # noqa: E402

QUANTILES = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)
TOKENS = (891, 901, 964, 1662, 3263, 4993, 6909, 9570, 13196, 17869, 27367, 39552, 85401, 126195)
BLOCK_TOKENS = 128
BLOCKS = 1024  # of an instance, so that the longest prompt fits; requests share them, nobody looks at the bytes
LAYERS, CHANNELS = 2, 2
LATENCY_S = 0.0002
TURN_S = 0.02
READ_S = 2.0  # in the mean
LEASE_S = 3.0
SECONDS = 6.0  # of which the second half is measured

CONFIG = Config(transport="loopback", staging_bytes=0, handshake_timeout=1.0, transfer_timeout=600.0)


class Clock:
    """Made-up time, and what is due in it."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), act))

    def run_until(self, moment: float) -> None:
        while self._due and self._due[0][0] <= moment:
            self.now, _, act = heapq.heappop(self._due)
            act()
        self.now = moment


class Meter:
    """Processor time of a kind of work, in all and by its parts."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, act: Callable[[], Any]) -> Any:
        began = time.thread_time()
        value = act()
        self.times.append(time.thread_time() - began)
        return value

    @property
    def total(self) -> float:
        return sum(self.times)


def prompt_tokens(random_: random.Random) -> int:
    return int(np.interp(random_.random(), QUANTILES, TOKENS))


def describe(engine: str, incarnation: str, memory: np.ndarray, endpoint: bytes) -> Manifest:
    """One worker whose blocks are tiny: what is counted is how many there are."""
    made = make_worker(0, 1, "LBHNC", BLOCK_TOKENS, BLOCKS, LAYERS, heads=1, channels=CHANNELS)
    segments = (Segment(memory.ctypes.data, len(memory), "cpu", 0),)
    return msgspec.structs.replace(
        made, engine_id=engine, incarnation=incarnation, segments=segments, endpoint=endpoint
    )


def make_memory() -> np.ndarray:
    return np.zeros(LAYERS * BLOCKS * BLOCK_TOKENS * 2 * CHANNELS * ITEM, dtype=np.uint8)


class Prefill:
    """A prefill instance: leases, manifests, and the answers to who asks for them."""

    def __init__(self, clock: Clock, number: int, meter: Meter):
        self.clock, self.port, self.engine, self.meter = clock, 10000 + number, f"p-{number}", meter
        self.memory = make_memory()
        self.transport: LoopbackTransport | None = None
        self.leases = LeaseTable(600.0)
        self.begin_life()

    def begin_life(self) -> None:
        if self.transport is not None:
            self.transport.close()
        self.incarnation, self.transport = secrets.token_hex(16), LoopbackTransport()
        manifest = describe(self.engine, self.incarnation, self.memory, self.transport.describe())
        self.transport.register(manifest.segments)
        self.leases = LeaseTable(600.0)
        self._manifests = m.Manifests(self.engine, self.incarnation, (msgspec.msgpack.encode(manifest),))

    def hold(self, request_id: str, table: BlockTable) -> ReadFrom:
        lease = LeaseRef(request_id, secrets.token_bytes(16))
        self.meter(lambda: self.leases.hold(request_id, lease.nonce, self.clock.now, LEASE_S, (table,)))
        return ReadFrom(PeerKey("127.0.0.1", self.port, self.incarnation), self.engine, lease, (table,))

    def answer(self, frame: bytes) -> bytes:
        return bytes(self.meter(lambda: self._answer(frame)))

    def _answer(self, frame: bytes) -> bytes:
        seq, request = m.decode_request(frame)
        now = self.clock.now
        reply: m.Reply
        match request:
            case m.GetManifests():
                reply = self._manifests
            case m.Renew(leases):
                reply = m.Renewed(tuple(self.leases.renew(leases, now)))
            case m.ReadDone():
                reply = self.leases.read_done(request, now)
            case m.Release(leases):
                self.leases.release(leases, now)
                reply = m.Released()
            case _:
                raise AssertionError(f"{request} is not asked here")
        self.leases.take_freed()
        return m.encode(seq, reply)


class Calls:
    """`worker.rpc.PendingCalls` of one decode worker, over the clock in place of sockets."""

    def __init__(self, clock: Clock, prefills: dict[str, Prefill], answers: Meter, links: Meter):
        self._clock, self._prefills, self._answers, self._links = clock, prefills, answers, links
        self.asked = self.linked = 0
        self._numbers = itertools.count(1)

    def ask(self, endpoint: str, request: m.Request, timeout_s: float, handler: Any = None) -> None:
        self.asked += 1
        frame = m.encode(next(self._numbers), request)
        prefill = self._prefills.get(endpoint)
        if prefill is None:
            self._clock.after(timeout_s, lambda: handler and handler(DeadlineExceeded("silence"), self._clock.now))
            return

        def arrive(there: Prefill = prefill) -> None:
            reply = there.answer(frame)
            if handler is not None:
                self._clock.after(LATENCY_S, lambda: self._deliver(reply, handler))

        self._clock.after(LATENCY_S, arrive)

    def _deliver(self, frame: bytes, handler: Any) -> None:
        began = time.thread_time()
        _, reply = m.decode_reply(frame)
        handler(reply, self._clock.now)
        meter = self._answers
        if isinstance(reply, m.Manifests):
            meter, self.linked = self._links, self.linked + 1
        meter.times.append(time.thread_time() - began)


class Link(LoopbackTransport):
    """A loopback transport whose transfers take as long as a request's bytes would."""

    def __init__(self, clock: Clock, random_: random.Random):
        super().__init__(serves=False)
        self._clock, self._random = clock, random_
        self._arrivals: dict[int, float] = {}
        self.copying = Meter()

    def poll(self, transfer: Any) -> TransferStatus:
        due = self._arrivals.get(id(transfer))
        if due is None:
            due = self._arrivals[id(transfer)] = self._clock.now + self._random.uniform(0.5, 1.5) * READ_S
        if self._clock.now < due:
            return TransferStatus.RUNNING
        del self._arrivals[id(transfer)]
        return TransferStatus(self.copying(lambda: LoopbackTransport.poll(self, transfer)))


class Unwatched:
    """In place of `worker.peers.process_watch`: no process is watched here."""

    def watch(self, life: object, now: float) -> None:
        return None


class Decode:
    """A decode instance with one worker, which keeps as many requests in flight, a third of them not yet read."""

    def __init__(self, clock: Clock, number: int, prefills: list[Prefill], in_flight: int):
        self.clock, self.number, self.prefills, self.in_flight = clock, number, prefills, in_flight
        self.random = random.Random(number)
        self.turns, self.binds, self.answers, self.links = Meter(), Meter(), Meter(), Meter()
        self.memory = make_memory()
        transport = self.link = Link(clock, self.random)
        manifest = describe(f"d-{number}", secrets.token_hex(16), self.memory, transport.describe())
        transport.register(manifest.segments)
        addresses = {f"tcp://127.0.0.1:{prefill.port}": prefill for prefill in prefills}
        self.calls: Any = Calls(clock, addresses, self.answers, self.links)
        self.outbox = Outbox()
        stager = Stager(transport, manifest.segments, 0)
        no_comparison: Any = None
        processes: Any = Unwatched()
        self.receives = Receives(
            CONFIG, manifest, transport, stager, self.calls, processes, EventQueue(), no_comparison, self.outbox, 0, 1,
            None, None,
        )  # fmt: skip
        self.waiting: deque[ReceiveRequest] = deque()
        self.reading = self.begun = self.good = self.failed = 0
        self._renew_at = clock.now

    def turn(self) -> None:
        """What the transfer thread and the scheduler half do in their time."""
        now = self.clock.now
        while self.reading + len(self.waiting) < self.in_flight:
            self._arrive()
        while len(self.waiting) > self.in_flight // 3:
            request = self.waiting.popleft()
            self.reading += 1
            asked = self.calls.asked
            self.binds(lambda request=request: self.receives.begin(request, now))
            if self.calls.asked > asked:  # its peer is not linked yet: that costs a link, not a request
                self.links.times.append(self.binds.times.pop())
        copied = self.link.copying.total
        self.turns(
            lambda: (self.receives.poll(now, math.inf), self.receives.tick(now), self.receives.next_deadline(now))
        )
        self.turns.times[-1] -= self.link.copying.total - copied  # a library's work, or a network card's
        self.link.copying.times.clear()
        results = self.outbox.take_results()
        self.reading -= len(results.finished_recving)
        self.good += len(results.finished_recving - results.failed_recving)
        self.failed += len(results.failed_recving)
        if self._renew_at <= now:
            self._renew_at = now + LEASE_S / 3
            self._renew()

    def _arrive(self) -> None:
        self.begun += 1
        prefill = self.random.choice(self.prefills)
        tokens = prompt_tokens(self.random)
        needed = -(-tokens // BLOCK_TOKENS)
        theirs, ours = (BlockTable.of(0, self.random.sample(range(1, BLOCKS), needed)) for _ in range(2))
        source = prefill.hold(f"{self.number}-{self.begun}", theirs)
        self.waiting.append(ReceiveRequest(f"d-{self.begun}", source, (ours,), 0, tokens))

    def _renew(self) -> None:
        by_peer: dict[str, list[Reading]] = {}
        for request in self.waiting:
            assert isinstance(request.source, ReadFrom)
            lease = request.source.lease
            address = f"tcp://127.0.0.1:{request.source.peer.port}"
            by_peer.setdefault(address, []).append(Reading(lease.request_id, lease.nonce, request.attempt))
        for address, readings in by_peer.items():
            for first in range(0, len(readings), MAX_LEASES):
                self.calls.ask(address, m.Renew(tuple(readings[first : first + MAX_LEASES])), 5.0)
