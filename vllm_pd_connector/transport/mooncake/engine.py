"""Starting Mooncake's engine: its options, and what must be right before and after there is one.

The protocol is the one asked for: the library ignores its protocol argument and takes RDMA if it can open a device, TCP
if it cannot. Here, `rdma` without a device is refused, and `tcp` (or `auto` for memory of the CPU) forces TCP. What the
engine says of itself when it has started is compared with what was asked: a container without its device plugin still
shows the kernel's list of devices and cannot open one.

Over RDMA one thread of the library posts for several peers and connects to them, and its only other one polls and,
after an error, asks the peer for its memory again. A peer that is gone would hold both up, nine times per descriptor,
and who listens at its port by then would answer. So a descriptor is tried once, and a peer that failed is left alone
for a while.

Source of the library's behaviour: mooncake-transfer-engine 0.3.13.post1, observed and read (docs/design/transports.md).
"""

from __future__ import annotations

import importlib
import logging
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from vllm_pd_connector.errors import InvalidConfig, TransferError
from vllm_pd_connector.transport.addresses import local_address
from vllm_pd_connector.transport.base import options_of, require_library
from vllm_pd_connector.transport.liveness import SILENCE_S
from vllm_pd_connector.transport.mooncake.descriptor import SegmentDescriptor, fetch_descriptor
from vllm_pd_connector.transport.mooncake.sockets import restrict_listeners

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm_pd_connector.transport.addresses import Address
    from vllm_pd_connector.transport.base import Use
    from vllm_pd_connector.transport.ranges import Ranges

logger = logging.getLogger(__name__)

Protocol = Literal["tcp", "rdma", "barex", "efa", "hip", "nvlink", "nvlink_intra"]
"""Those of the library that move memory of a CPU or a CUDA device. All but the first two are of builds of their own."""

BUILT_FOR = {"barex", "efa", "hip", "nvlink", "nvlink_intra"}

INSTALL_HINT = (
    "install one of mooncake-transfer-engine (CUDA 12), mooncake-transfer-engine-cuda13 and "
    "mooncake-transfer-engine-non-cuda (Debian also needs libibverbs1), or choose another transport"
)
RDMA_DEVICES = Path("/sys/class/infiniband")
DESCRIBE_S = 10.0

# Settings of the library, unless the environment has others. See docs/configuration.md for what each costs.
DEFAULTS = {
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "1",  # seconds; 5 by default, in which others wait
    "MC_RETRY_CNT": "1",  # tries; 9 by default
    "MC_CONN_PAUSE_TTL_MS": "5000",  # for which a peer that failed is left alone; 0 by default
    "MC_IB_PCI_RELAXED_ORDERING": "0",  # a push is reported on another connection than its bytes take
}

# Mooncake queues 1024 descriptors per peer and fails what comes on top of as many again.
MAX_IN_FLIGHT = 1024
MIN_RUN_BYTES, MAX_RUN_BYTES = 1 << 20, 8 << 20


class MooncakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of one engine.

    `protocol`: "auto" is "rdma" for device memory on a machine with RDMA devices, else "tcp"; the others are of builds
    of the library for them alone, and refused when its engine says that it uses another. `device`: RDMA devices to
    use, separated by commas; "" is all, of which the library takes those nearest to a block's device. Lists separated
    by semicolons are for the GPUs 0, 1 … of the machine. `address`: the IP address (4 or 6) that peers reach this
    worker at; "" takes the source address of the route to `route_to`, or of the default route when that is "" as well.
    `run_bytes`: longest descriptor. `in_flight`: descriptors of one transfer that the library has at a time,
    `in_flight_bytes` bounds their sum. `connect_timeout`: seconds in which a peer must answer;
    `silence_timeout`: after which one whose machine does not acknowledge is lost.
    `allow_unauthenticated_peers`: let the library be reached from other hosts, where whoever reaches it may read, write
    and stop this worker.
    """

    protocol: Literal["auto", "tcp", "rdma", "barex", "efa", "hip", "nvlink", "nvlink_intra"] = "auto"
    device: str = ""
    address: str = ""
    route_to: str = ""
    run_bytes: int = 4 << 20
    in_flight: int = 256
    in_flight_bytes: int = 64 << 20
    connect_timeout: float = 10.0
    silence_timeout: int = SILENCE_S
    allow_unauthenticated_peers: bool = False


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
        ("silence_timeout", 3, 3600),
    ):
        if not low <= getattr(options, key) <= high:
            raise InvalidConfig(f"transport_options.{key} is {getattr(options, key)}: it must be in [{low}, {high}]")
    if environment.get("MC_TCP_PROTO") == "1":
        raise InvalidConfig(
            "MC_TCP_PROTO=1 makes Mooncake report writes that the peer may not have; unset it to use transport mooncake"
        )


def own_devices(options: MooncakeOptions, device_id: int) -> MooncakeOptions:
    """The options of a worker whose caches are on GPU `device_id` (0 on the CPU) of those that its process sees, with
    its own list of RDMA devices.

    Raises:
        InvalidConfig: there are lists, and none for this GPU, or one that is empty: it would be all devices.
    """
    lists = options.device.split(";")
    if len(lists) == 1:
        return options
    if not all(_names(one) for one in lists):
        raise InvalidConfig(
            f"transport_options.device: list {next(i for i, one in enumerate(lists) if not _names(one))} of "
            f"{options.device!r} is empty; give each GPU its RDMA devices, or one list for all without a semicolon"
        )
    if device_id >= len(lists):
        raise InvalidConfig(
            f"transport_options.device has {len(lists)} lists, {options.device!r}, and this worker's caches are on GPU "
            f"{device_id}; give one for each GPU that CUDA_VISIBLE_DEVICES leaves, or one for all without a semicolon"
        )
    return msgspec.structs.replace(options, device=lists[device_id])


def choose_protocol(options: MooncakeOptions, devices: Path, memory: str) -> Protocol:
    """The protocol to use; `devices` is the kernel's directory of RDMA devices, `memory` the caches' `Segment.device`.

    CPU caches move over TCP unless RDMA is asked for: instances on CPUs are there to be tried and tested, and a decode
    instance that has a device by chance must not refuse a prefill instance that has none.

    Raises:
        InvalidConfig: RDMA, or a device, that this machine does not have, or a device for TCP.
    """
    if options.protocol in BUILT_FOR:
        if options.device and options.protocol != "efa":
            raise InvalidConfig(
                f"transport_options.device is {options.device!r} and the protocol is {options.protocol}, whose devices "
                "the library finds; leave device out"
            )
        return options.protocol  # type: ignore[return-value]
    present = sorted(entry.name for entry in devices.iterdir()) if devices.is_dir() else []
    if options.protocol == "tcp" or (options.protocol == "auto" and (memory == "cpu" or not present)):
        if options.device:
            raise InvalidConfig(
                f"transport_options.device is {options.device!r} and the protocol is tcp, which has no devices "
                f"(protocol: {options.protocol}, caches in {memory} memory); give protocol rdma to use one of this "
                f"machine's RDMA devices: {', '.join(present) or 'none'}"
            )
        return "tcp"
    unknown = [name for name in _names(options.device) if name not in present]
    if unknown or not present:
        raise InvalidConfig(
            f"transport_options.protocol is rdma with device {options.device!r}; this machine's RDMA devices: "
            f"{', '.join(present) or 'none'}; choose among them, or protocol tcp"
        )
    return "rdma"


def check_started(found: SegmentDescriptor, options: MooncakeOptions, chosen: Protocol) -> Protocol:
    """The protocol that an engine uses, from what it tells its peers. One that nobody asked for by name may be TCP in
    place of RDMA; that is logged.

    Raises:
        TransferError: it is another one than was asked for, or devices that were asked for are not used.
    """
    devices = [device.name for device in found.devices]
    missing = [name for name in _names(options.device) if name not in devices]
    if found.protocol == chosen and not missing:
        if chosen == "rdma":
            logger.info("Mooncake uses the RDMA devices %s", ", ".join(devices))
        return chosen
    if chosen in BUILT_FOR and found.protocol != chosen:
        raise TransferError(
            f"Mooncake was to use {chosen} and uses {found.protocol}: the installed one was not built for it, or found "
            "no such devices; install one that was, or set transport_options.protocol to what both sides have"
        )
    text = (
        f"Mooncake was to use {chosen} with the devices {options.device or 'that there are'} and uses {found.protocol} "
        f"with {', '.join(devices) or 'none'}: a device cannot be opened (a container needs /dev/infiniband and "
        "unlimited locked memory), or its port is down or has no GID; MC_LOG_LEVEL=INFO shows its own words"
    )
    if found.protocol == "tcp" and options.protocol == "auto" and not options.device:
        logger.warning("%s", text)
        return "tcp"
    raise TransferError(text)


def check_reachability(options: MooncakeOptions, address: Address, serves: bool) -> None:
    """Refuse to serve where unauthenticated peers reach the library.

    Raises:
        InvalidConfig: `address` is not loopback and nobody allowed it.
    """
    if serves and not address.is_loopback and not options.allow_unauthenticated_peers:
        raise InvalidConfig(
            f"Mooncake would serve at {address}, which other hosts reach, and its ports authenticate nobody: whoever "
            "reaches them can read and write the caches and end this worker. On a network that only the instances "
            "reach, set transport_options.allow_unauthenticated_peers to true; for one host give "
            "transport_options.address 127.0.0.1"
        )


def check(given: Mapping[str, object], use: Use) -> None:
    """See `registry.check`."""
    options = options_of("mooncake", given, MooncakeOptions)
    check_options(options, os.environ)
    check_reachability(options, local_address(options.address, options.route_to), use.serves)
    require_library("mooncake", "mooncake", INSTALL_HINT)


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


def start_engine(
    module: Any, options: MooncakeOptions, protocol: Protocol, address: Address, *, serves: bool
) -> tuple[Any, Protocol]:
    """An engine that is reached at `address`, and by nobody unless it `serves`; and the protocol that it uses.

    Raises:
        TransferError: it does not start, does not answer there, or uses another protocol or other devices.
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
    port = engine.get_rpc_port()
    found = fetch_descriptor(address, port, DESCRIBE_S)
    used = check_started(found, options, protocol)
    restrict_listeners({port, found.tcp_data_port} - {0}, address if serves else None)
    return engine, used


