"""A turn of the stager takes about as long however many streams there are, and each stream has its look."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_pd_connector.transport.base import TransferStatus
from vllm_pd_connector.worker.poll_interval import FIRST_S, LONGEST_OF_OLD_S
from vllm_pd_connector.worker.staging import stager as stager_module
from vllm_pd_connector.worker.staging.stager import Stager
from vllm_pd_connector.worker.staging.stream import InFlightChunk, Stream

STREAMS = 8
NOTHING: Any = SimpleNamespace()


class Clock:
    """Stands still but for what it is told."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Slow:
    """A transport that is busy for a while whenever it is looked at."""

    def __init__(self, clock: Clock, takes: float) -> None:
        self._clock, self._takes = clock, takes
        self.looked: list[int] = []
        self.status = TransferStatus.RUNNING

    def poll(self, transfer: Any) -> TransferStatus:
        self._clock.now += self._takes
        self.looked.append(transfer.number)
        return self.status


def reads(stager: Stager, number: int) -> None:
    """A stream of one chunk, which is being read."""
    stream = Stream(object(), number, NOTHING, NOTHING, iter(()), made=True)
    moving: Any = SimpleNamespace(number=number)
    stream.in_flight.append(InFlightChunk(stream, NOTHING, number, NOTHING, moving))
    stager._streams.append(stream)


@pytest.mark.parametrize(("takes", "looks"), [(1.4, 1), (0.4, 3), (0.01, STREAMS)])
def test_a_turn_looks_at_as_many_streams_as_it_has_time_for_and_at_the_others_in_the_next(
    monkeypatch: pytest.MonkeyPatch, takes: float, looks: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(stager_module, "time", clock)
    transport = Slow(clock, takes * stager_module.SLICE_S)
    stager = Stager(transport, (), 0)  # type: ignore[arg-type]
    for number in range(STREAMS):
        reads(stager, number)
    turns = []
    while len(turns) < STREAMS:
        before = len(transport.looked)
        assert stager.poll() == []
        turns.append(len(transport.looked) - before)
        stager._work = stager_module._Work.CONVERT  # what else there is to do has turns of its own
    assert set(turns) == {looks}
    assert [transport.looked.count(number) for number in range(STREAMS)] == [looks] * STREAMS


@pytest.mark.parametrize("soon", [TransferStatus.MOVING, TransferStatus.POSTING])
def test_what_moves_when_it_is_looked_at_is_looked_at_soon(
    monkeypatch: pytest.MonkeyPatch, soon: TransferStatus
) -> None:
    clock = Clock()
    monkeypatch.setattr(stager_module, "time", clock)
    stager = Stager(transport := Slow(clock, 0.0), (), 0)  # type: ignore[arg-type]
    reads(stager, 0)
    clock.now = 60.0  # since it was posted
    for status, pause in ((soon, FIRST_S), (TransferStatus.RUNNING, LONGEST_OF_OLD_S)):
        transport.status = status
        assert stager.poll() == [] and stager.pause() == pause


def test_what_instances_hold_is_counted_once_for_all_streams_that_wait() -> None:
    """Once for each of hundreds that wait was milliseconds for every chunk that began."""
    stager, counted = Stager(NOTHING, (), 0), []
    size_of = lambda slot: (counted.append(slot), 30)[1]  # noqa: E731
    stager.staging = SimpleNamespace(length=200, size_of=size_of, take=lambda size: None)  # type: ignore[assignment]
    instances = object(), object()
    for number in range(STREAMS):
        stream = Stream(object(), number, instances[number > 2], NOTHING, iter(()))
        stream.waiting = SimpleNamespace(size=1)  # type: ignore[assignment]
        if number < 4:  # 90 of the one instance, 30 of the other
            stream.in_flight.append(InFlightChunk(stream, NOTHING, number, NOTHING, NOTHING))
        stager._streams.append(stream)
    assert not stager._refill({}), "there is no room"
    assert sorted(counted) == [0, 1, 2, 3]
    asked: list[int] = []
    stager.staging.take = asked.append  # type: ignore[assignment, method-assign]
    for stream, size in zip(stager._streams, (11, 11, 11, 71, 71, 70, 71, 71), strict=True):
        stream.waiting = SimpleNamespace(size=size)  # type: ignore[assignment]
    assert not stager._refill({}) and asked == [70], "an instance has half of the buffer at most"
