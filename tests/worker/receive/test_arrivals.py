"""What a network device wrote into a GPU is made visible before anybody looks at it (`Copier.arrived`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.worker.decode_instance import Decode, Prefill
from tests.support.worker.late_memory import LateMemory
from tests.support.worker.writer import Target, Writer, pushed, whole
from vllm_pd_connector.config import Config


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateMemory:
    return LateMemory(monkeypatch)


@pytest.fixture(params=[0, 8 << 10], ids=["straight", "staged"])
def decode(request: pytest.FixtureRequest) -> Iterator[Decode]:
    made = Decode(Config(transport="loopback", staging_bytes=request.param))
    yield made
    made.loop.close()


def test_what_was_read_is_visible_when_it_is_reported(late: LateMemory, prefill: Prefill, decode: Decode) -> None:
    assert decode.received(prefill.request("a")) == [True] and late.calls
    assert (decode.worker.memory == decode.expected()).all()


def test_what_was_written_is_visible_when_it_is_reported(writer: Writer, target: Target, late: LateMemory) -> None:
    assert pushed(writer, target) and late.calls
    assert whole(target.worker.memory, target.expected())


def test_what_may_not_be_visible_fails_its_receive_alone(late: LateMemory, prefill: Prefill, decode: Decode) -> None:
    late.refuses = True
    assert decode.received(prefill.request("a")) == [False] and not decode.quarantined
    staging = decode.loop._stager.staging
    decode.until(lambda: staging.free == staging.length, "what else was on its way")
    assert decode.received(prefill.request("b")) == [True]
    assert (decode.worker.memory == decode.expected()).all()
