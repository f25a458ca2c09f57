"""A decode worker's transfer loop and its caches, against a prefill instance of this process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from tests.support.geometry.numbers import blank, write
from tests.support.geometry.world import Side, Worker, instance, table
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port
from tests.support.worker.prefill_instance import MODEL, TOKENS, PrefillInstance, real
from vllm_pd_connector.config import Config
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.metadata import ReadFrom, ReceiveRequest
from vllm_pd_connector.observability.stats import BY_PEER
from vllm_pd_connector.protocol.params.parse import RemotePrefill
from vllm_pd_connector.transport.base import Transport
from vllm_pd_connector.transport.loopback import LoopbackTransport
from vllm_pd_connector.worker.outbox import Outbox
from vllm_pd_connector.worker.receive.active import ActiveReceive
from vllm_pd_connector.worker.transfer_loop import TransferLoop

D_SIDE = Side(tp=1, layout="NHD")
D_BLOCKS = (2, 6, 4)
START = 4
Found = TypeVar("Found")


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.002)


def in_its_thread(loop: TransferLoop, act: Callable[[float], Found]) -> Found:
    """Have the loop do this in its thread, and wait until it has; what came of it. What the loop owns (its receives,
    its pushes, their transfers) is looked at so: it takes entries out and puts them in again in every turn."""
    done: Future[Found] = Future()

    def doing(now: float) -> None:
        try:
            done.set_result(act(now))
        except BaseException as error:  # a defect of the test's, not of the loop's
            done.set_exception(error)

    loop._comparison._results.append(doing)
    loop._wake.set()
    return done.result(PATIENCE_S)


def set_deadline(loop: TransferLoop, active: ActiveReceive, later: float = 0.0) -> None:
    """Let a receive's deadline come so many seconds from now."""

    def act(now: float) -> None:
        active.machine._deadline = now + later
        loop._receives._due.lower(now + later)

    in_its_thread(loop, act)


def until_in(loop: TransferLoop, condition: Callable[[], bool], what: str) -> None:
    """`until` for what the loop owns."""
    until(lambda: in_its_thread(loop, lambda _: condition()), what)


def set_faults(transports: Iterable[Transport], **faults: object) -> None:
    """What is wrong with these endpoints from now on; see `Faults` of `transport.loopback`."""
    for transport in transports:
        assert isinstance(transport, LoopbackTransport)
        for name, value in faults.items():
            setattr(transport.faults, name, value)


