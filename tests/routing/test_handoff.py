"""What the two legs of a hand-off say."""

from __future__ import annotations

import copy

import pytest

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.routing.handoff import ASK_PREFILL, check_client_body, decode_body, fetches_media, prefill_body

BODY = {
    "model": "m",
    "prompt": [1, 2, 3],
    "max_tokens": 50,
    "temperature": 0.5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "min_tokens": 4,
    "stop": ["."],
    "logprobs": 2,
}
HANDED_OVER = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "extra": {"a": 1}}


def test_prefill_computes_the_same_prompt_and_one_token() -> None:
    leg = prefill_body(BODY)
    assert (leg["prompt"], leg["model"], leg["temperature"]) == ([1, 2, 3], "m", 0.5)
    assert (leg["max_tokens"], leg["stream"]) == (1, False)
    assert leg["kv_transfer_params"] == dict(ASK_PREFILL)


def test_prefill_always_ends_by_length() -> None:
    leg = prefill_body(BODY)
    assert leg["ignore_eos"] is True
    assert not {"stop", "stop_token_ids", "min_tokens", "stream_options", "logprobs"} & leg.keys()


def test_prefill_gets_all_that_a_prompt_is_made_of() -> None:
    of_prompt = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
        "response_format": {"type": "json_object"},
        "reasoning_effort": "low",
        "chat_template_kwargs": {"thinking": True},
        "documents": [{"text": "d"}],
        "truncate_prompt_tokens": 9,
        "mm_processor_kwargs": {"num_crops": 4},
        "cache_salt": "s",
    }
    assert of_prompt.items() <= prefill_body(of_prompt | {"stop": ["."]}).items()


def test_both_limits_on_tokens_are_lowered() -> None:
    leg = prefill_body({"messages": [], "max_completion_tokens": 50})
    assert (leg["max_tokens"], leg["max_completion_tokens"]) == (1, 1)


def test_decode_gets_the_clients_request_and_the_parameters_unchanged() -> None:
    leg = decode_body(BODY, {"choices": [], "kv_transfer_params": HANDED_OVER})
    assert leg == BODY | {"kv_transfer_params": HANDED_OVER}


def test_the_clients_body_is_not_changed() -> None:
    before = copy.deepcopy(BODY)
    prefill_body(BODY)
    decode_body(BODY, {"kv_transfer_params": HANDED_OVER})
    assert before == BODY


@pytest.mark.parametrize("answer", [None, [], {}, {"kv_transfer_params": None}, {"kv_transfer_params": {"x": 1}}])
def test_an_answer_that_hands_nothing_over_is_refused(answer: object) -> None:
    with pytest.raises(ProtocolError, match="kv_transfer_params"):
        decode_body(BODY, answer)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ([], "list"),
        ("text", "str"),
        ({"n": 2}, "n: 2"),
        ({"use_beam_search": True}, "beam"),
        ({"prompt": ["one", "two"]}, "2 prompts"),
        ({"prompt": [[1], [2], [3]]}, "3 prompts"),
        ({"prompt_embeds": ["one", "two"]}, "2 prompts"),
        ({"prompt": "p", "prompt_embeds": "e"}, "2 prompts"),
        ({"prompt": ["p"], "prompt_embeds": ["one", "two"]}, "3 prompts"),
        ({"prompt": "p", "kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ],
)
def test_requests_that_need_more_than_one_cache_are_refused(body: object, word: str) -> None:
    with pytest.raises(ProtocolError, match=word):
        check_client_body(body)


def test_best_of_passes_which_vllm_does_not_look_at() -> None:
    assert check_client_body({"prompt": "p", "best_of": 3})["best_of"] == 3


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], []])
def test_one_prompt_passes_as_it_is(prompt: object) -> None:
    assert check_client_body({"prompt": prompt, "n": 1}) == {"prompt": prompt, "n": 1}


@pytest.mark.parametrize(("prompt", "only"), [(["text"], "text"), ([[1, 2]], [1, 2])])
def test_a_list_of_one_prompt_is_that_prompt(prompt: object, only: object) -> None:
    assert check_client_body({"prompt": prompt}) == {"prompt": only}


@pytest.mark.parametrize("body", [{"prompt_embeds": "e"}, {"prompt_embeds": ["e"], "prompt": None}])
def test_embeddings_of_one_prompt_pass_as_they_are(body: dict[str, object]) -> None:
    assert check_client_body(body) == body


def chat(*content: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": list(content)}]}


@pytest.mark.parametrize(
    ("body", "fetches"),
    [
        (chat({"type": "image_url", "image_url": {"url": "HTTPS://h/1.png"}}), True),
        (chat({"type": "text", "text": "x"}, {"type": "video_url", "video_url": "http://h/1.mp4"}), True),
        (chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}), False),
        (chat({"type": "text", "text": "see http://h"}), False),
        (chat({"image_url": {"url": 7}}, {"image_url": None}, "http://h", 7), False),
        ({"messages": [{"role": "user", "content": "http://h"}, "http://h", 7]}, False),
        ({"messages": {"image_url": "http://h"}}, False),
        ({"prompt": "http://h"}, False),
    ],
)
def test_only_media_with_an_address_elsewhere_are_fetched(body: dict[str, object], fetches: bool) -> None:
    assert fetches_media(body) is fetches
