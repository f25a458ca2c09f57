"""The transfer thread against a real side channel and the loopback transport: bytes, reports, quarantine."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from prefill_instance import MODEL, TOKENS, PrefillInstance, Side, instance, real, table, write

from vllm_pd_connector.config import Config
from vllm_pd_connector.errors import PeerLost, TransferError
from vllm_pd_connector.protocol.params import RemotePrefill
from vllm_pd_connector.steps import GroupBlocks, ReceiveOrder
from vllm_pd_connector.transport.base import Transport
from vllm_pd_connector.transport.loopback import LoopbackTransport
from vllm_pd_connector.worker.link import Bound, Link
from vllm_pd_connector.worker.loop import TransferLoop
from vllm_pd_connector.worker.outbox import Outbox

D_SIDE = Side(tp=1, layout="NHD")
D_BLOCKS = (2, 6, 4)
PATIENCE_S = float(os.environ.get("PD_TEST_PATIENCE", "30"))


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.002)


def in_its_thread(loop: TransferLoop, act: Callable[[float], None]) -> None:
    """Have the loop do this in its thread, and wait until it has."""
    done = threading.Event()

    def doing(now: float) -> None:
        act(now)
        done.set()

    loop._comparison._results.append(doing)
    loop._wake.set()
    until(done.is_set, "the loop's next turn")


def order_of(request_id: str, remote: RemotePrefill) -> ReceiveOrder:
    """What the decode instance's scheduler half would order for these parameters."""
    return ReceiveOrder(request_id, remote, "", (GroupBlocks(0, D_BLOCKS),), 4, TOKENS)


class Prefill(PrefillInstance):
    """A prefill instance beside the test."""

    def order(self, request_id: str, **changes: Any) -> ReceiveOrder:
        return order_of(request_id, self.hand_over(request_id, **changes))


class Decode:
    """One decode worker's loop, its memory, and everything that came out of it."""

    def __init__(
        self,
        config: Config,
        make: Callable[[], Transport] | None = None,
        transport: LoopbackTransport | None = None,
    ):
        [self.worker] = instance(MODEL, D_SIDE, "decode-1")
        self.transport = transport or LoopbackTransport()
        self.outbox = Outbox()
        self.loop = TransferLoop(config, real(self.worker), make or (lambda: self.transport), self.outbox, 0, 1)
        self.before = self.worker.memory.copy()
        self.finished: dict[str, bool] = {}
        self.quarantined: set[str] = set()
        self.drained: set[str] = set()
        self.failures: dict[str, int] = {}
        self.bytes = self.verified = self.relinked = 0
        self.loop.start()

    def collect(self) -> None:
        results = self.outbox.take_results()
        for request_id in results.finished_recving:
            assert request_id not in self.finished, f"{request_id} was reported twice"
            self.finished[request_id] = request_id not in results.failed_recving
        assert results.failed_recving <= results.finished_recving
        if (report := self.outbox.take_report()) is not None:
            self.quarantined |= report.quarantined.keys()
            self.drained |= report.drained.keys()
        if (stats := self.outbox.take_stats()) is not None:
            self.bytes += stats.data["bytes"]
            self.verified += stats.data["verified"]
            self.relinked += stats.data["relinked"]
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

    def expected(self, start: int = 4) -> np.ndarray:
        memory = self.before.copy()
        write(MODEL, D_SIDE, self.worker, [table(*D_BLOCKS)], memory, start, TOKENS)
        return memory


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    with contextlib.closing(Prefill()) as made:
        yield made


@pytest.fixture
def decode(request: pytest.FixtureRequest) -> Iterator[Decode]:
    # Without a slab, so that these reads write straight into the blocks; tests/worker/test_convert.py has the others.
    made = Decode(Config(transport="loopback", **({"staging_bytes": 0} | getattr(request, "param", {}))))
    yield made
    made.loop.close()


def test_a_read_puts_the_logical_elements_in_place_and_ends_the_lease(prefill, decode):
    decode.loop.submit([prefill.order("a")], [])
    assert decode.wait_for("a") == [True]
    assert (decode.worker.memory == decode.expected()).all()
    assert decode.bytes > 0 and not decode.failures and not decode.quarantined
    until(lambda: [freed.request_id for freed in prefill.server.take_freed()] == ["p-a"], "the lease to end")


def test_the_step_that_hears_of_a_failed_receive_hears_why(prefill, decode, monkeypatch):
    monkeypatch.setattr(decode.outbox, "flush", lambda: None)  # the end of the turn is too late: it may be hours away
    decode.transport.faults.failures.append(TransferError("a cable was pulled"))
    decode.loop.submit([prefill.order("a")], [])
    assert decode.wait_for("a") == [False]
    assert decode.failures == {"transfer_failed": 1}


