"""The side channel's messages: what a decode instance asks of a prefill instance, and the answers.

A frame is a header and a msgpack body. The header (magic, version, sequence number) keeps its form in every version,
so that another version, or junk, is told apart before the body is looked at, and a refusal still names the request
that it answers. The sequence number belongs to the client, which matches replies by it; 0 means "not known".

Bodies are strict tagged structs: unknown fields, other types and values out of bounds are refused. All requests are
idempotent: a client may repeat one whose reply was lost. What bodies are made of is in `fields`, those of pushes are in
`push_messages`. Bytes of unauthenticated peers go through `decode_request` and `decode_reply`, which raise
`ProtocolError` and nothing else, and whose work and memory are bounded by the frame.

See docs/design/protocol.md.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.validate import MAX_GROUPS
from vllm_pd_connector.protocol.wire import push_messages as pm
from vllm_pd_connector.protocol.wire.fields import (
    MAX_CONVERSATION,
    MAX_LEASES,
    MAX_PIECE_BYTES,
    MAX_REPLY_FRAME,
    MAX_REQUEST_FRAME,
    MAX_TEXT,
    EncodedManifest,
    EngineId,
    Incarnation,
    LeaseRef,
    Message,
    Nonce,
    Readings,
    RequestId,
    Tables,
    Text,
    Tokens,
    Worker,
    Workers,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAGIC: Final = b"VPDC"
PROTOCOL_VERSION: Final = 2
MIN_VERSION: Final = 2

_HEADER: Final = struct.Struct("!4sHQ")


class GetManifests(Message, frozen=True, tag="get_manifests"):
    """Ask for the manifests of all workers of engine `engine_id`."""

    engine_id: EngineId


class Describe(Message, frozen=True, tag="describe"):
    """Ask for the manifests of all workers of whatever engine is here: for tools, which only know an address.

    A reader of caches asks with `GetManifests`, so that an engine that replaced its peer is told apart.
    """


class Renew(Message, frozen=True, tag="renew"):
    """Extend leases of requests that still wait, each to now plus its own duration."""

    leases: Readings


class ReadDone(Message, frozen=True, tag="read_done"):
    """Reader `reader` of `readers` (workers that read this lease) has all its bytes: were they valid until now?

    `attempt` and `shared` are those of `Reading`. The attempt tells a repeated message, which is answered as before,
    from another instance that was given the same lease by a router and reads it too late.
    """

    lease: LeaseRef
    reader: Worker
    readers: Workers
    attempt: Nonce
    shared: bool = False
    taken: pm.Taken = pm.Taken()


class Release(Message, frozen=True, tag="release"):
    """Give leases back that will not be read (any further) by these requests."""

    leases: Readings


class GetLeaseCount(Message, frozen=True, tag="status"):
    """Ask how many leases a reader comes for: an instance's own worker does, before it unmaps the memory at the end."""


class ChecksumPart(Message, frozen=True):
    """Checksums (`geometry.checksums.sums`) of one layer and role for the indices from `first_index` on: little-endian
    uint64."""

    layer: Annotated[str, Meta(max_length=512)]
    role: Annotated[str, Meta(max_length=64)]
    first_index: Annotated[int, Meta(ge=0, lt=2**31)]
    values: Annotated[bytes, Meta(max_length=MAX_PIECE_BYTES)]


Starts = Annotated[tuple[Tokens, ...], Meta(max_length=MAX_GROUPS)]


class GetChecksums(Message, frozen=True, tag="verify"):
    """Ask for the checksums over a lease's blocks: tokens [starts[group], stop) of each group. Answered when all
    workers have made theirs."""

    lease: LeaseRef
    starts: Starts
    stop: Tokens


class NextChecksumJob(Message, frozen=True, tag="next_job"):
    """Worker `worker` of this instance is ready to make checksums. Answered when there is something to do.

    `token` is the worker's, as in `AwaitCommands`.
    """

    token: Nonce
    worker: Worker


