"""What is given back on another instance, until it is heard there. The clock is the test's; nothing is sent."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_pd_connector.errors import Busy, DeadlineExceeded, ProtocolError, Unreachable
from vllm_pd_connector.protocol.wire.messages import Failure, FailureCode, Release, Released
from vllm_pd_connector.sidechannel.errands import AT_ONCE, LASTS_S, MOST, Errands

FULL = Busy("512 other servers owe answers")


class Client:
    """Raises `refuses`, while it does, and notes what it is given."""

    def __init__(self) -> None:
        self.refuses: Exception | None = None
        self.tried: list[Any] = []
        self._tokens = itertools.count(1)

    def send(self, endpoint: str, request: Any, timeout_s: float) -> int:
        self.tried.append(request)
        if self.refuses is not None:
            raise self.refuses
        return next(self._tokens)


def moments(errands: Errands, client: Any, until: float) -> Iterator[float]:
    """When something is sent again."""
    while (due := errands.next_deadline()) is not None and due <= until:
        yield due
        errands.turn(client, due)


def test_what_finds_no_room_here_is_sent_again_while_a_lease_may_live(caplog: pytest.LogCaptureFixture) -> None:
    errands, client, made = Errands(), Client(), itertools.count()
    client.refuses = FULL
    errands.send(client, "tcp://a:1", lambda: next(made), 5.0, 0.0)
    assert list(moments(errands, client, 1000.0)) == [0.5, 1.5, 3.5, 7.5, 15.5]
    assert client.tried == [0, 1, 2, 3, 4, 5], "each is made anew: it may tell its age"
    assert "giving back at tcp://a:1, in vain" in caplog.text and LASTS_S < 31.5


def test_what_is_sent_at_last_is_sent_no_more() -> None:
    errands, client = Errands(), Client()
    client.refuses = FULL
    errands.send(client, "tcp://a:1", lambda: Release(()), 5.0, 0.0)
    client.refuses = None
    errands.turn(client, 0.5)
    assert errands.take(1, Released(), 0.6) and errands.next_deadline() is None and len(client.tried) == 2
    assert not errands.take(1, Released(), 0.7), "another's"


@pytest.mark.parametrize(
    ("outcome", "again", "when_ending"),
    [
        (FULL, True, True),
        (Failure(FailureCode.BUSY, "too much is under way"), True, True),
        (Unreachable("it gives way to others"), True, False),
        (Failure(FailureCode.INTERNAL, "a defect"), False, False),
        (DeadlineExceeded("no reply within 5 s"), False, False),
        (ProtocolError("no reply of ours"), False, False),
    ],
    ids=["no room here", "no room there", "not reached", "a defect there", "silence", "nonsense"],
)
@pytest.mark.parametrize("ends", [False, True])
def test_what_was_not_heard_is_sent_again(outcome: Any, again: bool, when_ending: bool, ends: bool) -> None:
    errands, client = Errands(), Client()
    if ends:
        errands.end()
    errands.send(client, "tcp://a:1", lambda: Release(()), 5.0, 0.0)
    assert errands.take(1, outcome, 2.0)
    assert list(moments(errands, client, 2.5)) == ([2.5] if (when_ending if ends else again) else [])
    assert errands.next_deadline() is None


def test_only_so_many_wait_to_be_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    errands, client = Errands(), Client()
    client.refuses = FULL
    for _ in range(MOST + 3):
        errands.send(client, "tcp://a:1", lambda: Release(()), 5.0, 0.0)
    client.tried.clear()
    turns = 0
    while errands.next_deadline() == 0.5:
        errands.turn(client, 0.5)
        turns += 1
        assert len(client.tried) <= turns * AT_ONCE, "a turn is short"
    assert len(client.tried) == MOST


def test_of_many_that_are_lost_at_one_server_the_first_is_told(caplog: pytest.LogCaptureFixture) -> None:
    errands, client = Errands(), Client()
    client.refuses = FULL
    for endpoint in ("tcp://a:1",) * 3 + ("tcp://b:1",) * 2:
        errands.send(client, endpoint, lambda: Release(()), 5.0, 0.0)
    assert list(moments(errands, client, 1000.0))
    assert [line for line in caplog.messages if "in vain" in line] == [
        f"giving back at tcp://{name}:1, in vain: {FULL}" for name in "ab"
    ]


def test_what_waits_when_the_sender_ends_is_tried_once_more_at_once() -> None:
    errands, client = Errands(), Client()
    errands.send(client, "tcp://a:1", lambda: Release(()), 5.0, 100.0)
    assert errands.take(1, Unreachable("refused"), 101.0) and errands.next_deadline() == 101.5
    errands.end()
    assert errands.next_deadline() is not None and errands.next_deadline() <= 101.0
    errands.turn(client, 101.0)
    assert len(client.tried) == 2
    assert errands.take(2, Unreachable("refused"), 101.0) and errands.next_deadline() is None


def test_one_that_cannot_be_sent_is_nobody_elses() -> None:
    errands, client, told = Errands(), Client(), []
    client.refuses = FULL

    def broken() -> Any:
        if told:
            raise OSError("a defect")
        told.append("once")
        return Release(())

    for make in (broken, lambda: Release(())):
        errands.send(client, "tcp://a:1", make, 5.0, 0.0)
    client.refuses = None
    client.tried.clear()
    errands.turn(client, 0.5)
    assert len(client.tried) == 1
    with pytest.raises(ProtocolError, match="no address"):
        client.refuses = ProtocolError("no address")
        errands.send(client, "nowhere", lambda: Release(()), 5.0, 0.0)
