"""Have the connector told of streams that vLLM's API server refuses.

vLLM tells its connector of a decode request that it refuses, so that the prefill's blocks are given back. It takes the
making of an answer for the taking of a request; but of a stream it has begun to answer before the request is checked
against the model (log-probabilities above a limit, what a drafter cannot do), so it tells of none of these, nor of
those of `/inference/v1/generate`. Their blocks would be held for the time of their lease. All requests are checked
where they are given to the engine, and there they are followed, also where a client leaves meanwhile. Of others vLLM
tells a second time, which changes nothing, and so it is of a request that has reached the engine core after all.

Of a stream that the engine core itself refuses, before its scheduler has it, nobody tells: a medium that has left the
processor's cache, say. Its prefill is held for the time of its lease.

Source: vLLM 0.32 and 0.33, `entrypoints/generate/base/serving.py` (`_with_kv_transfer_rejection_cleanup`),
`entrypoints/openai/completion/serving.py` (`completion_stream_generator`), `v1/engine/async_llm.py`.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from typing import Any


def tell_of_refused_streams() -> None:
    """From now on the engines of this process tell their connector; once per process."""
    from vllm.v1.engine.async_llm import AsyncLLM

    take = AsyncLLM.add_request
    if hasattr(take, "__wrapped__"):
        return

    telling: set[asyncio.Task[None]] = set()

    @functools.wraps(take)
    async def add_request(engine: Any, request_id: str, prompt: Any, params: Any, *args: Any, **more: Any) -> Any:
        try:
            return await take(engine, request_id, prompt, params, *args, **more)
        except (Exception, asyncio.CancelledError) as error:
            if not engine.errored:
                told = asyncio.create_task(_tell(engine, request_id, params, more.get("data_parallel_rank")))
                telling.add(told)
                told.add_done_callback(telling.discard)
                if not isinstance(error, asyncio.CancelledError):  # who waits is cancelled again at each turn
                    await asyncio.shield(told)
            raise

    AsyncLLM.add_request = add_request


async def _tell(engine: Any, request_id: str, params: Any, data_parallel_rank: int | None) -> None:
    asked = (getattr(params, "extra_args", None) or {}).get("kv_transfer_params")
    if not isinstance(asked, dict) or not asked.get("do_remote_prefill"):
        return
    try:
        name = f"{request_id}-{secrets.token_hex(4)}"  # as vLLM makes an engine's of a client's, which may come twice
        await engine.notify_kv_transfer_request_rejected(name, asked, data_parallel_rank=data_parallel_rank)
    except Exception:  # the client is to hear why its request was refused
        from vllm_pd_connector.compat.base import init_logger

        init_logger(__name__).warning("request %s: its prefill cannot be given back", request_id, exc_info=True)
