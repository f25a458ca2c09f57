"""What is said on a liveness link: the name of the hub that is dialled, from both sides, and from where one dials.

    greeting := length (4 bytes, big endian) name           the dialler's; ASKS may be behind the name
    answer   := length name [length place]                  the hub's; with the place if it was asked for

No socket in here.
"""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass, field
from typing import Any

from vllm_pd_connector.errors import ProtocolError

MAX_NAME_BYTES = 256
ASKS = b"?"


def framed(text: bytes) -> bytes:
    """A name or a place as it is sent."""
    return len(text).to_bytes(4, "big") + text


def place_of(address: tuple[Any, ...]) -> bytes:
    """An end of a connection, in one form on both sides; a zone is each machine's own."""
    return f"{ipaddress.ip_address(address[0].partition('%')[0])} {address[1]}".encode()


def answered(received: bytes, name: bytes, asks: bool) -> bytes | None:
    """What a hub's answer says besides its name: empty if nothing was asked for, None while the end has not come.

    Raises:
        ProtocolError: it is not the hub of that name, or it sends more than an answer.
    """
    own = framed(name)
    if not own.startswith(received[: len(own)]):
        raise ProtocolError("another name than the one that was asked for")
    rest = received[len(own) :]
    if not asks and rest:
        raise ProtocolError("more than a name")
    if len(received) < len(own) or not asks:
        return b"" if len(received) >= len(own) else None
    if len(rest) < 4:
        return None
    length, place = int.from_bytes(rest[:4], "big"), rest[4:]
    if length > MAX_NAME_BYTES or len(place) > length:
        raise ProtocolError("more than a place")
    return place if len(place) == length else None


@dataclass(eq=False, slots=True)
class IncomingLink:
    """What came from a dialler: our `name`, for which it has until `deadline`, and nothing else. `asks`: from where it
    is seen to dial."""

    name: bytes
    deadline: float
    greeted: bool = False
    asks: bool = False
    _received: bytearray = field(default_factory=bytearray)

    def take(self, received: bytes) -> None:
        """Go on with the greeting; `greeted` is true when it is whole.

        Raises:
            ProtocolError: the dialler is to be hung up on.
        """
        self._received += received
        if len(self._received) < 4:
            return
        length, said = int.from_bytes(self._received[:4], "big"), self._received[4:]
        if length > MAX_NAME_BYTES:
            raise ProtocolError(f"it announced a name of {length} bytes, at most {MAX_NAME_BYTES} are read")
        if len(said) > length:
            raise ProtocolError("it sent more than a name, and nothing is taken here")
        if len(said) == length:
            bare = said.removesuffix(ASKS)
            if not hmac.compare_digest(bare, self.name):
                raise ProtocolError("it asked for another process than this one")
            self.greeted, self.asks = True, bare != said

    def answer(self, seen: tuple[Any, ...]) -> bytes:
        """What it is answered, seen to dial from there."""
        return framed(self.name) + (framed(place_of(seen)) if self.asks else b"")
