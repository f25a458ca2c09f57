"""A port that was picked is free, and not picked again soon: two servers of a test must never be told the same one."""

from __future__ import annotations

import random
import socket
from collections import deque
from collections.abc import Callable

import pytest

from examples import launch
from tests.support import ports


class FewPorts:
    """Chooses among three ports, in turn: each is offered again and again."""

    def __init__(self) -> None:
        self.first = ports.free_ports((0, 1, 2))
        self.asked = 0

    def randrange(self, start: int, stop: int) -> int:
        self.asked += 1
        return self.first + self.asked // 4 % 3


@pytest.mark.parametrize("pick", [ports.free_port, launch.free_port], ids=["tests", "launch"])
def test_no_port_is_given_twice_nor_one_where_somebody_listens(
    monkeypatch: pytest.MonkeyPatch, pick: Callable[[], int]
) -> None:
    few = FewPorts()
    monkeypatch.setattr(random, "SystemRandom", lambda: few)
    monkeypatch.setattr(ports, "_given", deque(maxlen=2))
    monkeypatch.setattr(launch, "_given", deque(maxlen=2))
    with socket.create_server(("127.0.0.1", few.first + 1)):
        assert {pick(), pick()} == {few.first, few.first + 2}


def test_ports_that_were_picked_long_ago_come_again() -> None:
    assert len({ports.free_port() for _ in range(ports.SOON)}) == ports.SOON
    assert len(ports._given) == ports.SOON < len(ports.PORTS) // ports.SHARES // 2
