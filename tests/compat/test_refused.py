"""What an API server refuses is told to the connector under a name that no other request has; what the engine core's
input thread refuses, under its own."""

from __future__ import annotations

import asyncio
import queue
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.cache import MultiModalCacheMissError
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.request import Request, RequestStatus

from tests.support.scheduler.halves import PROMPT, freed, hand_over, make_half, make_request, serving_half, until
from tests.support.scheduler.push_halves import ASK, PushPeer, digest_of
from vllm_pd_connector.compat.refused import _tell, pass_on_unprepared, tell_of_refused_streams
from vllm_pd_connector.protocol.params.parse import pairing_name
from vllm_pd_connector.protocol.wire.push_messages import PushState


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


class Core(EngineCoreProc):  # type: ignore[misc]
    """vLLM's own engine core, with nothing but what it looks at where it refuses."""

    def __init__(self) -> None:
        self.input_queue, self.output_queue = queue.Queue(), queue.Queue()
        self.engine_index = 0
        pass_on_unprepared(self)

    def refuse(self, request: EngineCoreRequest, how: str) -> None:
        """As its input thread does, which answers the client first."""
        if how == "a medium left the cache":
            self._handle_mm_cache_miss(request, MultiModalCacheMissError(["an image"]))
        elif how == "its grammar is none":
            self._handle_request_validation_error(request, VLLMValidationError("a grammar"))
        else:
            self._handle_request_preproc_error(request)
        client, said = self.output_queue.get_nowait()
        assert client == request.client_index and said.outputs[0].finish_reason is FinishReason.ERROR

    def passed_on(self) -> list[Request]:
        taken = []
        while not self.input_queue.empty():
            kind, (request, wave) = self.input_queue.get_nowait()
            assert kind is EngineCoreRequestType.ADD and wave == 3
            taken.append(request)
        return taken


def sent(name: str, params: Any, **more: Any) -> EngineCoreRequest:
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params} if params is not None else None)
    return EngineCoreRequest(name, PROMPT, None, sampling, None, 0.0, None, None, None, current_wave=3, **more)


REFUSALS = ["a medium left the cache", "it cannot be made"]
if hasattr(EngineCoreProc, "_handle_request_validation_error"):  # vLLM 0.33
    REFUSALS.append("its grammar is none")


@pytest.mark.parametrize("how", REFUSALS)
def test_what_a_request_came_for_that_the_input_thread_refuses_is_given_back(how: str) -> None:
    producer, _ = serving_half("kv_producer", kv_lease_duration=600.0)  # so that only a message ends it
    half, _ = make_half("kv_consumer")
    core = Core()
    core.refuse(sent("d-1", hand_over(producer)), how)
    [request] = core.passed_on()
    assert request.abort_immediately, "vLLM's engine core ends it behind its arrival"
    half.on_new_request(request)
    request.status = RequestStatus.FINISHED_ABORTED
    half.request_finished(request, ([],))
    until(lambda: freed(producer) == ["p-1"], "the lease to be given back")


@pytest.mark.parametrize("how", REFUSALS)
def test_a_prefill_that_the_input_thread_refuses_is_waited_for_by_nobody(how: str) -> None:
    producer, _ = serving_half("kv_producer", mode="push")
    peer, core = PushPeer(producer), Core()
    answer = peer.register(digest_of(make_request("p-1", ASK)))
    core.refuse(sent("p-1", ASK), how)
    [request] = core.passed_on()
    producer.on_new_request(request)
    request.status = RequestStatus.FINISHED_ABORTED
    producer.request_finished(request, ([],))
    said = answer()
    peer.close()
    assert said.state is PushState.FAILED and "FINISHED_ABORTED" in said.reason


@pytest.mark.parametrize("how", REFUSALS)
def test_the_scheduler_is_told_of_nothing_else_that_the_input_thread_refuses(how: str) -> None:
    core = Core()
    core.refuse(sent("plain", None), how)
    core.refuse(sent("none", "no object"), how)
    core.refuse(sent("a session", {"do_remote_prefill": True}, resumable=True), how)
    assert not core.passed_on()


def test_a_request_that_cannot_be_passed_on_ends_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The input thread is every client's."""
    core = Core()
    unknown = sent("d-1", {"do_remote_prefill": True})
    unknown.sampling_params.max_tokens = None
    core.refuse(unknown, REFUSALS[1])
    assert not core.passed_on() and "request d-1: its prefill cannot be given back" in caplog.text


def test_what_a_later_vllm_tells_of_a_refusal_besides_is_passed_on() -> None:
    """Its input thread would end by it, and with it all clients."""
    told: list[Any] = []
    core = SimpleNamespace(_handle_request_preproc_error=lambda *why, **more: told.append((why, more)))
    pass_on_unprepared(core)
    refused = sent("plain", None)
    core._handle_request_preproc_error(refused, error="a grammar")
    assert told == [((refused,), {"error": "a grammar"})]
