"""What a prefill instance with this connector answers, for tests of what routers do with it."""

from __future__ import annotations

from typing import Any

from vllm_pd_connector.protocol.params.answer import remote_prefill_params


def handed_over(secret: bytes | None = None) -> dict[str, Any]:
    """`kv_transfer_params` of a prefill with two KV-cache groups on two ranks, signed with a `secret`."""
    return remote_prefill_params(
        block_ids=[[4, 5], [9]],
        first_blocks=[0, 2],
        request_id="cmpl-1-0-abcdef01",
        nonce=b"n" * 16,
        lease_seconds=30.0,
        prompt_digest="0123456789abcdef",
        engine_id="p-0",
        incarnation="0" * 32,
        host="10.0.0.7",
        port=5600,
        tp_size=2,
        dcp_size=1,
        pp_size=1,
        num_tokens=33,
        secret=secret,
    )
