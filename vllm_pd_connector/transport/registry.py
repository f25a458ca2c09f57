"""Transports by name: what the installed distributions list in the entry-point group `vllm_pd_connector.transports`.

An entry names a callable `(options, *, serves, memory) -> Transport`, the arguments as `create` has them. This
package's own transports are entries like those of others. One is imported when it is created, so that an unused one, or
its library, need not be there. How another package brings one: docs/design/transports.md.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from vllm_pd_connector.errors import InvalidConfig, PDConnectorError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_pd_connector.transport.base import Transport

GROUP = "vllm_pd_connector.transports"


@functools.cache
def entries() -> tuple[EntryPoint, ...]:
    """All entries of the group; looked up once in a process."""
    return tuple(sorted(entry_points(group=GROUP), key=lambda entry: entry.name))


def names() -> tuple[str, ...]:
    return tuple(dict.fromkeys(entry.name for entry in entries()))


def find(name: str) -> EntryPoint:
    """The entry of transport `name`; imports nothing.

    Raises:
        InvalidConfig: no distribution has it, or several have.
    """
    found = [entry for entry in entries() if entry.name == name]
    if not found:
        known = ", ".join(names()) or "none, so install this package again: its metadata is older than its code"
        raise InvalidConfig(f"transport: {name!r} is unknown, choose one of {known}")
    if len(found) > 1:
        several = " and ".join(map(_origin, found))
        raise InvalidConfig(f"transport: {name!r} is brought by {several}; uninstall all but one")
    return found[0]


def create(
    name: str, options: Mapping[str, object] | None = None, *, serves: bool = True, memory: str = "cpu"
) -> Transport:
    """A new endpoint of transport `name`.

    `options` are the fields of the transport's options struct (`NixlOptions`, `MooncakeOptions`, `LoopbackOptions`, or
    another's). `serves`: whether peers may read or write memory that is registered here; without that, nothing moves
    between calls, only what is polled to its end is sure to happen, and `replace_endpoint` can work. `memory`: the
    `Segment.device` of what will be registered, for transports that choose a protocol by it.

    Raises:
        InvalidConfig: unknown name, unknown or mistyped option, the transport's library is not installed, or the
            package that brings it is broken.
        TransferError: the library cannot start.
    """
    entry = find(name)
    try:
        transport: Transport = entry.load()(dict(options or {}), serves=serves, memory=memory)
        if transport.name != name:
            raise TypeError(f"it calls itself {transport.name!r}")
    except PDConnectorError:
        raise
    except Exception as error:
        raise InvalidConfig(
            f"transport: {name!r} of {_origin(entry)} cannot be used: {type(error).__name__}: {error}; install a "
            "version of it that fits this one, or choose another transport"
        ) from error
    return transport


def _origin(entry: EntryPoint) -> str:
    dist = entry.dist
    return f"{dist.name} {dist.version} ({entry.value})" if dist is not None else entry.value
