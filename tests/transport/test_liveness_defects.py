"""A defect that one line meets ends that line, and no other of the worker's; nor does who dials too often."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.transport.ends import until
from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.transport.liveness import IncomingLink, LivenessHub
from vllm_pd_connector.transport.liveness_link import LivenessLink, LivenessState

HERE = "127.0.0.1"


@pytest.fixture
def hubs() -> Iterator[tuple[LivenessHub, LivenessHub]]:
    with contextlib.ExitStack() as ending:
        made = LivenessHub(HERE, "a"), LivenessHub(HERE, "b")
        for hub in made:
            ending.callback(hub.close)
        yield made


def is_open(link: LivenessLink) -> None:
    until(lambda: link.state is LivenessState.OPEN, "an open line")


def test_a_line_that_cannot_be_watched_is_lost_and_no_other(hubs, monkeypatch):
    here, there = hubs
    first = here.dial(HERE, there.port, "b", 10.0)
    is_open(first)
    register = here._selector.register

    def full(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(here._selector, "register", full)
    second = here.dial(HERE, there.port, "b", 10.0)
    until(lambda: second.state is LivenessState.LOST, "the loss")
    assert "no space left" in second.reason
    monkeypatch.setattr(here._selector, "register", register)
    is_open(here.dial(HERE, there.port, "b", 10.0))
    assert first.state is LivenessState.OPEN


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space left"), None], ids=["not watched", "not understood"])
def test_a_dialler_that_meets_a_defect_is_hung_up_on_and_no_other(hubs, monkeypatch, error):
    here, there = hubs
    first = here.dial(HERE, there.port, "b", 10.0)
    is_open(first)

    def fails(*arguments: Any) -> Any:
        raise error or ValueError("a defect")

    with monkeypatch.context() as patch:
        if error is not None:
            patch.setattr(there._selector, "register", fails)
        else:
            patch.setattr(IncomingLink, "take", fails)
        with socket.create_connection((HERE, there.port)) as dialler:
            dialler.sendall(b"hello")
            dialler.settimeout(10.0)
            with contextlib.suppress(ConnectionResetError):
                assert dialler.recv(1) == b"", "hung up on"
    is_open(here.dial(HERE, there.port, "b", 10.0))
    assert first.state is LivenessState.OPEN


def test_what_is_no_port_is_refused(hubs):
    with pytest.raises(TransferError, match="port 70000"):
        hubs[0].dial(HERE, 70000, "b", 10.0)


def test_a_pause_that_the_kernel_has_no_room_to_end_goes_on_and_ends_nobody(hubs, monkeypatch):
    here, there = hubs
    monkeypatch.setattr("vllm_pd_connector.transport.liveness.PAUSE_S", 0.1)
    first = here.dial(HERE, there.port, "b", 10.0)
    is_open(first)
    listener, register, refused = there._listener, there._selector.register, []

    class Full:
        """Takes nobody once."""

        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

        def accept(self) -> Any:
            if not refused:
                raise OSError(errno.ENOMEM, "no memory")
            return listener.accept()

    def once(what: Any, *arguments: Any) -> Any:
        if what is there._listener and not refused:
            refused.append(what)
            raise OSError(errno.ENOSPC, "no space left")
        return register(what, *arguments)

    monkeypatch.setattr(there, "_listener", Full())
    monkeypatch.setattr(there._selector, "register", once)
    is_open(here.dial(HERE, there.port, "b", 10.0))
    assert refused and first.state is LivenessState.OPEN


def test_that_nobody_is_taken_is_said_once_until_somebody_is(hubs, monkeypatch, caplog):
    """Somebody may wait for hours where many are connected, and is looked for every second."""
    monkeypatch.setattr("vllm_pd_connector.transport.liveness.MAX_DIALLERS", 1)
    monkeypatch.setattr("vllm_pd_connector.transport.liveness.PAUSE_S", 0.01)
    here, there = hubs
    pauses, pause = [], there._pause
    monkeypatch.setattr(there, "_pause", lambda why: (pause(why), pauses.append(why)))
    link = here.dial(HERE, there.port, "b", 60.0)
    is_open(link)
    for said in (1, 2):
        others = here.dial(HERE, there.port, "b", 60.0)
        pauses.clear()
        until(lambda: len(pauses) > 5, "pauses")
        assert caplog.text.count("1 are connected, at most 1 may be") == said
        link.hang_up()
        is_open(others)
        link = others


def test_who_dials_where_many_are_connected_waits_and_nobody_is_hung_up_on_for_it(hubs, monkeypatch, caplog):
    """Who has greeted would take it for the end of this process."""
    monkeypatch.setattr("vllm_pd_connector.transport.liveness.MAX_DIALLERS", 3)
    monkeypatch.setattr("vllm_pd_connector.transport.liveness.PAUSE_S", 0.1)
    here, there = hubs
    links = [here.dial(HERE, there.port, "b", 60.0) for _ in range(3)]
    for link in links:
        is_open(link)
    with socket.create_connection((HERE, there.port)) as waiting:  # the kernel takes it
        waiting.sendall(b"\x00\x00\x00\x01b")
        until(lambda: "3 are connected, at most 3 may be" in caplog.text, "the limit")
        assert len(there._arriving) == 3
        assert all(link.state is LivenessState.OPEN for link in links)
        links.pop().hang_up()
        waiting.settimeout(30)
        assert waiting.recv(100) == b"\x00\x00\x00\x01b"
        assert all(link.state is LivenessState.OPEN for link in links)
