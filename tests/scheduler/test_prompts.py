"""Prompts that are more than token ids, as vLLM's own requests carry them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.request import Request

from vllm_pd_connector.compat.blocks import prompt_digest, stop_short

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


def with_media(*names: str, lora: str | None = None) -> Any:
    request: Any = Request("r", list(range(TOKENS)), SamplingParams(max_tokens=9), None)
    request.mm_features = [SimpleNamespace(identifier=name) for name in names]
    request.lora_request = SimpleNamespace(lora_name=lora) if lora else None
    return request


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (embedded(1.0, 2.0), embedded(1.0, 3.0)),
        (with_media("ab", "c"), with_media("a", "bc")),
        (with_media("a", lora="b"), with_media("ab")),
        (with_media("a"), with_media("b")),
        (with_media("renderer0-mm-7-image-0"), with_media("renderer0-mm-7-image-0", "renderer0-mm-7-image-1")),
    ],
)
def test_prompts_of_the_same_tokens_and_other_contents_are_told_apart(one, other):
    assert prompt_digest(one, TOKENS) != prompt_digest(other, TOKENS)
    assert prompt_digest(one, TOKENS) == prompt_digest(one, TOKENS)


def test_only_the_embeddings_of_the_tokens_that_are_handed_over_count():
    assert prompt_digest(embedded(1.0, 2.0), TOKENS - 1) == prompt_digest(embedded(1.0, 3.0), TOKENS - 1)


def test_media_that_each_process_names_for_itself_have_no_names_that_two_instances_could_compare():
    """vLLM hashes no image where it caches neither images nor prefixes."""
    there, here = with_media("renderer0-mm-7-image-0"), with_media("renderer1-mm-12-image-0")
    assert prompt_digest(there, TOKENS) == prompt_digest(here, TOKENS)
