"""A fleet without sockets and without time: the decode instances of `scale.py`, and the messages to prefill instances.

A decode instance is one worker's receives and the renewer of its scheduler half, both as they are in the product, with
`Calls` in place of sockets and `Link` in place of a network. A turn of its transfer thread has as much time for binding
and looking as the product's (`transfer_loop.TURN_S`, of the real clock); all else is by the made-up one.
"""

from __future__ import annotations

import itertools
import random
import secrets
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.fleet_prefill import (  # noqa: E402
    BLOCK_TOKENS,
    BLOCKS,
    LATENCY_S,
    LEASE_S,
    Clock,
    Meter,
    Prefill,
    Watches,
    describe,
    make_memory,
)
from vllm_pd_connector.config import Config  # noqa: E402
from vllm_pd_connector.geometry.blocks import BlockTable  # noqa: E402
from vllm_pd_connector.metadata import PushFrom, ReadFrom, ReceiveRequest  # noqa: E402
from vllm_pd_connector.protocol.wire import messages as m  # noqa: E402
from vllm_pd_connector.protocol.wire.fields import Reading  # noqa: E402
from vllm_pd_connector.protocol.wire.push_messages import InstanceAddress  # noqa: E402
from vllm_pd_connector.scheduler.leases.lease_renewer import LeaseRenewer  # noqa: E402
from vllm_pd_connector.transport import loopback  # noqa: E402
from vllm_pd_connector.transport.base import TransferStatus  # noqa: E402
from vllm_pd_connector.worker.outbox import Outbox  # noqa: E402
from vllm_pd_connector.worker.peers.event_queue import EventQueue  # noqa: E402
from vllm_pd_connector.worker.receive.driver import Receives  # noqa: E402
from vllm_pd_connector.worker.staging.stager import Stager  # noqa: E402
from vllm_pd_connector.worker.transfer_loop import TURN_S  # noqa: E402

QUANTILES = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)
TOKENS = (891, 901, 964, 1662, 3263, 4993, 6909, 9570, 13196, 17869, 27367, 39552, 85401, 126195)
READ_S = 2.0  # in the mean; as long as a prefill takes that is written while it is computed
PUSHED = 0.25  # of the requests are written by their prefill instance, the others read
REASONS = ("restart", "lease", "other")  # why requests failed
WAIT = 1 / 3  # of a decode instance's requests are not yet begun

CONFIG = Config(transport="loopback", staging_bytes=0, handshake_timeout=1.0, transfer_timeout=600.0)


def prompt_tokens(random_: random.Random) -> int:
    return int(np.interp(random_.random(), QUANTILES, TOKENS))


class Calls:
    """`worker.rpc.PendingCalls` over the clock in place of sockets; `answers` and `links` are what handlers take."""

    def __init__(self, name: bytes, clock: Clock, prefills: dict[str, Prefill], answers: Meter, links: Meter):
        self._name, self._clock, self._prefills, self._answers, self._links = name, clock, prefills, answers, links
        self.asked = self.linked = 0
        self._numbers = itertools.count(1)
        self._handlers: dict[int, Any] = {}

    def ask(self, endpoint: str, request: m.Request, timeout_s: float, handler: Any = None) -> None:
        self.asked += 1
        number, prefill = next(self._numbers), self._prefills[endpoint]
        frame = m.encode(number, request)
        if handler is not None:
            self._handlers[number] = handler
        self._clock.after(LATENCY_S, lambda: prefill.arrive(frame, self._name, self._deliver))

    def give_back(self, endpoint: str, make: Callable[[], m.Request], timeout_s: float) -> None:
        """Nobody here has no room for it, so it is sent once."""
        self.ask(endpoint, make(), timeout_s)

    def _deliver(self, frame: bytes) -> None:
        began = time.thread_time()
        number, reply = m.decode_reply(frame)
        if (handler := self._handlers.pop(number, None)) is not None:
            handler(reply, self._clock.now)
        meter = self._answers
        if isinstance(reply, m.Manifests):
            meter, self.linked = self._links, self.linked + 1
        meter.times.append(time.thread_time() - began)