class JobChecksums(Message, frozen=True, tag="sums"):
    """What worker `worker` found for a job, in one or several messages; `last` ends them."""

    token: Nonce
    job: Annotated[int, Meta(ge=0, lt=2**53)]
    worker: Worker
    pieces: Annotated[tuple[ChecksumPart, ...], Meta(max_length=4096)]
    last: bool


class FindConversation(Message, frozen=True, tag="find_conversation"):
    """Answered by `FoundConversation`: what is kept of the request of this name (`protocol.params.parse.pairing_name`).
    vLLM leaves a finished request's parameters out of answers that it streams, so a router has the name alone."""

    name: RequestId


class FoundConversation(Message, frozen=True, tag="found_conversation"):
    """The parameters of a conversation, as JSON (`protocol.params.conversation`); empty if none of the name is kept."""

    params: Annotated[bytes, Meta(max_length=MAX_CONVERSATION)]


class Manifests(Message, frozen=True, tag="manifests"):
    """One encoded `geometry.manifest.Manifest` per worker, of one incarnation of the engine."""

    engine_id: EngineId
    incarnation: Incarnation
    manifests: Annotated[tuple[EncodedManifest, ...], Meta(min_length=1, max_length=4096)]


class Renewed(Message, frozen=True, tag="renewed"):
    """`gone` are the request ids of the leases that are not held (with that nonce) any more."""

    gone: Annotated[tuple[RequestId, ...], Meta(max_length=MAX_LEASES)]


class ReadVerdict(Message, frozen=True, tag="read_verdict"):
    """`held`: the lease was held without interruption until the report came. Otherwise `reason` says what happened."""

    held: bool
    reason: Text


class Released(Message, frozen=True, tag="released"):
    """None of the leases is held for these requests any more."""


class LeaseCount(Message, frozen=True, tag="standing"):
    """How many leases are held for readers; of conversations that nobody has asked for none is known."""

    leases: Annotated[int, Meta(ge=0)]


class Ack(Message, frozen=True, tag="noted"):
    """The message was taken in."""


class ChecksumJob(Message, frozen=True, tag="job"):
    """Checksums to be made, see `GetChecksums`."""

    job: Annotated[int, Meta(ge=0, lt=2**53)]
    tables: Tables
    starts: Starts
    stop: Tokens


class Accepted(Message, frozen=True, tag="accepted"):
    """Checksums were taken, or nobody waits for them any more."""


class LeaseChecksums(Message, frozen=True, tag="verified"):
    """The checksums of all workers."""

    pieces: Annotated[tuple[ChecksumPart, ...], Meta(max_length=1 << 20)]


class FailureCode(StrEnum):
    """What a client can do about a failure differs by code."""

    MALFORMED = "malformed"
    VERSION = "version"
    FOREIGN_ENGINE = "foreign_engine"
    NOT_READY = "not_ready"
    BUSY = "busy"
    LEAVING = "leaving"
    NOT_OFFERED = "not_offered"
    INTERNAL = "internal"


class Failure(Message, frozen=True, tag="failure"):
    """The request was not served. NOT_READY and BUSY pass; the other codes do not.

    LEAVING with sequence number 0 is sent to every client when an instance ends in an orderly way.
    """

    code: FailureCode
    message: Text


Request = (
    GetManifests
    | Describe
    | Renew
    | ReadDone
    | Release
    | pm.PushInto
    | pm.WithdrawPush
    | pm.DeclinePush
    | pm.KeepPrefills
    | pm.AwaitCommands
    | pm.PushEnded
    | GetLeaseCount
    | GetChecksums
    | NextChecksumJob
    | JobChecksums
    | FindConversation
)
Reply = (
    Manifests
    | Renewed
    | ReadVerdict
    | Released
    | LeaseCount
    | pm.Pushed
    | pm.Commands
    | Ack
    | LeaseChecksums
    | ChecksumJob
    | Accepted
    | FoundConversation
    | Failure
)

