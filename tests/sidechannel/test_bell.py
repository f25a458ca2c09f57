"""The bell between workers and their scheduler half."""

from __future__ import annotations

import errno
import queue
import resource
import socket
import threading

import pytest

from vllm_pd_connector.sidechannel import bell as bells
from vllm_pd_connector.sidechannel.bell import Bell, ring


def test_what_is_rung_is_heard() -> None:
    heard: queue.Queue[bytes] = queue.Queue()
    bell = Bell(heard.put)
    ring(bell.address, b"one")
    assert heard.get() == b"one"
    ring(bell.address, b"two")
    assert heard.get() == b"two"
    bell.close()
    bell.close()


def test_a_message_that_meets_a_defect_keeps_no_later_one_from_being_heard() -> None:
    heard: queue.Queue[bytes] = queue.Queue()

    def meets_one(message: bytes) -> None:
        assert message != b"one"
        heard.put(message)

    bell = Bell(meets_one)
    ring(bell.address, b"one")
    ring(bell.address, b"two")
    assert heard.get(timeout=20.0) == b"two"
    bell.close()


def test_a_failure_to_receive_keeps_no_later_message_from_being_heard(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([OSError(errno.ENOMEM, "no memory")] * 3)

    class Failing(socket.socket):
        def recv(self, *arguments: int) -> bytes:
            if (failure := next(failures, None)) is not None:
                raise failure
            return super().recv(*arguments)

    monkeypatch.setattr(bells, "PAUSE_S", 0.01)
    monkeypatch.setattr(bells.socket, "socket", Failing)
    heard: queue.Queue[bytes] = queue.Queue()
    bell = Bell(heard.put)
    ring(bell.address, b"one")
    assert heard.get(timeout=20.0) == b"one"
    assert caplog.text.count("cannot be received") == 1
    bell.close()


def test_nobody_waits_at_a_bell_that_is_gone() -> None:
    bell = Bell(lambda message: None)
    bell.close()
    ring(bell.address, b"one")
    ring("pd-bell-of-nobody", b"one")


def test_a_bell_that_nobody_answers_costs_no_caller_anything() -> None:
    """The kernel keeps a few datagrams; the rest are lost, since who will look is told already."""
    answering, entered = threading.Event(), threading.Event()
    heard: list[bytes] = []

    def slow(message: bytes) -> None:
        entered.set()
        answering.wait()
        heard.append(message)

    bell = Bell(slow)
    ring(bell.address, b"first")
    entered.wait()
    for _ in range(10_000):
        ring(bell.address, b"again")
    answering.set()
    bell.close()
    assert heard[0] == b"first"
    assert 1 <= len(heard) < 10_000


def test_a_process_without_a_free_descriptor_rings_in_vain_and_ends_its_bell() -> None:
    """Its transfer thread rings, and so does the thread that launches forwards."""
    bell = Bell(lambda message: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        ring(bell.address, b"one")
        ending = threading.Thread(target=bell.close)
        ending.start()
        ending.join(10.0)
        assert not ending.is_alive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    bell.close()


def test_two_bells_are_two() -> None:
    both = [Bell(lambda message: None) for _ in range(2)]
    assert both[0].address != both[1].address
    assert all(len(bell.address) < 100 for bell in both), socket.AF_UNIX
    for bell in both:
        bell.close()