class Client:
    """`SideChannelClient` of the renewer, over `Calls`."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self._numbers = calls, itertools.count(1)
        self._outcomes: list[tuple[int, object]] = []

    def send(self, address: str, request: m.Request, timeout_s: float) -> int:
        number = next(self._numbers)
        self._calls.ask(address, request, timeout_s, lambda outcome, _: self._outcomes.append((number, outcome)))
        return number

    def receive(self) -> list[tuple[int, object]]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes


class Renewer(LeaseRenewer):
    """The product's, without its thread: its `_turn` is called. Its clock is that of its module, see `scale.fleet`."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(None, LEASE_S)
        self._client: Any = Client(calls)

    def _submit(self, command: Callable[[], object]) -> None:
        self._commands.append(command)


class Link(loopback.LoopbackTransport):
    """A loopback transport whose transfers take as long as a request's bytes would. `late` says of each that was seen
    to have ended how long ago it had; `copy` moves the bytes of those, as a network card would beside the thread."""

    def __init__(self, clock: Clock, random_: random.Random):
        super().__init__(serves=False)
        self._clock, self._random = clock, random_
        self._arrivals: dict[int, float] = {}
        self._ended: list[Any] = []
        self.late: list[float] = []
        self.looks = 0

    @property
    def running(self) -> int:
        return len(self._arrivals)

    def read(self, peer: Any, runs: Any) -> Any:
        transfer = super().read(peer, runs)
        self._arrivals[id(transfer)] = self._clock.now + self._random.uniform(0.5, 1.5) * READ_S
        return transfer

    def poll(self, transfer: Any) -> TransferStatus:
        self.looks += 1
        loopback._reach(transfer.peer)  # raises if that has ended
        late = self._clock.now - self._arrivals[id(transfer)]
        if late < 0:
            return TransferStatus.RUNNING
        del self._arrivals[id(transfer)]
        self.late.append(late)
        self._ended.append(transfer)
        return TransferStatus.DONE

    def copy(self) -> None:
        for transfer in self._ended:
            super().poll(transfer)
        self._ended = []


