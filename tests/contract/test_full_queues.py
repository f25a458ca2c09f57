"""The words by which the router knows that an instance takes no more requests for now."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError, MaxQueuedTokensError, QueueOverflowError
from vllm.v1.engine.core import EngineCoreProc

from vllm_pd_connector.compat.base import FOLLOWS_SLEEP
from vllm_pd_connector.proxy.instance import Full, InstanceRefusal, Paused, refusal_kind


@pytest.mark.parametrize("kind", [QueueOverflowError, MaxQueuedTokensError])
def test_vllm_says_so_of_full_queues(kind: type[GracefulHTTPError]) -> None:
    error = kind()
    assert refusal_kind(int(error.http_status), str(error).encode()) is Full
    assert refusal_kind(500, str(error).encode()) is InstanceRefusal


@pytest.mark.skipif(not FOLLOWS_SLEEP, reason="this vLLM has requests wait while it is paused")
def test_vllm_says_so_of_a_pause_and_tells_its_connector() -> None:
    told: list[Any] = []
    core = SimpleNamespace(reject_new_requests=True, scheduler=SimpleNamespace(has_request=lambda _: False))
    core._send_finish_outputs_to_client, core.add_request = lambda *said: told.extend(said), told.append
    request = SimpleNamespace(request_id="d-1", client_index=0, abort_immediately=False, kv_transfer_params={"a": 1})
    assert EngineCoreProc._reject_add_while_paused(core, request)
    error, stand_in = told[-2:]
    assert stand_in.abort_immediately, "what its prefill holds is given back"
    error = error.to_exception()
    assert refusal_kind(int(error.status_code), str(error).encode()) is Paused
    assert refusal_kind(500, str(error).encode()) is InstanceRefusal