REPLY_OF: Final[dict[type[Message], type[Message]]] = {
    GetManifests: Manifests,
    Describe: Manifests,
    Renew: Renewed,
    ReadDone: ReadVerdict,
    Release: Released,
    GetLeaseCount: LeaseCount,
    pm.PushInto: pm.Pushed,
    pm.WithdrawPush: pm.Pushed,
    pm.DeclinePush: Ack,
    pm.KeepPrefills: Ack,
    pm.AwaitCommands: pm.Commands,
    pm.PushEnded: Ack,
    GetChecksums: LeaseChecksums,
    NextChecksumJob: ChecksumJob,
    JobChecksums: Accepted,
    FindConversation: FoundConversation,
}

T = TypeVar("T")
_encoder: Final = msgspec.msgpack.Encoder()
_request_decoder: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
_reply_decoder: Final[msgspec.msgpack.Decoder[Reply]] = msgspec.msgpack.Decoder(Reply)


class VersionMismatch(ProtocolError):
    """A frame of a protocol version that this release does not speak."""


def encode(seq: int, message: Request | Reply) -> bytes:
    """One frame, at PROTOCOL_VERSION. `seq` is a client's number in [0, 2**64).

    Raises:
        ProtocolError: text that is not valid Unicode, or a frame over the limit of its kind.
    """
    try:
        frame = _HEADER.pack(MAGIC, PROTOCOL_VERSION, seq) + _encoder.encode(message)
    except (UnicodeEncodeError, struct.error) as error:
        raise ProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error
    limit = MAX_REQUEST_FRAME if type(message) in REPLY_OF else MAX_REPLY_FRAME
    if len(frame) > limit:
        raise ProtocolError(f"{type(message).__name__} has {len(frame)} bytes, the limit is {limit}; send fewer items")
    return frame


def body_size(message: Message) -> int:
    """Bytes that a message takes in a frame, alone or as a part of another."""
    return len(_encoder.encode(message))


def decode_request(frame: bytes) -> tuple[int, Request]:
    """Sequence number and request of a frame.

    Raises:
        VersionMismatch: another protocol version.
        ProtocolError: anything else that is not a request of this protocol.
    """
    return _decode(frame, MAX_REQUEST_FRAME, _request_decoder)


def decode_reply(frame: bytes) -> tuple[int, Reply]:
    """Sequence number and reply of a frame. Raises as `decode_request`."""
    return _decode(frame, MAX_REPLY_FRAME, _reply_decoder)


def sequence_of(frame: bytes) -> int:
    """The sequence number of a frame of any version, 0 if it has no header of ours."""
    if len(frame) < _HEADER.size or frame[: len(MAGIC)] != MAGIC:
        return 0
    return int(_HEADER.unpack_from(frame)[2])


def version_problem(version: int) -> str:
    """Why a peer's protocol version cannot be spoken here; empty if it can."""
    if MIN_VERSION <= version <= PROTOCOL_VERSION:
        return ""
    return (
        f"version: {version} there, {MIN_VERSION} to {PROTOCOL_VERSION} here — run releases of vllm_pd_connector on "
        "both sides that share a protocol version"
    )


def lease_batches(leases: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """Leases or prefills in groups that each fit one Renew, Release or KeepPrefills."""
    for first in range(0, len(leases), MAX_LEASES):
        yield tuple(leases[first : first + MAX_LEASES])


def _decode(frame: bytes, limit: int, decoder: msgspec.msgpack.Decoder[T]) -> tuple[int, T]:
    if len(frame) > limit:
        raise ProtocolError(f"frame: {len(frame)} bytes, the limit is {limit}")
    if len(frame) < _HEADER.size:
        raise ProtocolError(f"frame: {len(frame)} bytes, the header alone has {_HEADER.size}; not a peer of ours?")
    magic, version, seq = _HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise ProtocolError(f"magic: {magic!r} there, {MAGIC!r} here; something else speaks to this port")
    if problem := version_problem(version):
        raise VersionMismatch(f"protocol {problem}")
    try:
        return seq, decoder.decode(memoryview(frame)[_HEADER.size :])
    except Exception as error:  # whatever a decoder thinks of an unauthenticated peer's bytes is one error
        raise ProtocolError(f"message body: {error}"[:MAX_TEXT]) from error