class Decode:
    """A decode instance with one worker, which keeps as many requests in flight, of which WAIT are not yet begun. Its
    `turn` is called every `turns_s` of the made-up time.

    `failed` counts why requests failed: their prefill instance was restarted, their lease ended, or anything else.
    `late` is how many seconds of the thread passed from a read's end until that had been seen.
    """

    def __init__(self, clock: Clock, number: int, prefills: list[Prefill], in_flight: int, turns_s: float):
        self.clock, self.number, self.prefills, self.in_flight = clock, number, prefills, in_flight
        self.turns_s = turns_s
        self.random = random.Random(number)
        self.turns, self.rests, self.renewals = Meter(), Meter(), Meter()
        self.begins, self.binds, self.ends, self.answers, self.links = (Meter() for _ in range(5))
        self.memory = make_memory()
        transport = self.link = Link(clock, self.random)
        manifest = describe(f"d-{number}", secrets.token_hex(16), self.memory, transport.describe())
        transport.register(manifest.segments)
        self.home = InstanceAddress(manifest.engine_id, manifest.incarnation, "127.0.0.1", 1 + number)
        addresses, name = {prefill.address: prefill for prefill in prefills}, f"d-{number}".encode()
        self.calls: Any = Calls(name, clock, addresses, self.answers, self.links)
        self.renewing = Calls(name + b" renews", clock, addresses, self.renewals, self.renewals)
        self.renewer = Renewer(self.renewing)
        self.outbox = Outbox()
        watches: Any = Watches()
        no_comparison: Any = None
        self.receives: Any = Receives(
            CONFIG, manifest, transport, Stager(transport, manifest.segments, 0), self.calls, watches, EventQueue(),
            no_comparison, self.outbox, 0, 1, None, None,
        )  # fmt: skip
        self._metered("_bind", self.binds)
        self._metered("_transfer_ended", self.ends)
        self.orders = [self.random.sample(range(1, BLOCKS), BLOCKS - 1) for _ in range(16)]
        self.waiting: deque[tuple[ReceiveRequest, str]] = deque()
        self.inbox: deque[ReceiveRequest] = deque()
        self.going: dict[str, tuple[ReceiveRequest, Prefill, str]] = {}
        self.good = self.pushed = self.begun = 0
        self.failed: Counter[str] = Counter()
        self.late: list[float] = []

    @property
    def meters(self) -> tuple[Meter, ...]:
        own = self.begins, self.binds, self.ends, self.answers, self.links
        return (*own, self.turns, self.rests, self.renewals)

    def _metered(self, name: str, meter: Meter) -> None:
        act = getattr(self.receives, name)
        setattr(self.receives, name, lambda *arguments: meter(lambda: act(*arguments)))

    def turn(self) -> None:
        """What the scheduler half and the transfer thread do in `turns_s`: as many turns as there is work for, at most
        until each read was looked at, or `turns_s` of the thread's time have passed."""
        now, busy = self.clock.now, 0.0
        while len(self.going) < self.in_flight:
            self._arrive()
        while len(self.waiting) > self.in_flight * WAIT:
            self.inbox.append(self.waiting.popleft()[0])
        goes_on, looks = True, self.link.looks + self.link.running
        while goes_on and busy < self.turns_s:
            began, until = time.thread_time(), time.monotonic() + TURN_S
            while self.inbox:
                self._begin(self.inbox.popleft(), now)
                if time.monotonic() >= until:
                    break
            self.receives.poll(now, until)
            cut = time.monotonic() >= until
            due = self.rests(lambda: (self.receives.tick(now), self.receives.next_deadline(now))[1])
            self.turns.times.append(time.thread_time() - began)
            busy += self.turns.times[-1]
            self.late += [int(seconds / self.turns_s) * self.turns_s + busy for seconds in self.link.late]
            self.link.late.clear()
            goes_on = bool(self.inbox) or (due is not None and due <= now) or (cut and self.link.looks < looks)
        self.link.copy()
        results = self.outbox.take_results()
        for name in results.finished_recving:
            self._over(name, failed=name in results.failed_recving)
        self.renewals(self.renewer._turn)

    def _begin(self, request: ReceiveRequest, now: float) -> None:
        asked = self.calls.asked
        self.begins(lambda: self.receives.begin(request, now))
        if self.calls.asked > asked:  # its peer is not linked yet: that costs a link, not a request
            self.links.times.append(self.begins.times.pop())

    def _arrive(self) -> None:
        self.begun += 1
        prefill = self.random.choice(self.prefills)
        tokens = prompt_tokens(self.random)
        needed, theirs = -(-tokens // BLOCK_TOKENS), self.random.choice(self.orders)
        ours = (BlockTable.of(0, self.random.choice(self.orders)[:needed]),)
        there, here = f"{self.number}-{self.begun}", f"d-{self.begun}"
        source: ReadFrom | PushFrom
        if self.random.random() < PUSHED:
            seconds = self.random.uniform(0.5, 1.5) * READ_S
            source = prefill.compute(there, theirs[:needed], tokens, seconds, self.home)
            request, ref = ReceiveRequest(here, source, ours, 0, tokens), source.prefill
            self.renewer.keep_prefill(here, lambda: prefill.address, ref)
        else:
            source = prefill.hold(there, (BlockTable.of(0, theirs[:needed]),))
            request = ReceiveRequest(here, source, ours, 0, tokens)
            self.renewer.keep(prefill.address, self._reading(request), LEASE_S)
        self.going[here] = request, prefill, prefill.incarnation
        self.waiting.append((request, there))

    def _reading(self, request: ReceiveRequest) -> Reading:
        assert request.lease is not None
        return Reading(request.lease.request_id, request.lease.nonce, request.attempt)

    def _over(self, name: str, *, failed: bool) -> None:
        """A request was reported: until then the renewer has kept what it came for."""
        request, prefill, life = self.going.pop(name)
        if request.push is not None:
            self.renewer.drop_prefill(name)
            there, self.pushed = request.push.prefill.name, self.pushed + (not failed)
        else:
            reading = self._reading(request)
            self.renewer.drop(prefill.address, reading, release=False)
            there = reading.request_id
        if not failed:
            self.good += 1
        elif prefill.incarnation != life:
            self.failed["restart"] += 1
        else:
            self.failed["lease" if there in prefill.lost else "other"] += 1
