"""The record of a receive: all that its plan was made of and what became of it, in a file that can be handed on.

An operator's order (`vllm-pd trace next`) is a file in `trace_dir`. The scheduler half takes it when a request is about
to be received and marks so many requests, so that all ranks record the same ones. Each worker appends one line of JSON
to the request's file when its receive is over: whole or not at all, since it is one write. Until there is an order,
a receive costs one look for a file that is not there.

What a record says of both sides is their manifests, from which `cli.trace.replay` makes the same plan again. What it
does not say: prompts and bytes of caches, nonces of leases and signatures, and where transports and processes are
reached (`endpoint`, `life`), which names keys of memory. A record that is read is a stranger's word.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from vllm_pd_connector.errors import PDConnectorError
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.manifest import Manifest
from vllm_pd_connector.geometry.validate import MAX_GROUPS, MAX_RANKS

if TYPE_CHECKING:
    from pathlib import Path

RECORD_VERSION: Final = 1
ORDER: Final = "order.json"
PREFIX: Final = "trace-"
MAX_REQUESTS: Final = 100_000
MAX_FILES: Final = 64
MAX_FILE_BYTES: Final = 256 << 20
MAX_TOKENS: Final = 1 << 24

Word = Annotated[str, Meta(max_length=4096)]
Number = Annotated[int, Meta(ge=0, lt=2**62)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Tables = Annotated[tuple[BlockTable, ...], Meta(max_length=MAX_GROUPS)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Strict, immutable, comparable by value."""


class Order(_Strict, frozen=True):
    """Record the next `requests` requests; with `failures`, those of them that fail."""

    version: Literal[1] = RECORD_VERSION
    requests: Annotated[int, Meta(ge=1, le=MAX_REQUESTS)] = 1
    failures: bool = False


class Stage(_Strict, frozen=True):
    """One stage that was completed, in seconds since the worker got the request."""

    name: Word
    began: Annotated[float, Meta(ge=-1e9, le=1e9)]
    ended: Annotated[float, Meta(ge=-1e9, le=1e9)]


class Moved(_Strict, frozen=True):
    """What the transport was given, as whoever moved the bytes counted it."""

    bytes: Number = 0
    runs: Number = 0
    descriptors: Number = 0


class Record(_Strict, frozen=True):
    """One worker's receive.

    Attributes:
        software: of this worker. `at`: when the receive ended, in seconds since 1970.
        prefill: the request's id on the prefill side; `peer`: that instance's side channel.
        way: who moved the bytes: "pull" (this side read), "push" (the prefill side wrote).
        start, stop: the range of tokens; `blocks` are the tables of this side's groups, `source_blocks` those of the
            prefill side, None where only that knows them.
        destination: this worker's manifest; `sources`: those of all ranks there, none if they never came or cannot be
            read. Without `endpoint`, `scratch` and `life`.
        same_weights: that both sides have the same was known otherwise than by the manifests.
        chunk_bytes: the most that was staged at a time, 0 for nothing; `run_cost`: what a run counts, in bytes.
        verified: whether sums were compared; `waited_s`: what the request had waited before.
        ok, reason, kind: the outcome; a failure's kind is its label in the series. `quarantined`: transfers could still
            write when it was reported.
        seconds: from the order to the report.
    """

    version: Literal[1]
    software: Word
    at: Annotated[float, Meta(ge=0, le=1e11)]
    request: Word
    prefill: Word
    peer: Word
    way: Literal["pull", "push"]
    start: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    stop: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    blocks: Tables
    source_blocks: Tables | None
    destination: Manifest
    sources: Annotated[tuple[Manifest, ...], Meta(max_length=MAX_RANKS)]
    same_weights: bool
    chunk_bytes: Number
    run_cost: Annotated[int, Meta(ge=1, lt=2**62)]
    verified: bool
    waited_s: Seconds
    stages: Annotated[tuple[Stage, ...], Meta(max_length=64)]
    moved: Moved
    ok: bool
    reason: str
    kind: Word
    quarantined: bool
    seconds: Seconds


class Unreadable(PDConnectorError):
    """A file that has no records, or others than this release's."""


def shareable(manifest: Manifest) -> Manifest:
    """The manifest without what names places and keys of memory."""
    return msgspec.structs.replace(manifest, endpoint=b"", scratch=None, life=None)


def place_order(directory: Path, order: Order) -> Path:
    """Have the instance whose `trace_dir` this is record requests; replaces an order that was not taken.

    Raises:
        OSError: it cannot be written.
    """
    path, new = directory / ORDER, directory / f".{ORDER}.{os.getpid()}"
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644), "wb") as file:
            os.fchmod(file.fileno(), 0o644)  # also of an operator whose umask lets nobody else read
            file.write(msgspec.json.encode(order))
        new.rename(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    return path


def take_order(directory: Path) -> Order | None:
    """The order that lies there, which then does not any more; of several processes one gets it.

    Raises:
        Unreadable: it is none, and was thrown away.
        OSError: it cannot be read or thrown away.
    """
    path = directory / ORDER
    try:
        with path.open("rb") as file:
            content = file.read(4096)
        path.unlink()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(content, type=Order)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unreadable(f"{path}: {error}; place it with `vllm-pd trace next`") from error


def file_of(directory: Path, request_id: str, mark: str) -> Path:
    """Where a request's records go; `mark` tells requests of one id apart. The id is a client's word: only letters of
    it are taken."""
    return directory / f"{PREFIX}{re.sub(r'[^A-Za-z0-9_-]', '_', request_id)[:80]}-{mark}.jsonl"


def append(path: Path, record: Record) -> None:
    """Add a worker's record to its request's file.

    Raises:
        Unreadable: the directory has as many files as it may.
        OSError: it cannot be written whole.
    """
    line = msgspec.json.encode(record) + b"\n"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists() and sum(name.startswith(PREFIX) for name in os.listdir(path.parent)) >= MAX_FILES:
        raise Unreadable(f"{path.parent} has {MAX_FILES} files of records: move them away")
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        if (written := os.write(opened, line)) != len(line):
            raise OSError(f"{path}: {written} of {len(line)} bytes could be written; is the disk full?")
    finally:
        os.close(opened)


def read(path: Path) -> list[Record]:
    """The records in a file, a line each.

    Raises:
        Unreadable: it is not there, too large, or a line is no record of this release.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise Unreadable(f"{path}: {error.strerror if isinstance(error, OSError) else error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise Unreadable(f"{path}: more than {MAX_FILE_BYTES} bytes")
    found = [record_of(f"{path}: line {i}", line) for i, line in enumerate(content.splitlines(), 1) if line.strip()]
    if not found:
        raise Unreadable(f"{path}: no record in it")
    return found


def record_of(place: str, line: bytes) -> Record:
    """The record in a line of the file `place`.

    Raises:
        Unreadable: there is none of this release in it.
    """
    try:
        version: Any = msgspec.json.decode(line, type=_Versioned).version
        if version != RECORD_VERSION:
            raise Unreadable(f"{place}: a record of version {version}; this release reads version {RECORD_VERSION}")
        found = msgspec.json.decode(line, type=Record)
        msgspec.msgpack.encode(found)  # JSON has numbers of any length, manifests on the wire have not
        return found
    except (msgspec.MsgspecError, PDConnectorError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(f"{place}: no record of a receive: {error}") from error


class _Versioned(msgspec.Struct):
    """What all versions have."""

    version: int
