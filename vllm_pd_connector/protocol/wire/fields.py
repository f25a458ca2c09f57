"""What messages of the side channel are made of: limits, the types of their fields, values that several of them carry.

Every field is bounded, so that a frame's size bounds the work and the memory that an unauthenticated peer can ask for.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.validate import MAX_GROUPS

MAX_REQUEST_FRAME: Final = 1024 * 1024
MAX_REPLY_FRAME: Final = 16 * 1024 * 1024
MAX_LEASES: Final = 24  # of the longest request ids, in UTF-8, still fit a request frame
MAX_READERS: Final = 4096
MAX_TEXT: Final = 4096
MAX_CONVERSATION: Final = 8 << 20  # of the parameters of one, whose block ids are numbers in JSON
NONCE_BYTES: Final = 16
MAX_COMPARE_S: Final = 3600.0
MAX_WAITED_S: Final = 1e9
MAX_PIECE_BYTES: Final = 16 * 1024
MAX_PIECES_BYTES: Final = 40 * 1024  # of all pieces of one Sums, with names well below a request frame

RequestId = Annotated[str, Meta(min_length=1, max_length=512)]
EngineId = Annotated[str, Meta(min_length=1, max_length=512)]
Incarnation = Annotated[str, Meta(min_length=32, max_length=32, pattern="^[0-9a-f]{32}$")]
AnyLife = Annotated[str, Meta(max_length=32, pattern="^([0-9a-f]{32})?$")]  # an incarnation, or whichever it is
Seconds = Annotated[float, Meta(ge=0, le=MAX_WAITED_S)]
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
# Letters of names and addresses only: zmq gives ";", "/" and "*" in an endpoint a meaning of their own.
Host = Annotated[str, Meta(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9._:%-]+\Z")]
ServerKey = Annotated[str, Meta(min_length=40, max_length=40, pattern=r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]+\Z")]
EncodedManifest = Annotated[bytes, Meta(min_length=1, max_length=MAX_REPLY_FRAME)]
Tokens = Annotated[int, Meta(ge=0, lt=2**31)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Count = Annotated[int, Meta(ge=0, lt=2**62)]
Traceparent = Annotated[str, Meta(max_length=55)]  # W3C: "00-", 32 digits, "-", 16, "-", 2; empty for none
Worker = Annotated[int, Meta(ge=0, lt=MAX_READERS)]
Workers = Annotated[int, Meta(ge=1, le=MAX_READERS)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Strict, immutable, comparable by value."""


class LeaseRef(Message, frozen=True):
    """One lease: the request id on the prefill side and the nonce that was drawn when the lease began."""

    request_id: RequestId
    nonce: Nonce


class Reading(LeaseRef, frozen=True):
    """One request of a decode instance that reads a lease. `attempt` is drawn once per request, all workers share it;
    `shared`: other requests may bring the same parameters (vLLM makes several of one with `n` > 1)."""

    attempt: Nonce
    shared: bool = False


class Weights(Message, frozen=True):
    """Which weights an instance computes with: their name, and how often they were changed in place since it started
    (its epoch). Where neither side has changed any, the handshake compares what the manifests say."""

    name: Text = ""
    epoch: Count = 0


Readings = Annotated[tuple[Reading, ...], Meta(max_length=MAX_LEASES)]


Tables = Annotated[tuple[BlockTable, ...], Meta(max_length=MAX_GROUPS)]
"""One per KV-cache group."""
