"""The answer of a prefill instance: made, signed, and its signature checked.

With a secret that prefill and decode instances share, the answer is signed (HMAC-SHA256 over all of its fields), and
parameters that a client made up or changed, block ids inside the cache included, are refused before any traffic.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.protocol.params.parse import RemotePrefill, parse_remote_prefill
from vllm_pd_connector.protocol.wire.messages import PROTOCOL_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence


def remote_prefill_params(
    *,
    block_ids: Sequence[Sequence[int]],
    first_blocks: Sequence[int],
    request_id: str,
    nonce: bytes,
    lease_seconds: float,
    prompt_digest: str,
    engine_id: str,
    incarnation: str,
    host: str,
    port: int,
    tp_size: int,
    dcp_size: int,
    pp_size: int,
    num_tokens: int,
    transfer_mode: Literal["pull", "push"] = "pull",
    server_key: str | None = None,
    secret: bytes | None = None,
) -> dict[str, Any]:
    """The answer of a prefill instance, ready for JSON; `block_ids` per group, `num_tokens` of the prompt.

    `nonce` is drawn for this answer; what is to be held is the `lease` of the parsed parameters. `server_key` is the
    side channel's, None without CURVE; with a `secret` the answer is signed.

    Raises:
        ProtocolError: a value that no decode instance would accept, so that the failure shows where it is made.
    """
    params: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(group) for group in block_ids],
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": tp_size,
        "dcp_size": dcp_size,
        "pp_size": pp_size,
        "remote_num_tokens": num_tokens,
        # A moment of this host's clock means nothing on another; the lease protocol replaces it.
        "remote_blocks_expiry_time": None,
        "transfer_mode": transfer_mode,
        "pd_connector": {
            "version": PROTOCOL_VERSION,
            "incarnation": incarnation,
            "nonce": nonce.hex(),
            "lease_seconds": lease_seconds,
            "prompt_digest": prompt_digest,
            "first_blocks": list(first_blocks),
            **({"server_key": server_key} if server_key is not None else {}),
        },
    }
    remote = parse_remote_prefill(params)
    if secret is not None:
        params["pd_connector"]["signature"] = sign(remote, secret)
    return params


def sign(remote: RemotePrefill, secret: bytes) -> str:
    """64 hex digits over every field of the parameters that a decode instance reads, its signature aside."""
    bare = msgspec.structs.replace(remote.pd_connector, signature=None)
    content = msgspec.json.encode(msgspec.structs.replace(remote, pd_connector=bare))
    return hmac.new(secret, content, hashlib.sha256).hexdigest()


def require_signature(remote: RemotePrefill, secret: bytes | None) -> None:
    """Check who made the parameters; without a secret anybody may have.

    Raises:
        ProtocolError: a secret is given, and the parameters are not signed with it.
    """
    if secret is None:
        return
    found = remote.pd_connector.signature
    if found is None:
        raise ProtocolError(
            "kv_transfer_params: pd_connector.signature is missing, and params_secret is set here: set it on the "
            "prefill instance too"
        )
    if not hmac.compare_digest(found, sign(remote, secret)):
        raise ProtocolError(
            "kv_transfer_params: pd_connector.signature is not that of a prefill instance with this params_secret: "
            "the parameters were changed on the way, or the two sides have different secrets"
        )
