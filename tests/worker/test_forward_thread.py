"""The transfer thread knows whether it disturbs a forward: by the processor time of the thread that launches them."""

from __future__ import annotations

import threading
import time

import pytest

from tests.support.worker.decode_instance import until
from vllm_pd_connector.worker import forward_thread
from vllm_pd_connector.worker.forward_thread import QUIET_S, SAMPLE_S, ForwardThread


class Clock:
    """Processor time of a thread, as the test sets it."""

    def __init__(self) -> None:
        self.used, self.reads = 5.0, 0

    def __call__(self, clock_id: int) -> float:
        self.reads += 1
        return self.used


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(forward_thread.time, "clock_gettime", made)
    return made


def test_a_thread_that_was_not_seen_may_be_busy(clock):
    forwards = ForwardThread()
    assert not forwards.idle(10.0)
    assert not forwards.idle(20.0)
    assert clock.reads == 0


@pytest.mark.parametrize(("share", "idle"), [(0.0, True), (0.05, True), (0.2, False), (1.0, False)])
def test_it_is_idle_where_it_took_next_to_nothing_since_it_was_first_looked_at(clock, share, idle):
    forwards = ForwardThread()
    forwards.here()
    assert not forwards.idle(10.0), "one sample says nothing"
    clock.used += share * QUIET_S
    assert forwards.idle(10.0 + QUIET_S) is idle


def test_it_is_busy_between_two_steps_that_follow_each_other(clock):
    """As with short steps every few milliseconds: sleeps were exact in each pause, and for 2 ms of what came then."""
    forwards = ForwardThread()
    forwards.here()
    at, found = 10.0, []
    for _ in range(100):  # a millisecond's step, and three of pause
        clock.used += 0.001
        found += [forwards.idle(at := at + SAMPLE_S), forwards.idle(at := at + SAMPLE_S)]
    assert not any(found)
    assert not forwards.idle(at + QUIET_S / 2)
    assert forwards.idle(at + QUIET_S)


def test_the_kernel_is_asked_no_sooner_than_a_sample_is_due(clock):
    forwards = ForwardThread()
    forwards.here()
    forwards.idle(10.0)
    assert forwards.idle(11.0)
    clock.used += 1.0
    assert forwards.idle(11.0 + SAMPLE_S / 2)
    assert clock.reads == 2
    assert not forwards.idle(11.0 + SAMPLE_S)


def test_another_thread_that_launches_from_now_on_is_not_known_yet(clock):
    forwards = ForwardThread()
    forwards.here()
    forwards.idle(10.0)
    assert forwards.idle(11.0)
    other = threading.Thread(target=forwards.here)
    other.start()
    other.join()
    clock.used = 0.5  # less than the other had
    assert not forwards.idle(12.0)
    assert forwards.idle(12.0 + QUIET_S)


def test_another_thread_reads_the_time_of_the_one_that_was_here():
    forwards, found = ForwardThread(), []
    began = time.thread_time()
    forwards.here()

    def ask():
        forwards.idle(time.monotonic())
        found.append(forwards._used)

    other = threading.Thread(target=ask)
    other.start()
    other.join()
    assert began <= found[0] <= time.thread_time()


def test_a_thread_that_waits_for_those_of_microbatches_is_not_taken_for_an_idle_one(clock):
    forwards = ForwardThread(microbatches=True)
    forwards.here()
    assert [forwards.idle(at) for at in (10.0, 20.0, 30.0)] == [False] * 3
    assert clock.reads == 0


def test_a_thread_that_has_ended_is_not_taken_for_an_idle_one():
    forwards = ForwardThread()
    other = threading.Thread(target=forwards.here)
    other.start()
    other.join()

    def gone():
        try:
            time.clock_gettime(forwards._clock)
        except OSError:
            return True
        return False

    until(gone, "the kernel to let go of the thread")
    now = time.monotonic()
    assert [forwards.idle(now + at) for at in (0.0, 1.0, 2.0)] == [False] * 3


def test_the_transfer_thread_sleeps_exactly_while_it_disturbs_no_forward(prefill, decode, monkeypatch):
    asked, wait, idle = [], decode.loop._calls.wait, [True]

    def spied(wake, deadline, *, exact):
        asked.append(exact)
        return wait(wake, deadline, exact=exact)

    monkeypatch.setattr(decode.loop._calls, "wait", spied)
    monkeypatch.setattr(decode.loop._forwards, "idle", lambda now: idle[0])
    for request, idle[0] in (("a", True), ("b", False)):
        assert decode.received(prefill.request(request)) == [True]
        until(lambda: asked[-1] is idle[0], "a sleep behind the receive")
    assert decode.loop._forwards._ident == threading.get_ident(), "orders come from the thread that launches forwards"
