"""The prefill side of the fleet that `scale.py` simulates: leases, pushes, and the answers to who asks for them.

Around the real tables stand what a side channel's thread does with them, an engine that computes prompts for decode
instances step by step, and one worker that takes orders and reports that it has written; it writes nothing.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.bind import ITEM, make_worker  # noqa: E402
from vllm_pd_connector.geometry.blocks import BlockTable  # noqa: E402
from vllm_pd_connector.geometry.manifest import LivenessAddress, Manifest, Segment  # noqa: E402
from vllm_pd_connector.metadata import PushFrom, ReadFrom  # noqa: E402
from vllm_pd_connector.protocol.lease import End, LeaseTable  # noqa: E402
from vllm_pd_connector.protocol.peer import PeerKey  # noqa: E402
from vllm_pd_connector.protocol.wire import messages as m  # noqa: E402
from vllm_pd_connector.protocol.wire import push_messages as pm  # noqa: E402
from vllm_pd_connector.protocol.wire.fields import LeaseRef  # noqa: E402
from vllm_pd_connector.sidechannel.push_service import PushService  # noqa: E402
from vllm_pd_connector.transport.loopback import LoopbackTransport  # noqa: E402

BLOCK_TOKENS = 128
BLOCKS = 1024  # of an instance, so that the longest prompt fits; requests share them, nobody looks at the bytes
LAYERS, CHANNELS = 2, 2
LATENCY_S = 0.0002
LEASE_S = 3.0
PREFILL_STEPS = 4  # of a prompt that is written while it is computed
DIGEST = "0" * 16
WORKER = b"worker"
EXPIRED = (End.UNCLAIMED, End.EXPIRED, End.OVER_LIMIT)


class Clock:
    """Made-up time, and what is due in it."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def monotonic(self) -> float:
        return self.now

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


def describe(engine: str, incarnation: str, memory: np.ndarray, endpoint: bytes) -> Manifest:
    """One worker whose blocks are tiny: what is counted is how many there are."""
    made = make_worker(0, 1, "LBHNC", BLOCK_TOKENS, BLOCKS, LAYERS, heads=1, channels=CHANNELS)
    segments, life = (Segment(memory.ctypes.data, len(memory), "cpu", 0),), LivenessAddress("127.0.0.1", 1, incarnation)
    changes: dict[str, Any] = {"engine_id": engine, "incarnation": incarnation, "segments": segments, "life": life}
    return msgspec.structs.replace(made, endpoint=endpoint, **changes)


def make_memory() -> np.ndarray:
    return np.zeros(LAYERS * BLOCKS * BLOCK_TOKENS * 2 * CHANNELS * ITEM, dtype=np.uint8)


