"""Prompts that are more than token ids, as vLLM's own requests carry them."""

from __future__ import annotations

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.request import Request

from vllm_pd_connector.compat.blocks import stop_short

TOKENS, HIDDEN = 6, 4


def embedded(*values: float) -> Request:
    """A chat with embeddings in the place of its last tokens, one per value."""
    ids, embeds = list(range(TOKENS)), torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    for at, value in enumerate(values, TOKENS - len(values)):
        embeds[at] = value
    mask = [at < TOKENS - len(values) for at in range(TOKENS)]
    return Request("r", ids, SamplingParams(max_tokens=9), None, prompt_embeds=embeds, prompt_is_token_ids=mask)


def test_a_prompt_of_tokens_and_embeddings_is_cut_short_in_all_of_its_parts():
    """vLLM's workers refuse a request whose parts have different lengths, and end."""
    request = embedded(1.0, 2.0)
    stop_short(request, 1)
    assert length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds) == TOKENS - 1
    assert request.num_prompt_tokens == request.num_tokens == TOKENS - 1
    assert request.prompt_is_token_ids == [True] * 4 + [False]