def lacking(blocks: tuple[int, ...], start: int = START) -> BlockTable:
    """The table of a request with these blocks, of which the prefix cache found those before `start`."""
    return BlockTable.of(start // D_SIDE.block_tokens, blocks[start // D_SIDE.block_tokens :])


def request_of(request_id: str, remote: RemotePrefill) -> ReceiveRequest:
    """What the decode instance's scheduler half would order for these parameters."""
    source = ReadFrom(remote.peer, remote.remote_engine_id, remote.lease, remote.tables)
    return ReceiveRequest(request_id, source, (lacking(D_BLOCKS),), START, TOKENS)


class Prefill(PrefillInstance):
    """A prefill instance beside the test."""

    def request(self, request_id: str, **changes: Any) -> ReceiveRequest:
        return request_of(request_id, self.hand_over(request_id, **changes))


def under_way(active: ActiveReceive) -> bool:
    in_flight = active.in_flight
    begun = in_flight.moves and all(direct.running for direct in in_flight.transfers.values())
    return begun or bool(active.question)


class Decode:
    """One decode worker's loop, its memory, and everything that came out of it."""

    def __init__(
        self,
        config: Config,
        make: Callable[[], Transport] | None = None,
        transport: LoopbackTransport | None = None,
        worker: Worker | None = None,
    ):
        [self.worker] = [worker] if worker is not None else instance(MODEL, D_SIDE, "decode-1")
        self.transport = transport or LoopbackTransport()
        self.outbox = Outbox()
        self.loop = TransferLoop(config, real(self.worker), make or (lambda: self.transport), self.outbox, 0, 1)
        self.before = self.worker.memory.copy()
        self.finished: dict[str, bool] = {}
        self.quarantined: set[str] = set()
        self.drained: set[str] = set()
        self.spared: set[str] = set()
        self.failures: dict[str, int] = {}
        self.of_peers: dict[str, dict[str, int]] = {}
        self.bytes = self.runs = self.verified = self.relinked = 0
        self.endpoint = self.loop.start()

    def collect(self) -> None:
        results = self.outbox.take_results()
        for request_id in results.finished_recving:
            assert request_id not in self.finished, f"{request_id} was reported twice"
            self.finished[request_id] = request_id not in results.failed_recving
        assert results.failed_recving <= results.finished_recving
        if (report := self.outbox.take_report()) is not None:
            self.quarantined |= report.quarantined.keys()
            self.drained |= report.drained.keys()
            self.spared |= report.spared
        if (stats := self.outbox.take_stats()) is not None:
            self.bytes += stats.data["bytes"]
            self.runs += stats.data["runs"]
            self.verified += stats.data["verified"]
            self.relinked += stats.data["relinked"]
            self.of_peers |= {what: dict(stats.data[what]) for what in BY_PEER if stats.data[what]}
            for kind, number in stats.data["failures"].items():
                self.failures[kind] = self.failures.get(kind, 0) + number

    def until(self, condition: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            self.collect()
            return condition()

        until(holds, what)

    def wait_for(self, *request_ids: str) -> list[bool]:
        self.until(lambda: set(request_ids) <= self.finished.keys(), f"reports of {request_ids}")
        return [self.finished[request_id] for request_id in request_ids]

    def received(self, *requests: ReceiveRequest) -> list[bool]:
        """Have the loop receive these, and wait until it has: which of them came whole."""
        self.loop.submit(list(requests), [])
        return self.wait_for(*(request.request_id for request in requests))

    def active(self, request_id: str) -> ActiveReceive | None:
        """What the loop knows of this receive; None before it has begun and when it is over."""
        return in_its_thread(self.loop, lambda _: self.loop._receives._active.get(request_id))

    def reads(self, *request_ids: str) -> bool:
        """Whether the transport reads for all of these receives, from each rank of theirs, or they are being written:
        a read that is only ordered has nothing under way that could stand still."""

        def look(_: float) -> bool:
            found = map(self.loop._receives._active.get, request_ids)
            return all(active is not None and (active.machine.writing and under_way(active)) for active in found)

        return in_its_thread(self.loop, look)

    def see_workers(self) -> None:
        """Wait for an open line to every worker that was written or read by: an end before that is seen by nobody."""

        def look(_: float) -> bool:
            watches = self.loop._processes._watches.values()
            return bool(watches) and all(watch.here for watch in watches)

        until(lambda: in_its_thread(self.loop, look), "lines to the workers")

    def hear_the_end_of(self, prefill: Prefill) -> None:
        """Close `prefill`, and wait for its word that it ends: it means whoever is at that address when it comes."""
        heard, receives = threading.Event(), self.loop._receives
        departed = receives.departed

        def hear(endpoint: str, now: float) -> None:
            departed(endpoint, now)
            heard.set()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(receives, "departed", hear)
            prefill.close()
            until(heard.is_set, "the word that the prefill instance ends")

    def expected(self, start: int = START, blocks: tuple[int, ...] = D_BLOCKS) -> np.ndarray:
        memory = self.before.copy()
        self.receive(memory, blocks, start)
        return memory

    def written(self) -> np.ndarray:
        """This worker's memory with the tokens in it, and nothing zeroed, as after a receive that has failed before."""
        memory = self.before.copy()
        write(MODEL, D_SIDE, self.worker, [table(*D_BLOCKS)], memory, START, TOKENS)
        return memory

    def receive(self, memory: np.ndarray, blocks: tuple[int, ...], start: int = START) -> None:
        """Have `memory` look like this worker's after a receive: the tokens, and zeros in the slots behind them."""
        write(MODEL, D_SIDE, self.worker, [table(*blocks)], memory, start, TOKENS)
        blank(D_SIDE, self.worker, table(*blocks), memory, TOKENS, len(blocks) * D_SIDE.block_tokens)


class PatientInTheEnd(Decode):
    """One whose receives have a short limit until one of them has failed: those that follow are to succeed."""

    def wait_for(self, *request_ids: str) -> list[bool]:
        ended = super().wait_for(*request_ids)
        if not all(ended):
            object.__setattr__(self.loop._receives._limits, "read_s", 60.0)
        return ended


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    # At a port at which another may listen after it: nobody else takes it meanwhile, as connections take others.
    with contextlib.closing(Prefill(port=free_port())) as made:
        yield made


@pytest.fixture
def decode(request: pytest.FixtureRequest) -> Iterator[Decode]:
    # Without a staging buffer, so that these reads write straight into the blocks; tests/worker/staging/test_stager.py
    # has the others.
    made = Decode(Config(transport="loopback", **({"staging_bytes": 0} | getattr(request, "param", {}))))
    yield made
    made.loop.close()


def changed_model(**changes: object) -> object:
    [worker] = instance(MODEL, D_SIDE)
    return msgspec.structs.replace(worker.manifest.model, **changes)
