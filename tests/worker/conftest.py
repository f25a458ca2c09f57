"""What all tests of workers share."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest

from tests.support.geometry.world import instance
from tests.support.ports import free_port
from tests.support.worker.decode_instance import Prefill, decode, prefill
from tests.support.worker.library_processes import VARIANTS
from tests.support.worker.prefill_instance import MODEL, P_SIDE, real
from tests.support.worker.writer import CONFIG, Target, Writer
from vllm_pd_connector.config import Config, parse_config
from vllm_pd_connector.worker import half as half_module
from vllm_pd_connector.worker import transfer_loop
from vllm_pd_connector.worker.half import WorkerHalf
from vllm_pd_connector.worker.peers import process_watch
from vllm_pd_connector.worker.push.driver import Pushes
from vllm_pd_connector.worker.receive.driver import Receives

__all__ = ["decode", "prefill"]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has ended is known to have ended soon."""
    monkeypatch.setattr(process_watch, "SETTLE_S", 0.1)
    monkeypatch.setattr(process_watch, "AGAIN_S", 0.05)
    monkeypatch.setattr(process_watch, "LOOK_S", 0.02)


@pytest.fixture(autouse=True)
def starved(monkeypatch: pytest.MonkeyPatch) -> None:
    """With PD_TEST_STARVED set: transfer threads whose turns have no time, and that get a processor after a while only.
    What takes two turns mostly happens in one where nothing else runs."""
    if not os.environ.get("PD_TEST_STARVED"):
        return
    tick = Receives.tick

    def late(receives: Receives, now: float) -> None:
        tick(receives, now)
        time.sleep(0.01)

    monkeypatch.setattr(transfer_loop, "TURN_S", -0.001)
    monkeypatch.setattr(Receives, "tick", late)


@pytest.fixture(autouse=True)
def filed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each turn every push stands where the next one finds it, and nothing else does."""
    turn = Pushes.turn

    def checked(pushes: Pushes, now: float, until: float) -> None:
        turn(pushes, now, until)
        going = pushes._pushes
        waits = {key: push.machine.next_step for key, push in going.items() if push.machine.next_step is not None}
        assert {key: step for step, some in pushes._waiting_for.items() for key in some} == waits
        assert pushes._awake == {key: push for key, push in going.items() if not push.rests}

    monkeypatch.setattr(Pushes, "turn", checked)


@pytest.fixture
def other() -> Iterator[Prefill]:
    with contextlib.closing(Prefill("p-1")) as made:
        yield made


@pytest.fixture
def config(request: pytest.FixtureRequest) -> Config:
    """Of pairs that push."""
    return msgspec.structs.replace(CONFIG, **getattr(request, "param", {}))


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerHalf]:
    """Of a prefill instance that writes and is asked for checksums; its caches are registered."""
    [worker] = instance(MODEL, P_SIDE, "p-0")[:1]
    monkeypatch.setattr(half_module, "build_manifest", lambda *_, **__: real(worker))
    extra = {"transport": "loopback", "mode": "push", "verify": "all", "side_channel_port": free_port()}
    config = parse_config({**extra, "shutdown_timeout": 0})
    roles = SimpleNamespace(is_kv_producer=True, is_kv_consumer=True)
    engines = SimpleNamespace(data_parallel_index=0, use_ubatching=False)
    made = WorkerHalf(config, SimpleNamespace(kv_transfer_config=roles, parallel_config=engines), None)
    made.register({})
    yield made
    made.shutdown()


@pytest.fixture(params=list(VARIANTS))
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def writer(config: Config) -> Iterator[Writer]:
    with contextlib.closing(Writer(config)) as made:
        yield made


@pytest.fixture
def target(config: Config) -> Iterator[Target]:
    with contextlib.closing(Target(config)) as made:
        yield made
