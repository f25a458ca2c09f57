"""What an instance says of its model, from vLLM's configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_pd_connector.compat.facts import model_facts
from vllm_pd_connector.geometry.manifest import ModelFacts


def facts(
    path: str, model_id: str | None, draft: str | None = None, weights: str = "", method: str | None = "mtp"
) -> ModelFacts:
    """Of an instance that loads its model from `path`, and drafts by `method` unless that is None."""
    model = SimpleNamespace(
        model=path,
        model_weights=weights,
        architecture="LlamaForCausalLM",
        dtype="torch.bfloat16",
        hf_text_config=SimpleNamespace(),
        get_total_num_hidden_layers=lambda: 2,
        get_hidden_size=lambda: 64,
        get_total_num_kv_heads=lambda: 2,
        get_head_size=lambda: 32,
    )
    drafts = SimpleNamespace(
        method=method, num_speculative_tokens=2, draft_model_config=SimpleNamespace(model=draft or weights or path)
    )
    config: Any = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=drafts if method else None,
    )
    return model_facts(config, model_id)


@pytest.mark.parametrize("weights", ["", "/cache/weights"])
def test_a_model_that_drafts_for_itself_has_one_name_wherever_it_is_loaded_from(weights: str) -> None:
    assert facts("/here", "m", weights=weights) == facts("/there", "m")
    assert facts("/here", None) != facts("/there", None)


def test_a_draft_model_of_its_own_is_told_apart() -> None:
    assert facts("/here", "m", draft="/draft-1") != facts("/here", "m", draft="/draft-2")


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix"])
def test_drafts_made_of_tokens_alone_change_no_cache(method: str) -> None:
    """A decode instance that drafts so reads from a prefill instance that does not draft at all."""
    assert facts("/here", None, method=method) == facts("/here", None, method=None) != facts("/here", None)
