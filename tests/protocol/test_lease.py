"""Leases: examples of each rule; `test_lease_model` tries any order of events."""

from __future__ import annotations

from vllm_pd_connector.protocol.lease import MAX_ATTEMPTS, SHARED_S, End, Freed, Given, LeaseTable
from vllm_pd_connector.protocol.wire.fields import LeaseRef, Reading
from vllm_pd_connector.protocol.wire.messages import ReadDone
from vllm_pd_connector.protocol.wire.push_messages import Moved, Taken

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


def test_what_each_reader_got_is_told_once_and_the_last_of_a_request_makes_it_whole():
    table, taken = held(), Taken("decode-1", Moved(bytes=100))
    for reader in (1, 1, 0, 0):
        assert table.read_done(ReadDone(REF, reader, 2, A, taken=taken), 1.0).held
    assert table.take_given() == [Given("req", taken, False), Given("req", taken, True)]
    assert table.take_given() == []


def test_nothing_was_given_to_who_read_too_late():
    table = held()
    table.drop("req", 1.0)
    assert not table.read_done(report(), 2.0).held and not table.take_given()


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
    assert table.renew([reading(b"z" * 16)], 20.0) == [] and table.next_deadline() == 31.0  # it could not report
    verdict = table.read_done(report(attempt=b"z" * 16), 20.0)
    assert not verdict.held and str(MAX_ATTEMPTS) in verdict.reason
    table.release([reading(b"z" * 16)], 20.0)
    assert len(table) == 1


def test_whoever_renews_and_releases_a_lease_for_ever_leaves_nothing():
    table = held()
    for number in range(MAX_ATTEMPTS):
        table.release([reading(number.to_bytes(16, "big"), shared=True)], 1.0)
    timers = len(table._timers)
    for _ in range(100):
        table.renew([reading(b"z" * 16, shared=True)], 1.0)
        table.release([reading(b"z" * 16, shared=True)], 1.0)
    assert len(table._timers) == timers


def test_what_is_kept_under_a_name_is_told_while_it_is_held_and_the_latest_of_that_name():
    table = LeaseTable()
    table.hold("r-1", b"n" * 16, 0.0, 10.0, name="turn", answer=b"first")
    assert (len(table), table.awaited()) == (1, 0), "nobody is known to come for it"
    table.hold("r-2", b"m" * 16, 0.0, 20.0, name="turn", answer=b"second")
    assert table.answer_of("turn", 1.0) == b"second"
    table.drop("r-1", 1.0)
    assert table.answer_of("turn", 1.0) == b"second", "an older one that ends takes nothing with it"
    table.renew([Reading("r-2", b"m" * 16, b"a" * 16)], 2.0)
    assert table.awaited() == 1
    assert table.answer_of("turn", 22.0) == table.answer_of("other", 1.0) == b""
