"""What of this machine decides whether and how instances on it move caches, read from the kernel and from what is
installed. Nothing is started, and no library is loaded."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal

from vllm_pd_connector.config import Config
from vllm_pd_connector.errors import InvalidConfig
from vllm_pd_connector.sidechannel.net.sockets import require_free
from vllm_pd_connector.transport import registry
from vllm_pd_connector.transport.base import Use

State = Literal["good", "note", "bad"]

PACKAGES: Final = (
    "vllm-pd-connector",
    "vllm",
    "torch",
    "nixl",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
    "pyzmq",
)
SMALL_SHM_BYTES: Final = 1 << 30
_SYS_PTRACE, _IPC_LOCK = 19, 14
_DEVICES = "UCX_NET_DEVICES"


@dataclass(frozen=True, slots=True)
class Finding:
    """`bad` keeps instances from working, a `note` is worth knowing."""

    topic: str
    state: State
    says: str


def findings(root: Path = Path("/")) -> Iterator[Finding]:
    """Of this machine; `root` is where its `proc`, `sys` and `dev` are."""
    yield from _software()
    by_nixl = not _refusal("nixl")
    rdma = list(_active_rdma(root / "sys/class/infiniband"))
    opens = any(os.access(one, os.R_OK | os.W_OK) for one in (root / "dev/infiniband").glob("uverbs*"))
    interfaces = _active_interfaces(root / "sys/class/net")
    yield _network(interfaces, by_nixl)
    yield _rdma(rdma, opens)
    active = [*(one.name for one in interfaces), *(port.split()[0] for port in rdma)]
    yield _ways(rdma, opens, active if by_nixl else None)
    yield _shared_memory(root / "dev/shm")
    yield from _rights(root / "proc", bool(rdma))
    yield _gpus(root / "proc", bool(rdma))
    yield _port()
    resolution = time.get_clock_info("monotonic").resolution
    yield Finding("clock", "good", f"resolution {resolution:g} s; clocks of hosts need not agree, each counts its own")


def _software() -> Iterator[Finding]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    yield Finding("software", "good", ", ".join(found))
    for name in registry.names():
        if name == registry.IN_ONE_PROCESS:
            continue
        says = _refusal(name)
        good = "is installed; its library is loaded when an instance starts"
        yield Finding(f"transport {name}", "note" if says else "good", says or good)


def _refusal(transport: str) -> str:
    """Why instances here cannot have it; empty if they can."""
    try:
        registry.check(transport, use=Use(serves=False))  # whom it serves is for its configuration to say
    except InvalidConfig as error:
        return " ".join(str(error).split())
    return ""


def _active_rdma(devices: Path) -> Iterator[str]:
    for port in sorted(devices.glob("*/ports/*")):
        if "ACTIVE" in _read(port / "state"):
            yield f"{port.parent.parent.name}:{port.name} ({_read(port / 'rate')})"


def _active_interfaces(interfaces: Path) -> list[Path]:
    every = sorted(interfaces.iterdir()) if interfaces.is_dir() else ()
    return [one for one in every if _read(one / "operstate") in ("up", "unknown")]


def _network(interfaces: list[Path], by_nixl: bool) -> Finding:
    up, bridges = [], []
    for one in interfaces:
        if one.name != "lo":
            speed = _read(one / "speed")
            known = f", {speed} Mb/s" if speed.isdigit() else ""
            up.append(f"{one.name} (mtu {_read(one / 'mtu')}{known})")
            bridges += [one.name] if (one / "bridge").exists() else []
    says = ", ".join(up) or "no interface is up but loopback"
    if bridges and by_nixl and _named_devices() is None:
        says += (
            f"; {' and '.join(bridges)} {'is a bridge' if len(bridges) == 1 else 'are bridges'}, on which other hosts "
            "have the same addresses: UCX may choose it; set UCX_NET_DEVICES=<interface of side_channel_host>"
        )
        return Finding("network", "note", says)
    return Finding("network", "good" if up else "note", says)


def _named_devices() -> list[str] | None:
    """What UCX is told to take, None for all."""
    told = os.environ.get(_DEVICES, "all")
    return None if told == "all" else told.split(",")


def _rdma(rdma: list[str], opens: bool) -> Finding:
    """A container sees the kernel's list of devices whether it may open one or not."""
    if not rdma:
        return Finding("RDMA", "note", "no device has an active port")
    if not opens:
        says = (
            f"{', '.join(rdma)}, and this process may not read and write a /dev/infiniband/uverbs*: UCX takes TCP; "
            "docker: --device /dev/infiniband, Kubernetes: the device plugin's resource, else: the device's group"
        )
        return Finding("RDMA", "note" if os.environ.get("UCX_TLS") else "bad", says)
    return Finding("RDMA", "good", ", ".join(rdma))


