"""What an API server refuses is told to the connector under a name that no other request has."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from vllm_pd_connector.compat.refused import _tell
from vllm_pd_connector.protocol.params.parse import pairing_name


def test_two_refused_streams_of_one_client_s_name_are_two_and_name_one_prefill() -> None:
    """Beside a connector that keeps each request for a step the engine core ends at the second of a name. A client's
    own may end as vLLM's random part does."""
    asked, told = {"do_remote_prefill": True}, []

    async def rejected(name: str, params: Any, **rank: Any) -> None:
        told.append((name, params, rank))

    engine = SimpleNamespace(notify_kv_transfer_request_rejected=rejected)
    for client in ("chatcmpl-a", "chatcmpl-a", "chatcmpl-job-1a2b3c4d"):
        asyncio.run(_tell(engine, client, SimpleNamespace(extra_args={"kv_transfer_params": asked}), 2))
    assert len({name for name, _, _ in told}) == 3
    assert [pairing_name({}, name) for name, _, _ in told] == ["chatcmpl-a", "chatcmpl-a", "chatcmpl-job-1a2b3c4d"]
    assert all((params, rank) == (asked, {"data_parallel_rank": 2}) for _, params, rank in told)
