"""What is taken for the end of another worker's process, and what is not."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support.transport.line_proxy import Proxy
from tests.support.worker.decode_instance import in_its_thread, until
from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.manifest import LivenessAddress
from vllm_pd_connector.transport.liveness import LivenessHub
from vllm_pd_connector.transport.liveness_link import LivenessLink
from vllm_pd_connector.worker.peers import process_watch
from vllm_pd_connector.worker.peers.process_watch import ProcessWatch, ProcessWatches, address_towards

LOOPBACK = ipaddress.ip_address("127.0.0.1")


def made() -> ProcessWatches:
    return ProcessWatches(LOOPBACK, lambda: None)


@pytest.fixture
def mine() -> Iterator[ProcessWatches]:
    with closing(made()) as one:
        yield one


class Worker:
    """A listener that says the name, and then does to a link what processes, filters and proxies do."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.life = LivenessAddress("127.0.0.1", self._listener.getsockname()[1], "worker")

    def take(self, watch: ProcessWatch) -> socket.socket:
        """Answer the next time that it is dialled."""
        arrived: list[socket.socket] = []

        def dialled() -> bool:
            looked(watch)
            with contextlib.suppress(BlockingIOError):
                arrived.append(self._listener.accept()[0])
            return bool(arrived)

        until(dialled, "a dialler")
        arrived[0].settimeout(30.0)
        arrived[0].sendall(arrived[0].recv(1024))
        return arrived[0]

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    with closing(Worker()) as one:
        yield one


def looked(watch: ProcessWatch) -> ProcessWatch:
    watch.look(time.monotonic())
    return watch


def watched(mine: ProcessWatches, worker: Worker) -> tuple[ProcessWatch, socket.socket]:
    watch = mine.watch(worker.life, time.monotonic())
    line = worker.take(watch)
    until(lambda: looked(watch).here, "the line")
    return watch, line


def test_a_process_that_ended_is_over_when_what_it_sent_has_arrived(mine, monkeypatch):
    monkeypatch.setattr(process_watch, "SETTLE_S", 2.0)  # longer than a busy machine takes to look twice
    other = made()
    watch = mine.watch(other.own, time.monotonic())
    until(lambda: looked(watch).here, "the line")
    assert not watch.closed and not watch.over and watch.ended_at is None
    began = time.monotonic()
    other.close()
    until(lambda: looked(watch).over, "its end")
    assert time.monotonic() - began >= process_watch.SETTLE_S and watch.closed and not watch.here
    assert watch.ended_at is not None and watch.ended_at >= began
    assert "has ended" in str(watch)


def test_a_closed_line_that_is_answered_again_was_closed_by_somebody_in_between(mine, worker):
    watch, line = watched(mine, worker)
    line.close()
    until(lambda: looked(watch).closed, "the end of the line")
    with worker.take(watch):
        until(lambda: looked(watch).here, "the next line")
        until(lambda: time.monotonic() > watch._dialled_at + 2 * process_watch.SETTLE_S, "the time for an end")
        assert not looked(watch).over and not watch.closed and watch.ended_at is None


def test_a_reset_and_refusals_are_no_end(mine, worker):
    """As a packet filter answers that came into being."""
    watch, line = watched(mine, worker)
    worker.close()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()
    until(lambda: looked(watch).lost, "the reset")
    dialled = watch._dialled_at
    until(lambda: looked(watch)._dialled_at > dialled + 2 * process_watch.SETTLE_S and watch.lost, "refusals")
    assert not watch.closed and not watch.over and watch.ended_at is None


@pytest.mark.parametrize("failure", [errno.EADDRNOTAVAIL, errno.ENETUNREACH, errno.ENETDOWN, errno.EPERM])
def test_what_this_machine_cannot_dial_has_not_ended(mine, worker, monkeypatch, failure):
    """A proxy has closed the line, and then this machine has no port or no way left: the worker may write on."""
    watch, line = watched(mine, worker)
    with monkeypatch.context() as cut_off:
        cut_off.setattr(socket.socket, "connect_ex", lambda *_: failure)
        line.close()
        until(lambda: looked(watch).closed, "the end of the line")
        dialled = watch._dialled_at
        until(lambda: looked(watch)._dialled_at > dialled + 3 * process_watch.SETTLE_S, "dials that fail")
        assert watch.closed and not watch.over
    with worker.take(watch):
        until(lambda: looked(watch).here and not watch.closed, "the next line")


