"""Leases: examples of each rule, and any order of events against a model that keeps the whole history."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_pd_connector.protocol.fields import LeaseRef
from vllm_pd_connector.protocol.lease import End, Freed, LeaseTable
from vllm_pd_connector.protocol.messages import ReadDone

A, B = b"a" * 16, b"b" * 16
REF = LeaseRef("req", A)


def report(ref: LeaseRef = REF, reader: int = 0, readers: int = 1, attempt: bytes = A) -> ReadDone:
    return ReadDone(ref, reader, readers, attempt)


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
    table.release([REF], 1.0)
    table.hold("req", B, 2.0, 30.0)
    verdict = table.read_done(report(), 3.0)
    assert not verdict.held and "released" in verdict.reason
    unheard = table.read_done(report(LeaseRef("req", b"c" * 16)), 3.0)
    assert not unheard.held and "nonce" in unheard.reason
    table.release([REF], 3.0)
    assert table.renew([REF], 3.0) == ["req"]
    assert table.read_done(report(LeaseRef("req", B)), 4.0).held


def test_an_unknown_request_is_refused():
    verdict = LeaseTable().read_done(report(), 0.0)
    assert not verdict.held and "no lease" in verdict.reason


def test_readers_that_contradict_an_earlier_report_are_refused_and_change_nothing():
    table = held()
    assert table.read_done(report(reader=0, readers=2), 1.0).held
    verdict = table.read_done(report(reader=1, readers=3, attempt=B), 1.0)
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
    assert table.renew([REF], 20.0) == []
    assert table.next_deadline() == 50.0
    table.tick(49.9)
    assert len(table) == 1
    table.tick(50.0)
    assert len(table) == 0


def test_a_lease_past_its_deadline_is_not_revived_by_whatever_comes_first():
    for late in (
        lambda table: table.renew([REF], 30.0) == ["req"],
        lambda table: not table.read_done(report(), 30.0).held,
        lambda table: table.release([REF], 30.0) is None,
        lambda table: table.drop("req", 30.0) is None,
    ):
        table = held(duration=30.0)
        assert late(table)
        assert table.take_freed() == [Freed("req", End.EXPIRED)]


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
        table.release([LeaseRef(f"r{n}", A)], float(n))
    assert "released" in table.read_done(report(LeaseRef("r995", A)), 1000.0).reason
    assert "no lease" in table.read_done(report(LeaseRef("r5", A)), 1000.0).reason
    assert len(table._timers) < 200 and len(table._ended) == 10


NAMES = ["x", "y", "z"]
refs = st.builds(LeaseRef, st.sampled_from(NAMES), st.sampled_from([A, B]))


class Leases(RuleBasedStateMachine):
    """The model writes down when each lease began, until when it may live, and what each report was told."""

    def __init__(self):
        super().__init__()
        self.table = LeaseTable()
        self.now = 0.0
        self.deadline: dict[LeaseRef, float] = {}
        self.duration: dict[LeaseRef, float] = {}
        self.readers: dict[LeaseRef, dict[int, bytes]] = {}
        self.expected_readers: dict[LeaseRef, int] = {}
        self.told_held: dict[tuple[LeaseRef, int], bytes] = {}
        self.used: set[LeaseRef] = set()
        self.begun: Counter[str] = Counter()
        self.freed: Counter[str] = Counter()

    def is_held(self, ref):
        return ref in self.deadline and self.now < self.deadline[ref]

    def end(self, ref):
        del self.deadline[ref]

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
        self.deadline[ref], self.duration[ref], self.readers[ref] = self.now + duration, duration, {}
        self.table.hold(ref.request_id, ref.nonce, self.now, duration)

    @rule(chosen=st.lists(refs, max_size=3))
    def renew(self, chosen):
        gone = self.table.renew(chosen, self.now)
        assert gone == [ref.request_id for ref in chosen if not self.is_held(ref)]
        for ref in filter(self.is_held, chosen):
            self.deadline[ref] = max(self.deadline[ref], self.now + self.duration[ref])

    @rule(ref=refs, reader=st.integers(0, 2), readers=st.integers(1, 2), attempt=st.sampled_from([A, B]))
    def read_done(self, ref, reader, readers, attempt):
        verdict = self.table.read_done(report(ref, reader, readers, attempt), self.now)
        if self.is_held(ref):
            allowed = reader < readers and self.expected_readers.get(ref, readers) == readers
            assert verdict.held == allowed
            if allowed:
                self.expected_readers[ref] = readers
                self.readers[ref][reader] = self.told_held[ref, reader] = attempt
                if len(self.readers[ref]) == readers:
                    self.end(ref)
        else:
            assert verdict.held == (self.told_held.get((ref, reader)) == attempt)
        assert verdict.held or verdict.reason

    @rule(ref=refs)
    def release(self, ref):
        self.table.release([ref], self.now)
        if self.is_held(ref):
            self.end(ref)

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
            self.deadline[ref] = max(self.deadline[ref], self.now + self.duration[ref] + seconds)

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
