"""Who waits for which checksums on the prefill side: decode workers ask, this instance's workers make them.

A decode worker's `GetChecksums` and a prefill worker's `NextChecksumJob` are answered later than they come, so this
machine keeps where each answer goes (`B`, opaque) and returns the answers that an event makes due. A job is given to a
worker again and again until its checksums have come, so a lost answer only costs time; each time under another number,
so that what was sent for an earlier one and comes late, over a connection that has ended, completes nothing. What the
workers send for a job is bounded by the frame that must bring it to the readers. The caller has authenticated the
worker. No clock, no socket.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from vllm_pd_connector.geometry.blocks import unsendable
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.protocol.wire.fields import MAX_REPLY_FRAME, LeaseRef

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_pd_connector.geometry.blocks import BlockTable

B = TypeVar("B")

MAX_JOBS = 64
MAX_WAITING = 256
MAX_JOB_BYTES = MAX_REPLY_FRAME - 1024
"""Of all messages with a job's checksums; the rest is for the answer's own fields."""


@dataclass(slots=True)
class _Work(Generic[B]):
    job: m.ChecksumJob  # without a number
    waiting: list[B] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)  # under which each worker was given it last
    pieces: dict[int, list[m.ChecksumPart]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)  # bytes that each worker has sent
    done: set[int] = field(default_factory=set)

    def give(self, worker: int, number: int) -> m.ChecksumJob:
        """The worker begins, or begins anew."""
        self.pieces.pop(worker, None)
        self.sizes.pop(worker, None)
        self.numbers[worker] = number
        return msgspec.structs.replace(self.job, job=number)

    def take(self, found: m.JobChecksums, workers: int) -> None:
        """Keep a message's checksums. When all are too large for an answer none are kept, and nobody makes more."""
        self.sizes[found.worker] = self.sizes.get(found.worker, 0) + m.body_size(found)
        self.pieces.setdefault(found.worker, []).extend(found.pieces)
        if found.last:
            self.done.add(found.worker)
        if self.too_large:
            self.pieces.clear()
            self.done = set(range(workers))

    @property
    def too_large(self) -> bool:
        return sum(self.sizes.values()) > MAX_JOB_BYTES


class Verification(Generic[B]):
    """The jobs of one instance with `workers` workers, of which some may ask for work before it is known how many."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._work: dict[tuple[LeaseRef, tuple[int, ...], int] | None, _Work[B]] = {}  # at most MAX_JOBS, oldest first
        self._idle: dict[int, B] = {}
        self._number = 0

    def ask(self, back: B, request: m.GetChecksums, tables: Sequence[BlockTable]) -> list[tuple[B, m.Reply]]:
        """A reader of a held lease wants its checksums. Readers with the same range share a job."""
        if reason := unsendable(tables):
            return [(back, m.Failure(m.FailureCode.NOT_OFFERED, reason))]
        key = (request.lease, request.starts, request.stop)
        if (work := self._work.get(key)) is None:
            over = (of for of, work in self._work.items() if len(work.done) == self.workers)
            if len(self._work) >= MAX_JOBS and self._work.pop(next(over, None), None) is None:
                return [(back, m.Failure(m.FailureCode.BUSY, f"{MAX_JOBS} other requests are being compared here"))]
            work = self._work[key] = _Work(m.ChecksumJob(0, tuple(tables), request.starts, request.stop))
        if len(work.done) == self.workers:
            return [(back, _verified(work))]
        work.waiting = [*work.waiting[-MAX_WAITING + 1 :], back]
        idle = [worker for worker in self._idle if worker not in work.done]
        return [(self._idle.pop(worker), self._give(work, worker)) for worker in idle]

    def next_job(self, back: B, worker: int) -> list[tuple[B, m.Reply]]:
        """A worker has nothing to do."""
        for work in self._work.values():
            if worker not in work.done:
                return [(back, self._give(work, worker))]
        self._idle[worker] = back
        return []

    def _give(self, work: _Work[B], worker: int) -> m.ChecksumJob:
        self._number += 1
        return work.give(worker, self._number)

    def add(self, back: B, found: m.JobChecksums) -> list[tuple[B, m.Reply]]:
        """A worker has made checksums."""
        answers: list[tuple[B, m.Reply]] = [(back, m.Accepted())]
        for work in self._work.values():
            if work.numbers.get(found.worker) != found.job or found.worker in work.done or found.worker >= self.workers:
                continue
            work.take(found, self.workers)
            if len(work.done) == self.workers:
                answers += [(waiting, _verified(work)) for waiting in work.waiting]
                work.waiting = []
        return answers


def _verified(work: _Work[B]) -> m.LeaseChecksums | m.Failure:
    if work.too_large:
        return m.Failure(m.FailureCode.NOT_OFFERED, f"the sums of this request take more than {MAX_JOB_BYTES} bytes")
    return m.LeaseChecksums(tuple(piece for pieces in work.pieces.values() for piece in pieces))
