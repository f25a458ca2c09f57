"""What Mooncake's engine tells its peers of itself, asked for in the library's own exchange.

    length (8 bytes, little endian, the kind included) kind (1 byte) JSON          the answer has the same form

Source: mooncake-transfer-engine 0.3.13.post1, `common.h` (writeString), `transfer_metadata.cpp` (encodeSegmentDesc).
"""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

import msgspec

from vllm_pd_connector.errors import TransferError

if TYPE_CHECKING:
    from vllm_pd_connector.transport.addresses import Address

MAX_BYTES = 128 << 20
_METADATA = 1
_HEADER = struct.Struct("<QB")


class Device(msgspec.Struct, frozen=True):
    """An RDMA device that the engine opened."""

    name: str


class Buffer(msgspec.Struct, frozen=True):
    """Memory that peers may name: address and length in bytes."""

    addr: int
    length: int


class SegmentDescriptor(msgspec.Struct, frozen=True):
    """The part of it that we look at. `tcp_data_port` is 0 where there is none."""

    protocol: str
    buffers: tuple[Buffer, ...] = ()
    devices: tuple[Device, ...] = ()
    tcp_data_port: int = 0


def fetch_descriptor(address: Address, port: int, timeout: float) -> SegmentDescriptor:
    """The descriptor of the engine that listens there; `timeout` is the longest wait for a part of it, in seconds.

    Raises:
        TransferError: it does not answer, or something else.
    """
    where = f"Mooncake at {address} port {port}"
    try:
        with socket.create_connection((str(address), port), timeout) as connection:
            connection.sendall(_HEADER.pack(3, _METADATA) + b"{}")
            length, kind = _HEADER.unpack(_receive(connection, _HEADER.size))
            if kind != _METADATA or not 1 < length <= MAX_BYTES:
                raise TransferError(f"{where} answers kind {kind} with {length} bytes; {_METADATA} was expected")
            return msgspec.json.decode(_receive(connection, length - 1), type=SegmentDescriptor)
    except OSError as error:
        raise TransferError(f"{where} does not answer: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransferError(f"{where} describes itself in another form: {error}; is it another release?") from error


def _receive(connection: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        part = connection.recv(min(length - len(received), 1 << 20))
        if not part:
            raise ConnectionResetError(f"closed after {len(received)} of {length} bytes")
        received += part
    return bytes(received)
