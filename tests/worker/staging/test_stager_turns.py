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


def waiting(stager: Stager, sizes: list[int], instances: list[Any], in_flight: int = 0) -> None:
    """Streams that wait with chunks of these sizes."""
    for number, (size, instance) in enumerate(zip(sizes, instances, strict=True)):
        stream = Stream(object(), number, instance, NOTHING, iter(()), waiting=SimpleNamespace(size=size))  # type: ignore[arg-type]
        stream.in_flight = [InFlightChunk(stream, NOTHING, number, NOTHING, NOTHING) for _ in range(in_flight)]
        stager._streams.append(stream)


class Room:
    """A buffer that remembers what it was asked; `used_up` are the holders whose shares are."""

    def __init__(self, *used_up: object) -> None:
        self._used_up = set(map(id, used_up))
        self.asked: list[tuple[str, int]] = []

    def allows(self, size: int, holder: int) -> bool:
        self.asked.append(("allows", size))
        return holder not in self._used_up

    def take(self, size: int, holder: int) -> None:
        self.asked.append(("take", size))


def test_an_instances_share_is_asked_for_once_for_all_its_streams_that_wait() -> None:
    """Once for each of hundreds that wait was milliseconds for every chunk that began."""
    stager, one, other = Stager(NOTHING, (), 0), object(), object()
    waiting(stager, [1, 2, 3, 4, 5], [one, one, one, other, other])
    stager.staging = room = Room(one, other)  # type: ignore[assignment]
    assert not stager._refill({}), "both have what they may"
    assert room.asked == [("allows", 1), ("allows", 4)]


def test_who_has_least_under_way_keeps_its_turn_while_its_share_is_not_used_up() -> None:
    stager, one, other = Stager(NOTHING, (), 0), object(), object()
    waiting(stager, [7], [other], in_flight=1)
    waiting(stager, [1, 5, 6], [one, other, other])
    stager.staging = room = Room(one)  # type: ignore[assignment]
    assert not stager._refill({}), "there is no room"
    assert room.asked == [("allows", 1), ("allows", 5), ("take", 5)]
