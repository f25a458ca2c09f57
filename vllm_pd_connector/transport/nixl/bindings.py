"""NIXL's Python bindings: where they are found, how an agent is set up, what their exceptions mean."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_pd_connector.errors import InvalidConfig, PeerLost, TransferError
from vllm_pd_connector.transport.base import options_of, require_library

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_pd_connector.transport.base import Use

MODULES = ("nixl", "nixl_rocm")
"""NIXL's own, which chooses among those for CUDA, and the one for AMD's GPUs, which may be there alone."""

AMD_DRIVER = Path("/dev/kfd")

ENVIRONMENT = {"UCX_RCACHE_MAX_UNRELEASED": "1024"}
"""Of UCX, unless it is set: without a bound its cache of registrations may grow for ever. vLLM's connector sets it when
it imports NIXL, so that without that nobody would (vLLM 0.32, `distributed/nixl_utils.py`)."""

INSTALL_HINT = "install it with `pip install nixl`, or choose another transport"


class NixlOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of one agent; the defaults suit one host, TCP and RDMA.

    `backend` and `backend_options` go to NIXL's createBackend as they are. `ucx` are UCX settings without the `UCX_`
    prefix ({"TLS": "tcp"}), for this agent only; one in the environment wins, and only there can a list be given.
    `tcp_segment_size` is UCX's TCP segment size in both directions ("" leaves UCX's default; a UCX_TCP_*_SEG_SIZE in
    the environment or in `ucx` wins). `progress_interval_us` is the longest sleep of the progress thread in
    microseconds, which events cut short. `progress_thread`: agents that post have one, too; without it they move what
    they posted when they are polled, which a backend may not do. `batch_bytes` bounds what one call of the library is
    given.
    """

    backend: str = "UCX"
    backend_options: dict[str, str] = {}
    ucx: dict[str, str] = {}
    tcp_segment_size: str = "256k"
    progress_interval_us: int = 2000
    progress_thread: bool = False
    batch_bytes: int = 64 << 20


def translate(kind: str, message: str, started: bool) -> TransferError:
    """The error to raise for a NIXL exception of type name `kind`; `started`: it came from a call that posts or polls.

    A disconnect ends every operation on the connection, soon. The first transfer that sees it makes the library forget
    the peer, and the others hear that it is not found. Any other failure may be that of one part of a request whose
    other parts run on (`nixlUcxBackendReqH::status`), or come after some were posted (`sendXferRange`).
    """
    if kind == "nixlRemoteDisconnectError" or (started and kind == "nixlNotFoundError"):
        return PeerLost(f"{message}; the peer's process ended or the network broke, connect to its new incarnation")
    return TransferError(message, terminal=not started)


def described(options: NixlOptions, environment: Mapping[str, str]) -> str:
    """The backend, and what it was told of ways and devices, for people. Which of them a pair uses UCX does not say."""
    told = {f"UCX_{name}": value for name, value in options.ucx.items()}
    ways = [f"{n}={v}" for n in ("UCX_TLS", "UCX_NET_DEVICES") if (v := told.get(n, environment.get(n)))]
    return " ".join((f"nixl {options.backend}", *ways))


def net_devices(options: NixlOptions, environment: Mapping[str, str]) -> str:
    """The interfaces and devices that UCX is to take, "" if nobody says."""
    engine = options.backend_options.get("engine_config", "").split(",")
    given = next((one.partition("=")[2] for one in engine if one.startswith("NET_DEVICES=")), "")
    return environment.get("UCX_NET_DEVICES") or options.ucx.get("NET_DEVICES") or given


def backend_parameters(options: NixlOptions, environment: Mapping[str, str]) -> dict[str, str]:
    """Parameters for createBackend: `backend_options`, with `ucx` and the TCP segment size as UCX's engine_config.

    Raises:
        InvalidConfig: an option is out of range; `ucx` given for another backend, or twice, or with UCX's prefix, which
            UCX would take no notice of, or with a list, of which NIXL would take the first member alone: it cuts
            engine_config at every comma; a segment size beside an `engine_config`, which takes its place.
    """
    for name in ("progress_interval_us", "batch_bytes"):
        if (number := getattr(options, name)) < 1:
            raise InvalidConfig(f"transport_options.{name} is {number}: it must be at least 1")
    settings = dict(options.ucx)
    if prefixed := [key for key in settings if key.upper().startswith("UCX_")]:
        named = prefixed[0]
        raise InvalidConfig(f"ucx: {named} would have no effect; give it without the prefix, as {named[4:]}")
    if options.backend != "UCX":
        if settings:
            raise InvalidConfig(f"ucx: {settings} given, but backend is {options.backend}; use backend_options")
        return dict(options.backend_options)
    if "engine_config" in options.backend_options:
        if settings:
            raise InvalidConfig("ucx and backend_options.engine_config are both given; use ucx alone")
        if options.tcp_segment_size not in ("", NixlOptions().tcp_segment_size):
            raise InvalidConfig(
                f"tcp_segment_size is {options.tcp_segment_size!r}, and would have no effect beside "
                "backend_options.engine_config; use ucx in its place"
            )
    for key, value in settings.items():
        if "," in value:
            raise InvalidConfig(
                f"ucx: {key} is {value!r}, of which NIXL would take {value.partition(',')[0]!r} alone; set a list as "
                f"UCX_{key} in the environment of vllm serve"
            )
    for key in ("TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE"):
        if options.tcp_segment_size and f"UCX_{key}" not in environment:
            settings.setdefault(key, options.tcp_segment_size)
    parameters = {"engine_config": ",".join(f"{key}={value}" for key, value in settings.items())} if settings else {}
    return parameters | options.backend_options


def check(given: Mapping[str, object], _use: Use) -> None:
    """See `registry.check`."""
    backend_parameters(options_of("nixl", given, NixlOptions), os.environ)
    require_library("nixl", module_name(), INSTALL_HINT)


def module_name(driver: Path = AMD_DRIVER) -> str:
    """The module of NIXL for this machine: AMD's where it and AMD's driver are, or where there is no other."""
    there = [name for name in MODULES if importlib.util.find_spec(name) is not None]
    if there == ["nixl_rocm"] or ("nixl_rocm" in there and driver.exists()):
        return "nixl_rocm"
    return "nixl"


def bindings() -> Any:
    """NIXL's bindings, for the devices of this machine or for none.

    Raises:
        InvalidConfig: the library is missing or does not load.
    """
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    try:
        importlib.import_module(name := module_name())  # makes its parts known by their names
        return importlib.import_module(f"{name}._bindings")
    except (ImportError, AttributeError) as error:
        raise InvalidConfig(f"transport: nixl cannot be imported ({error}); {INSTALL_HINT}") from error
