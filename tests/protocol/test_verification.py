"""Every reader gets the checksums of all workers, whatever the order in which they come."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pd_connector.geometry.blocks import MAX_TABLE_BYTES, BlockTable
from vllm_pd_connector.protocol.verification import MAX_JOB_BYTES, MAX_JOBS, Verification
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.protocol.wire.fields import MAX_PIECE_BYTES, MAX_REPLY_FRAME, LeaseRef

LEASES = [LeaseRef(f"r{i}", bytes(16)) for i in range(MAX_JOBS + 1)]
TOKEN = b"t" * 16
TABLES = (BlockTable(0, bytes(8)),)


def verify(lease: int = 0, start: int = 0) -> m.GetChecksums:
    return m.GetChecksums(LEASES[lease], (start,), 10)


def piece(worker: int) -> m.ChecksumPart:
    return m.ChecksumPart("l", "key", worker, bytes(8))


def test_a_waiting_worker_gets_the_job_and_the_reader_the_sums() -> None:
    machine: Verification[str] = Verification(1)
    assert machine.next_job("w", 0) == []
    [(to, job)] = machine.ask("r", verify(), TABLES)
    assert to == "w" and job == m.ChecksumJob(1, TABLES, (0,), 10)
    assert machine.add("w2", m.JobChecksums(TOKEN, 1, 0, (piece(0),), True)) == [
        ("w2", m.Accepted()),
        ("r", m.LeaseChecksums((piece(0),))),
    ]
    assert machine.ask("again", verify(), TABLES) == [("again", m.LeaseChecksums((piece(0),)))]


def test_a_worker_that_asks_again_gets_the_same_job_and_its_first_sums_are_forgotten() -> None:
    machine: Verification[str] = Verification(1)
    machine.ask("r", verify(), TABLES)
    for number in (1, 2):
        assert machine.next_job("w", 0) == [("w", m.ChecksumJob(number, TABLES, (0,), 10))]
        machine.add("w", m.JobChecksums(TOKEN, number, 0, (piece(0),), False))
    assert ("r", m.LeaseChecksums((piece(0),) * 2)) in machine.add("w", m.JobChecksums(TOKEN, 2, 0, (piece(0),), True))


@pytest.mark.parametrize("worker", [0, 1])
def test_sums_of_an_earlier_time_that_come_late_make_no_job_whole(worker: int) -> None:
    """They were sent over a connection that has ended, and its question was asked again."""
    machine: Verification[str] = Verification(2)
    machine.ask("r", verify(), TABLES)
    for number in (0, 1):
        machine.next_job(f"w{number}", number)
    machine.next_job("again", worker)
    numbers = {0: 1, 1: 2} | {worker: 3}
    for late in ((piece(7),), (piece(8),)):
        assert machine.add("late", m.JobChecksums(TOKEN, worker + 1, worker, late, True)) == [("late", m.Accepted())]
    first, second = (m.JobChecksums(TOKEN, numbers[number], number, (piece(number),), True) for number in (0, 1))
    assert machine.add("w0", first) == [("w0", m.Accepted())], "the other worker's is another number"
    assert ("r", m.LeaseChecksums((piece(0), piece(1)))) in machine.add("w1", second)


def test_sums_that_nobody_waits_for_are_taken_and_change_nothing() -> None:
    machine: Verification[str] = Verification(1)
    machine.ask("r", verify(), TABLES)
    for found in (m.JobChecksums(TOKEN, 9, 0, (), True), m.JobChecksums(TOKEN, 1, 5, (), True)):
        assert machine.add("w", found) == [("w", m.Accepted())]
    assert machine.next_job("w", 7) != []  # an unauthenticated peer may ask, and changes nothing
    assert machine.add("w", m.JobChecksums(TOKEN, 1, 7, (), True)) == [("w", m.Accepted())]
    machine.next_job("w", 0)
    assert ("r", m.LeaseChecksums(())) in machine.add("w", m.JobChecksums(TOKEN, 2, 0, (), True))


def test_a_job_that_no_worker_could_decode_is_none() -> None:
    """Each worker would be given it again and again, and nothing behind it ever."""
    machine: Verification[str] = Verification(1)
    [(to, refusal)] = machine.ask("r", verify(), (BlockTable(0, bytes(MAX_TABLE_BYTES + 4)),))
    assert to == "r" and isinstance(refusal, m.Failure) and refusal.code is m.FailureCode.NOT_OFFERED
    machine.ask("r", verify(1), TABLES)
    assert machine.next_job("w", 0) == [("w", m.ChecksumJob(1, TABLES, (0,), 10))]


def test_a_worker_may_ask_before_the_instance_is_complete() -> None:
    machine: Verification[str] = Verification(0)
    assert machine.next_job("w", 0) == []
    machine.workers = 1
    assert [to for to, _ in machine.ask("r", verify(), TABLES)] == ["w"]


def test_jobs_are_bounded_and_each_that_was_taken_is_answered() -> None:
    """Who comes when there are too many hears it at once: forgotten ones would wait for their deadline, all of them
    where the oldest is always the one that is being made."""
    machine: Verification[str] = Verification(1)
    for lease in range(MAX_JOBS):
        assert machine.ask(f"r{lease}", verify(lease), TABLES) == []
    [(to, refused)] = machine.ask("late", verify(MAX_JOBS), TABLES)
    assert to == "late" and isinstance(refused, m.Failure) and refused.code is m.FailureCode.BUSY
    [(_, oldest)] = machine.next_job("w", 0)
    assert isinstance(oldest, m.ChecksumJob) and oldest.job == 1
    made = m.JobChecksums(TOKEN, oldest.job, 0, (), True)
    assert [to for to, _ in machine.add("w", made)] == ["w", "r0"]
    assert machine.ask("again", verify(MAX_JOBS), TABLES) == [], "one that is over makes room"
    assert machine.ask("r0", verify(0), TABLES)[0][1] == refused


def test_sums_without_end_are_not_kept_and_fail_who_waits_for_them() -> None:
    machine: Verification[str] = Verification(2)
    machine.ask("r", verify(), TABLES)
    machine.next_job("w", 0)
    sent = m.JobChecksums(TOKEN, 1, 0, (m.ChecksumPart("l", "key", 0, bytes(MAX_PIECE_BYTES)),) * 2, False)
    answers: list[tuple[str, m.Reply]] = []
    for _ in range(MAX_REPLY_FRAME // MAX_PIECE_BYTES):
        answers += [answer for answer in machine.add("w", sent) if answer != ("w", m.Accepted())]
    [(to, failure)] = answers
    assert to == "r" and isinstance(failure, m.Failure) and failure.code is m.FailureCode.NOT_OFFERED
    assert machine.ask("again", verify(), TABLES) == [("again", failure)]
    assert machine.next_job("v", 1) == [], "nobody makes sums that cannot be told"
    assert not any(work.pieces for work in machine._work.values())


def test_sums_up_to_the_limit_fit_the_answer() -> None:
    machine: Verification[str] = Verification(1)
    machine.ask("r", verify(), TABLES)
    machine.next_job("w", 0)
    large = m.JobChecksums(TOKEN, 1, 0, (m.ChecksumPart("l", "key", 0, bytes(MAX_PIECE_BYTES)),) * 8, False)
    for _ in range(MAX_JOB_BYTES // m.body_size(large)):
        machine.add("w", large)
    answer = dict(machine.add("w", m.JobChecksums(TOKEN, 1, 0, (), True)))["r"]
    assert isinstance(answer, m.LeaseChecksums) and len(m.encode(1, answer)) > MAX_REPLY_FRAME - m.body_size(large)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_in_any_order_of_events_every_reader_is_answered_once_with_everything(data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, 3))
    machine: Verification[str] = Verification(workers)
    asked: dict[str, m.GetChecksums] = {}
    answered: dict[str, m.LeaseChecksums] = {}
    at_work: dict[int, list[m.ChecksumJob]] = {worker: [] for worker in range(workers)}
    on_their_way: list[m.JobChecksums] = []  # over connections that have ended

    def deliver(answers: list[tuple[str, m.Reply]]) -> None:
        for to, reply in answers:
            if isinstance(reply, m.ChecksumJob):
                at_work[int(to)].append(reply)
            elif isinstance(reply, m.LeaseChecksums):
                assert to not in answered
                answered[to] = reply

    def work(worker: int, breaks: int = 2) -> None:
        """In two messages, the second when the first was taken; the connection may break with either, which then comes
        later, or not at all."""
        if not at_work[worker]:
            deliver(machine.next_job(str(worker), worker))
        if at_work[worker]:
            job = at_work[worker].pop()
            for part in (0, 1):
                message = m.JobChecksums(TOKEN, job.job, worker, (piece(2 * worker + part),), part == 1)
                if part == breaks:
                    on_their_way.append(message)
                    break
                late()
                deliver(machine.add(f"{worker}", message))

    def late() -> None:
        if on_their_way and data.draw(st.booleans()):
            deliver(machine.add("late", on_their_way.pop(data.draw(st.integers(0, len(on_their_way) - 1)))))

    for number in range(data.draw(st.integers(1, 8))):
        if data.draw(st.booleans()):
            reader = f"reader {number}"
            asked[reader] = verify(start=data.draw(st.integers(0, 1)))
            deliver(machine.ask(reader, asked[reader], TABLES))
        else:
            work(data.draw(st.integers(0, workers - 1)), data.draw(st.integers(0, 2)))
        late()
    for _ in range(10):
        for worker in range(workers):
            work(worker)
    assert answered.keys() == asked.keys()
    for reply in answered.values():
        assert sorted(found.first_index for found in reply.pieces) == list(range(2 * workers))