def test_a_dial_that_was_refused_before_and_cannot_be_made_now_is_no_end(mine, worker, monkeypatch):
    watch, line = watched(mine, worker)
    worker.close()
    line.close()
    until(lambda: looked(watch).closed, "the end of the line")
    monkeypatch.setattr(process_watch, "SETTLE_S", 10.0)
    until(lambda: looked(watch)._link.closed_at is None and watch.lost, "a refusal")
    monkeypatch.setattr(socket.socket, "connect_ex", lambda *_: errno.EADDRNOTAVAIL)
    dialled = watch._dialled_at
    until(lambda: looked(watch)._dialled_at > dialled + 0.2, "dials that fail")
    assert watch.closed and not watch.over


def test_what_a_proxy_closes_is_no_end_though_it_is_dialled_in_vain(mine):
    """As a proxy that ends does, while the worker writes on over another network."""
    with closing(made()) as other, closing(Proxy(other.own.port)) as proxy:
        life = LivenessAddress("127.0.0.1", proxy.port, other.own.name)
        watch = mine.watch(life, time.monotonic())
        proxy.carry()
        until(lambda: looked(watch).here, "the line")
        assert mine.watch(other.own, time.monotonic()) is not watch
        proxy.close()
        until(lambda: watch.closed, "the end of the line")
        assert watch.ended_at is None
        dialled = watch._dialled_at
        until(lambda: looked(watch)._dialled_at > dialled + 3 * process_watch.SETTLE_S and watch.lost, "refusals")
        assert watch.ended_at is None
        assert watch.closed and not watch.over and "proxy in between" in str(watch)


def test_a_worker_of_a_release_that_does_not_say_from_where_it_is_dialled_is_believed(mine):
    with closing(LivenessHub("127.0.0.1", "pd-life-00")) as other:
        watch = mine.watch(LivenessAddress("127.0.0.1", other.port, "pd-life-00"), time.monotonic())
        until(lambda: looked(watch).here, "the line")
    until(lambda: looked(watch).over, "its end")


def test_who_was_never_there_has_not_ended(mine, worker):
    worker.close()
    watch = mine.watch(worker.life, time.monotonic())
    dialled = watch._dialled_at
    until(lambda: looked(watch)._dialled_at > dialled + 2 * process_watch.SETTLE_S and watch.lost, "refusals")
    assert not watch.closed and not watch.over and "is there" not in str(watch)


def test_a_line_that_nobody_looks_at_is_let_go_of_and_had_again(mine, worker):
    watch, line = watched(mine, worker)
    with line:
        mine.tick(time.monotonic() + process_watch.IDLE_S + 1)
        assert line.recv(1) == b""
    assert not mine._watches, "of a thousand workers that ended none is kept for good"
    with worker.take(watch):
        until(lambda: looked(watch).here, "the next line")
    assert not watch.over
    mine.tick(time.monotonic() + 2 * (process_watch.IDLE_S + 1))
    assert not watch.here, "the line of a watch that was forgotten once is let go of again"


def test_one_line_serves_all_who_watch_a_worker(mine, worker):
    watch, line = watched(mine, worker)
    with line:
        assert mine.watch(worker.life, time.monotonic()) is watch


def test_a_defect_that_one_line_meets_ends_no_other(mine, worker, monkeypatch):
    with closing(made()) as other:
        well = mine.watch(other.own, time.monotonic())
        until(lambda: looked(well).here, "the line")
        readable = LivenessLink.readable

        def broken(link: LivenessLink) -> None:
            if link.peer == worker.life.name:
                raise RuntimeError("a defect")
            readable(link)

        monkeypatch.setattr(LivenessLink, "readable", broken)
        watch = mine.watch(worker.life, time.monotonic())
        with worker.take(watch):
            until(lambda: looked(watch).lost and "a defect" in str(watch), "the loss")
        assert looked(well).here


