"""How the side channel's sockets are made: the one place that sets their options.

Every frame is one zmq message of one part. Limits of size are set on the sockets, so that a larger part is cut off
by the library (it closes that connection) before it is in memory; `watch` cuts off messages whose parts do not end.
Nothing lingers: closing never waits for a peer.
With keys (see `keys`) every connection is authenticated in both directions and encrypted (CURVE); the address of a
server that has a key carries it, so that nobody else is ever spoken to at that address.
"""

from __future__ import annotations

import errno
import ipaddress
import re

import zmq

from vllm_pd_connector.errors import Busy, InvalidConfig, ProtocolError
from vllm_pd_connector.protocol.wire.fields import MAX_REPLY_FRAME, MAX_REQUEST_FRAME
from vllm_pd_connector.sidechannel.net.keys import Keys, secure_client, secure_server
from vllm_pd_connector.sidechannel.net.watch import Watch, allowance

# What a socket takes in per connection before its owner has looked. zmq takes as much of a message without end.
QUEUED_REQUESTS = 4
QUEUED_REPLIES = 2
MOST_PARTS = 2
MAX_PENDING = 1024  # with so many under way with one server a client asks no more for receives (`client.send`)
QUEUED = 2 * MAX_PENDING  # requests or replies of one connection, with room for what is asked all the same

KEY_MARK = " key "
_PLACE = re.compile(r"tcp://(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^\[\]:/;*]+)):(?P<port>[0-9]{1,5})\Z")


def endpoint(host: str, port: int, server_key: str | None = None) -> str:
    """The address of a server: a host name, an IPv4 or an IPv6 address (with or without brackets), and its key."""
    host = host.strip("[]")
    place = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    return place if server_key is None else f"{place}{KEY_MARK}{server_key}"


def place_of(address: str) -> tuple[str, int, str]:
    """Host, port and key (empty without one) of an address that was made by `endpoint`.

    Raises:
        ProtocolError: it is none.
    """
    place, _, server_key = address.partition(KEY_MARK)
    found = _PLACE.match(place)
    if found is None or not 1 <= int(found["port"]) <= 65535:
        raise ProtocolError(f"side channel: {place!r} is not an address: give tcp://host:port")
    return found["v6"] or found["host"], int(found["port"]), server_key


def bound_router(
    context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, watch: Watch, keys: Keys | None = None
) -> zmq.Socket[bytes]:
    """A server's socket; port 0 takes a free one. With keys, the context must have an authenticator.

    Raises:
        InvalidConfig: the address cannot be bound.
    """
    socket = context.socket(zmq.ROUTER)
    try:
        _common(socket)
        socket.setsockopt(zmq.IPV6, 0 if _is_ipv4(host) else 1)
        if keys is not None:
            secure_server(socket, keys)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_FRAME)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a reply to a client that has gone is an error, not silence
        socket.setsockopt(zmq.RCVHWM, QUEUED_REQUESTS)
        # A reply over this limit is lost, and its client only asks again after a time-out.
        socket.setsockopt(zmq.SNDHWM, QUEUED)
        watch.add(socket, allowance(QUEUED_REQUESTS, MAX_REQUEST_FRAME))
        _bind(socket, host, port)
    except BaseException:
        socket.close()  # its context would wait for it for ever
        raise
    return socket


def require_free(host: str, port: int, key: str = "side_channel_host") -> None:
    """Listen as a server would, and stop at once; port 0 asks for the host alone. `key` is what messages call the host
    (`Config.host_key`).

    Raises:
        InvalidConfig: the address cannot be bound.
    """
    with zmq.Context() as context:
        socket = context.socket(zmq.ROUTER)
        _common(socket)
        socket.setsockopt(zmq.IPV6, 0 if _is_ipv4(host) else 1)
        _bind(socket, host, port, key)
        socket.close()


def _bind(socket: zmq.Socket[bytes], host: str, port: int, key: str = "side_channel_host") -> None:
    try:
        socket.bind(endpoint(host, port))
    except zmq.ZMQError as error:
        socket.close()
        if error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL):
            raise InvalidConfig(
                f"side channel: {key} {host!r} is no address of this machine; choose one of those that "
                "`ip address` lists"
            ) from error
        raise InvalidConfig(
            f"side channel: cannot listen on host {host!r} port {port}: {error}; choose another {key} or "
            "side_channel_port"
        ) from error


def dealer(
    context: zmq.Context[zmq.Socket[bytes]], server_key: str, watch: Watch, keys: Keys | None = None
) -> tuple[zmq.Socket[bytes], str]:
    """A client's socket for one server, to be given to `connect`; and its name in the watch.

    Raises:
        Busy: there are too many sockets.
        ProtocolError: the server has a key and we have none, or its key is none.
    """
    if server_key and keys is None:
        raise ProtocolError("side channel: the server requires keys, and this side has none")
    try:
        socket = context.socket(zmq.DEALER)
    except zmq.ZMQError as error:
        raise Busy(f"side channel: no socket is left: {error}; raise the limit of open files") from error
    try:
        _common(socket)
        if server_key and keys is not None:
            secure_client(socket, keys, server_key)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_FRAME)
        socket.setsockopt(zmq.RCVHWM, QUEUED_REPLIES)
        socket.setsockopt(zmq.SNDHWM, QUEUED)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        return socket, watch.add(socket, allowance(QUEUED_REPLIES, MAX_REPLY_FRAME))
    except zmq.ZMQError as error:
        socket.close()
        raise Busy(f"side channel: no socket is left: {error}; raise the limit of open files") from error
    except BaseException:
        socket.close()
        raise


def connect(socket: zmq.Socket[bytes], host: str, port: int) -> None:
    """Have a client's socket connect, in the background; `host` is an address in numbers.

    Raises:
        ProtocolError: zmq does not take it.
    """
    socket.setsockopt(zmq.IPV6, 0 if _is_ipv4(host) else 1)
    try:
        socket.connect(endpoint(host, port))
    except zmq.ZMQError as error:
        raise ProtocolError(f"side channel: {host!r} port {port} is not an address: {error}") from error


def take(socket: zmq.Socket[bytes], *, drain: bool = False) -> list[zmq.Frame]:
    """The parts of the next message; `recv_multipart` takes ten times as long, because it asks zmq whether more come.
    No message of ours has more than MOST_PARTS, with its client's identity; a message of a few MiB may have millions.

    Args:
        drain: pass over what comes behind them, for a socket that others use, too.

    Raises:
        zmq.Again: there is none.
        ProtocolError: it has more parts; the socket is of no use any more.
    """
    parts = [last := socket.recv(zmq.NOBLOCK, copy=False)]
    while last.more:
        last = socket.recv(copy=False)
        if len(parts) <= MOST_PARTS:
            parts.append(last)
        elif not drain:
            raise ProtocolError(f"message parts: more than {MOST_PARTS + 1} there, 1 here")
    return parts


def _common(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)


def _is_ipv4(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).version == 4
    except ValueError:
        return host == "*"