def test_the_handshake_happens_once_for_many_requests(prefill, decode):
    names = [f"r{i}" for i in range(20)]
    decode.loop.submit([prefill.order(name) for name in names], [])
    assert all(decode.wait_for(*names))
    assert prefill.server.counts()["GetManifests"] == 1


@pytest.mark.parametrize("hold", [True, False])
def test_a_read_that_the_prefill_side_does_not_vouch_for_fails(prefill, decode, hold):
    order = prefill.order("a", hold=hold)
    if hold:
        prefill.server.drop("p-a")
    decode.loop.submit([order], [])
    assert decode.wait_for("a") == [False]
    assert decode.failures == {"lease_lost": 1} and not decode.quarantined


def test_a_lease_of_another_use_of_the_same_request_id_is_not_enough(prefill, decode):
    stale = prefill.order("a", hold=False)
    prefill.order("a")
    decode.loop.submit([stale], [])
    assert decode.wait_for("a") == [False]
    assert decode.failures == {"lease_lost": 1}


@pytest.mark.parametrize("change", [{"remote_block_ids": [[3, 1, 6]]}, {"remote_num_tokens": 11}], ids=str)
def test_other_blocks_than_those_that_were_handed_over_are_not_vouched_for(prefill, decode, change):
    decode.loop.submit([prefill.order("a", **change)], [])
    assert decode.wait_for("a") == [False]
    assert decode.failures == {"lease_lost": 1}


def test_an_incompatible_peer_is_refused_once_and_remembered(decode):
    with contextlib.closing(Prefill(version=1, model=changed_model(dtype="float16"))) as prefill:
        decode.loop.submit([prefill.order("a")], [])
        decode.wait_for("a")
        decode.loop.submit([prefill.order("b")], [])
        assert decode.wait_for("a", "b") == [False, False]
        assert decode.failures == {"incompatible_peer": 2}
        assert prefill.server.counts()["GetManifests"] == 1
        assert (decode.worker.memory == decode.before).all()


def changed_model(**changes: object) -> object:
    [worker] = instance(MODEL, D_SIDE)
    return msgspec.structs.replace(worker.manifest.model, **changes)


def test_a_foreign_engine_at_the_address_fails_the_request(prefill, decode):
    decode.loop.submit([prefill.order("a", remote_engine_id="p-9")], [])
    assert decode.wait_for("a") == [False]
    assert decode.failures == {"peer_unreachable": 1}
    decode.loop.submit([prefill.order("b")], [])
    assert decode.wait_for("b") == [True]


def test_another_incarnation_than_announced_fails_the_request(prefill, decode):
    order = prefill.order("a")
    other = msgspec.structs.replace(order.remote.pd_connector, incarnation="f" * 32)
    forged = msgspec.structs.replace(order.remote, pd_connector=other)
    decode.loop.submit([ReceiveOrder("a", forged, "", order.blocks, order.start, order.stop)], [])
    assert decode.wait_for("a") == [False]


def test_manifests_that_are_junk_refuse_the_peer(prefill, decode):
    prefill.server.set_manifests([b"\xc1junk", b"\x81"])
    decode.loop.submit([prefill.order("a")], [])
    assert decode.wait_for("a") == [False]
    assert decode.failures == {"incompatible_peer": 1}


@pytest.mark.parametrize("ids", [(3, 1, 8), (3, 1), (3, 1, 1 << 30)])
def test_block_ids_that_do_not_fit_fail_that_request_alone(prefill, decode, ids):
    decode.loop.submit([prefill.order("bad", remote_block_ids=[list(ids)]), prefill.order("good")], [])
    assert decode.wait_for("bad", "good") == [False, True]
    assert decode.failures == {"bad_parameters": 1}
    until(lambda: len(prefill.server.take_freed()) >= 0 and prefill.server.counts().get("Release") == 1, "the release")


def test_refused_parameters_are_reported_as_a_failed_receive(decode):
    decode.loop.submit([ReceiveOrder("a", None, "remote_port: Expected int", (), 0, 4)], [])
    assert decode.wait_for("a") == [False]
    assert decode.failures == {"bad_parameters": 1}


@pytest.mark.parametrize("decode", [{"transfer_timeout": 0.3}], indirect=True)
def test_a_frozen_peer_fails_the_request_in_time_and_its_blocks_wait_in_quarantine(prefill, decode):
    prefill.transports[1].faults.frozen = True
    decode.loop.submit([prefill.order("a")], [])
    assert decode.wait_for("a") == [False]
    assert decode.failures == {"deadline": 1}
    assert decode.quarantined == {"a"} and not decode.drained
    prefill.transports[1].faults.frozen = False
    decode.until(lambda: decode.drained == {"a"}, "the quarantine to end")


