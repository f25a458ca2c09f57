"""What changes in a request body on its way to the prefill and to the decode instance.

Serial hand-off (pull): the prefill instance gets the client's request cut down to one token, with `kv_transfer_params`
that ask it to keep the cache. Its answer carries the parameters by which a decode instance finds that cache; they are
passed on unchanged.

Concurrent hand-off (push): both instances get the request at the same time. The prefill instance's leg is the same;
the decode instance is told which engine will send the cache, by what that engine says of itself, and the two find each
other by the name that both legs carry (`transfer_id`). Nothing is taken from the prefill's answer.

The token that the prefill instance samples is thrown away: the decode instance samples the first token itself, so all
that only shapes the answer (stop conditions, log-probabilities) is left out of the first leg. Leaving the stop
conditions out is also what makes the first leg always end by length, the only end after which a connector hands a
cache over. Tools, the choice among them and the response format stay, since prompts are made of them: vLLM leaves tools
out of the prompt for the choice "none" if told so, Kimi K3's template writes the choice and the format, and tools
without a choice are refused where no parser of calls is configured.

Source of the fields: vLLM 0.32 `tests/v1/kv_connector/nixl_integration/toy_proxy_server.py`,
`examples/disaggregated/disaggregated_serving/disagg_proxy_pushconnector_demo.py`, and the schedulers of its NIXL
connectors.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_pd_connector.instance_info import EngineInfo

Body = dict[str, Any]

ASK_PREFILL: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

NOTHING: Mapping[str, Any] = MappingProxyType({})

ANSWER_ONLY = frozenset(
    {
        "echo",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "logprob_token_ids",
        "logprobs",
        "min_tokens",
        "prompt_logprobs",
        "repetition_detection",
        "return_prompt_text",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "return_weight_versions",
        "routed_experts_prompt_start",
        "stop",
        "stop_token_ids",
        "stream_options",
        "structured_outputs",
        "thinking_token_budget",
        "top_logprobs",
    }
)
"""Fields that only shape the answer; the first leg's answer is not seen by anyone. What goes with
one of them is among them: vLLM refuses `logprob_token_ids` without `logprobs`, and `thinking_token_budget` where no
reasoning is configured."""

REFUSED_WITHOUT: Mapping[str, str] = {
    "logprob_token_ids": "logprobs",
    "stream_options": "stream",
    "top_logprobs": "logprobs",
}
"""A field that vLLM refuses without another (`entrypoints/openai`, both `protocol.py`). Where a client has left
that out, the first leg has the field too: prefill says so, and computes nothing for nobody."""


def check_client_body(body: object) -> Body:
    """The body as an object that one cache can serve.

    Raises:
        ProtocolError: not an object, or a request that stands for several engine requests (several prompts, `n`,
            beams): a hand-off describes the cache of exactly one.
    """
    if not isinstance(body, dict):
        raise ProtocolError(f"the request body is {type(body).__name__}; send a JSON object")
    if body.get("n") not in (None, 1):
        raise ProtocolError(f"n: {body['n']!r:.80}; one cache is handed over per request, send several requests")
    if body.get("use_beam_search"):
        raise ProtocolError("use_beam_search: beams are several requests to the engine; only one cache is handed over")
    if body.get("kv_transfer_params") is not None:
        raise ProtocolError("kv_transfer_params: set by the router; leave it out")
    # vLLM runs all that `prompt` and `prompt_embeds` name, an empty text included.
    prompt: Any = body.get("prompt")
    embeds: Any = body.get("prompt_embeds")
    is_list = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    count = len(prompt) if is_list else int(prompt not in (None, []))
    count += len(embeds) if isinstance(embeds, list) else int(embeds is not None)
    if count > 1:
        raise ProtocolError(f"prompt, prompt_embeds: {count} prompts; send one request for each")
    return body | {"prompt": prompt[0]} if is_list else body


def computes_prompt(body: Mapping[str, Any]) -> bool:
    """Whether decode computes the whole prompt whatever it could load, so that a first leg would be in vain: for its
    log-probabilities. A chat that is echoed has them always, since `top_logprobs` is 0 where it is not set.

    Source: vLLM 0.32, `to_sampling_params` of both `protocol.py`, `SamplingParams.skip_reading_prefix_cache`.
    """
    echoed = bool(body.get("echo")) and ("messages" in body or body.get("logprobs") is not None)
    return echoed or body.get("prompt_logprobs") is not None


def fetches_media(body: Mapping[str, Any]) -> bool:
    """Whether an engine gets something from another host for this chat: `image_url` and its like that lead there."""
    messages = body.get("messages")
    said = [one.get("content") for one in messages if isinstance(one, dict)] if isinstance(messages, list) else []
    parts = [part for content in said if isinstance(content, list) for part in content if isinstance(part, dict)]
    named = [value for part in parts for name, value in part.items() if name.endswith("_url")]
    urls = [value.get("url") if isinstance(value, dict) else value for value in named]
    return any(isinstance(url, str) and url[:4].lower() == "http" for url in urls)


def prefill_body(body: Body, transfer_id: str | None = None, turn: Mapping[str, Any] = NOTHING) -> Body:
    """The first leg: the same prompt, one token, and the cache kept. `transfer_id` names a concurrent hand-off, `turn`
    says where a decode instance holds the prompt's beginning."""
    alone = {field for field, other in REFUSED_WITHOUT.items() if body.get(other) is None or body[other] is False}
    kept = {field: value for field, value in body.items() if field not in ANSWER_ONLY or field in alone}
    one_token = {"max_tokens": 1, **({"max_completion_tokens": 1} if "max_completion_tokens" in body else {})}
    params = {**ASK_PREFILL, **turn, **({} if transfer_id is None else {"transfer_id": transfer_id})}
    return kept | one_token | {"stream": False, "ignore_eos": True, "kv_transfer_params": params}


def decode_body(body: Body, prefill_answer: object, name: str = "") -> Body:
    """The second leg: the client's request and where its cache is. `name` is what the decode instance is to keep the
    turn under, if it keeps any.

    Raises:
        ProtocolError: the prefill instance handed nothing over. Going on would make the decode instance compute the
            prompt itself: right tokens, but the prefill's work is lost and nobody notices.
    """
    params = prefill_answer.get("kv_transfer_params") if isinstance(prefill_answer, dict) else None
    if not isinstance(params, dict) or not params.get("do_remote_prefill"):
        said = f"{list(params)!r:.200}" if isinstance(params, dict) else f"of type {type(params).__name__}"
        raise ProtocolError(
            f"the prefill instance answered with kv_transfer_params {said}; start it with "
            "--kv-transfer-config and a connector whose role is kv_producer"
        )
    return body | {"kv_transfer_params": params | ({"transfer_id": name} if name else {})}


def decode_body_beside(body: Body, engine: EngineInfo, transfer_id: str) -> Body:
    """The decode instance's leg of a concurrent hand-off: the client's request and which engine sends its cache."""
    return body | {
        "kv_transfer_params": {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": engine.engine_id,
            "remote_host": engine.side_channel_host,
            "remote_port": engine.side_channel_port,
            "remote_request_id": transfer_id,
            "tp_size": engine.tp_size,
            "pp_size": engine.pp_size,
            "dcp_size": engine.dcp_size,
            "transfer_id": transfer_id,
        }
    }
