"""Which GPUs are told to wait for what network devices wrote into them, with a driver of the test's own: functions that
ctypes calls as it calls CUDA's."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.geometry.world import Model, Side, instance
from tests.support.worker.prefill_instance import real
from vllm_pd_connector.config import Config
from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.transport.loopback import LoopbackTransport
from vllm_pd_connector.worker.outbox import Outbox
from vllm_pd_connector.worker.staging import cuda, gpudirect, stager
from vllm_pd_connector.worker.staging.copiers import copier_for
from vllm_pd_connector.worker.staging.gpudirect import FLUSH_OPTIONS, SUPPORTED, WRITES_ORDERING, flusher_of, nothing
from vllm_pd_connector.worker.transfer_loop import TransferLoop

_INT = ctypes.POINTER(ctypes.c_int)
NEEDED = {SUPPORTED: 1, FLUSH_OPTIONS: 1, WRITES_ORDERING: 0}
HANDLE = 7  # of GPU 1


def driver(flushed: list[tuple[int, int]], attributes: dict[int, int], status: int = 0) -> Any:
    """CUDA's driver; an attribute that is not given is one that it does not know."""

    def get(device: Any, ordinal: int) -> int:
        device[0] = HANDLE
        return 0 if ordinal == 1 else 101

    def get_attribute(value: Any, attribute: int, device: int) -> int:
        assert device == HANDLE
        value[0] = attributes.get(attribute, -1)
        return 0 if attribute in attributes else 1

    def flush(target: int, scope: int) -> int:
        flushed.append((target, scope))
        return status

    return SimpleNamespace(
        cuInit=ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint)(lambda flags: 0),
        cuDeviceGet=ctypes.CFUNCTYPE(ctypes.c_int, _INT, ctypes.c_int)(get),
        cuDeviceGetAttribute=ctypes.CFUNCTYPE(ctypes.c_int, _INT, ctypes.c_int, ctypes.c_int)(get_attribute),
        cuFlushGPUDirectRDMAWrites=ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int)(flush),
    )


def test_a_gpu_that_does_not_order_them_itself_is_told_to_wait(caplog: pytest.LogCaptureFixture) -> None:
    flushed: list[tuple[int, int]] = []
    flush = flusher_of(driver(flushed, NEEDED), 1)
    assert not flushed
    flush()
    assert flushed == [(0, 100)], "of the current context, for kernels of the same GPU"
    assert "WARNING" not in caplog.text


@pytest.mark.parametrize("changes", [{WRITES_ORDERING: 100}, {WRITES_ORDERING: 200}, {SUPPORTED: 0}])
def test_a_gpu_that_orders_them_or_that_no_network_device_reaches_is_left_alone(
    changes: dict[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    flushed: list[tuple[int, int]] = []
    assert flusher_of(driver(flushed, NEEDED | changes), 1) is nothing
    assert not flushed and not caplog.text


@pytest.mark.parametrize(
    ("attributes", "ordinal", "reason"),
    [
        (NEEDED | {FLUSH_OPTIONS: 2}, 1, "has no call that waits for them"),
        ({SUPPORTED: 1}, 1, "does not tell attribute 117 (CUDA error 1)"),
        (NEEDED, 0, "does not tell attribute 116 (CUDA error 101)"),
    ],
)
def test_what_is_not_known_is_said(
    attributes: dict[int, int], ordinal: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert flusher_of(driver([], attributes), ordinal) is nothing
    assert reason in caplog.text and 'verify to "sample"' in caplog.text


def test_a_driver_that_refuses_is_an_error() -> None:
    with pytest.raises(TransferError, match="cuFlushGPUDirectRDMAWrites: CUDA error 700"):
        flusher_of(driver([], NEEDED, status=700), 1)()


def test_a_machine_without_cuda_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(gpudirect, "DRIVER", "libcuda-of-no-machine.so.1")
    gpudirect.flusher.cache_clear()
    assert [gpudirect.flusher(3) for _ in range(2)] == [nothing, nothing]
    assert caplog.text.count("libcuda-of-no-machine.so.1 cannot be loaded") == 1
    gpudirect.flusher.cache_clear()


def test_a_gpu_of_amd_is_waited_for_where_there_are_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver has no call, and vLLM waits there, too: a state's page was read by who had it before."""
    waited: list[int] = []
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    gpudirect.flusher.cache_clear()
    gpudirect.flusher(3, states=True)()
    assert waited == [3] and gpudirect.flusher(3) is nothing

    def broken(device_id: int) -> None:
        raise RuntimeError("HIP error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(TransferError, match="may not be visible: GPU 3: HIP error"):
        gpudirect.flusher(3, states=True)()
    gpudirect.flusher.cache_clear()


@pytest.mark.parametrize("states", [0, 2])
def test_a_worker_says_of_its_caches_whether_states_are_among_them(
    monkeypatch: pytest.MonkeyPatch, states: int
) -> None:
    told: list[bool] = []

    def copier(segments: object, *, copies: bool, states: bool) -> object:
        told.append(states)
        raise TransferError("that is all")

    monkeypatch.setattr(stager, "copier_for", copier)
    [worker] = instance(Model(3, 4, 20, 20, states=states), Side())
    with pytest.raises(TransferError, match="that is all"):
        TransferLoop(Config(transport="loopback"), real(worker), LoopbackTransport, Outbox(), 0, 1).start()
    assert told == [states > 0]


def test_a_copier_for_a_gpu_tells_its_flusher_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, bool]] = []
    monkeypatch.setattr(cuda, "stream_for", lambda use, device_id: None)
    monkeypatch.setattr(cuda, "flusher", lambda *asked: told.append(asked))
    for states in (False, True):
        copier_for([Segment(1 << 20, 1 << 20, "cuda", 3)], copies=False, states=states)
    assert told == [(3, False), (3, True)]
