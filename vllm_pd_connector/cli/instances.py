"""Instances as commands name them: a file of manifests, or the address of a live side channel."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from vllm_pd_connector.arguments import host_and_port
from vllm_pd_connector.cli.output import CommandError, NotReached, NotReadable
from vllm_pd_connector.errors import InvalidConfig, PDConnectorError, ProtocolError
from vllm_pd_connector.geometry.manifest import Manifest
from vllm_pd_connector.protocol.wire.messages import Describe, Failure, GetManifests, Manifests, Request
from vllm_pd_connector.sidechannel.client import Outcome, SideChannelClient
from vllm_pd_connector.sidechannel.net.keys import Keys, load_keys, public_key
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.sidechannel.waiting import ask
from vllm_pd_connector.wake import Wake

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEME: Final = "tcp://"


@dataclass(frozen=True, slots=True)
class Identity:
    """Our keys and the key of the server that we ask."""

    keys: Keys
    server_key: str


def identity_of(directory: Path | None, server_key: Path | None) -> Identity | None:
    """What --keys and --server-key say; the server's key is the only one that is not ours if it is not given.

    Raises:
        NotReadable: no keys there, or several servers' and none is chosen.
    """
    if directory is None:
        return None
    try:
        keys = load_keys(directory)
        if server_key is not None:
            return Identity(keys, public_key(server_key))
    except InvalidConfig as error:
        raise NotReadable(str(error)) from error
    others = keys.peers - {keys.public} or keys.peers
    if len(others) > 1:
        raise NotReadable(f"--keys: {directory} has {len(others)} peers; say which with --server-key FILE")
    return Identity(keys, *others)


def load(source: str, timeout: float, identity: Identity | None = None) -> list[Manifest]:
    """The manifests of an instance, from a file or a side channel; not validated.

    Raises:
        CommandError: nothing there, or something else.
    """
    if source.startswith(SCHEME):
        encoded = [(f"{source}: worker {i}", data) for i, data in enumerate(fetch(source, timeout, identity))]
        return [manifest for name, data in encoded for manifest in _decode(name, data)]
    try:
        content = Path(source).read_bytes()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise NotReadable(f"{source}: {why}; give a file of manifests or tcp://host:port of a side channel") from error
    return _decode(source, content)


def _decode(name: str, content: bytes) -> list[Manifest]:
    kind = Manifest | list[Manifest]
    # No msgpack of a manifest or a list of up to 15 begins like JSON, and none of more does either.
    decode = msgspec.json.decode if content.lstrip()[:1] in (b"[", b"{") else msgspec.msgpack.decode
    try:
        found: Any = decode(content, type=kind)
        msgspec.msgpack.encode(found)  # JSON has numbers of any length, manifests on the wire have not
    except (msgspec.MsgspecError, PDConnectorError, ValueError, OverflowError, RecursionError) as error:
        raise NotReadable(f"{name}: not manifests of this release: {error}") from error
    return found if isinstance(found, list) else [found]


def place(address: str) -> tuple[str, int, str]:
    """Host, port and engine ("" for any) of tcp://host:port[/engine_id].

    Raises:
        NotReadable: it is none.
    """
    where, _, engine = address.removeprefix(SCHEME).partition("/")
    try:
        host, _, port = host_and_port(where).rpartition(":")
    except argparse.ArgumentTypeError as error:
        raise NotReadable(f"{address}: give tcp://host:port or tcp://host:port/engine_id") from error
    return host, int(port), engine


def fetch(address: str, timeout: float, identity: Identity | None = None) -> tuple[bytes, ...]:
    """The encoded manifests that a side channel serves, of the engine in the address or of any.

    Raises:
        NotReadable: not an address.
        NotReached: nobody there in time, or another engine.
        CommandError: the server refused.
    """
    host, port, engine = place(address)
    try:
        where = endpoint(host, port, identity.server_key if identity is not None else None)
        outcome = _ask(where, GetManifests(engine) if engine else Describe(), timeout, identity)
    except ProtocolError as error:
        raise NotReadable(f"{address}: {error}") from error
    match outcome:
        case Manifests():
            return outcome.manifests
        case Failure(code=code, message=message):
            raise CommandError(f"{address}: {code}: {message}")
        case _:
            keys = "" if identity is not None else ", and does it want --keys"
            raise NotReached(f"{address}: {outcome}; is a prefill instance with PDConnector listening there{keys}?")


def _ask(address: str, request: Request, timeout: float, identity: Identity | None) -> Outcome:
    keys = identity.keys if identity is not None else None
    with contextlib.closing(SideChannelClient(keys=keys)) as client, contextlib.closing(Wake()) as wake:
        return ask(client, wake, address, request, timeout)


def save(manifests: Sequence[Manifest], output: Path) -> None:
    """Write manifests: JSON if the name ends so, else msgpack.

    Raises:
        NotReadable: the file cannot be written.
    """
    encode = msgspec.json.encode if output.suffix == ".json" else msgspec.msgpack.encode
    try:
        output.write_bytes(encode(manifests))
    except OSError as error:
        raise NotReadable(f"{output}: cannot be written: {error.strerror}") from error
