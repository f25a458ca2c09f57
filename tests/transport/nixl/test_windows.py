"""How much of a transfer runs at once, by how long the library's calls take."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from vllm_pd_connector.transport.nixl import transport as nixl_transport

MIB = 1 << 20


def test_the_window_follows_how_long_the_librarys_calls_take() -> None:
    peer: Any = SimpleNamespace(window=16 * MIB)
    fit = nixl_transport._fit_window
    fit(peer, 0.0015, 8 * MIB)
    assert peer.window == 16 * MIB
    fit(peer, 0.01, 8 * MIB)
    assert peer.window == 8 * MIB
    fit(peer, 0.0001, 0)
    assert peer.window == 8 * MIB, "nothing has ended: the call says nothing of what it costs to copy"
    fit(peer, 0.0001, 5 * MIB)
    assert peer.window == 13 * MIB
    for _ in range(9):
        fit(peer, 0.01, 0)
    assert peer.window == 2 * MIB
    for _ in range(1000):
        fit(peer, 0.0001, 16 * MIB)
    assert peer.window == 64 * MIB, "over TCP most looks are quick, and one would copy all that the others let in"


def test_a_call_is_long_that_took_this_threads_time_and_not_one_in_which_others_had_the_core() -> None:
    clock, busy = nixl_transport._now(nixl_transport._LEAST_WINDOW + 1)
    assert busy is not None
    assert 10 < nixl_transport._took((clock - 20, busy - 10)) < 19
    assert nixl_transport._took((clock - 20, busy)) < 5
    assert nixl_transport._took((time.monotonic(), busy - 10)) < 1, "the clock says that it was short"


def test_a_call_with_little_to_move_changes_no_window_by_having_taken_long() -> None:
    peer: Any = SimpleNamespace(window=16 * MIB)
    clock, busy = nixl_transport._now(nixl_transport._LEAST_WINDOW)
    nixl_transport._fit_window(peer, nixl_transport._took((clock - 20, busy)), MIB)
    assert peer.window == 16 * MIB
    nixl_transport._fit_window(peer, nixl_transport._took((time.monotonic(), busy)), MIB)
    assert peer.window == 17 * MIB
