"""`kv_transfer_params` from a decode instance back to a prefill instance: what a finished turn left behind.

A decode instance that may keep its caches answers a finished request with parameters in the form of the in-tree NIXL
connector's turn-2 readback: those of a prefill instance with the two flags exchanged. Whoever brings the conversation's
next turn sends them to a prefill instance with the flags as they are: `do_remote_decode` as in every prefill, and where
a part of the prompt lies already.

The next prompt is made anew, by a chat template of a client's messages, and need not begin with every token that is
held. So the parameters have a digest of several prefixes, and the longest that the prompt begins with is read. A prefix
is named only if what is held serves it: windows and recurrent states reach back no further than where they stand.

Source: vLLM 0.32, `nixl/pull_scheduler.py` (`request_finished`, `get_num_new_matched_tokens`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.protocol.params.parse import (
    Extension,
    Kind,
    ParamsStruct,
    RemotePrefill,
    convert,
    kind_of,
    require_one_form,
)
from vllm_pd_connector.protocol.wire.fields import (
    NONCE_BYTES,
    EngineId,
    Host,
    LeaseRef,
    Port,
    RequestId,
    ServerKey,
    Tokens,
)

MAX_PREFIXES: Final = 66
LEAST_STEP: Final = 16
"""Tokens between two prefixes, at least; more where there would be more than `MAX_PREFIXES`."""

Prefix = tuple[Tokens, Annotated[str, Meta(min_length=16, max_length=16, pattern="^[0-9a-f]{16}$")]]
"""How many tokens, and their digest."""


class ConversationExtension(Extension, frozen=True, kw_only=True):
    """The value of "pd_connector" where a decode instance answers: `prefixes`, shortest first, are what may be read."""

    prefixes: Annotated[tuple[Prefix, ...], Meta(min_length=1, max_length=MAX_PREFIXES)]


class Conversation(RemotePrefill, frozen=True, kw_only=True):
    """Where a prefill instance finds what a decode instance holds of a conversation; `remote_num_tokens` are all of
    the tokens that it holds."""

    pd_connector: ConversationExtension

    @property
    def lease(self) -> LeaseRef:
        """As for a prefill; its nonce is made of the prefixes, too, so that changed ones name no lease."""
        bare = RemotePrefill.lease.fget(self)  # type: ignore[attr-defined]
        read = msgspec.msgpack.encode((bare.nonce, self.pd_connector.prefixes))
        return LeaseRef(bare.request_id, hashlib.blake2b(read, digest_size=NONCE_BYTES).digest())


class NamedExtension(ParamsStruct, frozen=True):
    """The value of "pd_connector" where a router has nothing but a name: the key that the decode instance says it has
    (`instance_info`). It decides nothing: whose key is not known here is not spoken to."""

    server_key: ServerKey


class NamedConversation(ParamsStruct, frozen=True):
    """The same from a router that has not seen a decode instance's answer, since vLLM leaves it out of streams:
    `remote_request_id` is the name that it gave the decode request (`transfer_id`, see `pairing_name`)."""

    do_remote_decode: bool
    remote_engine_id: EngineId
    remote_request_id: RequestId
    remote_host: Host
    remote_port: Port
    do_remote_prefill: bool | None = None
    remote_block_ids: None = None
    tp_size: None = None
    dcp_size: None = None
    pp_size: None = None
    remote_num_tokens: None = None
    remote_blocks_expiry_time: None = None
    transfer_mode: None = None
    pd_connector: NamedExtension | None = None

    @property
    def server_key(self) -> str | None:
        return self.pd_connector.server_key if self.pd_connector is not None else None


def prefix_lengths(least: int, most: int, also: int) -> list[int]:
    """The lengths of prefixes, in tokens, that are named of `most` tokens, ascending: every so many from `least` on,
    `also` if it lies between the two, and `most` itself. Empty where nothing lies between the two."""
    least = max(least, 1)
    if most < least:
        return []
    step = LEAST_STEP
    while (most - least) // step > MAX_PREFIXES - 3:
        step *= 2
    lengths = {most, *range(-(-least // step) * step, most, step)}
    return sorted(lengths | ({also} if least <= also <= most else set()))


def names_conversation(params: object) -> bool:
    """Whether parameters for a prefill instance say where a part of the prompt lies already."""
    return isinstance(params, Mapping) and any(
        params.get(name) is not None for name in ("remote_block_ids", "remote_request_id", "pd_connector")
    )


def is_named_alone(params: object) -> bool:
    """Whether they give a conversation's name, under which the decode instance is to be asked for the rest."""
    return isinstance(params, Mapping) and params.get("remote_block_ids") is None


def parse_named(params: object) -> NamedConversation:
    """A conversation's name and where to ask for it.

    Raises:
        ProtocolError: names the field that is unknown, missing, of another type or out of bounds.
    """
    assert isinstance(params, Mapping)
    return convert(params, NamedConversation)


def parse_conversation(params: object) -> Conversation:
    """The parameters of a conversation's next turn on the prefill side.

    Raises:
        ProtocolError: names the field that is unknown, missing, of another type or out of bounds, or the versions.
    """
    if kind_of(params) is not Kind.REMOTE_DECODE or not isinstance(params, Mapping):
        raise ProtocolError("kv_transfer_params: do_remote_decode is not true: this is no turn for a prefill instance")
    if params.get("pd_connector") is None:
        raise ProtocolError(
            "kv_transfer_params: pd_connector is missing: the decode instance does not run PDConnector, or the router "
            "did not forward its answer unchanged"
        )
    parsed = convert(params, Conversation)
    require_one_form(parsed)
    lengths = [tokens for tokens, _ in parsed.pd_connector.prefixes]
    if lengths != sorted(set(lengths)) or lengths[0] < 1 or lengths[-1] != parsed.remote_num_tokens:
        raise ProtocolError(
            f"kv_transfer_params: pd_connector.prefixes: lengths {lengths} of {parsed.remote_num_tokens} tokens; they "
            "ascend from 1 on to all of them"
        )
    return parsed