class Prefill:
    """A prefill instance. `serving` takes what its side channel's thread does, `stepping` what its scheduler half tells
    it in steps; `lost` are the requests whose lease has ended because nobody renewed it, in this life."""

    lives: ClassVar[set[str]] = set()
    """The incarnations that run."""

    def __init__(self, clock: Clock, number: int, serving: Meter, stepping: Meter):
        self.clock, self.port, self.engine = clock, 10000 + number, f"p-{number}"
        self.serving, self.stepping = serving, stepping
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.memory = make_memory()
        self.transport: LoopbackTransport | None = None
        self.incarnation = ""
        self.begin_life()

    def begin_life(self) -> None:
        if self.transport is not None:
            self.transport.close()
        self.lives.discard(self.incarnation)
        self.incarnation, self.transport = secrets.token_hex(16), LoopbackTransport()
        self.lives.add(self.incarnation)
        manifest = describe(self.engine, self.incarnation, self.memory, self.transport.describe())
        self.transport.register(manifest.segments)
        self.leases, self.lost = LeaseTable(600.0), set[str]()
        self.pushes = PushService(self.leases, threading.Lock(), lambda: None, self.clock.monotonic)
        self.pushes.enable((bytes(16),), LEASE_S)
        self._manifests = m.Manifests(self.engine, self.incarnation, (msgspec.msgpack.encode(manifest),))
        self._clients: dict[bytes, Callable[[bytes], None]] = {}
        self._step = 0
        self.pushes.serve(pm.AwaitCommands(bytes(16), 0, 0), (WORKER, 0), self.clock.now)

    def key(self, incarnation: str) -> PeerKey:
        return PeerKey("127.0.0.1", self.port, incarnation)

    def hold(self, request_id: str, tables: tuple[BlockTable, ...]) -> ReadFrom:
        """A prefill has finished, to be read."""
        lease = LeaseRef(request_id, secrets.token_bytes(16))
        self.stepping(lambda: self.leases.hold(request_id, lease.nonce, self.clock.now, LEASE_S, tables))
        return ReadFrom(self.key(self.incarnation), self.engine, lease, tables)

    def compute(self, request_id: str, table: list[int], tokens: int, seconds: float, home: pm.InstanceAddress) -> Any:
        """A prefill begins that is written while it is computed, in so many seconds."""
        self.stepping(lambda: self.pushes.started(request_id, request_id, tokens, DIGEST))
        life = self.incarnation
        for part in range(1, PREFILL_STEPS + 1):

            def step(part: int = part) -> None:
                if self.incarnation == life:
                    self.stepping(lambda: self._computed(request_id, table, tokens, part))
                    self.serving(self._settle)  # which orders it

            self.clock.after(seconds * part / PREFILL_STEPS, step)
        return PushFrom(self.key(""), self.engine, pm.PrefillRef(request_id, None), home, DIGEST)

    def _computed(self, request_id: str, table: list[int], tokens: int, part: int) -> None:
        self._step += 1
        ready = tokens * part // PREFILL_STEPS
        tables = (BlockTable.of(0, table[: -(-ready // BLOCK_TOKENS)]),)
        if part < PREFILL_STEPS:
            self.pushes.progressed([(request_id, tables, ready)], self._step)
        else:
            nonce = secrets.token_bytes(16)
            self.leases.hold(request_id, nonce, self.clock.now, LEASE_S, tables)
            self.pushes.finished(request_id, nonce, tables, self._step)

    def arrive(self, frame: bytes, client: bytes, deliver: Callable[[bytes], None]) -> None:
        """A message has come; `deliver` takes the answer's frame."""
        self._clients[client] = deliver
        self.serving(lambda: self._answer(frame, client))

    def _answer(self, frame: bytes, client: bytes) -> None:
        seq, request = m.decode_request(frame)
        reply = self._serve(request, (client, seq), self.clock.now)
        if reply is not None:
            self._send((client, seq), reply)
        self._settle()

    def _serve(self, request: m.Request, ticket: tuple[bytes, int], now: float) -> m.Reply | None:
        match request:
            case m.GetManifests():
                return self._manifests
            case m.Renew(leases):
                return m.Renewed(tuple(self.leases.renew(leases, now)))
            case m.ReadDone():
                return self.leases.read_done(request, now)
            case m.Release(leases):
                self.leases.release(leases, now)
                return m.Released()
            case pm.PushInto() | pm.WithdrawPush() if request.incarnation not in ("", self.incarnation):
                return m.Failure(m.FailureCode.FOREIGN_ENGINE, "it was restarted")
            case pm.PushInto() | pm.WithdrawPush() | pm.DeclinePush() | pm.KeepPrefills():
                return self.pushes.serve(request, ticket, now)
        raise AssertionError(f"{request} is not asked here")

    def _settle(self) -> None:
        """What the side channel's thread does when it has served what had come: here for each message."""
        now = self.clock.now
        self.pushes.tick(now)
        self.lost.update(request_id for request_id, reason in self.pushes.settle(now) if reason in EXPIRED)
        for ticket, reply in self.pushes.take_replies():
            if ticket[0] == WORKER:
                assert isinstance(reply, pm.Commands)
                self._work(reply)
            else:
                self._send(ticket, reply)

    def _send(self, ticket: tuple[bytes, int], reply: m.Reply) -> None:
        frame, deliver = m.encode(ticket[1], reply), self._clients[ticket[0]]
        self.clock.after(LATENCY_S, lambda: deliver(frame))

    def _work(self, commands: pm.Commands) -> None:
        """A worker takes orders, and reports when all is written, or nothing more of it."""
        life = self.incarnation

        def report() -> None:
            if self.incarnation != life:
                return
            for order in commands.orders:
                if isinstance(order, pm.CancelCommand) or (isinstance(order, pm.WriteCommand) and order.final):
                    failed = isinstance(order, pm.CancelCommand)
                    reason = order.reason if isinstance(order, pm.CancelCommand) else ""
                    ended = pm.PushEnded(bytes(16), 0, order.attempt, not failed, reason, True)
                    self.pushes.serve(ended, (WORKER, 0), self.clock.now)
            awaits = pm.AwaitCommands(bytes(16), 0, commands.last)
            self.pushes.serve(awaits, (WORKER, commands.last), self.clock.now)
            self._settle()

        self.clock.after(LATENCY_S, lambda: self.serving(report))


class Watch:
    """`ProcessWatch` of a worker in this process."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def over(self) -> bool:
        return self._name not in Prefill.lives

    here = property(lambda self: not self.over)
    lost = closed = over

    def look(self, now: float) -> None:
        return None

    def ended(self, now: float) -> bool:
        return self.over


class Watches:
    """`ProcessWatches` of workers in this process."""

    losses = 0

    def watch(self, life: Any, now: float) -> Watch:
        return Watch(life.name)
