"""How Mooncake's transport shares what the library queues for a peer, over a stand-in for the library's engine, which
ends descriptors in the order in which it took them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.transport.ends import runs
from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.transport.base import Transfer, TransferStatus
from vllm_pd_connector.transport.liveness_link import LivenessState
from vllm_pd_connector.transport.mooncake import transport as mooncake
from vllm_pd_connector.transport.mooncake.engine import MAX_IN_FLIGHT, MooncakeOptions
from vllm_pd_connector.transport.ranges import Ranges

MEMORY = Segment(address=1 << 20, length=1 << 30, device="cpu", device_id=0)
SLICE = 8192


class Engine:
    """Descriptors are known by their number; `ended` is how many of them have ended, the oldest."""

    def __init__(self) -> None:
        self.taken = self.ended = 0

    def batch_transfer_async(self, *arguments: Any) -> int:
        self.taken += 1
        return self.taken

    def transfer_check_status(self, batch: int) -> int:
        return int(batch <= self.ended)

    def end(self, count: int) -> None:
        self.ended = min(self.ended + count, self.taken)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Iterator[mooncake.MooncakeTransport]:
    module = SimpleNamespace(TransferOpcode=SimpleNamespace(Read=0, Write=1))
    monkeypatch.setattr(mooncake, "load_module", lambda *_: module)
    monkeypatch.setattr(mooncake, "start_engine", lambda *_, serves: (engine, "tcp"))
    monkeypatch.setattr(mooncake, "_SUBMIT_S", 60.0)
    made = mooncake.MooncakeTransport(MooncakeOptions(protocol="tcp", address="127.0.0.1"))
    made._openings.close()
    made._openings = SimpleNamespace(  # type: ignore[assignment]
        ready=lambda opening: True, end_exchanges=lambda opening, now: None, close=lambda: None
    )
    made._ranges = Ranges.of([MEMORY], "this worker")
    yield made
    made.close()


@pytest.fixture
def read(transport: mooncake.MooncakeTransport) -> Callable[[int], Transfer]:
    """Start a read of so many descriptors."""
    opening: Any = SimpleNamespace(segment="peer")
    alive: Any = SimpleNamespace(state=LivenessState.OPEN)
    peer = mooncake._Peer("peer", opening, frozenset({MEMORY}), transport._ranges, alive)
    address = MEMORY.address
    return lambda count: transport.read(
        peer, runs([(address + 8192 * i, address + 8192 * i, 64) for i in range(count)])
    )


def looks(transport: mooncake.MooncakeTransport, engine: Engine, one: Transfer, others: list[Transfer]) -> int:
    """After how many looks at all of them it has ended."""
    for number in range(1, 10_000):
        engine.end(50)
        for other in others:
            assert transport.poll(other) is not TransferStatus.DONE, "the long one was not long enough"
        if transport.poll(one) is TransferStatus.DONE:
            return number
    raise AssertionError("it never ended")


def test_a_short_read_does_not_wait_for_the_end_of_a_long_one(transport, engine, read):
    slices = [read(SLICE) for _ in range(4)]
    for _ in range(20):
        engine.end(50)
        assert {transport.poll(part) for part in slices} == {TransferStatus.RUNNING}
    short = read(200)
    [peer] = {part.peer for part in slices}
    assert len(short.in_flight) > 0 and peer.queued <= MAX_IN_FLIGHT
    # What was queued before it ends within some 20 looks, its own descriptors within a few more; the slices take 650.
    assert looks(transport, engine, short, slices) < 60


def test_however_many_run_each_has_room_for_one_descriptor_and_the_library_for_all(transport, engine, read):
    many = [read(3) for _ in range(MAX_IN_FLIGHT + 50)]
    assert many[0].peer.queued == MAX_IN_FLIGHT
    for _ in range(1000):
        engine.end(50)
        many = [one for one in many if transport.poll(one) is not TransferStatus.DONE]
    assert not many


@pytest.mark.parametrize("lost", [False, True])
def test_what_was_submitted_before_a_defect_is_followed_to_its_end_and_may_go_on(
    transport, engine, read, monkeypatch, lost
):
    """Whether the descriptor that met it is the library's nobody knows."""
    submit = engine.batch_transfer_async
    monkeypatch.setattr(engine, "batch_transfer_async", lambda *what: submit() if engine.taken < 2 else 1 // 0)
    monkeypatch.setattr(mooncake, "_GRACE_S", 0.0)
    transfer = read(5)
    assert transport.poll(transfer) is TransferStatus.RUNNING and transfer.peer.queued == 2
    engine.end(2)
    if lost:
        silent = SimpleNamespace(state=LivenessState.LOST, ended=False, reason="it fell silent")
        monkeypatch.setattr(transfer.peer, "liveness", silent)
    with pytest.raises(TransferError, match="it fell silent" if lost else "unexpected ZeroDivisionError") as failure:
        transport.poll(transfer)
    assert not failure.value.terminal and transfer.peer.queued == transfer.peer.running == 0


def test_it_is_said_when_time_alone_kept_descriptors_back(transport, engine, read, monkeypatch):
    monkeypatch.setattr(mooncake, "_SUBMIT_S", 0.0)
    transfer = read(1000)
    assert transport.poll(transfer) is TransferStatus.POSTING and not transfer.in_flight
    monkeypatch.setattr(mooncake, "_SUBMIT_S", 60.0)
    assert transport.poll(transfer) is TransferStatus.RUNNING and len(transfer.in_flight) == 256
    assert transport.poll(transfer) is TransferStatus.RUNNING, "the library has as much as it may have"
    monkeypatch.setattr(mooncake, "_SUBMIT_S", 0.0)
    engine.end(1)
    assert transport.poll(transfer) is TransferStatus.POSTING
    transfer.peer.leaving = True
    assert transport.poll(transfer) is TransferStatus.RUNNING, "no other descriptor will be submitted"
