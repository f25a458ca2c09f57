"""What an API server refuses is told to the connector under a name that no other request has."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_pd_connector.compat.refused import _tell, tell_of_refused_streams
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


@pytest.mark.parametrize("leaves", ["", "first", "meanwhile"], ids=["refused", "its client leaves", "and it, too"])
def test_what_is_not_taken_is_told_of_also_where_its_client_leaves_meanwhile(
    monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    """A server cancels at each turn who serves a client that has left: nothing can be waited for there."""
    told: list[str] = []

    async def take(*_: Any) -> None:
        if leaves != "first":
            raise ValueError("logprobs")
        await asyncio.sleep(3600)

    async def rejected(name: str, *_: Any, **__: Any) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        told.append(name)

    async def serve() -> None:
        monkeypatch.setattr(AsyncLLM, "add_request", take)
        tell_of_refused_streams()
        engine = SimpleNamespace(notify_kv_transfer_request_rejected=rejected, errored=False)
        asked = SimpleNamespace(extra_args={"kv_transfer_params": {"do_remote_prefill": True}})
        adding = asyncio.ensure_future(AsyncLLM.add_request(engine, "a", "prompt", asked))
        await asyncio.sleep(0)
        if leaves == "meanwhile":
            await asyncio.sleep(0)  # it is told of by now
            assert not told
        while leaves and not adding.done():
            adding.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError if leaves else ValueError):
            await adding
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(serve())
    assert len(told) == 1
