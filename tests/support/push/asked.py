"""Which running prefills decode instances have asked for."""

from __future__ import annotations

from vllm_pd_connector.sidechannel.push_service import PushService


def asked_for(pushes: PushService, *request_ids: str) -> bool:
    """Whether somebody waits for more of each of these prefills."""
    found = pushes._such(request_ids, lambda prefill: bool(prefill.registrations) and not prefill.failure)
    return found == set(request_ids)


def ordered(pushes: PushService, request_id: str) -> bool:
    """Whether workers are to write all that a prefill was said to have computed."""
    told = lambda prefill: all(one.last[0] == prefill.ready for one in prefill.registrations.values())  # noqa: E731
    return pushes._such([request_id], told) == {request_id}
