"""Which device a thread of ours works on."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import pytest
import torch

from tests.support.gpu.stand_in import VARIABLE
from vllm_pd_connector.compat.memory import make_device_current, marker
from vllm_pd_connector.geometry.manifest import Segment


def test_a_thread_works_on_the_segments_device_and_something_was_done_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA says of a new thread that device 0 is its own, so that choosing it binds no context, which libraries use."""
    done: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", done.append)
    monkeypatch.setattr(torch, "zeros", lambda size, device: done.append(device))
    make_device_current([Segment(0, 16, "cpu", 0), Segment(0, 16, "cuda", 3)])
    assert done == [3, torch.device("cuda", 3)]
    done.clear()
    make_device_current([Segment(0, 16, "cpu", 0)])
    assert not done


def test_who_waits_for_what_a_device_does_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's own wait spins: in the thread that launches forwards, where the step of a drafter ends a prefill."""
    made: list[dict[str, Any]] = []

    class Event:
        def __init__(self, **how: Any) -> None:
            made.append(how)

        def record(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "Event", Event)
    marker([Segment(0, 16, "cuda", 3)])()
    assert made == [{"blocking": True}]


@pytest.mark.gpu
def test_a_new_thread_has_the_segments_context() -> None:
    memory = torch.zeros(16, device="cuda:0")
    found: list[tuple[int, int | None]] = []

    def look() -> None:
        make_device_current([Segment(memory.data_ptr(), 16, "cuda", 0)])
        if VARIABLE in os.environ:  # a stand-in for a GPU has no contexts: it is seen that the call ends
            found.append((0, 1))
            return
        context = ctypes.c_void_p()
        status = ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
        found.append((status, context.value))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    [(status, context)] = found
    assert status == 0 and context
