"""Authenticates this instance's own workers by the secret that each passed through vLLM."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from vllm_pd_connector.protocol.wire.messages import Failure, FailureCode, JobChecksums, NextChecksumJob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_pd_connector.protocol.wire.push_messages import AwaitCommands, PushEnded


def refusal(
    message: AwaitCommands | PushEnded | NextChecksumJob | JobChecksums, tokens: Sequence[bytes]
) -> Failure | None:
    """Why a message is not from the worker that it names, None if it is; `tokens` are the workers', in rank order."""
    if not tokens:
        return Failure(FailureCode.NOT_READY, "the workers of this instance are not known yet")
    known = message.worker < len(tokens)
    if not known or not hmac.compare_digest(tokens[message.worker], message.token):
        return Failure(FailureCode.MALFORMED, f"token: not that of worker {message.worker} of this instance")
    return None
