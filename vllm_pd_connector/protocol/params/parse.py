"""`kv_transfer_params`: how a prefill instance, a router and a decode instance hand one request on.

The router sends `do_remote_decode` to the prefill instance, takes the parameters that it answers and forwards them,
unchanged, to the decode instance. The fields are those of vLLM's in-tree NIXL pull connector, so that routers need
not know us; what is our own stands under one extra key, "pd_connector". A user can write these parameters, so they
are data of an unauthenticated peer: everything is typed and bounded, and a field that is neither ours nor known from
vLLM is refused, because a misspelt field silently ignored is a wrong cache served; beside a whole answer of ours it was
added on the way, and is left out. `answer` makes and signs the answer.

Source: vLLM 0.32 `nixl/pull_scheduler.py` (`request_finished`), `nixl/metadata.py`, `mooncake_connector.py`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.validate import MAX_GROUPS
from vllm_pd_connector.protocol.peer import PeerKey
from vllm_pd_connector.protocol.wire.fields import (
    NONCE_BYTES,
    EngineId,
    Host,
    Incarnation,
    LeaseRef,
    Port,
    RequestId,
    ServerKey,
    Tokens,
    Weights,
)
from vllm_pd_connector.protocol.wire.messages import version_problem

BlockId = Annotated[int, Meta(ge=0, lt=2**31)]
BlockIds = Annotated[
    tuple[Annotated[tuple[BlockId, ...], Meta(max_length=1 << 20)], ...],
    Meta(max_length=MAX_GROUPS),
]
ParallelSize = Annotated[int, Meta(ge=1, le=65536)]
Signature = Annotated[str, Meta(min_length=64, max_length=64, pattern="^[0-9a-f]{64}$")]
NonceHex = Annotated[str, Meta(min_length=32, max_length=32, pattern="^[0-9a-f]{32}$")]

IN_TREE_KEYS: Final = frozenset(
    {
        "_p_side_truncated",
        "_remote_blocks_processed",
        "prompt_token_ids",
        "remote_prefill_cached_tokens",
        "remote_block_size",
        "remote_bootstrap_addr",
        "remote_tp_size",
        "transfer_id",
    }
)
"""Fields that vLLM 0.32 or its routers write for other connectors; they carry nothing that a pull needs."""


class Kind(Enum):
    """What the parameters make of a request on this instance."""

    NONE = "none"
    REMOTE_DECODE = "remote_decode"
    REMOTE_PREFILL = "remote_prefill"


class ParamsStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Strict, immutable, comparable by value."""


class Extension(ParamsStruct, frozen=True):
    """The value of "pd_connector": what a pull needs beyond the in-tree fields.

    Attributes:
        version: of the side channel's protocol.
        incarnation, nonce: which incarnation of the prefill instance and which lease of it is meant (see `lease`).
        lease_seconds: how long the lease lasts without a renewal.
        prompt_digest: of the prompt tokens whose cache is offered, so that it is never read for another prompt.
        first_blocks: per KV-cache group, which logical block the first id of `remote_block_ids` is (more than 0
            where a sliding window has passed the first blocks).
        server_key: the side channel's CURVE public key, None where it has none.
        weights: with which the caches were computed.
        signature: over all fields but itself, None where nothing is signed.
    """

    version: Annotated[int, Meta(ge=0, lt=2**16)]
    incarnation: Incarnation
    nonce: NonceHex
    lease_seconds: Annotated[float, Meta(gt=0, le=86400)]
    prompt_digest: Annotated[str, Meta(min_length=16, max_length=16, pattern="^[0-9a-f]{16}$")]
    first_blocks: Annotated[tuple[BlockId, ...], Meta(max_length=MAX_GROUPS)]
    server_key: ServerKey | None = None
    weights: Weights = Weights()
    signature: Signature | None = None


