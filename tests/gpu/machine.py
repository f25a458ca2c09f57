"""What the machine is: GPUs, drivers, libraries, what `vllm-pd doctor` finds, how the GPUs are connected."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

from tests.gpu.section import Findings, gpu_count, run
from vllm_pd_connector.cli.machine import findings as found_by_doctor
from vllm_pd_connector.worker.staging import gpudirect

PACKAGES = ("vllm", "torch", "triton", "nixl", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")


def main(findings: Findings) -> None:
    import torch

    findings.require(gpu_count() > 0, "torch sees no GPU here: the kit is for machines with one or more")
    for number in range(gpu_count()):
        one = torch.cuda.get_device_properties(number)
        findings.row(
            what=f"GPU {number}",
            says=f"{one.name}, capability {one.major}.{one.minor}, {one.total_memory >> 20} MiB; {_ordering(number)}",
        )
    for package in PACKAGES:
        try:
            findings.row(what=package, says=version(package))
        except PackageNotFoundError:
            continue
    findings.row(what="CUDA of torch", says=torch.version.cuda or "none")
    for one in found_by_doctor():
        findings.row(what=one.topic, says=f"{one.state}: {one.says}")
    for words in (("nvidia-smi",), ("nvidia-smi", "topo", "-m")):
        if shutil.which(words[0]):
            done = subprocess.run(words, capture_output=True, text=True, timeout=20)
            findings.remark(f"`{' '.join(words)}`:\n\n```\n{done.stdout}\n```\n")


def _ordering(number: int) -> str:
    """What the driver says of writes by network devices; see `gpudirect`."""
    try:
        driver = ctypes.CDLL(gpudirect.DRIVER)
    except OSError as error:
        return f"no driver ({error})"
    device, said = ctypes.c_int(), []
    status = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), number)
    for name in ("SUPPORTED", "FLUSH_OPTIONS", "WRITES_ORDERING"):
        value = ctypes.c_int()
        status = status or driver.cuDeviceGetAttribute(ctypes.byref(value), getattr(gpudirect, name), device)
        said.append(f"{name} {value.value if not status else f'unknown (CUDA error {status})'}")
    return f"GPUDirect: {', '.join(said)}"


if __name__ == "__main__":
    run(main)
