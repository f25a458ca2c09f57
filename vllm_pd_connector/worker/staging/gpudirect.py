"""What a network device wrote into a GPU's memory, made visible to kernels that are launched afterwards.

A NIC that writes into a GPU (GPUDirect RDMA) reports the end of it elsewhere: a read's end in the memory of the host,
a push's end over the side channel, which is another device and another connection. The report may overtake the bytes
inside the receiving machine. Most GPUs order such writes before work that is launched later, and say so; of the others
the driver has a call that returns when all of them are visible. So the receiving worker asks the GPU once, and makes
that call, if it is needed, where it learns of an end and before it lets anybody look.

AMD's driver has no such call and says nothing. There, as vLLM's own connector does, the GPU is waited for where a model
has recurrent states, whose pages a former request read and wrote in each step. That takes what its steps take.

Source: CUDA driver API, `cuFlushGPUDirectRDMAWrites` and the attributes of a device from 116 to 118 (CUDA 11.3 on);
vLLM 0.32, `_sync_device_after_direct_recv` of `nixl/base_worker.py`.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

DRIVER = "libcuda.so.1"

# CUdevice_attribute: CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_…
SUPPORTED, FLUSH_OPTIONS, WRITES_ORDERING = 116, 117, 118
_ORDERED_FOR_OWNER = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER; a larger number is a larger scope
_FLUSH_BY_HOST = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST, a bit
_OF_CURRENT_CONTEXT, _TO_OWNER = 0, 100  # CUflushGPUDirectRDMAWritesTarget, …Scope


def nothing() -> None:
    """There is nothing to call: what was written is visible, or nobody knows."""


@functools.cache
def flusher(device_id: int, states: bool = False) -> Callable[[], None]:
    """What to call after a network device wrote into this GPU, numbered as this process sees it, and before anything
    is launched that reads it; `states`: of a model that has recurrent ones. In a thread whose current device it is.

    The call raises TransferError when the driver refuses. Where it is not known whether the GPU needs one, that is
    logged, and nothing is called.
    """
    import torch

    if torch.version.hip is not None:
        return functools.partial(_wait_for, device_id) if states else nothing
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as error:
        return _unknown(device_id, f"{DRIVER} cannot be loaded ({error})")
    return flusher_of(driver, device_id)


def flusher_of(driver: Any, device_id: int) -> Callable[[], None]:
    """See `flusher`; `driver` is CUDA's library."""
    device, found = ctypes.c_int(), {}
    status = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), device_id)
    for attribute in (SUPPORTED, FLUSH_OPTIONS, WRITES_ORDERING):
        value = ctypes.c_int()
        if status := status or driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return _unknown(device_id, f"its driver does not tell attribute {attribute} (CUDA error {status})")
        found[attribute] = value.value
    if not found[SUPPORTED] or found[WRITES_ORDERING] >= _ORDERED_FOR_OWNER:
        return nothing
    if not found[FLUSH_OPTIONS] & _FLUSH_BY_HOST:
        return _unknown(device_id, "it orders them for nobody, and its driver has no call that waits for them")
    logger.info("GPU %d is told to wait for what network devices wrote into it", device_id)
    return functools.partial(_flush, driver)


def _wait_for(device_id: int) -> None:
    import torch

    try:
        torch.cuda.synchronize(device_id)
    except RuntimeError as error:
        raise TransferError(f"what was received may not be visible: GPU {device_id}: {error}") from error


def _flush(driver: Any) -> None:
    if status := driver.cuFlushGPUDirectRDMAWrites(_OF_CURRENT_CONTEXT, _TO_OWNER):
        raise TransferError(f"what was received may not be visible: cuFlushGPUDirectRDMAWrites: CUDA error {status}")


def _unknown(device_id: int, why: str) -> Callable[[], None]:
    logger.warning(
        "whether GPU %d shows its kernels at once what network devices wrote into it is not known: %s; over RDMA, set "
        'verify to "sample" to see whether it does',
        device_id,
        why,
    )
    return nothing
