"""What all tests of workers share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import pytest

from tests.support.worker.decode_instance import Prefill, decode, prefill
from tests.support.worker.library_processes import VARIANTS
from tests.support.worker.writer import CONFIG, Target, Writer
from vllm_pd_connector.config import Config
from vllm_pd_connector.worker.peers import process_watch

__all__ = ["decode", "prefill"]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has ended is known to have ended soon."""
    monkeypatch.setattr(process_watch, "SETTLE_S", 0.1)
    monkeypatch.setattr(process_watch, "AGAIN_S", 0.05)
    monkeypatch.setattr(process_watch, "LOOK_S", 0.02)


@pytest.fixture
def other() -> Iterator[Prefill]:
    with contextlib.closing(Prefill("p-1")) as made:
        yield made


@pytest.fixture
def config(request: pytest.FixtureRequest) -> Config:
    """Of pairs that push."""
    return msgspec.structs.replace(CONFIG, **getattr(request, "param", {}))


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