def test_a_lost_line_wakes_who_waits(worker):
    woken = []
    with closing(ProcessWatches(LOOPBACK, lambda: woken.append(True))) as mine:
        watch, line = watched(mine, worker)
        line.close()
        until(lambda: bool(woken), "the call")
        assert looked(watch).closed


def test_a_worker_at_an_address_of_the_other_version_of_ip_is_watched(mine):
    with closing(ProcessWatches(ipaddress.ip_address("::1"), lambda: None)) as other:
        for watching, watched_one in ((mine, other), (other, mine)):
            watch = watching.watch(watched_one.own, time.monotonic())
            until(lambda watch=watch: looked(watch).here, "the line")


@pytest.mark.parametrize("address", ["fe80::1%nosuch", "nowhere"])
def test_an_address_that_cannot_be_dialled_is_told_and_no_end(mine, address):
    watch = mine.watch(LivenessAddress(address, 1, "worker"), time.monotonic())
    assert watch.lost and not watch.over and address in str(watch)


def test_watches_are_bounded(mine, monkeypatch):
    monkeypatch.setattr(process_watch, "MAX_WATCHES", 2)
    for i in range(4):
        mine.watch(LivenessAddress("127.0.0.1", 1, f"worker {i}"), float(i))
    assert {life.name for life in mine._watches} == {"worker 2", "worker 3"}


def test_who_says_the_name_of_another_takes_no_watch_of_it_and_is_one_more(mine, worker, monkeypatch):
    """Any instance's manifest may name any worker, at ports of its own."""
    watch, line = watched(mine, worker)
    with line, closing(Worker()) as posing:
        other, also = watched(mine, posing)
        with also:
            assert other is not watch and mine.watch(worker.life, time.monotonic()) is watch and watch.here
            monkeypatch.setattr(process_watch, "IDLE_S", 0.0)
            in_time = time.monotonic() + process_watch.TICK_S
            mine.tick(in_time)
            until(lambda: not mine._hub._lines, "both lines to be let go of")


def test_a_watch_that_gave_way_takes_the_place_of_another_when_its_holder_looks_again(mine, monkeypatch):
    monkeypatch.setattr(process_watch, "MAX_WATCHES", 2)
    held = [mine.watch(LivenessAddress("127.0.0.1", 1, f"worker {i}"), float(i)) for i in range(3)]
    held[0].look(100.0)
    assert {life.name for life in mine._watches} == {"worker 0", "worker 2"}


def test_a_worker_is_seen_at_the_address_of_its_side_channel():
    assert address_towards("127.0.0.1") == LOOPBACK == address_towards("localhost")
    assert not address_towards("no.such.host.invalid").is_unspecified


def test_nothing_can_listen_at_an_address_of_another_machine():
    with pytest.raises(TransferError, match="cannot listen"):
        ProcessWatches(ipaddress.ip_address("198.51.100.1"), lambda: None)


def test_a_read_on_a_link_that_is_old_is_known_to_end_with_its_prefill_instance(prefill, decode):
    """Nobody looks at the lines of a link whose reads end well; when one may still write, its process may be gone."""
    assert decode.received(prefill.request("warm")) == [True]
    processes = decode.loop._processes

    def an_hour_passes(now: float) -> None:
        known = list(processes._watches.values())
        processes.tick(now + process_watch.IDLE_S + 1)
        for watch in known:
            assert watch.lost
            watch._dialled_at -= process_watch.IDLE_S

    in_its_thread(decode.loop, an_hour_passes)
    decode.transport.faults.held = True
    decode.loop.submit([prefill.request("a")], [])
    until(lambda: decode.reads("a"), "it to read")
    watches = list(decode.active("a").in_flight.watches.values())
    until(lambda: all(watch.here for watch in watches), "a line to each worker that is read from")
    decode.transport.faults.held = False
    assert decode.wait_for("a") == [True]
