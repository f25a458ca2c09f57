"""Sleep and waking over real libraries, as vLLM 0.33 calls it on a worker (`tests/support/worker/sleeper.py`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.worker import sleeper
from tests.support.worker.decode_instance import Decode, request_of
from tests.support.worker.library_processes import VARIANTS, Instance, instances
from vllm_pd_connector.config import Config
from vllm_pd_connector.transport.registry import create

DEADLINE_S = 20.0


@pytest.fixture(scope="module", params=[*VARIANTS, "nixl"])
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VARIANTS, "nixl", ("nixl", {}))
        yield str(request.param)


@pytest.fixture(scope="module")
def prefill(variant: str) -> Iterator[Instance]:
    with instances(sleeper.serve, variant) as start:
        yield start("p-0")


@pytest.fixture
def decode(variant: str) -> Iterator[Decode]:
    name, options = VARIANTS[variant]
    config = Config(transport="loopback", staging_bytes=0, transfer_timeout=DEADLINE_S, handshake_timeout=20.0)
    made = Decode(config, lambda: create(name, options))
    yield made
    made.loop.close()


def receives(decode: Decode, prefill: Instance, name: str) -> bool:
    decode.worker.memory[:] = decode.before
    [good] = decode.received(request_of(name, prefill.ask(name)))
    return good and bool((decode.worker.memory == decode.expected()).all())


def test_an_instance_that_slept_is_read_again_as_another(decode: Decode, prefill: Instance) -> None:
    assert receives(decode, prefill, "a")
    old = prefill.ask("old")
    for night in range(3):
        prefill.ask("sleep")
        decode.loop.submit([request_of(f"asleep {night}", old)], [])
        assert decode.wait_for(f"asleep {night}") == [False], "its word is taken, and its memory is not touched"
        prefill.ask("wake")
        assert decode.received(request_of(f"too late {night}", old)) == [False], "what it had held is gone"
        assert receives(decode, prefill, f"awake {night}")
    decode.until(lambda: decode.drained == decode.quarantined, "nothing to be in quarantine")


def test_reads_under_way_end_when_an_instance_falls_asleep(decode: Decode, prefill: Instance) -> None:
    """Its lease has ended, so none of them is taken for good after that; and its memory is not there."""
    assert receives(decode, prefill, "warm")
    for night in range(5):
        names = [f"{night} {number}" for number in range(20)]
        orders = [request_of(name, prefill.ask(name)) for name in names]
        decode.loop.submit(orders, [])
        prefill.ask("sleep")
        decode.wait_for(*names)
        prefill.ask("wake")
        assert receives(decode, prefill, f"awake {night}")
    decode.until(lambda: decode.drained == decode.quarantined, "nothing to be in quarantine")
