"""The metadata of an endpoint: where a worker's engine and liveness hub listen, and what the engine speaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.transport.addresses import Address, check_reachable

if TYPE_CHECKING:
    from vllm_pd_connector.transport.endpoint import Endpoint


class Whereabouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The metadata of an endpoint: where the engine and the liveness hub listen, and on which host (see
    `addresses`)."""

    address: str
    engine_port: int
    line_port: int
    protocol: str
    host: str


def locate(endpoint: Endpoint, protocol: str, ours: Address) -> tuple[Whereabouts, Address]:
    """Where a peer is, for a worker with `protocol` at address `ours`.

    Raises:
        TransferError: malformed, or not to be reached from here.
    """
    try:
        where = msgspec.msgpack.decode(endpoint.metadata, type=Whereabouts)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransferError(f"endpoint of {endpoint.name} is malformed: {error}; fetch the manifest again") from error
    if where.protocol != protocol:
        raise TransferError(
            f"protocol: {protocol} here, {where.protocol[:20]} there; set transport_options.protocol alike"
        )
    if not (0 < where.engine_port < 65536 and 0 < where.line_port < 65536):
        raise TransferError(f"ports of {endpoint.name}: {where.engine_port} and {where.line_port} are not ports")
    return where, check_reachable(where.address, where.host, ours)
