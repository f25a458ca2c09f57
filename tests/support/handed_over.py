"""What instances with this connector answer, for tests of what is done with it."""

from __future__ import annotations

from typing import Any

from vllm_pd_connector.protocol.params.answer import encode_params, require_signature
from vllm_pd_connector.protocol.params.conversation import (
    is_named_alone,
    names_conversation,
    parse_conversation,
    parse_named,
)
from vllm_pd_connector.protocol.params.parse import Extension, RemotePrefill, parse_remote_decode
from vllm_pd_connector.protocol.wire.messages import PROTOCOL_VERSION

OWN = Extension.__struct_fields__


def answer_of(**changes: Any) -> RemotePrefill:
    """The answer of a prefill with two KV-cache groups on two ranks; `changes` are fields of it or of its extension."""
    values: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": ((4, 5), (9,)),
        "remote_engine_id": "p-0",
        "remote_request_id": "cmpl-1-0-abcdef01",
        "remote_host": "10.0.0.7",
        "remote_port": 5600,
        "tp_size": 2,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 33,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "version": PROTOCOL_VERSION,
        "incarnation": "0" * 32,
        "nonce": (b"n" * 16).hex(),
        "lease_seconds": 30.0,
        "prompt_digest": "0123456789abcdef",
        "first_blocks": (0, 2),
    } | changes
    own = Extension(**{key: values.pop(key) for key in OWN if key in values})
    return RemotePrefill(**values, pd_connector=own)


def handed_over(secret: bytes | None = None) -> dict[str, Any]:
    """Its `kv_transfer_params`, signed with a `secret`."""
    return encode_params(answer_of(), secret)


NAMED = {
    "do_remote_decode": True,
    "remote_engine_id": "d-0",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_request_id": "cmpl-1",
}
"""What a router sends that knows a conversation by its name alone."""


NAMED_WITH_KEY = NAMED | {"pd_connector": {"server_key": "k" * 40}}
"""The same of an instance with keys."""


def kept(secret: bytes | None = None) -> dict[str, Any]:
    """What a decode instance answers that keeps a conversation."""
    params = handed_over() | {"do_remote_prefill": False, "do_remote_decode": True}
    params["pd_connector"] |= {"prefixes": [[16, "0" * 16], [33, "0123456789abcdef"]]}
    return encode_params(parse_conversation(params), secret)


def use_turn(params: Any) -> object:
    """Parameters for a prefill instance, as its scheduler half reads them."""
    if not names_conversation(params):
        return parse_remote_decode(params)
    if is_named_alone(params):
        return parse_named(params)
    found = parse_conversation(params)
    require_signature(found, b"s" * 32)
    return found.lease
