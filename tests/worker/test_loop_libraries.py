"""The transfer thread over real libraries, with prefill instances in processes that are stopped and killed.

Whatever happens to one of them: its requests end with a report within their deadline, requests of others are
untouched, blocks that may still be written to are in quarantine until nothing can, and its next life is used.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prefill_instance import serve
from test_loop import Decode, order_of, until

from forked import PROCESSES
from vllm_pd_connector.config import Config
from vllm_pd_connector.steps import ReceiveOrder
from vllm_pd_connector.transport.registry import create

DEADLINE_S = 4.0
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mooncake": ("mooncake", {"protocol": "tcp", "address": "127.0.0.1"}),
    "nixl-tcp": ("nixl", {"ucx": {"TLS": "tcp,self"}}),
}


class Instance:
    """A prefill instance in a process of its own."""

    def __init__(self, variant: str, engine_id: str):
        self._pipe, child = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=serve, args=(child, engine_id, *VARIANTS[variant]), daemon=True)
        self._process.start()
        child.close()
        assert self._pipe.poll(60), "the prefill process does not start"
        self.port = self._pipe.recv()

    def order(self, request_id: str) -> ReceiveOrder:
        self._pipe.send(request_id)
        assert self._pipe.poll(60), "the prefill process does not answer"
        return order_of(request_id, self._pipe.recv())

    def stop(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        until(lambda: self._state() == "T", "the process to stop")

    def go_on(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def tell_to_end(self) -> None:
        if self._process.is_alive():
            self.go_on()
        self._pipe.close()

    def close(self) -> None:
        self._process.join(60)
        assert self._process.exitcode in (0, -signal.SIGKILL)

    def _state(self) -> str:
        with open(f"/proc/{self._process.pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]


@pytest.fixture(params=list(VARIANTS))
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(variant: str) -> Iterator[Callable[[str], Instance]]:
    made: list[Instance] = []

    def start_one(engine_id: str) -> Instance:
        made.append(Instance(variant, engine_id))
        return made[-1]

    yield start_one
    for instance in made:
        instance.tell_to_end()
    for instance in made:
        instance.close()


@pytest.fixture
def decode(variant: str) -> Iterator[Decode]:
    name, options = VARIANTS[variant]
    config = Config(transport="loopback", staging_bytes=0, transfer_timeout=DEADLINE_S, handshake_timeout=60.0)
    made = Decode(config, lambda: create(name, options))
    yield made
    made.loop.close()


def test_the_bytes_arrive(decode: Decode, start: Callable[[str], Instance]) -> None:
    first = start("p-0")
    decode.loop.submit([first.order("a")], [])
    assert decode.wait_for("a") == [True]
    assert (decode.worker.memory == decode.expected()).all()


def test_a_stopped_instance_fails_its_request_at_the_deadline_and_delays_no_other(
    decode: Decode, start: Callable[[str], Instance]
) -> None:
    stuck, other = start("p-0"), start("p-1")
    decode.loop.submit([stuck.order("warm"), other.order("warm too")], [])
    assert decode.wait_for("warm", "warm too") == [True, True]
    order = stuck.order("a")
    stuck.stop()
    decode.loop.submit([order], [])
    names = [f"b{i}" for i in range(10)]
    decode.loop.submit([other.order(name) for name in names], [])
    assert all(decode.wait_for(*names))
    assert decode.wait_for("a") == [False]
    assert decode.failures == {"deadline": 1} and decode.quarantined == {"a"} and not decode.drained
    stuck.kill()
    decode.until(lambda: decode.drained == {"a"}, "the quarantine to end with the process")
    decode.loop.submit([other.order("c")], [])
    assert decode.wait_for("c") == [True]


def test_a_killed_instance_fails_its_request_before_the_deadline_and_its_next_life_is_used(
    decode: Decode, start: Callable[[str], Instance]
) -> None:
    first, other = start("p-0"), start("p-1")
    decode.loop.submit([first.order("warm"), other.order("warm too")], [])
    assert decode.wait_for("warm", "warm too") == [True, True]
    order = first.order("a")
    first.stop()
    decode.loop.submit([order], [])
    decode.loop.submit([other.order("b")], [])
    assert decode.wait_for("b") == [True]
    first.kill()
    assert decode.wait_for("a") == [False]
    assert sum(decode.failures.values()) == 1
    decode.until(lambda: decode.drained == decode.quarantined, "nothing to be in quarantine")
    second = start("p-0")
    decode.loop.submit([second.order("c"), other.order("d")], [])
    assert decode.wait_for("c", "d") == [True, True]
    assert (decode.worker.memory == decode.expected()).all()
