"""Transports by name: what the installed distributions list in the entry-point group `vllm_pd_connector.transports`.

An entry names a callable `(options, use) -> Transport`, the arguments as `create` has them. This package's own
transports are entries like those of others. One is imported when it is created, so that an unused one, or its library,
need not be there. How another package brings one: docs/design/transports.md.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from vllm_pd_connector.errors import InvalidConfig, PDConnectorError
from vllm_pd_connector.transport.base import Use

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from vllm_pd_connector.transport.base import Transport

GROUP = "vllm_pd_connector.transports"

IN_ONE_PROCESS = "loopback"
"""This package's own transport for tests and tools; between two instances it reaches nobody."""


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
        known = (
            ", ".join(one for one in names() if one != IN_ONE_PROCESS)
            or "none, so install this package again: its metadata is older than its code"
        )
        raise InvalidConfig(f"transport: {name!r} is unknown, choose one of {known}")
    if len(found) > 1:
        several = " and ".join(map(_origin, found))
        raise InvalidConfig(f"transport: {name!r} is brought by {several}; uninstall all but one")
    return found[0]


def create(name: str, options: Mapping[str, object] | None = None, use: Use | None = None) -> Transport:
    """A new endpoint of transport `name`.

    `options` are the fields of the transport's options struct (`NixlOptions`, `MooncakeOptions`, `LoopbackOptions`, or
    another's); `use` what its worker will do with it.

    Raises:
        InvalidConfig: unknown name, unknown or mistyped option, the transport's library is not installed, or the
            package that brings it is broken.
        TransferError: the library cannot start.
    """
    entry = find(name)
    with _usable(entry):
        transport: Transport = entry.load()(dict(options or {}), use or Use())
        if transport.name != name:
            raise TypeError(f"it calls itself {transport.name!r}")
        return transport


def check(name: str, options: Mapping[str, object] | None = None, use: Use | None = None) -> None:
    """Refuse what `create` would refuse and can be known without the library: before an instance loads its model.

    Asks `check`, with the arguments of the entry's callable and in its module, if there is one; it starts nothing.

    Raises:
        InvalidConfig: as `create`.
    """
    entry = find(name)
    with _usable(entry):
        ask = getattr(importlib.import_module(entry.module), "check", None)
        if ask is not None:
            ask(dict(options or {}), use or Use())


@contextlib.contextmanager
def _usable(entry: EntryPoint) -> Iterator[None]:
    """What a package that brings a transport raises of its own is a refusal of that package."""
    try:
        yield
    except PDConnectorError:
        raise
    except Exception as error:
        raise InvalidConfig(
            f"transport: {entry.name!r} of {_origin(entry)} cannot be used: {type(error).__name__}: {error}; install a "
            "version of it that fits this one, or choose another transport"
        ) from error


def ways(name: str) -> AbstractContextManager[Callable[[], tuple[str, ...]]]:
    """Around `create` and `connect`, for tools: gives what the library says of the ways that it chose for its peers, a
    line each. Asks `ways` in the entry's module; a transport without one says nothing, and of one that is broken
    `create` says how.

    Raises:
        InvalidConfig: as `find`.
    """
    entry = find(name)
    ask = None
    with contextlib.suppress(ImportError):
        ask = getattr(importlib.import_module(entry.module), "ways", None)
    return ask() if ask is not None else contextlib.nullcontext(tuple)


def _origin(entry: EntryPoint) -> str:
    dist = entry.dist
    return f"{dist.name} {dist.version} ({entry.value})" if dist is not None else entry.value
