"""What a prefill instance with this connector answers, for tests of what is done with it."""

from __future__ import annotations

from typing import Any

from vllm_pd_connector.protocol.params.answer import encode_params
from vllm_pd_connector.protocol.params.parse import Extension, RemotePrefill
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
