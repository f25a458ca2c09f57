"""The envelope of `Transport.describe`: who answers, what the library needs, and a hash over both.

A library's metadata is parsed by native code that does not survive damage (NIXL 1.5.1 drops the live peer and never
accepts its name again when metadata arrives truncated), so nothing reaches a library before the hash is right. The
hash finds damage, not malice: whoever may write to the side channel is trusted not to forge.
"""

from __future__ import annotations

import hashlib

import msgspec

from vllm_pd_connector.errors import TransferError

MAX_ENDPOINT_BYTES = 16 << 20
MAX_PROTOCOL = 20


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """`transport` is the port's name, `name` is unique per process start, `metadata` belongs to the library. `protocol`
    is what the library speaks, for people; "" where that differs by peer."""

    transport: str
    name: str
    metadata: bytes
    digest: bytes
    protocol: str = ""


def seal(transport: str, name: str, metadata: bytes, protocol: str = "") -> bytes:
    """Bytes for a manifest's `endpoint`."""
    digest = _digest(transport, name, metadata, protocol)
    return msgspec.msgpack.encode(Endpoint(transport, name, metadata, digest, protocol))


def unseal(transport: str, endpoint: bytes) -> Endpoint:
    """The endpoint that a peer sealed.

    Raises:
        TransferError: too large, malformed, damaged, or made by another transport than `transport`.
    """
    if len(endpoint) > MAX_ENDPOINT_BYTES:
        raise TransferError(
            f"endpoint of {len(endpoint)} bytes, at most {MAX_ENDPOINT_BYTES} are accepted; "
            "check that the peer runs the same version of this connector"
        )
    try:
        made = msgspec.msgpack.decode(endpoint, type=Endpoint)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the second is msgspec's way to refuse a bad string
        raise TransferError(f"malformed endpoint ({len(endpoint)} bytes): {error}; fetch the manifest again") from error
    if made.transport != transport:
        raise TransferError(
            f"transport: {transport} here, {made.transport:.80} there; start both sides with the same transport"
        )
    expected = _digest(made.transport, made.name, made.metadata, made.protocol)
    if made.digest != expected:
        raise TransferError(
            f"endpoint {made.name!r:.80} is damaged: digest {made.digest.hex()} received, {expected.hex()} computed; "
            "fetch the manifest again"
        )
    return made


def protocol_of(transport: str, endpoint: bytes) -> str:
    """What the maker of an endpoint says that its library speaks, for people; "" if it does not say, or seals its
    endpoints in another way."""
    try:
        return unseal(transport, endpoint).protocol[:MAX_PROTOCOL]
    except TransferError:
        return ""


def _digest(transport: str, name: str, metadata: bytes, protocol: str) -> bytes:
    return hashlib.sha256(b"\0".join((transport.encode(), name.encode(), protocol.encode(), metadata))).digest()
