"""A port that was picked is free, and not picked again soon: two servers of a test must never be told the same one."""

from __future__ import annotations

import random
import socket
from collections import deque
from pathlib import Path

import pytest

from examples import launch, ports


class FewPorts:
    """Chooses among three ports, in turn: each is offered again and again."""

    def __init__(self) -> None:
        self.first = ports.free_ports((0, 1, 2))
        self.asked = 0

    def randrange(self, start: int, stop: int) -> int:
        self.asked += 1
        return self.first + self.asked // 4 % 3


def test_no_port_is_given_twice_nor_one_where_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    few = FewPorts()
    monkeypatch.setattr(random, "SystemRandom", lambda: few)
    monkeypatch.setattr(ports, "_given", deque(maxlen=2))
    with socket.create_server(("127.0.0.1", few.first + 1)):
        assert {ports.free_port(), ports.free_port()} == {few.first, few.first + 2}


def test_ports_that_were_picked_long_ago_come_again() -> None:
    assert len({ports.free_port() for _ in range(ports.SOON)}) == ports.SOON
    assert len(ports._given) == ports.SOON < len(ports.PORTS) // ports.SHARES // 2


def test_no_two_workers_of_a_run_start_servers_at_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins to listen long after its port was looked at."""
    shares = []
    for worker in ("gw0", "gw1"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        specs = [launch.vllm_spec("p", Path("m"), transfer={"kv_connector": "PDConnector"}) for _ in range(16)]
        shares.append([port for spec in specs for port in (spec.port, side_port(spec))])
    assert max(shares[0]) < min(shares[1])


def side_port(spec: launch.Spec) -> int:
    return int(spec.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"])