def _ways(rdma: list[str], opens: bool, active: list[str] | None) -> Finding:
    """`active`: the devices and interfaces that UCX finds; None where nobody would take it."""
    named = _named_devices() or []
    if active is not None and named == [""]:
        says = f"{_DEVICES} is set and empty: UCX takes no device then, and NIXL does not start; unset it"
        return Finding("UCX", "bad", f"{says}. There are {', '.join(active) or 'none'}")
    # UCX takes names as they are, blanks too (1.23, seen); "^a,b" leaves these out, "a[0-3]" are four.
    wanted = [] if named[:1] and named[0].startswith("^") else [one for one in named if "[" not in one]
    if active is not None and (missing := [repr(one) for one in wanted if one not in active]):
        says = (
            f"{_DEVICES}={','.join(named)}: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not here or "
            f"not active; NIXL does not start where none is. There are {', '.join(active) or 'none'}"
        )
        return Finding("UCX", "bad", says)
    given = [f"{key}={value}" for key, value in sorted(os.environ.items()) if key in ("UCX_TLS", _DEVICES)]
    if given:
        return Finding("UCX", "note", f"chooses among what {' and '.join(given)} leaves it")
    between = "TCP, for there is no RDMA"
    if rdma:
        between = f"RDMA, for {rdma[0]} is active" if opens else f"TCP, for {rdma[0]} cannot be opened"
    return Finding("UCX", "good", f"on one host shared memory, between hosts {between}")


def _shared_memory(where: Path) -> Finding:
    try:
        found = os.statvfs(where)
    except OSError as error:
        return Finding("/dev/shm", "bad", f"{error.strerror}: vLLM's processes and UCX need it")
    size, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
    text = f"{free >> 20} MiB of {size >> 20} MiB are free"
    if size < SMALL_SHM_BYTES:
        return Finding("/dev/shm", "note", f"{text}; containers: --ipc host or --shm-size 8g")
    return Finding("/dev/shm", "good", text)


def _rights(proc: Path, rdma: bool) -> Iterator[Finding]:
    bits = next(
        (line.split()[1] for line in _read(proc / "self/status").splitlines() if line.startswith("CapEff")), "0"
    )
    scope = _read(proc / "sys/kernel/yama/ptrace_scope") or "0"
    traces = bool(int(bits, 16) >> _SYS_PTRACE & 1) or scope == "0"
    says = f"SYS_PTRACE {'is' if int(bits, 16) >> _SYS_PTRACE & 1 else 'is not'} given, ptrace_scope is {scope}"
    more = "" if traces else ": processes of one host copy through shared memory, not straight from each other (CMA)"
    yield Finding("capabilities", "good" if traces else "note", says + more)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locks = limit == resource.RLIM_INFINITY or bool(int(bits, 16) >> _IPC_LOCK & 1)
    text = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"
    if locks or not rdma:
        yield Finding("locked memory", "good", f"{text}{'' if rdma else ', which only RDMA asks for'}")
    else:
        what = "ulimit -l unlimited (docker: --ulimit memlock=-1), or for root alone the capability IPC_LOCK"
        yield Finding("locked memory", "bad", f"{text}: RDMA locks the caches; {what}")


def _gpus(proc: Path, rdma: bool) -> Finding:
    gpus = len(list((proc / "driver/nvidia/gpus").glob("*")))
    if not gpus:
        none = "there is none of NVIDIA's, and other makers' are not looked at; without any, caches are in host memory"
        return Finding("GPU", "note", none)
    peer = any(line.startswith("nvidia_peermem ") for line in _read(proc / "modules").splitlines())
    if rdma and not peer:
        return Finding(
            "GPU", "note", f"{gpus}, and nvidia_peermem is not loaded: without DMA-BUF, RDMA cannot reach them"
        )
    return Finding("GPU", "good", f"{gpus}{', RDMA reaches them by nvidia_peermem' if rdma else ''}")


def _port() -> Finding:
    try:
        host, port = Config().side_channel(0)
        require_free(host, port, Config().host_key())
    except InvalidConfig as error:
        return Finding("ports", "note", str(error))
    return Finding("ports", "good", f"the side channel's, {host}:{port}, is free")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
