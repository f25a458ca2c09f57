"""Leases: any order of events against a model that keeps the whole history."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_pd_connector.protocol.lease import SHARED_S, End, LeaseTable
from vllm_pd_connector.protocol.wire.fields import LeaseRef, Reading
from vllm_pd_connector.protocol.wire.messages import ReadDone

A, B = b"a" * 16, b"b" * 16

NAMES = ["x", "y", "z"]
refs = st.builds(LeaseRef, st.sampled_from(NAMES), st.sampled_from([A, B]))
readings = st.builds(
    Reading, st.sampled_from(NAMES), st.sampled_from([A, B]), st.sampled_from([A, B, b"c" * 16]), st.booleans()
)
LIMIT_S = 25.0


def ref_of(one: Reading) -> LeaseRef:
    return LeaseRef(one.request_id, one.nonce)


class Leases(RuleBasedStateMachine):
    """The model writes down when each lease began, until when it may live, who reads it, and what each report was
    told."""

    def __init__(self):
        super().__init__()
        self.table = LeaseTable(LIMIT_S)
        self.now = 0.0
        self.deadline: dict[LeaseRef, float] = {}
        self.duration: dict[LeaseRef, float] = {}
        self.limit: dict[LeaseRef, float] = {}
        self.reading: dict[LeaseRef, set[bytes]] = {}  # attempts that are known and not over
        self.over: dict[LeaseRef, set[bytes]] = {}
        self.waits: dict[LeaseRef, bool] = {}
        self.shared: set[LeaseRef] = set()
        self.readers: dict[tuple[LeaseRef, bytes], int] = {}
        self.reported: dict[tuple[LeaseRef, bytes], set[int]] = {}
        self.used: set[LeaseRef] = set()
        self.begun: Counter[str] = Counter()
        self.freed: Counter[str] = Counter()

    def is_held(self, ref):
        return ref in self.deadline and self.now < self.deadline[ref]

    def end(self, ref):
        del self.deadline[ref]

    def prolong(self, ref, until):
        self.deadline[ref] = max(self.deadline[ref], min(until, self.limit[ref]))

    def know(self, ref, attempt, shared):
        """An attempt is heard of."""
        if shared:
            self.shared.add(ref)
        if attempt not in self.over[ref] and attempt not in self.reading[ref]:
            self.reading[ref].add(attempt)
            if self.waits[ref]:
                self.waits[ref] = False
                self.prolong(ref, self.now + self.duration[ref])

    def is_over(self, ref, attempt):
        if attempt in self.over[ref]:
            return
        self.reading[ref].discard(attempt)
        self.over[ref].add(attempt)
        if self.reading[ref]:
            return
        if ref in self.shared:
            self.waits[ref] = True
            self.deadline[ref] = min(self.deadline[ref], self.now + SHARED_S)
        else:
            self.end(ref)

    @rule(step=st.sampled_from([0.0, 1.0, 4.0, 11.0]))
    def time_passes(self, step):
        self.now += step
        self.table.tick(self.now)
        for ref in [ref for ref in self.deadline if not self.is_held(ref)]:
            self.end(ref)

    @rule(ref=refs, duration=st.sampled_from([2.0, 10.0]))
    def hold(self, ref, duration):
        # A nonce is drawn anew for each lease, so a pair is never used twice.
        if ref in self.used or any(other.request_id == ref.request_id for other in self.deadline):
            return
        self.used.add(ref)
        self.begun[ref.request_id] += 1
        self.deadline[ref], self.duration[ref], self.limit[ref] = self.now + duration, duration, self.now + LIMIT_S
        self.reading[ref], self.over[ref], self.waits[ref] = set(), set(), False
        self.table.hold(ref.request_id, ref.nonce, self.now, duration)

    @rule(chosen=st.lists(readings, max_size=3))
    def renew(self, chosen):
        gone = self.table.renew(chosen, self.now)
        assert gone == [one.request_id for one in chosen if not self.is_held(ref_of(one))]
        for one in chosen:
            ref = ref_of(one)
            if self.is_held(ref):
                self.know(ref, one.attempt, one.shared)
                if one.attempt not in self.over[ref]:
                    self.prolong(ref, self.now + self.duration[ref])

    @rule(one=readings, reader=st.integers(0, 2), readers=st.integers(1, 2))
    def read_done(self, one, reader, readers):
        ref = ref_of(one)
        key = ref, one.attempt
        verdict = self.table.read_done(ReadDone(ref, reader, readers, one.attempt, one.shared), self.now)
        if self.is_held(ref):
            if reader < readers:
                self.know(ref, one.attempt, False)
            allowed = reader < readers and self.readers.get(key, readers) == readers
            assert verdict.held == allowed
            if allowed:
                self.know(ref, one.attempt, one.shared)
                self.readers[key] = readers
                self.reported.setdefault(key, set()).add(reader)
                if len(self.reported[key]) == readers:
                    self.is_over(ref, one.attempt)
        else:
            assert verdict.held == (reader in self.reported.get(key, ()))
        assert verdict.held or verdict.reason

    @rule(one=readings)
    def release(self, one):
        ref = ref_of(one)
        self.table.release([one], self.now)
        if self.is_held(ref):
            self.know(ref, one.attempt, one.shared)
            self.is_over(ref, one.attempt)

    @precondition(lambda self: self.deadline)
    @rule(data=st.data())
    def drop(self, data):
        ref = data.draw(st.sampled_from(sorted(self.deadline, key=repr)))
        self.table.drop(ref.request_id, self.now)
        self.end(ref)

    @rule(name=st.sampled_from(NAMES))
    def end_unneeded(self, name):
        self.table.drop(name, self.now, End.RELEASED)
        for ref in [ref for ref in self.deadline if ref.request_id == name]:
            self.end(ref)

    @rule(ref=refs, seconds=st.sampled_from([0.0, 3.0, 20.0]))
    def extend(self, ref, seconds):
        self.table.extend(ref, self.now, seconds)
        if self.is_held(ref):
            self.prolong(ref, self.now + self.duration[ref] + seconds)

    @rule()
    def drop_all(self):
        self.table.drop_all(self.now)
        self.deadline.clear()

    @rule()
    def take(self):
        self.freed.update(freed.request_id for freed in self.table.take_freed())

    @invariant()
    def every_lease_is_held_or_freed_exactly_once(self):
        waiting = Counter(freed.request_id for freed in self.table._freed)
        now_held = Counter(ref.request_id for ref in self.deadline)
        assert self.begun == self.freed + waiting + now_held
        assert len(self.table) == len(self.deadline)

    @invariant()
    def the_next_deadline_is_the_earliest(self):
        assert self.table.next_deadline() == min(self.deadline.values(), default=None)


TestLeases = Leases.TestCase
TestLeases.settings = settings(
    deadline=None, max_examples=150, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
