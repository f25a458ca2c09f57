"""Starting Mooncake's engine: its options, and what must be right before there is one.

The protocol is the one asked for: the library ignores its protocol argument and takes RDMA if there is a device, TCP
if there is none. Here, `rdma` without a device is refused, and `tcp` (or `auto` for memory of the CPU) forces TCP.

Source of the library's behaviour: mooncake-transfer-engine 0.3.13.post1, observed and read.
"""

from __future__ import annotations

import importlib
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from vllm_pd_connector.errors import InvalidConfig, TransferError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm_pd_connector.transport.addresses import Address

INSTALL_HINT = (
    "install one of mooncake-transfer-engine (CUDA 12), mooncake-transfer-engine-cuda13 and "
    "mooncake-transfer-engine-non-cuda (Debian also needs libibverbs1), or choose another transport"
)
RDMA_DEVICES = Path("/sys/class/infiniband")

# Mooncake queues 1024 descriptors per peer and fails what comes on top of as many again.
MAX_IN_FLIGHT = 1024
MIN_RUN_BYTES, MAX_RUN_BYTES = 1 << 20, 8 << 20


class MooncakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of one engine.

    `protocol`: "auto" is "rdma" for device memory on a machine with RDMA devices, else "tcp". `device`: RDMA devices to
    use, separated by commas; "" is all. `address`: the IP address (4 or 6) that peers reach this worker at; "" takes
    the source address of the route to `route_to`, or of the default route when that is "" as well. `run_bytes`: longest
    descriptor. `in_flight`: descriptors of one transfer that the library has at a time, `in_flight_bytes` bounds their
    sum. `connect_timeout`: seconds in which a peer must answer.
    """

    protocol: Literal["auto", "tcp", "rdma"] = "auto"
    device: str = ""
    address: str = ""
    route_to: str = ""
    run_bytes: int = 4 << 20
    in_flight: int = 256
    in_flight_bytes: int = 64 << 20
    connect_timeout: float = 10.0


def check_options(options: MooncakeOptions, environment: Mapping[str, str]) -> None:
    """Refuse numbers out of range, and a setting of the library under which a write would be done before it arrived.

    Raises:
        InvalidConfig: with the field, its value and its range.
    """
    for key, low, high in (
        ("run_bytes", MIN_RUN_BYTES, MAX_RUN_BYTES),
        ("in_flight", 1, MAX_IN_FLIGHT),
        ("in_flight_bytes", 1, 1 << 40),
        ("connect_timeout", 0.1, 3600),
    ):
        if not low <= getattr(options, key) <= high:
            raise InvalidConfig(f"transport_options.{key} is {getattr(options, key)}: it must be in [{low}, {high}]")
    if environment.get("MC_TCP_PROTO") == "1":
        raise InvalidConfig(
            "MC_TCP_PROTO=1 makes Mooncake report writes that the peer may not have; unset it to use transport mooncake"
        )


def choose_protocol(options: MooncakeOptions, devices: Path, memory: str) -> Literal["tcp", "rdma"]:
    """The protocol to use; `devices` is the kernel's directory of RDMA devices, `memory` the caches' `Segment.device`.

    CPU caches move over TCP unless RDMA is asked for: instances on CPUs are there to be tried and tested, and a decode
    instance that has a device by chance must not refuse a prefill instance that has none.

    Raises:
        InvalidConfig: RDMA, or a device, that this machine does not have, or a device for TCP.
    """
    present = sorted(entry.name for entry in devices.iterdir()) if devices.is_dir() else []
    if options.protocol == "tcp" or (options.protocol == "auto" and (memory == "cpu" or not present)):
        if options.device:
            raise InvalidConfig(
                f"transport_options.device is {options.device!r} and the protocol is tcp, which has no devices "
                f"(protocol: {options.protocol}, caches in {memory} memory); give protocol rdma to use one of this "
                f"machine's RDMA devices: {', '.join(present) or 'none'}"
            )
        return "tcp"
    unknown = [name for name in filter(None, options.device.split(",")) if name not in present]
    if unknown or not present:
        raise InvalidConfig(
            f"transport_options.protocol is rdma with device {options.device!r}; this machine's RDMA devices: "
            f"{', '.join(present) or 'none'}; choose among them, or protocol tcp"
        )
    return "rdma"


def load_module(protocol: str, address: Address) -> Any:
    """Mooncake's engine module. Its log is reduced to errors unless MC_LOG_LEVEL says otherwise.

    Raises:
        InvalidConfig: the library is missing or does not load.
    """
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        with _environment(protocol, address):
            return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise InvalidConfig(f"transport: mooncake cannot be imported ({error}); {INSTALL_HINT}") from error


def start_engine(module: Any, options: MooncakeOptions, protocol: str, address: Address) -> Any:
    """An engine that listens at `address`.

    Raises:
        TransferError: it does not start, or does not answer there.
    """
    with _environment(protocol, address):
        engine = module.TransferEngine()
        status = engine.initialize(str(address), "P2PHANDSHAKE", protocol, options.device)
    if status:
        raise TransferError(
            f"Mooncake does not start with protocol {protocol} at {address} (status {status}); "
            "MC_LOG_LEVEL=INFO shows its own words"
        )
    # The library fixes the version of IP when it is imported, which may have been before us.
    if engine.send_probe(segment_name(address, engine.get_rpc_port())):
        raise TransferError(
            f"Mooncake started and does not answer at {address}; another engine in this process may have "
            "chosen the other version of IP"
        )
    return engine


def segment_name(address: Address, port: int) -> str:
    """The library's name for the memory of an engine that listens there."""
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


@contextmanager
def _environment(protocol: str, address: Address) -> Iterator[None]:
    """Variables that the library reads while an engine starts, put back afterwards; None is "not set"."""
    values = {
        "MC_FORCE_TCP": "1" if protocol == "tcp" else None,
        "MC_USE_IPV6": "1" if address.version == 6 else None,
    }
    before = {key: os.environ.get(key) for key in values}
    _set_environment(values)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for key, value in values.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
