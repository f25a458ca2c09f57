"""The transfer thread over real libraries, with prefill instances in processes that are stopped and killed.

Whatever happens to one of them: its requests end with a report within their deadline, requests of others are
untouched, blocks that may still be written to are in quarantine until nothing can, and its next life is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.worker.decode_instance import Decode, request_of, set_deadline, until
from tests.support.worker.library_processes import VARIANTS, Instance, instances
from tests.support.worker.prefill_instance import serve
from vllm_pd_connector.config import Config
from vllm_pd_connector.metadata import ReceiveRequest
from vllm_pd_connector.transport.registry import create

DEADLINE_S = 1.0
"""Of a read that is to reach it. All others have so much time that no busy machine reaches it."""
Start = Callable[[str], Instance]


@pytest.fixture
def start(variant: str) -> Iterator[Start]:
    with instances(serve, variant) as start_one:
        yield start_one


def order(instance: Instance, request_id: str) -> ReceiveRequest:
    """Of a request whose prefill ran in this instance."""
    return request_of(request_id, instance.ask(request_id))


@pytest.fixture
def decode(variant: str) -> Iterator[Decode]:
    name, options = VARIANTS[variant]
    config = Config(transport="loopback", staging_bytes=0, transfer_timeout=2 * PATIENCE_S, handshake_timeout=60.0)
    made = Decode(config, lambda: create(name, options))
    yield made
    made.loop.close()


def test_the_bytes_arrive(decode: Decode, start: Start) -> None:
    first = start("p-0")
    assert decode.received(order(first, "a")) == [True]
    assert (decode.worker.memory == decode.expected()).all()


def test_a_stopped_instance_fails_its_request_at_the_deadline_and_delays_no_other(decode: Decode, start: Start) -> None:
    stuck, other = start("p-0"), start("p-1")
    assert decode.received(order(stuck, "warm"), order(other, "warm too")) == [True, True]
    waiting = order(stuck, "a")
    stuck.stop()
    decode.loop.submit([waiting], [])
    until(lambda: decode.reads("a"), "the read")
    active = decode.active("a")
    assert active is not None
    set_deadline(decode.loop, active, DEADLINE_S)
    names = [f"b{i}" for i in range(10)]
    assert all(decode.received(*(order(other, name) for name in names)))
    assert decode.wait_for("a") == [False]
    assert decode.failures == {"deadline": 1} and decode.quarantined == {"a"} and not decode.drained
    stuck.kill()
    decode.until(lambda: decode.drained == {"a"}, "the quarantine to end with the process")
    assert decode.received(order(other, "c")) == [True]


def test_a_killed_instance_fails_its_request_before_the_deadline_and_its_next_life_is_used(
    decode: Decode, start: Start
) -> None:
    first, other = start("p-0"), start("p-1")
    assert decode.received(order(first, "warm"), order(other, "warm too")) == [True, True]
    waiting = order(first, "a")
    first.stop()
    decode.loop.submit([waiting], [])
    until(lambda: decode.reads("a"), "the read")
    assert decode.received(order(other, "b")) == [True]
    first.kill()
    assert decode.wait_for("a") == [False]
    assert sum(decode.failures.values()) == 1 and "deadline" not in decode.failures
    decode.until(lambda: decode.drained == decode.quarantined, "nothing to be in quarantine")
    second = start("p-0")
    assert decode.received(order(second, "c"), order(other, "d")) == [True, True]
    assert (decode.worker.memory == decode.expected()).all()
