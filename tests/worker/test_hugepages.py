"""Huge pages under caches: asked for page by page, with rests, until the memory goes."""

from __future__ import annotations

import logging
import mmap
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.worker import hugepages

NOWHERE = Segment(address=1 << 46, length=64 << 20, device="cpu", device_id=0)


@settings(deadline=None)
@given(st.integers(1, 1 << 40), st.integers(0, 1 << 30))
def test_the_huge_part_is_aligned_inside_and_misses_less_than_a_page_per_end(address: int, length: int) -> None:
    start, size = hugepages.huge_part(address, length)
    assert start % hugepages.HUGE_PAGE == 0 and size % hugepages.HUGE_PAGE == 0
    if size:
        assert address <= start < address + hugepages.HUGE_PAGE
        assert 0 <= address + length - (start + size) < hugepages.HUGE_PAGE
    else:
        assert length < 2 * hugepages.HUGE_PAGE


def test_collapsing_changes_no_byte() -> None:
    with mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as region:
        memory = np.frombuffer(region, dtype=np.uint8)
        memory[:] = np.arange(8 << 20, dtype=np.uint64).astype(np.uint8)
        before = memory.tobytes()
        segment = Segment(address=int(memory.ctypes.data), length=8 << 20, device="cpu", device_id=0)
        background = hugepages.Background([segment])
        assert background.thread.daemon
        background.thread.join()
        assert memory.tobytes() == before
        del memory


def test_a_kernel_that_refuses_is_only_a_debug_message(caplog: pytest.LogCaptureFixture) -> None:
    on_a_device = Segment(address=1 << 46, length=4 << 20, device="cuda", device_id=0)
    with caplog.at_level(logging.DEBUG, logger="vllm_pd_connector"):
        assert hugepages.collapse([NOWHERE, on_a_device]) == 0
    assert "32 of 32 huge pages refused (last: ENOMEM)" in caplog.text


def test_each_page_is_followed_by_a_rest_which_may_be_the_last() -> None:
    took: list[float] = []

    def rest(seconds: float) -> bool:
        took.append(seconds)
        return len(took) == 3

    assert hugepages.collapse([NOWHERE], rest) == 0
    assert len(took) == 3 and min(took) > 0


def test_pages_are_made_for_a_share_of_the_time_until_the_end_is_told() -> None:
    background = hugepages.Background(())
    background.thread.join()
    rests: list[float] = []
    event, background._ends = background._ends, SimpleNamespace(wait=rests.append)  # type: ignore[assignment]
    background._rest(0.003)
    assert rests == [pytest.approx(0.027)]
    background._ends = event
    background.end()
    assert background._rest(1000.0)
