"""The answer of an instance that holds caches: encoded, signed, and its signature checked.

With a secret that prefill and decode instances share, the answer is signed (HMAC-SHA256 over all of its fields), and
parameters that a client made up or changed, block ids inside the cache included, are refused before any traffic.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import msgspec

from vllm_pd_connector.errors import ProtocolError, UnauthenticatedPeer
from vllm_pd_connector.protocol.params.conversation import Conversation, parse_conversation
from vllm_pd_connector.protocol.params.parse import RemotePrefill, parse_remote_prefill


def encode_params(answer: RemotePrefill, secret: bytes | None) -> dict[str, Any]:
    """An answer as it is returned to the router, ready for JSON; with a `secret` it is signed.

    Raises:
        ProtocolError: a value that no reader would accept, so that the failure shows where it is made.
    """
    try:
        params: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(answer))
    except UnicodeEncodeError as error:
        raise ProtocolError(f"kv_transfer_params: {error}") from error
    params["pd_connector"] = {key: value for key, value in params["pd_connector"].items() if value is not None}
    accepted = (parse_conversation if isinstance(answer, Conversation) else parse_remote_prefill)(params)
    if secret is not None:
        params["pd_connector"]["signature"] = sign(accepted, secret)
    return params


def sign(remote: RemotePrefill, secret: bytes) -> str:
    """64 hex digits over every field of the parameters that a decode instance reads, its signature aside."""
    bare = msgspec.structs.replace(remote.pd_connector, signature=None)
    content = msgspec.json.encode(msgspec.structs.replace(remote, pd_connector=bare))
    return hmac.new(secret, content, hashlib.sha256).hexdigest()


def require_signature(remote: RemotePrefill, secret: bytes | None) -> None:
    """Check who made the parameters; without a secret anybody may have.

    Raises:
        UnauthenticatedPeer: a secret is given, and the parameters are not signed with it.
    """
    if secret is None:
        return
    found = remote.pd_connector.signature
    if found is None:
        raise UnauthenticatedPeer(
            "kv_transfer_params: pd_connector.signature is missing, and params_secret is set here: set it on the "
            "prefill instance too"
        )
    if not hmac.compare_digest(found, sign(remote, secret)):
        raise UnauthenticatedPeer(
            "kv_transfer_params: pd_connector.signature is not that of a prefill instance with this params_secret: "
            "the parameters were changed on the way, or the two sides have different secrets"
        )
