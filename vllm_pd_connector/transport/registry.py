"""Transports by name. A library is imported when its transport is created, so that an unused one need not be there."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from vllm_pd_connector.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_pd_connector.transport.base import Transport

Options = TypeVar("Options", bound=msgspec.Struct)

NAMES = ("nixl", "mooncake", "loopback")


def create(
    name: str, options: Mapping[str, object] | None = None, *, serves: bool = True, memory: str = "cpu"
) -> Transport:
    """A new endpoint of transport `name`.

    `options` are the fields of the transport's options struct (`NixlOptions`, `MooncakeOptions`,
    `LoopbackOptions`). `serves`: whether peers may read or write memory that is registered here; without that,
    nothing moves between calls, only what is polled to its end is sure to happen, and `renew` can work. `memory`: the
    `Segment.device` of what will be registered, for transports that choose a protocol by it.

    Raises:
        InvalidConfig: unknown name, unknown or mistyped option, or the transport's library is not installed.
        TransferError: the library cannot start.
    """
    given = dict(options or {})
    if name == "nixl":
        from vllm_pd_connector.transport.nixl.bindings import NixlOptions
        from vllm_pd_connector.transport.nixl.transport import NixlTransport

        return NixlTransport(_convert(name, given, NixlOptions), serves=serves)
    if name == "mooncake":
        from vllm_pd_connector.transport.mooncake.engine import MooncakeOptions
        from vllm_pd_connector.transport.mooncake.transport import MooncakeTransport

        return MooncakeTransport(_convert(name, given, MooncakeOptions), memory=memory)
    if name == "loopback":
        from vllm_pd_connector.transport.loopback import LoopbackOptions, LoopbackTransport

        return LoopbackTransport(_convert(name, given, LoopbackOptions), serves=serves)
    raise InvalidConfig(f"transport: {name!r} is unknown, choose one of {', '.join(NAMES)}")


def _convert(name: str, given: dict[str, object], form: type[Options]) -> Options:
    try:
        return msgspec.convert(given, type=form)
    except msgspec.ValidationError as error:
        known = ", ".join(form.__struct_fields__) or "none"
        raise InvalidConfig(f"transport_options of {name}: {error}; known options: {known}") from error