class RemotePrefill(ParamsStruct, frozen=True):
    """Where a decode instance finds the cache of a request: the answer of a prefill instance.

    `remote_block_ids` has one tuple of logical block ids per KV-cache group, `remote_num_tokens` counts the prompt
    tokens whose cache is there.
    """

    do_remote_prefill: bool
    do_remote_decode: bool
    remote_block_ids: BlockIds
    remote_engine_id: EngineId
    remote_request_id: RequestId
    remote_host: Host
    remote_port: Port
    tp_size: ParallelSize
    dcp_size: ParallelSize
    pp_size: ParallelSize
    remote_num_tokens: Tokens
    remote_blocks_expiry_time: float | None
    transfer_mode: Literal["pull", "push"]
    pd_connector: Extension

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        """The blocks, as everybody but routers knows them."""
        return tuple(map(BlockTable.of, self.pd_connector.first_blocks, self.remote_block_ids))

    @property
    def peer(self) -> PeerKey:
        """The prefill instance that is meant, in the incarnation that is meant."""
        ours = self.pd_connector
        return PeerKey(self.remote_host, self.remote_port, ours.incarnation, ours.server_key)

    @property
    def lease(self) -> LeaseRef:
        """The lease under which the blocks are held.

        Its nonce is made of the one in the parameters and of everything that says what is read: parameters in which
        another block, token count, prompt or name of weights was put name a lease that was never held. The address is
        left out, which may be translated on the way.
        """
        ours = self.pd_connector
        read = (self.remote_block_ids, ours.first_blocks, self.remote_num_tokens, ours.prompt_digest)
        whose = (self.remote_engine_id, ours.incarnation, ours.nonce, ours.weights)
        nonce = hashlib.blake2b(msgspec.msgpack.encode((read, whose)), digest_size=NONCE_BYTES).digest()
        return LeaseRef(self.remote_request_id, nonce)


class RemotePush(ParamsStruct, frozen=True):
    """Which prefill a decode instance asks for when nobody has computed it yet: the request of a concurrent router.

    The prefill is found by the name that both legs share, see `pairing_name`; sizes are learned from the manifests.
    """

    do_remote_prefill: bool
    remote_engine_id: EngineId
    remote_host: Host
    remote_port: Port
    do_remote_decode: bool | None = None
    remote_request_id: str | None = None
    remote_block_ids: BlockIds | None = None
    tp_size: ParallelSize | None = None
    dcp_size: ParallelSize | None = None
    pp_size: ParallelSize | None = None
    remote_num_tokens: Tokens | None = None
    remote_blocks_expiry_time: float | None = None
    transfer_mode: Literal["push"] | None = None
    pd_connector: None = None


class RemoteBootstrap(ParamsStruct, frozen=True):
    """The same from a proxy of the in-tree Mooncake connector, which names the bootstrap address instead of the
    side channel's; both legs carry the same `transfer_id`."""

    do_remote_prefill: bool
    remote_engine_id: EngineId
    remote_bootstrap_addr: Annotated[str, Meta(max_length=300)]
    transfer_id: Annotated[str, Meta(min_length=1, max_length=512)]
    do_remote_decode: bool | None = None


class RemoteDecode(ParamsStruct, frozen=True):
    """What a router asks of a prefill instance: compute the prompt, keep the cache for a decode instance.

    Routers send the fields of the answer as nulls; a value in one of them would ask for something else.
    """

    do_remote_decode: bool
    do_remote_prefill: bool | None = None
    remote_block_ids: None = None
    remote_engine_id: None = None
    remote_request_id: None = None
    remote_host: None = None
    remote_port: None = None
    tp_size: None = None
    dcp_size: None = None
    pp_size: None = None
    remote_num_tokens: None = None
    remote_blocks_expiry_time: None = None
    transfer_mode: None = None
    pd_connector: None = None


S = TypeVar("S", bound=ParamsStruct)
MAX_NAME: Final = 512  # as `fields.RequestId`
_RANDOM_SUFFIX: Final = re.compile(r"-[0-9a-f]{8}\Z", re.IGNORECASE)
_LATER_OF_BATCH: Final = re.compile(r"(?:\d+_)?cmpl-.*(-[1-9]\d{0,5})-[0-9a-f]{8}\Z", re.IGNORECASE | re.DOTALL)
_LATER_ROUND: Final = re.compile(r"resp_.*_[1-9]\d{0,5}-[0-9a-f]{8}\Z", re.IGNORECASE | re.DOTALL)
_CHOICE: Final = re.compile(r"\d+_")  # vLLM 0.32, v1/engine/parallel_sampling.py; its own ids begin with a letter


