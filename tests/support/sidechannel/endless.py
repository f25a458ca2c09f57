"""A peer of the side channel that sends parts of one message and never its end: ZMTP by hand, since zmq itself sends
nothing before a message is whole. Without keys, as a client or as a server."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

_MORE, _LONG = 1, 2
_BLOCK = 1 << 20


def _greet(connection: socket.socket, kind: bytes) -> None:
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    received = b""
    while len(received) < 64:
        received += (some := connection.recv(64 - len(received)))
        if not some:
            raise ConnectionResetError("the other side closed while it greeted")
    properties = ((b"Socket-Type", kind), (b"Identity", b""))
    ready = b"\x05READY" + b"".join(
        bytes([len(name)]) + name + struct.pack("!I", len(value)) + value for name, value in properties
    )
    connection.sendall(bytes([4, len(ready)]) + ready)
    connection.recv(4096)  # the other side's READY


def _pour(connection: socket.socket, part_bytes: int, most: int) -> bool:
    """Send parts of so many bytes until `most` are sent; whether the connection was cut before."""
    if part_bytes < 256:
        part = bytes([_MORE, part_bytes]) + bytes(part_bytes)
    else:
        part = bytes([_MORE | _LONG]) + struct.pack("!Q", part_bytes) + bytes(part_bytes)
    block = part * max(1, _BLOCK // len(part))
    with contextlib.suppress(ConnectionError):
        for _ in range(most // len(block)):
            connection.sendall(block)
        return False
    return True


def attack_server(host: str, port: int, part_bytes: int, most: int) -> bool:
    """Begin a message at a server; whether the connection was cut before `most` bytes of it were sent."""
    with socket.create_connection((host, port), timeout=60) as connection:
        _greet(connection, b"DEALER")
        return _pour(connection, part_bytes, most)


def attack_client(listener: socket.socket, part_bytes: int, most: int) -> bool:
    """The same to the first client that greets at `listener`."""
    listener.settimeout(60)
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(ConnectionError):
            connection.settimeout(60)
            if not connection.recv(1, socket.MSG_PEEK):
                continue  # it only looked whether somebody is there
            _greet(connection, b"ROUTER")
            return _pour(connection, part_bytes, most)


def memory_of(pid: int) -> tuple[int, int]:
    """Resident bytes of a process: now, and at most so far."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return tuple(int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def listener_of(port: int) -> int:
    """The process of this host that listens at a port (IPv4)."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    listening = [line.split() for line in lines if line.split()[3] == "0A"]
    [inode] = {fields[9] for fields in listening if int(fields[1].rpartition(":")[2], 16) == port}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(descriptor) == f"socket:[{inode}]":
                return int(descriptor.parts[2])
    raise AssertionError(f"nobody listens at port {port}")