def require_offered(address: Address, port: int, ranges: Ranges, protocol: Protocol) -> None:
    """Ask the engine for what it tells peers of the memory that was registered: by some protocols the library takes
    memory that it cannot share with a warning in its log alone, which is off, and no transfer would ever work.

    Raises:
        TransferError: some of it is not offered.
    """
    buffers = sorted((buffer.addr, buffer.length) for buffer in fetch_descriptor(address, port, DESCRIBE_S).buffers)
    for start, stop in zip(*ranges.places, strict=True):
        reached = start
        for begin, length in buffers:
            reached = max(reached, begin + length) if begin <= reached else reached
        if reached < stop:
            why = " (fabric memory is of its own allocator alone, which vLLM's caches are not)"
            raise TransferError(
                f"Mooncake took {stop - start} bytes at {start:#x} and offers peers {reached - start} of them by "
                f"{protocol}{why * protocol.startswith('nvlink')}; MC_LOG_LEVEL=WARNING shows its own words; set "
                "transport_options.protocol to rdma or tcp, or transport to nixl, which uses NVLink within a host"
            )


def segment_name(address: Address, port: int) -> str:
    """The library's name for the memory of an engine that listens there."""
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


class SegmentNames:
    """The library's names for peers' memory, never one that it used for another process.

    The library keeps what it learnt under a name for ever, and after restarts the same port is another process: leading
    zeros, which it does not read, tell the incarnations apart.
    """

    def __init__(self) -> None:
        self._incarnations: dict[str, list[str]] = {}

    def of(self, peer: str, address: Address, port: int) -> str:
        """That of the memory of `peer`, whose engine listens there."""
        plain = segment_name(address, port)
        incarnations = self._incarnations.setdefault(plain, [])
        if peer not in incarnations:
            incarnations.append(peer)
        host, _, number = plain.rpartition(":")
        return f"{host}:{'0' * incarnations.index(peer)}{number}"


def _names(devices: str) -> list[str]:
    return [name for name in devices.split(",") if name]


@contextmanager
def _environment(protocol: str, address: Address) -> Iterator[None]:
    """Variables that the library reads while it is imported and while an engine starts, put back afterwards; None is
    "not set"."""
    values = {
        "MC_FORCE_TCP": "1" if protocol == "tcp" else None,
        "MC_USE_IPV6": "1" if address.version == 6 else None,
    } | {key: os.environ.get(key, value) for key, value in DEFAULTS.items()}
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
