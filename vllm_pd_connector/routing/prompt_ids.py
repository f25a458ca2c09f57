"""The token ids of a chat's prompt, from the prefill that made them to the decode that need not make them again.

Both instances would render a chat's template and cut its text into tokens, one after the other. In a serial hand-off
prefill is asked for the ids (`return_token_ids`), and decode gets them in its parameters where both have PDConnector,
whose releases of vLLM know the key, and take it out before a connector sees it. Where prefill did not send them well
decode renders the chat itself.

vLLM uses them for chats of text alone, and not with `echo`, of which nothing is prefilled either (`handoff`); what
`return_prompt_text` asks for would be null. For completions it does not look, and the ids would go on to its engine.

They take 36 bytes each, far more than all else of an answer, so they are kept until decode's leg is sent and no longer.

Source: vLLM 0.32 and 0.33, `renderers/online_renderer.py` (`_reused_prompt_token_ids`, `preprocess_cmpl`),
`entrypoints/openai/chat_completion/protocol.py` (`drop_prompt_token_ids_with_media`) and `serving.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from vllm_pd_connector.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm_pd_connector.routing.handoff import Body

logger = logging.getLogger(__name__)

PROMPT_IDS = "prompt_token_ids"
MOST_IDS = 1 << 24
"""More than any model's context."""


@dataclass(slots=True)
class PromptIds:
    """Those of one request. `asked`: the prefill that was sent last was asked for them. `engines` are those that an
    instance says of itself, none without PDConnector."""

    asked: bool = False
    kept: list[int] | None = None

    def ask(self, leg: Body, body: Body, engines: Collection[int]) -> Body:
        """The first leg of a client's `body`, with which the ids are asked for where decode can use them."""
        self.asked = bool(engines) and is_text_chat(body)
        return leg | {"return_token_ids": True} if self.asked else leg

    def take(self, answer: Body, who: str) -> Body:
        """What the prefill instance `who` answered, from now on without them."""
        self.kept = None
        if self.asked:
            try:
                self.kept = take_prompt_ids(answer)
            except ProtocolError as error:
                _say_once(who, str(error))
        return answer

    def give(self, leg: Body, engines: Collection[int]) -> Body:
        """The second leg, with them where the instance takes them."""
        if self.kept is None or not engines:
            return leg
        return leg | {"kv_transfer_params": leg["kv_transfer_params"] | {PROMPT_IDS: self.kept}}

    def forget(self, _instance: object) -> None:
        """Decode's leg is sent."""
        self.kept = None


def is_text_chat(body: Body) -> bool:
    """Whether decode may get the prompt's ids for this client's body: see the module. A part of another type than text
    is media, or nothing that is known here."""
    if any(body.get(field) for field in ("echo", "return_prompt_text", "prompt", "prompt_embeds")):
        return False
    messages = body.get("messages")
    return isinstance(messages, list) and all(isinstance(m, dict) and _is_text(m.get("content")) for m in messages)


def _is_text(content: object) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text") for part in content)
    return content is None or isinstance(content, str)


def take_prompt_ids(prefill_answer: Body) -> list[int]:
    """The ids out of a prefill instance's answer to a chat, which has them no more.

    Raises:
        ProtocolError: there are none, or what is there is no list of token ids. Decode would refuse the request.
    """
    ids = prefill_answer.pop(PROMPT_IDS, None)
    if not isinstance(ids, list) or not 0 < len(ids) <= MOST_IDS:
        said = f"{len(ids)} of them" if isinstance(ids, list) else type(ids).__name__
        raise ProtocolError(f"{PROMPT_IDS} of its answer: {said}, 1 to {MOST_IDS} token ids expected")
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= 2**31:
        raise ProtocolError(f"{PROMPT_IDS} of its answer: not each is a number from 0 to {2**31 - 1}")
    return ids


@lru_cache(1024)
def _say_once(who: str, problem: str) -> None:
    logger.warning("prefill instance %s: %s; decode renders such chats itself. Said once", who, problem)
