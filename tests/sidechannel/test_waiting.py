"""One place to sleep: input, another thread's call and a deadline each end it, and nothing else does."""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.sidechannel import waiting
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.sidechannel.server import SideChannelServer
from vllm_pd_connector.sidechannel.waiting import wait
from vllm_pd_connector.wake import Wake


@pytest.fixture
def wake() -> Iterator[Wake]:
    made = Wake()
    yield made
    made.close()


def test_a_deadline_ends_the_wait(client, wake):
    deadline = time.monotonic() + 0.05
    wait(client, wake, deadline)
    assert time.monotonic() >= deadline


def test_a_deadline_in_less_than_a_millisecond_is_not_rounded_up(client, wake):
    wait(client, wake, time.monotonic())
    shortest = min(_waited(client, wake, 0.0001) for _ in range(50))
    assert 0.0001 <= shortest < 0.001


def _waited(client, wake, seconds):
    begin = time.monotonic()
    wait(client, wake, begin + seconds)
    return time.monotonic() - begin


def test_a_deadline_that_has_passed_gives_others_a_moment_and_no_more(client, wake, monkeypatch):
    """A turn that is due at once does not keep the interpreter from the thread that launches forwards."""
    slept = []
    monkeypatch.setattr(waiting.time, "sleep", slept.append)
    wait(client, wake, time.monotonic() - 1.0)
    assert slept == [0.0]
    wake.set()
    wait(client, wake, time.monotonic() - 1.0)
    assert slept == [0.0], "a call waits for nobody"


PR_GET_TIMERSLACK = 30


def slack():
    """Nanoseconds by which the kernel may end this thread's sleeps later."""
    return ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)


@pytest.mark.parametrize("exact", [True, False])
def test_a_sleep_is_exact_where_that_is_asked_for_and_no_other_is(client, wake, monkeypatch, exact):
    """Also behind one that was interrupted: threads that are made later inherit what is set."""
    before, during = slack(), []

    def interrupted(seconds):
        during.append(slack())
        raise KeyboardInterrupt

    monkeypatch.setattr(waiting.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        wait(client, wake, time.monotonic() + 0.0001, exact=exact)
    assert during == [1 if exact else before]
    assert slack() == before > 1


def test_another_thread_ends_the_wait_and_is_heard_once(client, wake):
    other = threading.Thread(target=wake.set)
    other.start()
    wait(client, wake, None)
    other.join()
    deadline = time.monotonic() + 0.05
    wait(client, wake, deadline)
    assert time.monotonic() >= deadline, "the call was heard twice"


def test_a_call_before_the_wait_is_not_lost(client, wake):
    wake.set()
    wake.set()
    wait(client, wake, None)


def test_a_reply_ends_the_wait(client, wake):
    server = SideChannelServer("127.0.0.1", 0, "engine", "ab" * 16)
    try:
        token = client.send(endpoint("127.0.0.1", server.port), m.Release(()), 20.0)
        outcomes = []
        while not outcomes:
            wait(client, wake, None)
            outcomes = client.receive()
        assert outcomes == [(token, m.Released())]
    finally:
        server.close()


def test_a_request_that_is_not_answered_ends_the_wait_at_its_deadline(client, wake):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client.send(endpoint("127.0.0.1", silent.getsockname()[1]), m.Release(()), 0.05)
        outcomes = []
        while not outcomes:
            wait(client, wake, None)
            outcomes = client.receive()
    assert "no reply within 0.05 s" in str(outcomes[0][1])