def test_an_aborted_read_is_reported_and_drained(prefill, decode):
    prefill.transports[0].faults.frozen = True
    decode.loop.submit([prefill.order("a")], [])
    until(lambda: prefill.server.counts().get("GetManifests") == 1, "the handshake")
    decode.loop.submit([], ["a"])
    assert decode.wait_for("a") == [False]
    prefill.transports[0].faults.frozen = False
    decode.until(lambda: decode.quarantined == decode.drained, "the quarantine to end")
    assert decode.failures == {"aborted": 1}


def test_an_abort_before_the_peer_answers_is_reported(decode):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        order = announced_at(silent.getsockname()[1])
        decode.loop.submit([order], [])
        decode.loop.submit([], ["a", "unknown"])
        assert decode.wait_for("a") == [False]
        assert decode.failures == {"aborted": 1} and not decode.quarantined


def announced_at(port: int) -> ReceiveOrder:
    with contextlib.closing(Prefill()) as prefill:
        return prefill.order("a", remote_port=port)


@pytest.mark.parametrize("decode", [{"handshake_timeout": 0.5}], indirect=True)
def test_a_peer_that_does_not_answer_fails_the_request_in_time(decode):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        decode.loop.submit([announced_at(silent.getsockname()[1])], [])
        assert decode.wait_for("a") == [False]
        assert set(decode.failures) <= {"deadline", "peer_unreachable"}


def test_a_failed_transfer_fails_only_its_request(prefill, decode):
    decode.transport.faults.failures.append(TransferError("a cable was pulled"))
    decode.loop.submit([prefill.order("a")], [])
    assert decode.wait_for("a") == [False]
    decode.loop.submit([prefill.order("b")], [])
    assert decode.wait_for("b") == [True]
    assert decode.failures == {"transfer_failed": 1}


def test_a_transfer_that_may_still_write_keeps_its_blocks_until_the_peer_is_known_dead(prefill, decode):
    decode.transport.faults.failures.append(TransferError("unclear", terminal=False))
    decode.loop.submit([prefill.order("a")], [])
    assert decode.wait_for("a") == [False]
    assert decode.quarantined == {"a"} and not decode.drained
    until(lambda: not decode.loop._receives._active["a"].transfers, "the read from the other rank to end")
    decode.transport.faults.failures.append(PeerLost("connection reset"))
    decode.loop.submit([prefill.order("b")], [])
    assert decode.wait_for("b") == [False]
    decode.until(lambda: decode.drained == decode.quarantined, "the quarantine to end")
    assert "a" in decode.drained


def test_a_restarted_peer_at_the_same_address_works(prefill, decode):
    decode.loop.submit([prefill.order("a")], [])
    decode.wait_for("a")
    port = prefill.server.port
    for transport in prefill.transports:
        transport.faults.lost = True
    stale = prefill.order("stale")
    decode.hear_the_end_of(prefill)
    with contextlib.closing(Prefill(port=port)) as again:
        decode.loop.submit([stale, again.order("b")], [])
        assert decode.wait_for("stale", "b") == [False, True]


def test_an_unexpected_error_fails_requests_and_not_the_thread(prefill, decode, monkeypatch):
    bind = Link.bind

    def broken(link: Link, order: ReceiveOrder) -> Bound:
        if order.request_id == "a":
            raise RuntimeError("a defect")
        return bind(link, order)

    monkeypatch.setattr(Link, "bind", broken)
    decode.loop.submit([prefill.order("before"), prefill.order("a"), prefill.order("b")], [])
    assert decode.wait_for("before", "a", "b") == [True, False, True]
    assert decode.failures == {"internal": 1}


def test_a_receive_whose_trace_cannot_be_written_is_reported_all_the_same(prefill, decode, monkeypatch):
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(decode.loop._receives, "_received", full)
    decode.loop.submit([prefill.order("a")], [])
    assert decode.wait_for("a") == [True]


def test_a_transport_that_cannot_start_stops_the_engine_with_its_reason():
    def broken() -> LoopbackTransport:
        raise TransferError("no device mlx5_9")

    [worker] = instance(MODEL, D_SIDE)
    loop = TransferLoop(Config(transport="loopback"), real(worker), broken, Outbox(), 0, 1)
    with pytest.raises(TransferError, match="mlx5_9"):
        loop.start()


def test_an_idle_loop_burns_nothing(prefill, decode):
    decode.loop.submit([prefill.order("a")], [])
    decode.wait_for("a")
    [thread] = [t for t in threading.enumerate() if t is decode.loop._thread]
    before, began = cpu_ticks(thread), time.monotonic()
    until(lambda: time.monotonic() - began > 1.0, "a second")
    assert cpu_ticks(thread) - before <= 2, "more than 0.02 s of processor time in an idle second"


def cpu_ticks(thread: threading.Thread) -> int:
    """Processor time of one thread, in ticks of 10 ms."""
    fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
