"""How the side channel's sockets are made: the one place that sets their options.

Every frame is one zmq message of one part. Limits of size are set on the sockets, so that a larger message is cut off
by the library (it closes that connection) before it is in memory. Nothing lingers: closing never waits for a peer.
With keys (see `keys`) every connection is authenticated in both directions and encrypted (CURVE); the address of a
server that has a key carries it, so that nobody else is ever spoken to at that address.
"""

from __future__ import annotations

import ipaddress

import zmq

from vllm_pd_connector.errors import InvalidConfig, ProtocolError
from vllm_pd_connector.protocol.fields import MAX_REPLY_FRAME, MAX_REQUEST_FRAME
from vllm_pd_connector.sidechannel.keys import Keys, secure_client, secure_server

QUEUED_PER_CLIENT = 16  # requests that a server takes in before it has served them, per connection
MAX_PENDING = 1024  # requests that a client has under way with one server, and so replies that may wait for it


KEY_MARK = " key "


def endpoint(host: str, port: int, server_key: str | None = None) -> str:
    """The address of a server: a host name, an IPv4 or an IPv6 address (with or without brackets), and its key."""
    host = host.strip("[]")
    place = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    return place if server_key is None else f"{place}{KEY_MARK}{server_key}"


def bound_router(
    context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, keys: Keys | None = None
) -> zmq.Socket[bytes]:
    """A server's socket; port 0 takes a free one. With keys, the context must have an authenticator.

    Raises:
        InvalidConfig: the address cannot be bound.
    """
    socket = context.socket(zmq.ROUTER)
    _common(socket, host)
    if keys is not None:
        secure_server(socket, keys)
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


def connected_dealer(
    context: zmq.Context[zmq.Socket[bytes]], address: str, keys: Keys | None = None
) -> zmq.Socket[bytes]:
    """A client's socket, connecting in the background; `address` is made by `endpoint`.

    Raises:
        ProtocolError: not an address, one with a key while we have none, or there are too many sockets.
    """
    place, _, server_key = address.partition(KEY_MARK)
    if server_key and keys is None:
        raise ProtocolError(f"side channel: {place} requires keys, and this side has none")
    try:
        socket = context.socket(zmq.DEALER)
    except zmq.ZMQError as error:
        raise ProtocolError(f"side channel: no socket for {place}: {error}; raise the limit of open files") from error
    _common(socket, place.removeprefix("tcp://").rpartition(":")[0])
    if server_key and keys is not None:
        secure_client(socket, keys, server_key)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_FRAME)
    socket.setsockopt(zmq.RCVHWM, MAX_PENDING)
    socket.setsockopt(zmq.SNDHWM, MAX_PENDING)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    try:
        socket.connect(place)
    except zmq.ZMQError as error:
        socket.close()
        raise ProtocolError(f"side channel: {place!r} is not an address: {error}") from error
    return socket


def _common(socket: zmq.Socket[bytes], host: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.IPV6, 0 if _is_ipv4(host) else 1)


def _is_ipv4(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).version == 4
    except ValueError:
        return host == "*"
