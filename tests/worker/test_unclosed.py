"""Ends of a worker's transfer thread that cannot be had: its transport does not close, or the thread never began."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.worker.decode_instance import Decode, Prefill, set_faults, until
from vllm_pd_connector.config import Config
from vllm_pd_connector.errors import PDConnectorError, TransferError
from vllm_pd_connector.transport import registry
from vllm_pd_connector.transport.loopback import LoopbackTransport
from vllm_pd_connector.worker import transfer_loop
from vllm_pd_connector.worker.half import WorkerHalf


class Unclosed(LoopbackTransport):
    def close(self) -> None:
        raise RuntimeError("the library does not end")


def test_the_memory_does_not_go_where_the_transport_does_not_close_and_nobody_takes_the_worker_for_ended(
    half: WorkerHalf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    half.unregister()
    monkeypatch.setattr(registry, "create", lambda *_: Unclosed())
    half.restore()
    loop = half._loop
    assert loop is not None
    for call in (half.unregister, half.unregister, half.restore):
        with pytest.raises(PDConnectorError, match=r"pd-transfer .* has not ended: restart the instance"):
            call()
    assert "transport loopback does not close" in caplog.text
    socket.create_connection((loop.life.address, loop.life.port)).close()
    loop._processes.close()


def test_a_transport_that_takes_long_to_close_is_waited_for_by_who_asks_again(
    half: WorkerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing = threading.Event()

    class Slow(LoopbackTransport):
        def close(self) -> None:
            assert closing.wait(PATIENCE_S)

    half.unregister()
    monkeypatch.setattr(registry, "create", lambda *_: Slow())
    monkeypatch.setattr(transfer_loop, "SHUTDOWN_S", 0.05)
    half.restore()
    with pytest.raises(PDConnectorError, match="ask for sleep again later, or restart the instance"):
        half.unregister()
    closing.set()
    until(lambda: not half._ending[0].runs, "the end of the thread")
    half.unregister()


def test_a_transport_that_could_not_register_and_does_not_close_keeps_the_memory(
    half: WorkerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refuses(Unclosed):
        def register(self, segments: Any) -> None:
            raise TransferError("no memory can be pinned")

    half.unregister()
    monkeypatch.setattr(registry, "create", lambda *_: Refuses())
    with pytest.raises(TransferError, match="no memory can be pinned"):
        half.restore()
    with pytest.raises(PDConnectorError, match="restart the instance"):
        half.restore()
    half._ending[0]._processes.close()  # type: ignore[union-attr]


def test_reads_of_a_transport_that_does_not_close_are_not_known_to_end(prefill: Prefill) -> None:
    decode = Decode(Config(transport="loopback", staging_bytes=0), transport=Unclosed())
    set_faults(prefill.transports, frozen=True)
    decode.loop.submit([prefill.request("a")], [])
    until(lambda: decode.reads("a"), "the read")
    decode.loop.close()
    assert decode.wait_for("a") == [False]
    assert decode.quarantined == {"a"} and not decode.drained
    decode.loop._processes.close()


def test_a_waking_for_which_no_thread_is_left_says_so_and_can_be_asked_for_again(
    half: WorkerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    half.unregister()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                half.restore()
    half.restore()
    assert half._loop is not None and half._loop.runs


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_orders_that_the_thread_had_not_taken_when_it_ended_are_reported(
    decode: Decode, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM waits for each; a sleep may come behind the step that ordered it."""
    monkeypatch.setattr(decode.loop, "_take_orders", lambda now, until: None)
    decode.loop.submit([prefill.request("a"), prefill.request("b")], ["a"])
    decode.loop.close()
    assert decode.wait_for("a", "b") == [False, False]
    assert not decode.quarantined
