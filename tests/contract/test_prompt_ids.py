"""vLLM takes the ids of a chat's prompt where the router gives them, and from there they go nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers import online_renderer

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.routing.handoff import decode_body, prefill_body
from vllm_pd_connector.routing.prompt_ids import PromptIds, is_text_chat, take_prompt_ids

IDS = [7, 0, 2]
ANSWER = {"do_remote_prefill": True, "remote_engine_id": "p"}
TEXT: list[dict[str, Any]] = [{"type": "text", "text": "x"}]
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "echo": False},
    {"messages": [{"role": "system", "content": TEXT}, {"role": "user", "content": TEXT}], "return_token_ids": True},
    {"messages": [{"role": "user", "content": [*TEXT, {"type": "image_url", "image_url": {"url": "u"}}]}]},
    {"messages": [{"role": "user", "content": "x"}], "echo": True},
]


class Renderer:
    def validate_token_ids(self, ids: list[int], **_: Any) -> None:
        """Of a vocabulary that has them all."""


def decodes(body: dict[str, Any], ids: object) -> tuple[ChatCompletionRequest, list[int] | None]:
    """A decode leg as vLLM reads it, and the ids that it takes instead of rendering."""
    params = ANSWER | {"prompt_token_ids": ids}
    request = ChatCompletionRequest.model_validate({"model": "m", **body, "kv_transfer_params": params})
    return request, online_renderer._reused_prompt_token_ids(request, Renderer(), request.messages)  # type: ignore[arg-type]


@pytest.mark.parametrize("body", CHATS)
def test_vllm_takes_the_ids_of_what_is_a_chat_of_text_here(body: dict[str, Any]) -> None:
    request, taken = decodes(body, IDS)
    assert taken == (IDS if is_text_chat(body) else None)
    assert request.kv_transfer_params == ANSWER, "the engine and its connector see none"


@pytest.mark.parametrize("body", CHATS[:2])
def test_vllm_takes_both_legs_with_what_the_router_adds(body: dict[str, Any]) -> None:
    ids = PromptIds()
    first = ids.ask(prefill_body({"model": "m", **body}), body, {0})
    assert ChatCompletionRequest.model_validate(first).return_token_ids is True
    answer = ids.take({"kv_transfer_params": ANSWER, "prompt_token_ids": IDS}, "p")
    second = ids.give(decode_body({"model": "m", **body}, answer), {0})
    assert ChatCompletionRequest.model_validate(second).return_token_ids == body.get("return_token_ids")


@pytest.mark.parametrize("ids", ["1", {}, [], [-1], [1.0], [True], ["1"], [[1]]], ids=str)
def test_what_vllm_refuses_as_ids_is_not_sent_there(ids: object) -> None:
    with pytest.raises(VLLMValidationError):
        decodes(CHATS[0], ids)
    with pytest.raises(ProtocolError):
        take_prompt_ids({"prompt_token_ids": ids})
