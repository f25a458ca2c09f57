"""The sockets of Mooncake's library, for which it has no calls: ending its connections, narrowing its listeners.

They are found among the descriptors of this process, by address and port. The library listens on every interface
whatever it is told, serves one dialler after the other and authenticates nobody. So each listener is given a filter
that the kernel applies to every packet: only those to one address of this machine pass, or none.

Source: Linux, `Documentation/networking/filter.rst`; no privilege is needed, accepted connections inherit the filter.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
from typing import TYPE_CHECKING

from vllm_pd_connector.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from vllm_pd_connector.transport.addresses import Address

_SO_ATTACH_FILTER = 26
_NETWORK_HEADER = -0x100000 & 0xFFFFFFFF  # SKF_NET_OFF
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
_PASS, _DROP = 0xFFFFFFFF, 0

# Where the destination lies in the header of either version of IP.
_DESTINATION = {4: 16, 6: 24}


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


# With the GIL, which costs less than giving it up: a look at 10,000 descriptors takes some milliseconds.
_getpeername = ctypes.PyDLL(None).getpeername


def hang_up(address: Address, port: int) -> None:
    """Shut down this process's connections to there."""
    for connection in _sockets(_connected_to(port)):
        with contextlib.suppress(OSError):  # not connected, or not any more
            host, at, *_ = connection.getpeername()
            if at == port and ipaddress.ip_address(host.partition("%")[0]) == address:
                connection.shutdown(socket.SHUT_RDWR)


def restrict_listeners(ports: Collection[int], address: Address | None) -> None:
    """Let this process's listeners at `ports` be reached at `address` alone, or by nobody if that is None.

    Raises:
        TransferError: one of them is not there, or the kernel takes no filter.
    """
    instructions = _to(address) if address is not None else [(_RETURN, 0, 0, _DROP)]
    program = (_Instruction * len(instructions))(*(_Instruction(*fields) for fields in instructions))
    attached = bytes(_Program(len(instructions), program))
    found, why = set(), "they are not there"
    for listener in _sockets(_descriptors()):
        with contextlib.suppress(OSError):
            port = listener.getsockname()[1]
            if port not in ports or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            try:
                listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, attached)
                found.add(port)
            except OSError as error:
                why = f"the kernel takes no packet filter for them ({error.strerror}); use transport nixl here"
    if missing := set(ports) - found:
        raise TransferError(
            f"Mooncake's listeners at ports {sorted(missing)} cannot be kept to {address or 'nobody'}: {why}"
        )


def _to(address: Address) -> list[tuple[int, int, int, int]]:
    """A program that passes packets to `address`. A jump skips that many instructions."""
    packed = address.packed
    words = [int.from_bytes(packed[at : at + 4], "big") for at in range(0, len(packed), 4)]
    program = [(_LOAD_BYTE, 0, 0, _NETWORK_HEADER), (_SHIFT_RIGHT, 0, 0, 4)]
    program.append((_EQUAL, 0, 2 * len(words) + 1, address.version))
    for number, word in enumerate(words):
        program.append((_LOAD_WORD, 0, 0, _NETWORK_HEADER + _DESTINATION[address.version] + 4 * number))
        program.append((_EQUAL, 0, 2 * (len(words) - number) - 1, word))
    return [*program, (_RETURN, 0, 0, _PASS), (_RETURN, 0, 0, _DROP)]


def _descriptors() -> list[int]:
    """Those of sockets: a file's must not be duplicated, for the process's locks on it end with any of them."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, as the directory's own is
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
    return found


def _connected_to(port: int) -> list[int]:
    """Descriptors of sockets whose other end is at this port, if they are internet sockets (`struct sockaddr`)."""
    address = ctypes.create_string_buffer(128)
    length = ctypes.c_uint32()
    found = []
    for number in _descriptors():
        length.value = len(address)
        if not _getpeername(number, address, ctypes.byref(length)) and address.raw[2:4] == port.to_bytes(2, "big"):
            found.append(number)
    return found


def _sockets(numbers: Iterable[int]) -> Iterator[socket.socket]:
    """Internet sockets among descriptors, each duplicated: it stays the same one when another thread closes it."""
    for number in numbers:
        try:
            descriptor = os.dup(number)
        except OSError:  # closed meanwhile, as the directory's own is
            continue
        try:
            found = socket.socket(fileno=descriptor)
        except OSError:  # no socket
            os.close(descriptor)
            continue
        with found:
            if found.family in (socket.AF_INET, socket.AF_INET6):
                yield found
