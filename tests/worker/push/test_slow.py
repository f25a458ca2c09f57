"""A push of which bytes still move has no deadline, on either side; one of which nothing moves fails with that text."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.support.patience import PATIENCE_S
from tests.support.worker.decode_instance import set_faults, until
from tests.support.worker.library_processes import VARIANTS
from tests.support.worker.writer import CONFIG, TINY, Target, Writer, pushed, whole, writes
from vllm_pd_connector.config import Config
from vllm_pd_connector.protocol.push import table
from vllm_pd_connector.transport import loopback
from vllm_pd_connector.transport.base import TransferStatus, Transport
from vllm_pd_connector.transport.registry import create
from vllm_pd_connector.worker.push import driver

LIMIT_S = 3.0
LONG = PATIENCE_S * 10


@pytest.fixture(autouse=True)
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is told more often than deadlines pass, as it is with the default of either."""
    monkeypatch.setattr(table, "ANSWER_S", LIMIT_S / 10)
    monkeypatch.setattr(driver, "TELL_S", LIMIT_S / 10)


@contextlib.contextmanager
def pair(prefill_s: float, decode_s: float) -> Iterator[tuple[Writer, Target]]:
    """A prefill and a decode instance with these values of transfer_timeout."""
    sides = [
        msgspec.structs.replace(CONFIG, staging_bytes=0, transfer_timeout=seconds) for seconds in (prefill_s, decode_s)
    ]
    with contextlib.closing(Writer(sides[0])) as writer, contextlib.closing(Target(sides[1])) as target:
        set_faults(writer.transports, held=True)
        writer.whole("a")
        target.loop.submit([target.request(writer)], [])
        yield writer, target
        set_faults(writer.transports, held=False)


def test_a_push_whose_parts_end_goes_on_at_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = itertools.count()
    monkeypatch.setattr(loopback._Transfer, "left", property(lambda transfer: -next(ended)))
    with pair(LIMIT_S, LIMIT_S) as (writer, target):
        until(lambda: all(writes(loop) for loop in writer.loops), "the writes")
        active, [push] = target.active("d"), writer.pushes()[0]
        assert active is not None
        first, began = push.machine.next_deadline(), time.monotonic()
        until(lambda: (push.machine.next_deadline() or 0) > first + 3 * LIMIT_S, "deadlines of the prefill side")
        until(lambda: active.machine._moved_at > began + 3 * LIMIT_S, "answers with news")
        assert not active.reported
        set_faults(writer.transports, held=False)
        assert target.wait_for("d") == [True]
        assert whole(target.worker.memory, target.expected()) and not target.failures


def test_a_prefill_side_whose_writes_stand_still_says_so() -> None:
    with pair(LIMIT_S, LONG) as (_, target):
        assert target.wait_for("d") == [False]
        assert target.failures == {"transfer_failed": 1}


def test_a_decode_side_that_hears_of_no_progress_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with pair(LONG, LIMIT_S) as (_, target):
        assert target.wait_for("d") == [False]
        assert target.failures == {"deadline": 1} and target.quarantined == {"d"}
    assert f"took longer than {LIMIT_S:g} s: the prefill side answers" in caplog.text


class Slow:
    """A transport over which a transfer arrives every so many seconds."""

    def __init__(self, real: Transport, every_s: float):
        self._real, self._every_s = real, every_s
        self._next: float | None = None  # counted from when the first is looked at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def poll(self, transfer: Any) -> TransferStatus:
        now = time.monotonic()
        self._next = self._next or now + self._every_s
        if now < self._next:
            return TransferStatus.RUNNING
        status = self._real.poll(transfer)
        if status is TransferStatus.DONE:
            self._next = now + self._every_s
        return status


def test_a_push_over_a_slow_library_takes_longer_than_its_deadline(variant: str) -> None:
    name, options = VARIANTS[variant]
    limit_s, part_s = 8.0, 3.0  # there are three parts, and a busy machine adds less than five seconds to one
    config = Config(transport="loopback", mode="push", transfer_timeout=limit_s, staging_bytes=TINY)

    def slow() -> Transport:
        return Slow(create(name, options), part_s)  # type: ignore[return-value]

    with (
        contextlib.closing(Writer(config, make=slow)) as writer,
        contextlib.closing(Target(config, lambda: create(name, options))) as target,
    ):
        began = time.monotonic()
        assert pushed(writer, target)
        assert time.monotonic() - began > limit_s, "no deadline was passed"
        assert whole(target.worker.memory, target.expected())
