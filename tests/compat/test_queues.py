"""Workers that wait calmly for the engine core: vLLM's real shared-memory queue, one reader."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

from vllm_pd_connector.compat import queues


class Reader:
    """A queue's reader in a thread; counts how often it polls and how often it sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writer = MessageQueue(1, 1, max_chunk_bytes=4096, max_chunks=4)
        self.read: list[Any] = []
        self.polls = 0
        self.slept = threading.Event()
        self.polled = threading.Event()
        self.came = threading.Event()
        monkeypatch.setattr(shm_broadcast, "sched_yield", self._poll)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.writer.wait_until_ready()

    def _poll(self) -> None:
        self.polls += 1
        self.polled.set()

    def _run(self) -> None:
        queue = MessageQueue.create_from_handle(self.writer.export_handle(), 0)
        queue.wait_until_ready()
        poll = queue._spin_condition.poller.poll

        def sleep(timeout: int | None = None) -> Any:
            self.slept.set()
            return poll(timeout=timeout)

        queue._spin_condition.poller.poll = sleep
        queue._spin_condition.busy_loop_s = 600.0
        while (message := queue.dequeue(indefinite=True)) != "end":
            self.read.append(message)
            if message == "calm":
                queues.rest_until_next_message()
            self.polls = 0
            self.came.set()

    def send(self, message: str) -> None:
        self.came.clear()
        self.polled.clear()
        self.slept.clear()
        self.writer.enqueue(message)
        assert self.came.wait(60)

    def end(self) -> None:
        self.writer.enqueue("end")
        self._thread.join()


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    monkeypatch.setattr(SpinCondition, "wait", SpinCondition.wait)
    monkeypatch.setattr(queues, "_installed", False)
    monkeypatch.setattr(queues, "_calm_from", -math.inf)
    made = Reader(monkeypatch)
    yield made
    made.end()


def test_a_calm_reader_sleeps_until_the_next_message_and_an_eager_one_polls(reader: Reader) -> None:
    reader.send("eager")
    assert reader.polled.wait(60)
    reader.send("calm")
    assert reader.slept.wait(60)
    assert reader.polls == 0
    reader.send("eager")
    assert reader.polled.wait(60)
    assert reader.read == ["eager", "calm", "eager"]


def test_a_notification_that_got_lost_is_not_waited_for(reader: Reader) -> None:
    reader.send("calm")
    assert reader.slept.wait(60)
    reader.writer._spin_condition.notify = lambda: None
    reader.send("eager")
    assert reader.read == ["calm", "eager"]
    del reader.writer._spin_condition.notify


def test_a_reader_that_has_idled_as_long_as_vllm_polls_sleeps_as_vllm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int | None] = []
    monkeypatch.setattr(SpinCondition, "wait", lambda self, timeout_ms=None: waits.append(timeout_ms))
    monkeypatch.setattr(queues, "_installed", False)
    monkeypatch.setattr(queues, "_calm_from", -math.inf)
    queues.rest_until_next_message()
    condition = SpinCondition.__new__(SpinCondition)
    condition.last_read, condition.busy_loop_s = -600.0, 1.0
    condition.wait(timeout_ms=5000)
    condition.last_read, condition.busy_loop_s = 0.0, 1e9
    condition.wait(timeout_ms=5000)
    condition.wait(timeout_ms=1)
    assert condition.last_read == 0.0
    condition.last_read = time.monotonic() + 1.0
    condition.wait(timeout_ms=5000)
    assert waits[0] == waits[3] == 5000
    assert 1 <= waits[1] <= queues.LONGEST_NAP_MS
    assert waits[2] == 1


def test_naps_grow_with_the_time_since_the_last_message() -> None:
    naps = [queues._nap_ms(seconds) for seconds in (0.0, 0.003, 0.02, 1.0)]
    assert naps == [1, 1, 5, queues.LONGEST_NAP_MS]
