"""Lives of a prefill instance, and of its workers: which one is asked, and whose end ends a quarantine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.ports import free_port
from tests.support.worker.decode_instance import in_its_thread, lacking, set_faults, until
from tests.support.worker.writer import CONFIG, Target, Writer, freed, hold_writes, pushed, whole, writes
from vllm_pd_connector.geometry.manifest import Manifest
from vllm_pd_connector.protocol.wire.push_messages import WithdrawPush


def test_the_first_request_after_a_prefill_instance_was_restarted_is_served(target: Target) -> None:
    first = Writer(CONFIG, free_port())
    assert pushed(first, target)
    freed(first, "a")
    port = first.server.port
    target.hear_the_end_of(first)
    with contextlib.closing(Writer(CONFIG, port)) as second:
        assert pushed(second, target, "e", "b")
        assert whole(target.worker.memory, target.expected())
        freed(second, "b")


@contextlib.contextmanager
def without_a_core(target: Target) -> Iterator[Writer]:
    """A prefill instance whose core has ended while its workers write for request d; they end at last."""
    writer = Writer(CONFIG, free_port())
    hold_writes(writer, target)
    target.hear_the_end_of(SimpleNamespace(close=writer.server.close))
    try:
        yield writer
    finally:
        for loop in writer.loops:
            loop.close()
    target.until(lambda: target.drained == {"d"}, "the quarantine to end with the workers")


def test_a_port_that_refuses_says_nothing_of_the_workers_behind_it(target: Target) -> None:
    with without_a_core(target) as writer:
        asked: list[object] = []
        ask = target.loop._calls.ask

        def counted(address: str, request: object, timeout_s: float, handler: Any = None) -> None:
            asked.append(request)
            ask(address, request, min(timeout_s, 0.05), handler)  # type: ignore[arg-type]

        in_its_thread(target.loop, lambda _: setattr(target.loop._calls, "ask", counted))
        assert target.wait_for("d") == [False]
        assert target.quarantined == {"d"}
        until(lambda: sum(isinstance(request, WithdrawPush) for request in asked) > 3, "questions in vain")
        target.collect()
        assert not target.drained
        before = target.worker.memory.copy()
        set_faults(writer.transports, held=False)
        until(lambda: not any(writes(loop) for loop in writer.loops), "the writes to land")
        assert not whole(target.worker.memory, before)


def test_another_life_at_the_address_says_nothing_of_the_workers_of_the_last(target: Target) -> None:
    with without_a_core(target) as writer, contextlib.closing(Writer(CONFIG, writer.server.port)) as second:
        second.whole("b")
        target.loop.submit([target.request(second, "e", "b", blocks=(lacking((1, 3, 5)),))], [])
        assert target.wait_for("d", "e") == [False, True]

        def heard() -> bool:  # and asked again, because it says nothing of that push
            return bool(target.drained) or second.server.counts().get("WithdrawPush", 0) > 1

        target.until(heard, "its word for the last one's push")
        assert target.quarantined == {"d"} and not target.drained
        freed(second, "b")


def test_a_push_fails_at_once_when_a_worker_has_ended(
    writer: Writer, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was killed: it says nothing of what it wrote."""
    for loop in writer.loops:
        monkeypatch.setattr(loop._pushes, "fail_all", lambda *_: None)
    hold_writes(writer, target)
    writer.loops[0].close()
    assert target.wait_for("d") == [False]
    assert target.failures == {"peer_unreachable": 1} and target.quarantined == {"d"} and not target.drained
    writer.loops[1].close()
    target.until(lambda: target.drained == {"d"}, "the quarantine to end with the other worker")


def test_nothing_is_asked_of_workers_that_cannot_be_watched(writer: Writer, target: Target, caplog) -> None:
    one, other = writer.server._manifests.manifests
    blind = msgspec.structs.replace(msgspec.msgpack.decode(other, type=Manifest), life=None)
    writer.server.set_manifests([one, msgspec.msgpack.encode(blind)], writer.tokens)
    assert not pushed(writer, target)
    assert "PushInto" not in writer.server.counts() and target.quarantined == target.drained
    assert "cannot be watched" in caplog.text and "run the same release" in caplog.text
