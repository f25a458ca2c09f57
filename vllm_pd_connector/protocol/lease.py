"""Leases on the prefill side: which finished requests' blocks are kept still, for whom, until when.

    HELD --all that read it are done--> READ      HELD --deadline passed--> UNCLAIMED, EXPIRED, OVER_LIMIT
    HELD --release----------------> RELEASED      HELD --drop-------------> DROPPED

A lease is named by request id and nonce, so that a stale reference to blocks that were given away is never taken for
the present one. Every lease that was held comes out of `take_freed` exactly once, whatever ended it. No renewal keeps
one for longer than `limit_s`: of two instances that hold blocks for requests that wait for blocks of the other, one
gives up.

Who reads is told apart by *attempt*, a random number of one request on the decode side that all its workers share. An
attempt is known from its first renewal or report on, and over when all its workers have reported, or when it is
released; a lease lives on while one that is known is not over. A report is answered "held" only if the lease is held at
that moment, or if the very same report (attempt and reader) was answered so before: its bytes were read earlier still.

vLLM makes several requests of one with `n` > 1, which bring the same parameters, each with an attempt of its own. None
of them says how many there are, and an engine may be busy when one comes, so a lease that is read so is *shared*: when
all that are known are over, it waits for another for `SHARED_S`.

No clock, no thread and no socket in here; `now` is seconds of any monotonic clock, and each event first expires what is
due.

Source: vLLM 0.32, `nixl/pull_scheduler.py` (leases and heartbeats of the in-tree connector),
`v1/engine/parallel_sampling.py`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from vllm_pd_connector.bounded import Bounded
from vllm_pd_connector.protocol.wire.fields import LeaseRef, Reading
from vllm_pd_connector.protocol.wire.messages import ReadDone, ReadVerdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_pd_connector.geometry.blocks import BlockTable
    from vllm_pd_connector.protocol.wire.push_messages import Taken

SHARED_S = 2.0
Told = tuple[str, bytes]
"""By which name a lease can be asked for, and what is answered then."""
UNTOLD: Told = ("", b"")
MAX_ATTEMPTS = 4096  # of one lease; vLLM allows `n` up to 16384, of which as many at a time are served


class End(Enum):
    """Why a lease ended; the value completes the sentence "the lease …"."""

    READ = "ended when all its readers had reported"
    RELEASED = "was released by the decode side"
    UNCLAIMED = "expired before any decode instance asked for it"
    EXPIRED = "expired: the decode side did not renew it in time"
    OVER_LIMIT = "was renewed until it reached the prefill side's kv_lease_limit"
    DROPPED = "was dropped by the prefill side"
    WEIGHTS = "ended: the prefill side's weights were changed in place"
    RESET = "ended: the prefill side's caches were reset"
    ASLEEP = "ended: the prefill side went to sleep"


WITHDRAWN = tuple(end.value for end in (End.WEIGHTS, End.RESET, End.ASLEEP))
"""How a refusal ends of what an operator of the prefill side has ended."""


class Given(NamedTuple):
    """One reader has what it came for; `whole`: it was the last of its attempt, so a request was served."""

    request_id: str
    taken: Taken
    whole: bool


class Freed(NamedTuple):
    """A request whose blocks need not be kept any longer."""

    request_id: str
    reason: End


@dataclass(slots=True)
class _Attempt:
    readers: int = 0  # 0 until the first report
    reported: set[int] = field(default_factory=set)
    over: bool = False


@dataclass(slots=True)
class _Lease:
    nonce: bytes
    duration: float
    deadline: float
    limit: float
    tables: tuple[BlockTable, ...]
    name: str = ""
    answer: bytes = b""
    attempts: dict[bytes, _Attempt] = field(default_factory=dict)
    claimed: bool = False  # a decode instance has asked for it
    shared: bool = False
    done: End | None = None  # why it ends at its deadline, while it waits for another attempt

    def extend(self, until: float) -> None:
        self.claimed, self.deadline = True, max(self.deadline, min(until, self.limit))

    def attempt(self, name: bytes, now: float) -> _Attempt | None:
        """The attempt of that name, known from now on; None if there are too many."""
        known = self.attempts.get(name)
        if known is None and len(self.attempts) < MAX_ATTEMPTS:
            known = self.attempts[name] = _Attempt()
            if self.done is not None:  # this is what it waited for
                self.done = None
                self.extend(now + self.duration)
        return known

    def expiry(self) -> End:
        """Why it ends at its deadline."""
        if self.done is not None:
            return self.done
        if not self.claimed:
            return End.UNCLAIMED
        return End.OVER_LIMIT if self.deadline >= self.limit else End.EXPIRED


@dataclass(frozen=True, slots=True)
class _Ended:
    reason: End
    attempts: dict[bytes, _Attempt]


class LeaseTable:
    """All leases of one prefill instance.

    Args:
        limit_s: the longest life of a lease, in seconds.
        remember: how many ended ones can still be explained.
    """

    def __init__(self, limit_s: float = inf, remember: int = 4096) -> None:
        self._limit_s = limit_s
        self._held: dict[str, _Lease] = {}
        self._named: dict[str, str] = {}
        self._ended: Bounded[tuple[str, bytes], _Ended] = Bounded(remember)
        self._timers: list[tuple[float, str, bytes]] = []  # at least one per lease, never later than its deadline
        self._freed: list[Freed] = []
        self._given: list[Given] = []

    def __len__(self) -> int:
        """How many leases are held."""
        return len(self._held)

    def awaited(self) -> int:
        """How many of them a reader comes for: not those that are told by name, while nobody has asked for them."""
        return sum(lease.claimed or not lease.answer for lease in self._held.values())

    def hold(
        self,
        request_id: str,
        nonce: bytes,
        now: float,
        duration: float,
        tables: tuple[BlockTable, ...] = (),
        name: str = "",
        answer: bytes = b"",
    ) -> None:
        """Begin a lease of `duration` seconds; `request_id` must not be held already. `tables` are its blocks;
        `answer` can be asked for by `name`, the latest of that name."""
        assert request_id not in self._held, f"request {request_id} is already under a lease"
        limit = now + max(self._limit_s, duration)
        self._held[request_id] = _Lease(nonce, duration, now + duration, limit, tables, name, answer)
        if name:
            self._named[name] = request_id
        if len(self._timers) > 2 * len(self._held) + 64:
            self._timers = [(lease.deadline, key, lease.nonce) for key, lease in self._held.items()]
            heapq.heapify(self._timers)
        else:
            heapq.heappush(self._timers, (now + duration, request_id, nonce))

    def tables_of(self, ref: LeaseRef, now: float) -> tuple[BlockTable, ...] | None:
        """The blocks of a held lease, None if it is not held."""
        self.tick(now)
        lease = self._find(ref)
        return lease.tables if lease is not None else None

    def answer_of(self, name: str, now: float) -> bytes:
        """What was told of the lease that is held under this name, empty if none is."""
        self.tick(now)
        lease = self._held.get(self._named.get(name, ""))
        return lease.answer if lease is not None else b""

    def renew(self, leases: Iterable[Reading], now: float) -> list[str]:
        """Extend each lease to `now` plus its duration; returns the request ids of those that are not held."""
        self.tick(now)
        gone = []
        for reading in leases:
            lease = self._find(reading)
            if lease is None:
                gone.append(reading.request_id)
                continue
            lease.shared |= reading.shared
            attempt = lease.attempt(reading.attempt, now)
            # Else it was overtaken by the end of what it was sent for, or its report would be refused.
            if attempt is not None and not attempt.over:
                lease.extend(now + lease.duration)
        return gone

    def read_done(self, report: ReadDone, now: float) -> ReadVerdict:
        """Was the lease held until `now`? Ends it when all that read it are done."""
        self.tick(now)
        lease = self._find(report.lease)
        if lease is None:
            return self._explain(report)
        if report.reader >= report.readers:
            return _refused(f"reader {report.reader} of {report.readers}: readers are counted from 0")
        attempt = lease.attempt(report.attempt, now)
        if attempt is None:
            return _refused(f"{MAX_ATTEMPTS} requests of decode instances read this lease already, the limit here")
        if attempt.readers not in (0, report.readers):
            return _refused(
                f"readers: {report.readers} in this report, {attempt.readers} in an earlier one of the same request; "
                "a worker is misconfigured"
            )
        lease.claimed, lease.shared = True, lease.shared or report.shared
        attempt.readers = report.readers
        if report.reader not in attempt.reported:
            attempt.reported.add(report.reader)
            whole = len(attempt.reported) == attempt.readers
            self._given.append(Given(report.lease.request_id, report.taken, whole))
        if len(attempt.reported) == attempt.readers and not attempt.over:
            self._over(report.lease.request_id, lease, attempt, End.READ, now)
        return ReadVerdict(held=True, reason="")

    def release(self, leases: Iterable[Reading], now: float) -> None:
        """These will not be read, or no further, by these attempts; leases that are not held are ignored."""
        self.tick(now)
        for reading in leases:
            lease = self._find(reading)
            if lease is None:
                continue
            lease.claimed, lease.shared = True, lease.shared or reading.shared
            attempt = lease.attempt(reading.attempt, now) or _Attempt()
            if not attempt.over:
                self._over(reading.request_id, lease, attempt, End.RELEASED, now)

    def extend(self, ref: LeaseRef, now: float, seconds: float) -> None:
        """Keep a lease for at least its duration and `seconds` more from now; ignored if it is not held."""
        self.tick(now)
        lease = self._find(ref)
        if lease is not None:
            lease.extend(now + lease.duration + seconds)

    def drop(self, request_id: str, now: float, reason: End = End.DROPPED) -> None:
        """End a lease from the prefill side, or because the decode side needs nothing of it; ignored if it is not
        held."""
        self.tick(now)
        if request_id in self._held:
            self._end(request_id, reason)

    def drop_all(self, now: float, reason: End = End.DROPPED) -> None:
        """End all leases from the prefill side."""
        self.tick(now)
        for request_id in list(self._held):
            self._end(request_id, reason)

    def tick(self, now: float) -> None:
        """Expire the leases whose deadline is `now` or earlier."""
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            request_id = self._timers[0][1]
            self._end(request_id, self._held[request_id].expiry())

    def take_freed(self) -> list[Freed]:
        """What has ended since the last call, in order."""
        freed, self._freed = self._freed, []
        return freed

    def take_given(self) -> list[Given]:
        """Who got what since the last call, in order; a repeated report is there once."""
        given, self._given = self._given, []
        return given

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

    def _over(self, request_id: str, lease: _Lease, attempt: _Attempt, reason: End, now: float) -> None:
        """An attempt needs the lease no more; the last one that is known ends it, or leaves it waiting for others."""
        attempt.over = True
        if not all(other.over for other in lease.attempts.values()):
            return
        if not lease.shared:
            self._end(request_id, reason)
        elif lease.deadline > now + SHARED_S:
            lease.done, lease.deadline = reason, now + SHARED_S
            heapq.heappush(self._timers, (lease.deadline, request_id, lease.nonce))
        else:
            lease.done = reason

    def _end(self, request_id: str, reason: End) -> None:
        lease = self._held.pop(request_id)
        if self._named.get(lease.name) == request_id:
            del self._named[lease.name]
        self._freed.append(Freed(request_id, reason))
        self._ended[request_id, lease.nonce] = _Ended(reason, lease.attempts)

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
        if (attempt := ended.attempts.get(report.attempt)) is not None and report.reader in attempt.reported:
            return ReadVerdict(held=True, reason="")
        return _refused(f"the lease {ended.reason.value}")


def _refused(reason: str) -> ReadVerdict:
    return ReadVerdict(held=False, reason=reason)