def kind_of(params: object) -> Kind:
    """What `parse` ask of this instance, from the two flags alone; a null flag counts as false, as in vLLM.

    Raises:
        ProtocolError: not an object, a flag that is no boolean, or both flags set.
    """
    if params is None:
        return Kind.NONE
    fields = _fields(params)
    decode, prefill = (_flag(fields, name) for name in ("do_remote_decode", "do_remote_prefill"))
    if decode and prefill:
        raise ProtocolError(
            "kv_transfer_params: do_remote_decode and do_remote_prefill are both true; set the first for the prefill "
            "instance, the second for the decode instance"
        )
    return Kind.REMOTE_DECODE if decode else Kind.REMOTE_PREFILL if prefill else Kind.NONE


def parse_remote_prefill(params: object) -> RemotePrefill:
    """The parameters of a request on the decode side (pull).

    Raises:
        ProtocolError: names the field that is unknown, missing, of another type or out of bounds, or the versions.
    """
    fields = _asking(params, Kind.REMOTE_PREFILL)
    if fields.get("pd_connector") is None:
        raise ProtocolError(
            "kv_transfer_params: pd_connector is missing; the prefill instance does not run PDConnector, or the router "
            "did not forward its answer unchanged, or sent both legs at once, for which decode needs mode push or auto"
        )
    parsed = convert(fields, RemotePrefill)
    require_one_form(parsed)
    return parsed


def require_one_form(parsed: RemotePrefill) -> None:
    """Refuse an answer whose parts do not fit each other, or of a release that cannot be read.

    Raises:
        ProtocolError: names the fields, or the versions.
    """
    groups, firsts = len(parsed.remote_block_ids), len(parsed.pd_connector.first_blocks)
    if groups != firsts:
        raise ProtocolError(
            f"kv_transfer_params: remote_block_ids has {groups} groups, pd_connector.first_blocks {firsts}; forward "
            "the instance's answer unchanged"
        )
    if problem := version_problem(parsed.pd_connector.version):
        raise ProtocolError(f"kv_transfer_params: pd_connector.{problem}")


def parse_remote_push(params: object) -> RemotePush:
    """The parameters of a request on the decode side whose prefill may still be under way (push).

    Raises:
        ProtocolError: names the field that is unknown, missing, of another type or out of bounds.
    """
    return convert(_asking(params, Kind.REMOTE_PREFILL), RemotePush)


def parse_remote_bootstrap(params: object) -> RemoteBootstrap:
    """The parameters of a request on the decode side, as proxies of the in-tree Mooncake connector write them.

    Raises:
        ProtocolError: names the field that is unknown, missing, of another type or out of bounds.
    """
    return convert(_asking(params, Kind.REMOTE_PREFILL), RemoteBootstrap)


def names_bootstrap(params: object) -> bool:
    """Whether parameters for a decode instance are those of the in-tree Mooncake connector's proxies."""
    fields = _fields(params)
    return fields.get("remote_bootstrap_addr") is not None and fields.get("pd_connector") is None


def is_answer(params: object) -> bool:
    """Whether parameters for a decode instance are a prefill instance's answer, and not a concurrent router's own."""
    return _fields(params).get("pd_connector") is not None


