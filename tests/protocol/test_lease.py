"""Leases: examples of each rule, and any order of events against a model that keeps the whole history."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_pd_connector.protocol.lease import MAX_ATTEMPTS, SHARED_S, End, Freed, LeaseTable
from vllm_pd_connector.protocol.wire.fields import LeaseRef, Reading
from vllm_pd_connector.protocol.wire.messages import ReadDone

A, B = b"a" * 16, b"b" * 16
REF = LeaseRef("req", A)
READING = Reading("req", A, A)


def report(
    ref: LeaseRef = REF, reader: int = 0, readers: int = 1, attempt: bytes = A, shared: bool = False
) -> ReadDone:
    return ReadDone(ref, reader, readers, attempt, shared)


def reading(attempt: bytes = A, shared: bool = False, ref: LeaseRef = REF) -> Reading:
    return Reading(ref.request_id, ref.nonce, attempt, shared)


def held(duration: float = 30.0) -> LeaseTable:
    table = LeaseTable()
    table.hold("req", A, 0.0, duration)
    return table


def test_blocks_are_freed_once_when_all_readers_have_reported():
    table = held()
    assert table.read_done(report(reader=1, readers=2), 1.0).held
    assert table.take_freed() == []
    assert table.read_done(report(reader=0, readers=2), 2.0).held
    assert table.take_freed() == [Freed("req", End.READ)]
    assert table.take_freed() == [] and len(table) == 0 and table.next_deadline() is None


def test_a_reader_that_repeats_its_report_counts_once():
    table = held()
    for _ in range(3):
        assert table.read_done(report(readers=2), 1.0).held
    assert len(table) == 1


def test_a_repeated_report_is_answered_as_before_even_when_the_lease_has_ended():
    table = held()
    assert table.read_done(report(), 1.0).held
    assert table.read_done(report(), 2.0).held
    assert table.read_done(report(), 1000.0).held
    assert table.take_freed() == [Freed("req", End.READ)]


def test_another_instance_that_reads_an_ended_lease_is_told_so():
    table = held()
    assert table.read_done(report(attempt=A), 1.0).held
    verdict = table.read_done(report(attempt=B), 2.0)
    assert not verdict.held and "all its readers had reported" in verdict.reason


def test_a_stale_nonce_is_refused_while_the_request_is_held_again():
    table = held()
    table.release([READING], 1.0)
    table.hold("req", B, 2.0, 30.0)
    verdict = table.read_done(report(), 3.0)
    assert not verdict.held and "released" in verdict.reason
    unheard = table.read_done(report(LeaseRef("req", b"c" * 16)), 3.0)
    assert not unheard.held and "nonce" in unheard.reason
    table.release([READING], 3.0)
    assert table.renew([READING], 3.0) == ["req"]
    assert table.read_done(report(LeaseRef("req", B)), 4.0).held


def test_an_unknown_request_is_refused():
    verdict = LeaseTable().read_done(report(), 0.0)
    assert not verdict.held and "no lease" in verdict.reason


def test_readers_that_contradict_an_earlier_report_are_refused_and_change_nothing():
    table = held()
    assert table.read_done(report(reader=0, readers=2), 1.0).held
    verdict = table.read_done(report(reader=1, readers=3), 1.0)
    assert not verdict.held and "3 in this report, 2 in an earlier one" in verdict.reason
    assert not table.read_done(report(reader=2, readers=2), 1.0).held
    assert table.take_freed() == []


def test_a_lease_that_was_read_in_part_still_expires():
    table = held(duration=30.0)
    assert table.read_done(report(reader=0, readers=2), 1.0).held
    table.tick(30.0)
    assert table.take_freed() == [Freed("req", End.EXPIRED)]
    verdict = table.read_done(report(reader=1, readers=2), 31.0)
    assert not verdict.held and "expired" in verdict.reason


def test_a_renewal_extends_to_now_plus_the_duration():
    table = held(duration=30.0)
    assert table.renew([READING], 20.0) == []
    assert table.next_deadline() == 50.0
    table.tick(49.9)
    assert len(table) == 1
    table.tick(50.0)
    assert len(table) == 0


def test_a_lease_past_its_deadline_is_not_revived_by_whatever_comes_first():
    for late in (
        lambda table: table.renew([READING], 30.0) == ["req"],
        lambda table: not table.read_done(report(), 30.0).held,
        lambda table: table.release([READING], 30.0) is None,
        lambda table: table.drop("req", 30.0) is None,
    ):
        table = held(duration=30.0)
        assert late(table)
        assert table.take_freed() == [Freed("req", End.UNCLAIMED)]


def test_a_dropped_lease_is_freed_and_explained():
    table = held()
    table.drop("req", 1.0)
    table.drop("req", 1.0)
    assert table.take_freed() == [Freed("req", End.DROPPED)]
    assert "dropped" in table.read_done(report(), 2.0).reason


def test_what_is_remembered_of_ended_leases_is_bounded():
    table = LeaseTable(remember=10)
    for n in range(1000):
        table.hold(f"r{n}", A, float(n), 30.0)
        table.release([Reading(f"r{n}", A, A)], float(n))
    assert "released" in table.read_done(report(LeaseRef("r995", A)), 1000.0).reason
    assert "no lease" in table.read_done(report(LeaseRef("r5", A)), 1000.0).reason
    assert len(table._timers) < 200 and len(table._ended) == 10


def test_a_second_reader_of_another_size_neither_counts_for_the_first_nor_ends_its_lease():
    """Two decode instances that were given the same parameters."""
    table = held()
    assert table.read_done(report(reader=0, readers=2, attempt=A), 1.0).held
    assert table.read_done(report(reader=0, readers=1, attempt=B), 2.0).held
    assert table.take_freed() == []
    assert table.read_done(report(reader=1, readers=2, attempt=A), 3.0).held
    assert table.take_freed() == [Freed("req", End.READ)]


def test_the_workers_of_two_instances_are_not_taken_for_those_of_one():
    table = held()
    assert table.read_done(report(reader=0, readers=2, attempt=A), 1.0).held
    assert table.read_done(report(reader=1, readers=2, attempt=B), 1.0).held
    assert table.take_freed() == []
    for reader, attempt in ((1, A), (0, B)):
        assert table.read_done(report(reader=reader, readers=2, attempt=attempt), 2.0).held
    assert table.take_freed() == [Freed("req", End.READ)]


def test_a_second_reader_that_fails_releases_nothing_under_the_first():
    table = held()
    assert table.renew([reading(A)], 1.0) == []
    table.release([reading(B)], 2.0)
    assert table.take_freed() == [] and table.read_done(report(attempt=A), 3.0).held
    assert table.take_freed() == [Freed("req", End.READ)]


def test_a_renewal_that_was_overtaken_by_the_end_of_its_request_keeps_nothing():
    table = held()
    table.renew([reading(A), reading(B)], 0.0)
    table.read_done(report(attempt=A), 1.0)
    assert table.renew([reading(A)], 25.0) == []
    assert table.next_deadline() == 30.0
    table.release([reading(B)], 26.0)
    assert table.take_freed() == [Freed("req", End.RELEASED)]


def test_the_choices_of_a_request_each_read_under_the_lease_and_the_last_one_ends_it():
    table = held()
    for attempt in (A, B):
        table.renew([reading(attempt, shared=True)], 1.0)
    assert table.read_done(report(attempt=B, shared=True), 2.0).held
    table.tick(20.0)
    assert table.take_freed() == []
    assert table.read_done(report(attempt=A, shared=True), 21.0).held
    table.tick(21.0 + SHARED_S)
    assert table.take_freed() == [Freed("req", End.READ)]


def test_a_choice_that_comes_when_the_others_are_done_finds_the_lease_held():
    """It goes to another engine of the decode side, which was in a step."""
    table = held()
    assert table.read_done(report(attempt=A, shared=True), 1.0).held
    late = 1.0 + SHARED_S / 2
    assert table.renew([reading(B, shared=True)], late) == []
    table.tick(late + 20.0)
    assert table.read_done(report(attempt=B, shared=True), late + 20.0).held
    table.tick(late + 20.0 + SHARED_S)
    assert table.take_freed() == [Freed("req", End.READ)]


def test_a_request_alone_ends_its_lease_at_once_and_so_do_not_choices_that_are_released():
    table = held()
    table.release([reading(A, shared=True)], 1.0)
    assert len(table) == 1 and table.next_deadline() == 1.0 + SHARED_S
    table.tick(1.0 + SHARED_S)
    assert table.take_freed() == [Freed("req", End.RELEASED)]
    table.hold("req", B, 5.0, 30.0)
    table.release([reading(A, ref=LeaseRef("req", B))], 5.0)
    assert table.take_freed() == [Freed("req", End.RELEASED)]


def test_no_renewal_keeps_a_lease_for_longer_than_the_limit():
    table = LeaseTable(limit_s=60.0)
    table.hold("req", A, 0.0, 30.0)
    for now in range(10, 60, 10):
        assert table.renew([READING], float(now)) == []
        table.extend(REF, float(now), 100.0)
    assert table.next_deadline() == 60.0
    assert table.renew([READING], 60.0) == ["req"]
    assert table.take_freed() == [Freed("req", End.OVER_LIMIT)]
    assert "kv_lease_limit" in table.read_done(report(), 61.0).reason


def test_why_a_lease_expired_is_told():
    table = LeaseTable(limit_s=60.0)
    for name in ("nobody", "silent"):
        table.hold(name, A, 0.0, 30.0)
    table.renew([Reading("silent", A, A)], 1.0)
    table.tick(40.0)
    assert table.take_freed() == [Freed("nobody", End.UNCLAIMED), Freed("silent", End.EXPIRED)]


def test_the_requests_that_read_a_lease_are_bounded():
    table = held()
    for number in range(MAX_ATTEMPTS):
        table.renew([reading(number.to_bytes(16, "big"))], 1.0)
    assert table.renew([reading(b"z" * 16)], 20.0) == [] and table.next_deadline() == 50.0
    verdict = table.read_done(report(attempt=b"z" * 16), 20.0)
    assert not verdict.held and str(MAX_ATTEMPTS) in verdict.reason
    table.release([reading(b"z" * 16)], 20.0)
    assert len(table) == 1


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
        verdict = self.table.read_done(report(ref, reader, readers, one.attempt, one.shared), self.now)
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
    def release_by_id(self, name):
        self.table.release_by_id(name, self.now)
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
