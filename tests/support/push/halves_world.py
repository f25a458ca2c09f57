"""A pushing pair without threads, sockets or time: the prefill side's halves, its workers, the decode side's receives.

The prefill side is the real scheduler half with the real push service and lease table behind it; of its side channel
only the socket is missing. Its workers write nothing and say what real ones would. The decode side is one real
`Receive` per worker, with the real quarantine. Both sides' blocks are those of real pools, so that what must hold after
every event can be asked of them: whatever a worker may still read or write is in nobody else's hands.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import RequestStatus

from tests.support.scheduler.halves import FULL, PROMPT, TOKEN, make_half, make_request
from tests.support.scheduler.push_halves import ASK, HOME, digest_of, step
from vllm_pd_connector.compat.blocks import Quarantine
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.protocol import receive as r
from vllm_pd_connector.protocol.lease import LeaseTable
from vllm_pd_connector.protocol.params.parse import parse_remote_prefill
from vllm_pd_connector.protocol.push.table import ANSWER_S
from vllm_pd_connector.protocol.wire import push_messages as pm
from vllm_pd_connector.protocol.wire.fields import LeaseRef, Reading
from vllm_pd_connector.protocol.wire.messages import Ack
from vllm_pd_connector.sidechannel.push_service import PushService

LEASE_S = 8.0
LIMITS = r.PhaseLimits(wait_s=10.0, read_s=60.0, confirm_s=10.0, silent_s=15.0)
WORKERS, READERS = 2, 2
DISTURBING = ("D aborts", "P aborts", "lease ends", "link drops")
EVENTS = ("D registers", "P schedules", "P finishes", *DISTURBING)
PREEMPTING = ("D registers", "P schedules", "P is preempted", "P finishes", "P aborts", "link drops")

History = tuple[str, ...]


def possible(event: str, before: History, serial: bool) -> bool:
    """Whether an event can follow; each happens once at most. A serial router tells D of a prefill that has finished,
    and a request that was aborted or has finished does nothing more."""
    told = not serial or "P finishes" in before
    match event:
        case "D registers":
            return told and "D aborts" not in before
        case "D aborts":
            return told
        case "P schedules":
            return "P aborts" not in before
        case "P is preempted":
            return "P schedules" in before and not {"P finishes", "P aborts"} & {*before}
        case "P finishes":
            return "P schedules" in before and "P aborts" not in before
        case "P aborts":
            return "P finishes" not in before
    return True


def histories(serial: bool, events: History = EVENTS, before: History = ()) -> Iterator[History]:
    """Every order of every subset of the events, impossible ones aside."""
    yield before
    for event in events:
        if event not in before and possible(event, before, serial):
            yield from histories(serial, events, (*before, event))


@dataclass
class Part:
    """What one worker has to write for one reader."""

    source: set[int] = field(default_factory=set)
    final: bool = False
    failed: bool = False


@dataclass
class Reader:
    """One decode worker."""

    machine: r.Receive
    attempt: bytes
    question: tuple[bytes, int] | None = None
    withdrawing: bool = False
    reported: r.Report | None = None


class World:
    """See the module. Also plays the prefill side's server for its scheduler half.

    Args:
        serial: whether the router waits for the prefill's answer.
        quick: whether workers end what they can after every event, or only when everything else has happened.
    """

    def __init__(self, serial: bool, quick: bool) -> None:
        self.serial, self.quick, self.now = serial, quick, 0.0
        self.half, self.pool = make_half("kv_producer", mode="push", spec=FULL, kv_lease_duration=LEASE_S)
        self.leases = LeaseTable()
        self.pushes = PushService(self.leases, threading.Lock(), lambda: None, lambda: self.now)
        self.pushes.enable([TOKEN] * WORKERS, LEASE_S)
        self.half.producer._server = self  # type: ignore[assignment]
        self.half.producer.progress.pushes = self.pushes
        self.half.producer.progress.tables = lambda _: [self.ids]
        self.request = make_request("p-1", ASK)
        self.ids: list[int] = []
        self.arrived = self.over = self.finished = self.link_down = False
        self.lease: LeaseRef | None = None
        self.parts: dict[tuple[int, bytes], Part] = {}
        self.seen = [0] * WORKERS
        self.written: defaultdict[bytes, set[int]] = defaultdict(set)
        self.lost: set[bytes] = set()
        self.readers: list[Reader] = []
        self.their_pool = BlockPool(num_gpu_blocks=8, enable_caching=False, hash_block_size=16)
        self.quarantine = Quarantine(self.their_pool)
        self.theirs: list[Any] = []
        self.tickets = 0
        self.happened: list[str] = []
        self.told_early = False  # somebody was told to write before the prefill had finished
        self.free = self.pool.get_num_free_blocks(), self.their_pool.get_num_free_blocks()

    # The prefill side's server, as its scheduler half uses it

    def hold(self, request_id: str, nonce: bytes, duration: float, tables: tuple[BlockTable, ...], *_: object) -> None:
        self.leases.hold(request_id, nonce, self.now, duration, tables)

    def drop(self, request_id: str) -> None:
        self.leases.drop(request_id, self.now)

    def has_news(self) -> bool:
        return True

    def take_given(self) -> list[Any]:
        return []

    def take_freed(self) -> list[Any]:
        return self.pushes.settle(self.now)

    # What can happen

    def do(self, event: str) -> None:
        self.happened.append(event)
        match event:
            case "D registers":
                self.theirs = self.their_pool.get_new_blocks(3)
                self.readers = [Reader(r.Receive(LIMITS, self.now), bytes([i]) * 16) for i in range(READERS)]
                for reader in self.readers:
                    self.tell(reader, r.PushReady())
            case "D aborts":
                self.decode_aborts()
            case "P schedules":
                self.arrive()
                self.ids = [block.block_id for block in self.pool.get_new_blocks(3)]
                step(self.half, p_1=(0, 20))
            case "P is preempted":
                self.preempt()
            case "P finishes":
                self.finished = True
                params = self.prefill_ends(RequestStatus.FINISHED_LENGTH_CAPPED)
                self.lease = parse_remote_prefill(params).lease
            case "P aborts":
                self.arrive()
                assert self.prefill_ends(RequestStatus.FINISHED_ABORTED) is None
            case "lease ends":
                self.elapse()
            case "link drops":
                self.drop_link()
        self.settle()
        if self.request.status is RequestStatus.FINISHED_ABORTED and not self.forgotten:
            assert all(reader.reported for reader in self.readers), "D is not told at once that P has given up"
        if self.quick:
            self.work()

    @property
    def forgotten(self) -> bool:
        """Whether P's failure was before D asked, and a lease's time ago."""
        return self.time_passed(before="D registers", after="P aborts")

    def preempt(self) -> None:
        """vLLM takes the prefill's blocks, gives them to others, and computes it again in the next step."""
        self.half.producer.progress.take_back()
        self.half.producer.drain()
        self.pool.free_blocks([self.pool.blocks[i] for i in reversed(self.ids)])
        self.check()
        self.ids = [block.block_id for block in self.pool.get_new_blocks(3)]
        step(self.half, p_1=(0, 20))

    def arrive(self) -> None:
        if not self.arrived:
            self.arrived = True
            self.half.on_new_request(self.request)

    def prefill_ends(self, status: RequestStatus) -> Any:
        self.over, self.request.status = True, status
        _, params = self.half.request_finished(self.request, (self.ids,))
        self.pool.free_blocks([self.pool.blocks[i] for i in reversed(self.ids)])
        return params

    def decode_aborts(self) -> None:
        for reader in self.readers:
            self.tell(reader, r.Abort())
        if not self.readers and self.lease is not None and self.serial:
            self.leases.release([Reading(self.lease.request_id, self.lease.nonce, bytes(16))], self.now)
        elif not self.readers:
            assert self.pushes.serve(pm.DeclinePush(self.prefill, self.waited_s), self.ticket(), self.now) == Ack()

    def elapse(self) -> None:
        """So much time that a lease ends, also one whose reader asked a moment ago."""
        self.now += LEASE_S + 2 * ANSWER_S + 1
        self.settle()
        for reader in self.readers:
            self.tell(reader, r.ReceiveTick())
        self.settle()

    def drop_link(self) -> None:
        """Worker 0 cannot write any more, and answers that are on their way to D are lost."""
        self.link_down = True
        for (worker, attempt), part in list(self.parts.items()):
            if worker == 0 and not part.failed:
                part.failed = True
                self.report(worker, attempt, ok=False, terminal=False)
        for reader in self.readers:
            if reader.question is not None:
                self.tell(reader, r.PushSilent())

    # Messages

    def settle(self) -> None:
        """What the server's thread does after every event, and everybody's answers to what comes of it."""
        while True:
            self.pushes.tick(self.now)
            self.half.producer.drain()
            for worker in range(WORKERS):
                self.pushes.serve(pm.AwaitCommands(TOKEN, worker, self.seen[worker]), (b"worker", worker), self.now)
            replies = self.pushes.take_replies()
            for ticket, reply in replies:
                if isinstance(reply, pm.Commands):
                    self.obey(ticket[1], reply)
                else:
                    assert isinstance(reply, pm.Pushed)
                    self.answer(ticket, reply)
            self.check()
            if not replies:
                return

    def ticket(self) -> tuple[bytes, int]:
        self.tickets += 1
        return b"decode", self.tickets

    @property
    def waited_s(self) -> float:
        """The decode request had come before all else; what it needs, it needs of this attempt's prefill."""
        return self.now + 1.0

    @property
    def prefill(self) -> pm.PrefillRef:
        if not self.serial:
            return pm.PrefillRef(ASK["transfer_id"], None)
        assert self.lease is not None
        return pm.PrefillRef(self.lease.request_id, self.lease.nonce)

    def check(self) -> None:
        """What a worker may still write is in nobody else's hands; what is read while it is, is lost."""
        for (_, attempt), part in self.parts.items():
            if not all(self.pool.blocks[i].ref_cnt > 0 for i in part.source):
                self.lost.add(attempt)
            assert all(block.ref_cnt > 0 for block in self.theirs), "D's blocks are free and may be written"
            assert self.readers[attempt[0]].machine.writing, "D takes its blocks for settled, and they may be written"

    # The prefill side's workers

    def obey(self, worker: int, receives: pm.Commands) -> None:
        self.seen[worker] = max(self.seen[worker], receives.last)
        for receive in receives.orders:
            if isinstance(receive, pm.BeginCommand):
                continue
            attempt = receive.attempt
            part = self.parts.get((worker, attempt))
            self.told_early |= isinstance(receive, pm.WriteCommand) and not self.finished
            if isinstance(receive, pm.WriteCommand) and not (worker == 0 and self.link_down):
                part = self.parts.setdefault((worker, attempt), Part())
                part.source |= {i for table in receive.source for i in table.ids.tolist()}
                part.final |= receive.final
            elif part is not None:
                part.failed = True
            else:
                self.report(worker, attempt, ok=False, terminal=True)

    def work(self) -> None:
        """Workers end what they can."""
        for (worker, attempt), part in list(self.parts.items()):
            if part.failed or part.final:
                self.check()
                del self.parts[worker, attempt]
                if not part.failed:
                    self.written[attempt].add(worker)
                self.report(worker, attempt, ok=not part.failed, terminal=True)
                self.settle()

    def report(self, worker: int, attempt: bytes, ok: bool, terminal: bool) -> None:
        ended = pm.PushEnded(TOKEN, worker, attempt, ok, "" if ok else "a link dropped", terminal)
        assert self.pushes.serve(ended, (b"worker", worker), self.now) == Ack()

    # The decode side's workers

    def tell(self, reader: Reader, event: r.Event) -> None:
        for action in reader.machine.handle(event, self.now):
            match action:
                case r.AskPush():
                    place = self.readers.index(reader)
                    blocks = (BlockTable(0, b"".join(block.block_id.to_bytes(4, "little") for block in self.theirs)),)
                    seat = 0, 0, place, place, READERS, reader.attempt
                    stop, digest = len(PROMPT), digest_of(self.request)
                    self.ask(
                        reader, pm.PushInto(self.prefill, HOME, *seat, blocks, 0, stop, digest, waited_s=self.waited_s)
                    )
                case r.Withdraw():
                    self.ask(reader, pm.WithdrawPush(self.prefill, reader.attempt))
                case r.Report():
                    self.reported(reader, action)
                case r.Drained():
                    self.quarantine.drain("d-1", 1)

    def ask(self, reader: Reader, message: pm.PushInto | pm.WithdrawPush) -> None:
        reader.question, reader.withdrawing = self.ticket(), isinstance(message, pm.WithdrawPush)
        assert self.pushes.serve(message, reader.question, self.now) is None

    def answer(self, ticket: tuple[bytes, int], reply: pm.Pushed) -> None:
        for reader in self.readers:
            if reader.question != ticket:
                continue  # another was sent since
            reader.question = None
            if reader.withdrawing:
                self.tell(reader, r.PushFailed(reply.reason, True) if reply.terminal else r.PushSilent())
            elif reply.state is pm.PushState.DONE:
                self.tell(reader, r.PushDone())
            elif reply.state is pm.PushState.FAILED:
                self.tell(reader, r.PushFailed(reply.reason, reply.terminal))
            else:
                self.tell(reader, r.PushAlive(reply.moved.descriptors if reply.state is pm.PushState.WRITING else None))

    def reported(self, reader: Reader, report: r.Report) -> None:
        """vLLM has the blocks back when all ranks have reported; here also after a success, as if decode had ended."""
        assert reader.reported is None, "reported twice"
        reader.reported = report
        if report.ok:
            assert self.finished and self.written[reader.attempt] == set(range(WORKERS)), "a success, and bytes lack"
            assert reader.attempt not in self.lost, "a success, and others had P's blocks while they were read"
        if report.quarantined:
            self.quarantine.add("d-1", self.theirs, 1)
        if all(other.reported for other in self.readers):
            self.their_pool.free_blocks(reversed(self.theirs))

    # The end

    def time_passed(self, before: str, after: str = "") -> bool:
        """Whether a lease's time passed before an event; only after another one, if that is named."""
        if "lease ends" not in self.happened:
            return False
        place = self.happened.index("lease ends")
        return before in self.happened[place:] and (not after or after in self.happened[:place])

    def check_that_nobody_waits(self) -> None:
        """Who learns that the other side is over is over at once; only what was forgotten is found out by time."""
        decode_is_over = "D aborts" in self.happened or any(reader.reported for reader in self.readers)
        if self.over and ("P aborts" in self.happened or any(part.failed for part in self.parts.values())):
            assert self.half.producer.num_leases == 0, "P keeps what a worker may never say to be over"
        if decode_is_over and self.over and not self.time_passed(before="P schedules"):
            assert self.half.producer.num_leases == len(self.leases) == 0, "P keeps what nobody asks for any more"
            assert self.pool.get_num_free_blocks() == self.free[0]
        if self.over and not self.forgotten:
            assert all(reader.reported and not reader.machine.writing for reader in self.readers), "D is not told"
            assert self.their_pool.get_num_free_blocks() == self.free[1]

    def end(self) -> bool:
        """Nothing new comes: workers end, clients leave, time passes. Everything must be over and free then; returns
        whether decode got its cache."""
        self.work()
        if self.arrived and not self.over:
            self.do("P aborts")
            self.work()
        self.check_that_nobody_waits()
        for _ in range(3):
            self.elapse()
            self.work()
        assert not self.parts and all(reader.reported and not reader.machine.writing for reader in self.readers)
        assert self.half.producer.num_leases == len(self.leases) == self.quarantine.num_blocks == 0
        assert self.pushes.next_deadline() == self.now + 30.0, "only the workers wait"
        assert (self.pool.get_num_free_blocks(), self.their_pool.get_num_free_blocks()) == self.free
        return bool(self.readers) and all(reader.reported.ok for reader in self.readers if reader.reported)