def pairing_name(params: object, request_id: str) -> str:
    """The name by which the two legs of a request find each other: `transfer_id`, or what the router set as
    X-Request-Id. vLLM puts a random suffix of 8 hex digits behind the latter, another one on each instance.

    The choices of a request with `n` > 1 pair off one by one.

    Raises:
        ProtocolError: a transfer_id that is no text of 1 to 512 characters, or an id of more. Names go out several in a
            message, which is refused as a whole for one.
    """
    transfer_id = _fields(params).get("transfer_id")
    if transfer_id is None:
        name = _RANDOM_SUFFIX.sub("", request_id) or request_id
        if len(name) > MAX_NAME:
            raise ProtocolError(f"request id: {len(name)} characters, at most {MAX_NAME}; set a shorter X-Request-Id")
        return name
    choice, later = choice_of(request_id), later_of_batch(request_id)
    if not isinstance(transfer_id, str) or not 1 <= len(transfer_id) <= MAX_NAME - len(choice) - len(later):
        raise ProtocolError("kv_transfer_params: transfer_id: expected text of 1 to 512 characters")
    return choice + transfer_id + later


def later_of_batch(request_id: str) -> str:
    """What vLLM puts behind the id of a completion with several prompts for each but the first of the requests that it
    makes of it ("-1", "-2", …); empty for any other. All have the parameters of one, and of a prefill's answers the
    router gets the first prompt's alone.

    Source: vLLM 0.32, `entrypoints/openai/completion/serving.py` (`final_res_batch[0].kv_transfer_params`).
    """
    found = _LATER_OF_BATCH.match(request_id)
    return found.group(1) if found else ""


def later_round(request_id: str) -> bool:
    """Whether vLLM made it of a response with built-in tools after the first of them: all have that one's parameters,
    and any engine may get them. Source: vLLM 0.32, `entrypoints/openai/responses/serving.py` (`sub_request_id`)."""
    return _LATER_ROUND.match(request_id) is not None


def choice_of(request_id: str) -> str:
    """What vLLM puts before the id of a request with `n` > 1 for each of the requests that it makes of it ("0_", "1_",
    …); empty for any other."""
    found = _CHOICE.match(request_id)
    return found.group() if found else ""


def parse_remote_decode(params: object) -> RemoteDecode:
    """The parameters of a request on the prefill side.

    Raises:
        ProtocolError: a field is unknown, or has a value where routers send null.
    """
    return convert(_asking(params, Kind.REMOTE_DECODE), RemoteDecode)


def _fields(params: object) -> Mapping[Any, Any]:
    if not isinstance(params, Mapping):
        raise ProtocolError(f"kv_transfer_params: expected an object, got {type(params).__name__}")
    return params


def _flag(fields: Mapping[Any, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ProtocolError(f"kv_transfer_params: {name}: expected true, false or null, got {type(value).__name__}")
    return bool(value)


def _asking(params: object, kind: Kind) -> Mapping[Any, Any]:
    """The fields of parameters that ask for this."""
    found = kind_of(params)
    if found is not kind:
        raise ProtocolError(f"kv_transfer_params: do_{kind.value} is not true (the parameters say {found.value!r})")
    return _fields(params)


def _texts(fields: Mapping[Any, Any]) -> Iterator[str]:
    for value in fields.values():
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from (inner for inner in value.values() if isinstance(inner, str))


def unknown_fields(fields: Mapping[Any, Any], struct: type[ParamsStruct]) -> list[str]:
    """At most eight that neither this struct nor vLLM 0.32 has."""
    return sorted(repr(key)[:80] for key in fields.keys() - IN_TREE_KEYS - {*struct.__struct_fields__})[:8]


def convert(fields: Mapping[Any, Any], struct: type[S]) -> S:
    """Parameters as one of these structs; beside an answer, which has every field, unknown ones are left out.

    Raises:
        ProtocolError: names the field that is unknown, missing, of another type or out of bounds.
    """
    if not issubclass(struct, RemotePrefill) and (unknown := unknown_fields(fields, struct)):
        raise ProtocolError(
            f"kv_transfer_params: unknown fields {', '.join(unknown)}; forward the prefill instance's answer as it is"
        )
    ours = {key: fields[key] for key in struct.__struct_fields__ if key in fields}
    try:
        for text in _texts(ours):
            text.encode()  # JSON has escapes for what is no text: a lease's name could not be made of it
        return msgspec.convert(ours, struct)
    except Exception as error:  # a user's data, as in messages; msgspec says `Object contains unknown field`, say
        raise ProtocolError(f"kv_transfer_params: {error}"[:4096]) from error
