"""Which IP address a worker advertises, and whether a peer can mean it.

A library that announces `host:port` must be given a host that the peer can reach. The first answer of the name service
is often loopback or an interface that leads nowhere, so names are not asked at all: the address is configured, or it is
the source address that the kernel would use on the route to a given destination (a peer, or the network it is in),
which by default is any address outside this machine's networks. A machine without such a route has only itself to
talk to and says loopback; a peer elsewhere refuses that instead of connecting to itself.
"""

from __future__ import annotations

import ipaddress
import os
import socket

from vllm_pd_connector.errors import InvalidConfig, TransferError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# Reserved for documentation (RFC 5737, RFC 3849): no machine has them, so their route is the default route.
_ELSEWHERE = ("198.51.100.1", "2001:db8::1")


def local_address(configured: str, route_to: str) -> Address:
    """The address to advertise: `configured`, else the one on the route to `route_to`, else on the default route.

    Raises:
        InvalidConfig: not an IP address, not one of this machine, or there is no route to `route_to`.
    """
    if configured:
        address = _parse(configured, "address")
        if not _is_of_this_machine(address):
            raise InvalidConfig(
                f"transport_options.address: {address} is no address of this machine; give one that `ip address` lists"
            )
        return address
    if route_to:
        source = source_address(_parse(route_to, "route_to"))
        if source is None:
            raise InvalidConfig(
                f"transport_options.route_to: no route from this machine to {route_to}; check the address or give "
                "transport_options.address"
            )
        return source
    for destination in _ELSEWHERE:
        source = source_address(ipaddress.ip_address(destination))
        if source is not None:
            return source
    return ipaddress.IPv4Address("127.0.0.1")


def source_address(destination: Address) -> Address | None:
    """The address that packets to `destination` leave from; None without a route. Nothing is sent."""
    family = socket.AF_INET if destination.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(destination), 9))
            source = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None
    # A link-local address means nothing without an interface that the peer cannot know.
    return None if source.is_unspecified or source.is_link_local else source


def check_reachable(text: str, their_host: str, ours: Address) -> Address:
    """The address that a peer advertises, if it can be meant for us. `their_host` is the peer's `host_identity`.

    Raises:
        TransferError: not an address, one that no machine has, loopback on either side of two machines, or of the
            other IP version.
    """
    try:
        address = _address(text)
    except ValueError:
        raise TransferError(f"the peer advertises {text[:80]!r}, which is no IP address") from None
    if _is_of_no_machine(address):
        raise TransferError(
            f"the peer advertises {address}, which leads to no machine; set its transport_options.address"
        )
    if address.is_loopback and their_host != host_identity():
        raise TransferError(
            f"the peer is on another machine and advertises the loopback address {address}; set "
            "transport_options.address (or route_to) there to an address that reaches it from here"
        )
    if ours.is_loopback and their_host != host_identity():
        raise TransferError(
            f"the peer is on another machine and this worker is at the loopback address {ours}; set "
            "side_channel_host or transport_options.address here to an address that reaches this machine from there"
        )
    if address.version != ours.version:
        raise TransferError(
            f"address: {ours} here, {address} there, and a process speaks one version of IP; set "
            "transport_options.address on one side to the version of the other"
        )
    return address


def host_identity() -> str:
    """Equal for processes that share loopback: one boot of one kernel and one network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot_id:
            return f"{boot_id.read().strip()}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _parse(text: str, key: str) -> Address:
    try:
        address = _address(text)
    except ValueError:
        raise InvalidConfig(
            f"transport_options.{key}: {text!r} is not an IP address (names are not looked up); give one like 10.0.0.5"
        ) from None
    if _is_of_no_machine(address):
        raise InvalidConfig(f"transport_options.{key}: {address} is not the address of one machine; give one that is")
    return address


def _address(text: str) -> Address:
    """An IP address; one of version 4 in the clothes of version 6 (::ffff:10.0.0.5) is what it is.

    Raises:
        ValueError: it is none.
    """
    address = ipaddress.ip_address(text)
    return address.ipv4_mapped or address if isinstance(address, ipaddress.IPv6Address) else address


def _is_of_no_machine(address: Address) -> bool:
    """Whether an address means nothing to a peer, or many: the name of an interface of ours (%eth0) is none of its."""
    zone = isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None
    return zone or address.is_unspecified or address.is_multicast or address.is_link_local


def _is_of_this_machine(address: Address) -> bool:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True
