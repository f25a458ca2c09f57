"""How much of a transfer runs at once, by how long the library's calls take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_pd_connector.transport.nixl import transport as nixl_transport

MIB = 1 << 20


class Clocks:
    """The clock and a thread's processor time, as far as calls of a library let them go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
        self.clock = self.busy = 0.0
        self.asked = 0
        self.peer: Any = SimpleNamespace(window=window, timed=0)
        clocks = SimpleNamespace(monotonic=lambda: self.clock, thread_time=self._thread_time)
        monkeypatch.setattr(nixl_transport, "time", clocks)

    def _thread_time(self) -> float:
        self.asked += 1
        return self.busy

    def call(self, took: float, busy: float, ended: int) -> int:
        """The window after a call that took so long, of this thread's processor time so much."""
        began = nixl_transport._now(self.peer)
        self.clock, self.busy = self.clock + took, self.busy + busy
        nixl_transport._fit_window(self.peer, began, ended)
        return int(self.peer.window)


def test_the_window_follows_how_long_the_librarys_calls_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch, 16 * MIB)
    assert clocks.call(0.0015, 0.0015, 8 * MIB) == 16 * MIB
    assert clocks.call(0.0001, 0.0001, 0) == 16 * MIB, "nothing has ended: the call does not say what it costs to copy"
    assert clocks.call(0.0001, 0.0001, 5 * MIB) == 21 * MIB
    for _ in range(10):
        clocks.call(0.01, 0.01, 0)
    assert clocks.peer.window == 2 * MIB
    for _ in range(1000):
        clocks.call(0.0001, 0.0001, 16 * MIB)
    assert clocks.peer.window == 64 * MIB, "over TCP most looks are quick, and one copies all that others let in"


def test_a_call_is_long_that_took_this_threads_time_and_not_one_in_which_others_had_the_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks = Clocks(monkeypatch, 16 * MIB)
    assert clocks.call(20, 10, MIB) == 16 * MIB, "nothing is known of it but the clock"
    for _ in range(5):
        assert clocks.call(20, 0.0015, MIB) == 16 * MIB
    assert clocks.call(20, 0.0001, MIB) == 17 * MIB, "it was short, and others had the core"
    assert clocks.call(20, 10, MIB) == 17 * MIB // 2


def test_the_kernel_is_asked_for_a_threads_time_only_for_a_while_after_a_call_that_seemed_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks = Clocks(monkeypatch, 16 * MIB)
    for _ in range(5):
        clocks.call(0.0019, 0.0019, MIB)
        clocks.call(0.0001, 0.0001, MIB)
    clocks.call(0.0021, 0.0021, MIB)
    assert not clocks.asked
    for _ in range(nixl_transport._TIMED):
        clocks.call(0.0001, 0.0001, MIB)
    assert clocks.asked == nixl_transport._TIMED
    clocks.call(0.0001, 0.0001, MIB)
    assert clocks.asked == nixl_transport._TIMED, "it was long ago"
