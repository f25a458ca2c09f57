"""Have the connector told of requests that vLLM refuses before its scheduler has them.

vLLM tells its connector of a decode request that it refuses, so that the prefill's blocks are given back. It takes the
making of an answer for the taking of a request; but of a stream it has begun to answer before the request is checked
against the model (log-probabilities above a limit, what a drafter cannot do), so it tells of none of these, nor of
those of `/inference/v1/generate`. Their blocks would be held for the time of their lease. All requests are checked
where they are given to the engine, and there they are followed, also where a client leaves meanwhile. Of others vLLM
tells a second time, which changes nothing, and so it is of a request that has reached the engine core after all.

The engine core's input thread refuses what it cannot make a request of: a medium that has left the processor's cache,
say, or in 0.33 a grammar that is none. vLLM tells of those that are no streams alone. All are passed on to the
scheduler, as requests that are aborted at once.

Source: vLLM 0.32 and 0.33, `entrypoints/generate/base/serving.py` (`_with_kv_transfer_rejection_cleanup`),
`entrypoints/openai/completion/serving.py` (`completion_stream_generator`), `v1/engine/async_llm.py`,
`v1/engine/core.py` (`EngineCoreProc.process_input_sockets`).
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_REFUSALS = "_handle_mm_cache_miss", "_handle_request_preproc_error", "_handle_request_validation_error"
_NOT_GIVEN_BACK = "request %s: its prefill cannot be given back"


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

        init_logger(__name__).warning(_NOT_GIVEN_BACK, request_id, exc_info=True)


def pass_on_unprepared(core: Any) -> None:
    """From now on the scheduler of this engine core hears of requests with transfer parameters that its input thread
    refuses, behind the answer to their client: under their own id, with their own prompt, and aborted at once."""

    def also_passes_on(refuse: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(refuse)
        def refuses(request: Any, *why: Any, **more: Any) -> None:
            refuse(request, *why, **more)
            _pass_on(core, request)

        return refuses

    for name in filter(functools.partial(hasattr, core), _REFUSALS):  # the last is 0.33's
        setattr(core, name, also_passes_on(getattr(core, name)))


def _pass_on(core: Any, refused: Any) -> None:
    asked = (getattr(refused.sampling_params, "extra_args", None) or {}).get("kv_transfer_params")
    if not isinstance(asked, dict) or refused.resumable:  # a streaming session's: it goes on under this id
        return
    try:
        from vllm.v1.engine import EngineCoreRequestType
        from vllm.v1.request import Request

        refused.abort_immediately = True
        request = Request.from_engine_core_request(refused, None)
        core.input_queue.put_nowait((EngineCoreRequestType.ADD, (request, refused.current_wave)))
    except Exception:  # the input thread, which ends by it, is every client's
        from vllm_pd_connector.compat.base import init_logger

        init_logger(__name__).warning(_NOT_GIVEN_BACK, refused.request_id, exc_info=True)
