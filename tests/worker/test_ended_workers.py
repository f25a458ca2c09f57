"""A transfer that the library never ends is over with the process at its other end, when nothing of that lands any
more."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.worker.decode_instance import Decode, in_its_thread, set_faults, until, until_in
from tests.support.worker.writer import Target, Writer, freed, hold_writes
from vllm_pd_connector.config import Config
from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.runs import Runs
from vllm_pd_connector.geometry.spans import Slices
from vllm_pd_connector.protocol.transfers import TransferFailed
from vllm_pd_connector.transport.base import TransferStatus
from vllm_pd_connector.worker.in_flight import POLL_DRAINING_S, InFlight

NOTHING: Any = SimpleNamespace()
IDLE: Any = SimpleNamespace(holds=lambda _: False, moves=lambda _: False, cancel=lambda _: None, landed=lambda _: 0)


class Transport:
    """Whose first transfer fails, if that is set, and whose others run for ever."""

    failure: TransferError | None = None
    settles = True

    def __init__(self) -> None:
        self.given: list[Any] = []

    def read(self, peer: object, runs: Runs) -> Any:
        self.given.append(SimpleNamespace(left=1, descriptors=len(runs)))
        return self.given[-1]

    def poll(self, transfer: Any) -> TransferStatus:
        if transfer is self.given[0] and self.failure is not None:
            raise self.failure
        return TransferStatus.RUNNING

    def settle(self, peer: object) -> bool:
        return self.settles


class Watch:
    over = False

    def look(self, now: float) -> None: ...

    def ended(self, now: float) -> bool:
        return self.over

    def __str__(self) -> str:
        return "it has ended"


class Three(Slices):
    def __iter__(self) -> Any:
        return iter([Runs(*[np.ones(1, dtype=np.int64)] * 3)] * 3)


@pytest.fixture
def transport() -> Transport:
    return Transport()


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def flight(transport: Transport, watch: Watch) -> InFlight:
    link: Any = SimpleNamespace(connection=NOTHING, watch_of=lambda peer: watch)
    made = InFlight("a read", NOTHING, link, transport, IDLE, writes=False)  # type: ignore[arg-type]
    made.start(0, NOTHING, Three((NOTHING,) * 3))
    assert not told(made) and len(transport.given) == 3
    return made


def told(flight: InFlight) -> list[Any]:
    return [end for end, _ in flight.poll(0.0, math.inf)]


def test_what_was_given_up_and_runs_on_is_over_with_the_worker(flight, watch):
    flight.cancel()
    assert not told(flight) and flight.may_write == {0} and flight.moves
    watch.over = True
    assert told(flight) == [TransferFailed(0, "it was given up", terminal=True)]
    assert flight.ended and not flight.may_write and not told(flight)


@pytest.mark.parametrize("certain", [True, False])
def test_what_failed_in_part_and_runs_on_is_over_with_the_worker(flight, transport, watch, certain):
    transport.failure = TransferError("a part", terminal=certain)
    assert told(flight) == [TransferFailed(0, "a part", terminal=False)]
    watch.over = True
    assert told(flight) == [TransferFailed(0, "a part" if certain else "it has ended", terminal=True)]
    assert flight.ended and not told(flight)


def test_what_fails_in_the_look_that_finds_the_worker_ended_is_told_once(flight, transport, watch):
    transport.failure, watch.over = TransferError("a part"), True
    assert told(flight) == [TransferFailed(0, "a part", terminal=True)]
    assert flight.ended and not told(flight)


def test_what_was_not_given_up_is_the_transports_to_end(flight, watch):
    watch.over = True
    assert not told(flight) and flight.moves and len(flight.transfers[0].running) == 3


@pytest.mark.parametrize("stuck", [True, False])
def test_it_is_over_when_the_transport_has_settled(flight, transport, watch, stuck):
    """What the worker had sent may lie in a socket that is read only when the transport is asked to."""
    if stuck:
        transport.failure = TransferError("who knows", terminal=False)
        assert told(flight)
        flight.transfers[0].running.clear()
        assert not told(flight) and flight.stuck == {0}
    flight.cancel()
    watch.over, transport.settles = True, False
    assert not told(flight) and flight.may_write == {0}
    assert [at for at in flight.next_look(0.0, draining=True) if at > 0.0] == [pytest.approx(POLL_DRAINING_S, abs=0.05)]
    transport.settles = True
    assert [end.terminal for end in told(flight)] == [True]


@pytest.fixture(params=[0, 512], ids=["straight", "staged"])
def reader(request: pytest.FixtureRequest) -> Iterator[Decode]:
    made = Decode(Config(transport="loopback", staging_bytes=request.param, transfer_timeout=0.5))
    yield made
    made.loop.close()


def back(reader: Decode) -> bool:
    """Whether blocks and slots are."""
    staging = reader.loop._stager.staging
    return reader.drained == reader.quarantined and staging.free == staging.length


def test_blocks_and_slots_of_a_read_that_never_ends_come_back_with_the_worker(prefill, reader):
    set_faults(prefill.transports, frozen=True)
    assert reader.received(prefill.request("a")) == [False]
    reader.see_workers()
    reader.collect()
    assert not back(reader)
    prefill.end_workers()
    reader.until(lambda: back(reader), "the blocks and the slots")
    assert (reader.worker.memory == reader.before).all()


@pytest.mark.parametrize("ends", ["never", "unclear"])
def test_blocks_come_back_when_the_transport_has_taken_in_what_the_worker_had_sent(prefill, reader, ends):
    faults = reader.transport.faults
    if ends == "unclear":
        faults.failures.extend([TransferError("unclear", terminal=False)] * 8)
    else:
        set_faults(prefill.transports, frozen=True)
    assert reader.received(prefill.request("a")) == [False]
    reader.see_workers()
    faults.unsettled = asked = 1 << 30
    prefill.end_workers()
    reader.until(lambda: faults.unsettled < asked - 4, "the transport to be asked")
    assert not back(reader), "what lay in a socket would land in blocks that were given back"
    faults.unsettled = 0
    reader.until(lambda: back(reader), "the blocks and the slots")


def test_a_transport_that_cannot_say_whether_it_has_settled_costs_no_other_receive(
    prefill, other, reader, monkeypatch, caplog
):
    """One of another package whose `settle` meets a defect: all receives and pushes failed, turn after turn."""
    set_faults(prefill.transports, frozen=True)
    assert reader.received(prefill.request("a")) == [False]
    reader.see_workers()
    asked: list[object] = []
    monkeypatch.setattr(reader.transport, "settle", lambda peer: (asked.append(peer), 1 // 0))
    prefill.end_workers()
    until(lambda: len(asked) > 20, "the transport to be asked")
    assert reader.received(other.request("b", remote_engine_id="p-1")) == [True]
    assert not back(reader)
    told = sum("its room is kept" in record.getMessage() for record in caplog.records)
    assert (0 < told <= 2) if reader.loop._config.staging_bytes else not told, "once of each rank"


@pytest.mark.parametrize("config", [{"staging_bytes": 0}, {"staging_bytes": 512}], indirect=True)
def test_a_push_that_never_ends_is_over_with_the_decode_worker(writer: Writer, target: Target, config: Config) -> None:
    hold_writes(writer, target)
    target.loop.submit([], ["d"])
    assert target.wait_for("d") == [False]
    until(lambda: all(push.machine.failed for part in writer.pushes() for push in part), "the word to cancel")
    freed(writer, "a")
    assert all(writer.pushes()), "the transport still writes"
    for loop in writer.loops:
        watches = loop._processes._watches
        until_in(loop, lambda watches=watches: all(w.here for w in watches.values()), "a line to the worker")
    with contextlib.suppress(TransferError):
        in_its_thread(target.loop, lambda _: target.loop._processes.close())
    until(lambda: not any(writer.pushes()), "the pushes to end with it")
    for loop in writer.loops:
        staging = loop._stager.staging
        until(lambda staging=staging: staging.free == staging.length, "the slots")
