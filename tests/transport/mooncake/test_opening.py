"""What is ended under the library for one link to a port, and the steps of another that leads there."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.descriptors import no_descriptor_left
from tests.support.transport.ends import until
from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.transport.mooncake import opening as mooncake_opening
from vllm_pd_connector.transport.mooncake import sockets
from vllm_pd_connector.transport.mooncake.descriptor import fetch_descriptor
from vllm_pd_connector.transport.mooncake.opening import Opening, Openings

HERE = ipaddress.ip_address("127.0.0.1")
DESCRIPTOR = b'{"protocol": "tcp"}'
ANSWER = (1 + len(DESCRIPTOR)).to_bytes(8, "little") + b"\x01" + DESCRIPTOR


class Engine:
    """Its probe is the library's exchange."""

    def __init__(self, port: int) -> None:
        self._port = port

    def send_probe(self, segment: str) -> int:
        try:
            fetch_descriptor(HERE, self._port, 10)
        except TransferError:
            return -1
        return 0

    def batch_transfer_sync_read(self, *_: object) -> int:
        return 0


class Port:
    """The port of an engine that answers when it is told to."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.number = self._listener.getsockname()[1]
        self.asked: list[socket.socket] = []
        self.answers = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.recv(64)
                answers = self.answers  # as it was before this question shows
                self.asked.append(connection)
                if answers:
                    connection.sendall(ANSWER)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for one in (self._listener, *self.asked):
            one.close()


@pytest.fixture
def port() -> Iterator[Port]:
    with contextlib.closing(Port()) as made:
        yield made


def test_a_step_that_was_ended_for_another_link_is_taken_again(port: Port) -> None:
    openings = Openings(Engine(port.number), 60.0)
    lost, again = (Opening(name, HERE, port.number) for name in ("lost", "again"))
    assert not openings.ready(again)
    until(lambda: port.asked, "the probe")
    deadline = again.deadline
    port.answers = True
    openings.end_exchanges(lost, time.monotonic())
    until(lambda: openings.ready(again), "the next link to open")
    assert len(port.asked) == 2 and again.deadline <= deadline + mooncake_opening.OPEN_S
    openings.close()


def test_a_step_that_failed_by_itself_is_not_taken_again(port: Port) -> None:
    openings, one = Openings(Engine(port.number), 60.0), Opening("one", HERE, port.number)
    assert not openings.ready(one)
    until(lambda: port.asked, "the probe")
    port.asked[0].shutdown(socket.SHUT_RDWR)
    until(lambda: not one.runs(), "its end")
    with pytest.raises(TransferError, match="cannot open one"):
        openings.ready(one)
    openings.close()


def test_a_step_whose_time_is_over_is_not_taken_again(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_opening, "hang_up", lambda address, port: None)
    openings = Openings(Engine(port.number), 60.0)
    lost, again = (Opening(name, HERE, port.number) for name in ("lost", "again"))
    assert not openings.ready(again)
    until(lambda: port.asked, "the probe")
    openings.end_exchanges(lost, time.monotonic())
    again.deadline = 0.0
    assert not openings.ready(again) and again.overdue
    port.asked[0].shutdown(socket.SHUT_RDWR)
    until(lambda: not again.runs(), "its end")
    with pytest.raises(TransferError, match="no answer in time"):
        until(lambda: openings.ready(again), "the refusal")
    assert len(port.asked) == 1
    openings.close()


def test_no_step_begins_where_something_is_being_ended(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    going = threading.Event()
    monkeypatch.setattr(mooncake_opening, "hang_up", lambda address, port: going.wait())
    openings = Openings(Engine(port.number), 60.0)
    port.answers = True
    openings.end_exchanges(Opening("lost", HERE, port.number), time.monotonic())
    again = Opening("again", HERE, port.number)
    assert not openings.ready(again) and again.thread is None
    going.set()
    until(lambda: openings.ready(again), "the next link to open")
    openings.close()


def test_where_no_thread_is_left_a_peer_cannot_be_opened_and_nothing_is_ended_yet(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are open are not concerned: whose transfers end the exchange may be well."""
    openings, one = Openings(Engine(port.number), 60.0), Opening("one", HERE, port.number)
    port.answers = True
    until(lambda: openings.ready(one), "the link to open")
    asked = len(port.asked)
    other, now = Opening("other", HERE, port.number), time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        openings.end_exchanges(one, now)
        with pytest.raises(TransferError, match=r"cannot open other: can't start new thread"):
            openings.ready(other)
        assert openings.ready(one) and other.thread is None
    openings.end_exchanges(one, now + mooncake_opening._AGAIN_S)
    assert len(openings._ending) == 1, "it is not tried again"
    until(lambda: openings.ready(other), "the other link to open")
    assert len(port.asked) == asked + 1
    openings.close()


def test_where_no_descriptor_is_left_an_overdue_peer_is_ended_later_and_others_are_well(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    """The look at this process's sockets takes one; who asked for a peer that is well must not hear of it."""
    with contextlib.closing(Port()) as silent:
        openings = Openings(Engine(port.number), 60.0)
        well, overdue = Opening("well", HERE, port.number), Opening("overdue", HERE, silent.number)
        port.answers = True
        until(lambda: openings.ready(well), "the link to open")
        openings._engine = Engine(silent.number)
        assert not openings.ready(overdue)
        until(lambda: silent.asked, "the probe")
        with no_descriptor_left():
            overdue.deadline = 0.0
            assert openings.ready(well) and overdue.runs()
        assert "an exchange of Mooncake with overdue cannot be ended yet" in caplog.text

        def ended() -> bool:
            assert openings.ready(well)
            return not overdue.runs()

        until(ended, "it to be ended")
        openings.close()


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


LOCKED = """
import fcntl, sys
with open(sys.argv[1], "r+") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(7)
"""


def test_looking_for_sockets_leaves_locks_on_files_alone(tmp_path: Path) -> None:
    """A process loses its locks on a file with the first of its descriptors of that file that is closed."""
    locked = tmp_path / "locked"
    locked.touch()
    with socket.create_server(("127.0.0.1", 0)) as listener, open(locked, "r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        sockets.hang_up(HERE, listener.getsockname()[1])
        sockets.restrict_listeners({listener.getsockname()[1]}, HERE)
        assert file.fileno() not in sockets._descriptors() and listener.fileno() in sockets._descriptors()
        assert subprocess.run([sys.executable, "-c", LOCKED, os.fspath(locked)], check=False).returncode == 7


def test_a_kernel_that_takes_no_filter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_SO_ATTACH_FILTER", 9999)  # unknown to any
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.getsockname()[1]
        with pytest.raises(TransferError, match=rf"ports \[{number}\] .*Protocol not available.*transport nixl"):
            sockets.restrict_listeners({number}, HERE)
