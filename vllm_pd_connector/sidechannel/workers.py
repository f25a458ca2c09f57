"""Whether a message is from a worker of this instance: each has drawn a secret, and given it to its scheduler half by
way of vLLM, so that nobody else is taken for it."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from vllm_pd_connector.protocol.messages import Failure, FailureCode, NextJob, Sums
from vllm_pd_connector.protocol.push_messages import AwaitOrders, PushEnded


def refusal(message: AwaitOrders | PushEnded | NextJob | Sums, tokens: Sequence[bytes]) -> Failure | None:
    """Why a message is not from the worker that it names, None if it is; `tokens` are the workers', in rank order."""
    if not tokens:
        return Failure(FailureCode.NOT_READY, "the workers of this instance are not known yet")
    known = message.worker < len(tokens)
    if not known or not hmac.compare_digest(tokens[message.worker], message.token):
        return Failure(FailureCode.MALFORMED, f"token: not that of worker {message.worker} of this instance")
    return None
