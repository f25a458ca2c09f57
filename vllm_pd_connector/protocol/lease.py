"""Leases on the prefill side: which finished requests' blocks are kept still, for whom, until when.

    HELD --all readers reported--> READ        HELD --deadline passed--> EXPIRED
    HELD --release------------------> RELEASED    HELD --drop-------------> DROPPED

A lease is named by request id and nonce, so that a stale reference to blocks that were given away is never taken for
the present one. Every lease that was held comes out of `take_freed` exactly once, whatever ended it. A report is
answered "held" only if the lease is held at that moment, or if the very same report (reader and attempt) was
answered so before: its bytes were read earlier still. No clock, no thread and no socket in here; `now` is seconds of
any monotonic clock, and each event first expires what is due.

Source: architecture.md, "Pull"; peers-and-demands.md §1, ranks 1, 4 and 16.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from vllm_pd_connector.bounded import Bounded
from vllm_pd_connector.protocol.fields import LeaseRef, Table
from vllm_pd_connector.protocol.messages import ReadDone, ReadVerdict


class End(Enum):
    """Why a lease ended; the value completes the sentence "the lease …"."""

    READ = "ended when all its readers had reported"
    RELEASED = "was released by the decode side"
    EXPIRED = "expired before it was renewed or read"
    DROPPED = "was dropped by the prefill side"


class Freed(NamedTuple):
    """A request whose blocks need not be kept any longer."""

    request_id: str
    reason: End


@dataclass(slots=True)
class _Lease:
    nonce: bytes
    duration: float
    deadline: float
    tables: tuple[Table, ...]
    readers: int = 0  # 0 until the first report
    reported: dict[int, bytes] = field(default_factory=dict)  # reader -> its latest attempt that was answered "held"


@dataclass(frozen=True, slots=True)
class _Ended:
    reason: End
    reported: dict[int, bytes]


class LeaseTable:
    """All leases of one prefill instance. `remember` bounds how many ended ones can still be explained."""

    def __init__(self, remember: int = 4096) -> None:
        self._held: dict[str, _Lease] = {}
        self._ended: Bounded[tuple[str, bytes], _Ended] = Bounded(remember)
        self._timers: list[tuple[float, str, bytes]] = []  # at least one per lease, never later than its deadline
        self._freed: list[Freed] = []

    def __len__(self) -> int:
        """How many leases are held."""
        return len(self._held)

    def hold(self, request_id: str, nonce: bytes, now: float, duration: float, tables: tuple[Table, ...] = ()) -> None:
        """Begin a lease of `duration` seconds; `request_id` must not be held already. `tables` are its blocks."""
        assert request_id not in self._held, f"request {request_id} is already under a lease"
        self._held[request_id] = _Lease(nonce, duration, now + duration, tables)
        if len(self._timers) > 2 * len(self._held) + 64:
            self._timers = [(lease.deadline, key, lease.nonce) for key, lease in self._held.items()]
            heapq.heapify(self._timers)
        else:
            heapq.heappush(self._timers, (now + duration, request_id, nonce))

    def tables_of(self, ref: LeaseRef, now: float) -> tuple[Table, ...] | None:
        """The blocks of a held lease, None if it is not held."""
        self.tick(now)
        lease = self._find(ref)
        return lease.tables if lease is not None else None

    def renew(self, leases: Iterable[LeaseRef], now: float) -> list[str]:
        """Extend each lease to `now` plus its duration; returns the request ids of those that are not held."""
        self.tick(now)
        gone = []
        for ref in leases:
            lease = self._find(ref)
            if lease is None:
                gone.append(ref.request_id)
            else:
                lease.deadline = max(lease.deadline, now + lease.duration)
        return gone

    def read_done(self, report: ReadDone, now: float) -> ReadVerdict:
        """Was the lease held until `now`? Ends it when all its readers have reported."""
        self.tick(now)
        lease = self._find(report.lease)
        if lease is None:
            return self._explain(report)
        if report.reader >= report.readers:
            return _refused(f"reader {report.reader} of {report.readers}: readers are counted from 0")
        if lease.readers not in (0, report.readers):
            return _refused(
                f"readers: {report.readers} in this report, {lease.readers} in an earlier one; two decode instances "
                "read this lease, or a worker is misconfigured"
            )
        lease.readers = report.readers
        lease.reported[report.reader] = report.attempt
        if len(lease.reported) == lease.readers:
            self._end(report.lease.request_id, End.READ)
        return ReadVerdict(held=True, reason="")

    def release(self, leases: Iterable[LeaseRef], now: float) -> None:
        """End leases that will not be read; those that are not held are ignored."""
        self.tick(now)
        for ref in leases:
            if self._find(ref) is not None:
                self._end(ref.request_id, End.RELEASED)

    def extend(self, ref: LeaseRef, now: float, seconds: float) -> None:
        """Keep a lease for at least its duration and `seconds` more from now; ignored if it is not held."""
        self.tick(now)
        lease = self._find(ref)
        if lease is not None:
            lease.deadline = max(lease.deadline, now + lease.duration + seconds)

    def release_by_id(self, request_id: str, now: float) -> None:
        """End a lease of which the decode side needs nothing; ignored if it is not held."""
        self.tick(now)
        if request_id in self._held:
            self._end(request_id, End.RELEASED)

    def drop(self, request_id: str, now: float) -> None:
        """End a lease from the prefill side; ignored if it is not held."""
        self.tick(now)
        if request_id in self._held:
            self._end(request_id, End.DROPPED)

    def drop_all(self, now: float) -> None:
        """End all leases from the prefill side."""
        self.tick(now)
        for request_id in list(self._held):
            self._end(request_id, End.DROPPED)

    def tick(self, now: float) -> None:
        """Expire the leases whose deadline is `now` or earlier."""
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            self._end(self._timers[0][1], End.EXPIRED)

    def take_freed(self) -> list[Freed]:
        """What has ended since the last call, in order."""
        freed, self._freed = self._freed, []
        return freed

    def next_deadline(self) -> float | None:
        """When the next lease expires, None if none is held."""
        while self._timers:
            when, request_id, nonce = self._timers[0]
            lease = self._find(LeaseRef(request_id, nonce))
            if lease is None:
                heapq.heappop(self._timers)
            elif lease.deadline > when:
                heapq.heapreplace(self._timers, (lease.deadline, request_id, nonce))
            else:
                return when
        return None

    def _find(self, ref: LeaseRef) -> _Lease | None:
        lease = self._held.get(ref.request_id)
        return lease if lease is not None and lease.nonce == ref.nonce else None

    def _end(self, request_id: str, reason: End) -> None:
        lease = self._held.pop(request_id)
        self._freed.append(Freed(request_id, reason))
        self._ended[request_id, lease.nonce] = _Ended(reason, lease.reported)

    def _explain(self, report: ReadDone) -> ReadVerdict:
        ref = report.lease
        ended = self._ended.get((ref.request_id, ref.nonce))
        if ended is None:
            known = ref.request_id in self._held
            return _refused(
                "the nonce is another than that of the lease now held for this request"
                if known
                else "no lease of this request is known"
            )
        if ended.reported.get(report.reader) == report.attempt:
            return ReadVerdict(held=True, reason="")
        return _refused(f"the lease {ended.reason.value}")


def _refused(reason: str) -> ReadVerdict:
    return ReadVerdict(held=False, reason=reason)
