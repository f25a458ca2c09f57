"""How the side channel's sockets are made: the one place that sets their options.

Every frame is one zmq message of one part. Limits of size are set on the sockets, so that a larger message is cut off
by the library (it closes that connection) before it is in memory. Nothing lingers: closing never waits for a peer.
Authentication and encryption (CURVE) belong in `_secure`, which both kinds of socket pass through before they are
bound or connected.
"""

from __future__ import annotations

import ipaddress

import zmq

from vllm_pd_connector.errors import InvalidConfig, ProtocolError
from vllm_pd_connector.protocol.messages import MAX_REPLY_FRAME, MAX_REQUEST_FRAME

QUEUED_PER_CLIENT = 16  # requests that a server takes in before it has served them, per connection
MAX_PENDING = 1024  # requests that a client has under way with one server, and so replies that may wait for it


def endpoint(host: str, port: int) -> str:
    """The zmq endpoint of a host name, an IPv4 or an IPv6 address (with or without brackets)."""
    host = host.strip("[]")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def bound_router(context: zmq.Context[zmq.Socket[bytes]], host: str, port: int) -> zmq.Socket[bytes]:
    """A server's socket; port 0 takes a free one.

    Raises:
        InvalidConfig: the address cannot be bound.
    """
    socket = context.socket(zmq.ROUTER)
    _common(socket, host)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_FRAME)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a reply to a client that has gone is an error, not silence
    socket.setsockopt(zmq.RCVHWM, QUEUED_PER_CLIENT)
    # A reply over this limit is lost, and its client only asks again after a time-out.
    socket.setsockopt(zmq.SNDHWM, MAX_PENDING)
    try:
        socket.bind(endpoint(host, port))
    except zmq.ZMQError as error:
        socket.close()
        raise InvalidConfig(
            f"side channel: cannot listen on host {host!r} port {port}: {error}; choose another host or port"
        ) from error
    return socket


def connected_dealer(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A client's socket, connecting in the background; `address` is made by `endpoint`.

    Raises:
        ProtocolError: not an address.
    """
    socket = context.socket(zmq.DEALER)
    _common(socket, address.removeprefix("tcp://").rpartition(":")[0])
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_FRAME)
    socket.setsockopt(zmq.RCVHWM, MAX_PENDING)
    socket.setsockopt(zmq.SNDHWM, MAX_PENDING)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close()
        raise ProtocolError(f"side channel: {address!r} is not an address: {error}") from error
    return socket


def _common(socket: zmq.Socket[bytes], host: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.IPV6, 0 if _is_ipv4(host) else 1)
    _secure(socket)


def _secure(socket: zmq.Socket[bytes]) -> None:
    """Here come the keys of CURVE, once configured; without them the side channel needs a trusted network."""


def _is_ipv4(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).version == 4
    except ValueError:
        return host == "*"
