"""Which chats go to decode by the ids of their prompts, and what of a prefill's answer are such ids."""

from __future__ import annotations

import pytest

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.routing.handoff import decode_body, prefill_body
from vllm_pd_connector.routing.prompt_ids import MOST_IDS, PromptIds, is_text_chat, take_prompt_ids

HANDED_OVER = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]]}
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "x"}, "y"]}]
BODY = {"messages": CHAT}
ENGINES = {0}


def test_the_ids_of_a_prompt_stand_in_the_decodes_parameters_and_nowhere_else() -> None:
    ids = PromptIds()
    assert ids.ask(prefill_body(BODY), BODY, ENGINES)["return_token_ids"] is True
    answer = ids.take({"kv_transfer_params": HANDED_OVER, "prompt_token_ids": [5, 6]}, "p")
    assert answer == {"kv_transfer_params": HANDED_OVER}
    leg = decode_body(BODY, answer)
    assert ids.give(leg, ENGINES) == BODY | {"kv_transfer_params": HANDED_OVER | {"prompt_token_ids": [5, 6]}}
    assert leg["kv_transfer_params"] == HANDED_OVER, "what is given back has none"
    ids.forget(None)
    assert ids.give(leg, ENGINES) == leg


def test_a_prefill_that_was_not_asked_after_one_that_was_leaves_no_ids() -> None:
    ids, answer = PromptIds(), {"kv_transfer_params": HANDED_OVER, "prompt_token_ids": [5, 6]}
    ids.ask(prefill_body(BODY), BODY, ENGINES)
    ids.take(dict(answer), "p")
    assert "return_token_ids" not in ids.ask(prefill_body(BODY), BODY, ())
    ids.take(dict(answer), "q")
    leg = decode_body(BODY, answer)
    assert ids.give(leg, ENGINES) == leg


def test_a_first_token_id_and_a_last_one_are_ids() -> None:
    assert take_prompt_ids({"prompt_token_ids": [0, 2**31 - 1]}) == [0, 2**31 - 1]


BAD_IDS = [None, "1", {}, [], [-1], [2**31], [1.0], [True], ["1"], [[1]], [1] * (MOST_IDS + 1)]


@pytest.mark.parametrize("ids", BAD_IDS, ids=lambda ids: f"{ids!r:.12}")
def test_what_is_no_list_of_token_ids_is_refused(ids: object) -> None:
    with pytest.raises(ProtocolError, match="prompt_token_ids"):
        take_prompt_ids({"prompt_token_ids": ids})


@pytest.mark.parametrize(
    ("body", "is_text"),
    [
        ({"messages": CHAT}, True),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, True),
        ({"messages": CHAT, "echo": False, "return_token_ids": True, "tools": []}, True),
        ({"messages": CHAT, "echo": True}, False),
        ({"messages": CHAT, "return_prompt_text": True}, False),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}, False),
        ({"messages": [*CHAT, {"role": "tool", "content": [{"image_url": {"url": "u"}}]}]}, False),
        ({"messages": [{"role": "user", "content": {"type": "text"}}]}, False),
        ({"messages": [CHAT]}, False),
        ({"messages": "x"}, False),
        ({"prompt": "x"}, False),
        ({"prompt": "x", "messages": CHAT}, False),
    ],
)
def test_only_chats_of_text_go_to_decode_by_their_ids(body: dict[str, object], is_text: bool) -> None:
    assert is_text_chat(body) is is_text
