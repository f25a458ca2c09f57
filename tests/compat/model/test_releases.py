"""What is said of vLLM's release, and what releases say otherwise though it is the same."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_pd_connector.compat.model import facts, pages
from vllm_pd_connector.compat.model.facts import _rope


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.32.0", "0.32"),
        ("0.32.0+cpu", "0.32"),
        ("0.33.1+rocm702", "0.33"),
        ("0.33.0.post1+cu129", "0.33"),
        ("0.33.1.dev12+g4ba787ec9", "0.33.1.dev12+g4ba787ec9"),
        ("0.33.0+g4ba787ec9", "0.33.0+g4ba787ec9"),
        ("0.33.0rc1", "0.33.0rc1"),
        ("0.33.0+9114fd76", "0.33.0+9114fd76"),
        ("0.33.0+git9114fd7", "0.33.0+git9114fd7"),
        ("0.33.0+cu130.d20261101", "0.33.0+cu130.d20261101"),
        ("0.33.0+precompiled", "0.33"),
        ("0.33.0+gfx942", "0.33"),
        ("0.33.0rc1+cu129", "0.33.0rc1+cu129"),
        ("dev", "dev"),
    ],
)
def test_a_build_between_two_releases_is_neither(monkeypatch: pytest.MonkeyPatch, version: str, release: str) -> None:
    monkeypatch.setattr(facts, "vllm_version", lambda: version)
    assert facts.vllm_release() == release


@pytest.mark.parametrize(
    ("version", "alike"), [("0.32.0", True), ("0.33.1", True), ("0.33.1.dev1", False), ("0.34.0", False)]
)
def test_what_was_read_in_two_releases_is_not_said_of_others(
    monkeypatch: pytest.MonkeyPatch, version: str, alike: bool
) -> None:
    monkeypatch.setattr(facts, "vllm_version", lambda: version)
    pooled = FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=64, dtype=torch.uint8, tokens_per_state=Fraction(4)
    )
    assert pages.page_of(pooled, "DEEPSEEK_V4_INDEXER", rocm=False).anywhere is alike
    assert (", vLLM" not in pages.surroundings()) is alike, "on CPUs"


def test_on_arm_pages_are_alike_only_between_equal_builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whether bfloat16 lies in tiles there was chosen by who built vLLM; nothing but its operators tells."""
    found = []
    for content in (b"plain", b"tiles", b"plain", None, None):
        place = tmp_path / str(len(found))
        place.mkdir()
        if content is not None:
            (place / "_C.abi3.so").write_bytes(content)
        monkeypatch.setattr(vllm, "__path__", [str(place)])
        pages._build.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(pages, "machine", lambda: "aarch64")
            found.append(pages.surroundings())
    pages._build.cache_clear()
    assert found[0] == found[2] and len(set(found)) == 4
    assert "build" in found[0] and "build" not in pages.surroundings()


YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
THETAS = {"rope_theta": 10000.0, "compress_rope_theta": 160000.0}


def rope_of(config: Any) -> str:
    model: Any = SimpleNamespace(hf_text_config=config)
    return _rope(SimpleNamespace(model_config=model))  # type: ignore[arg-type]


def nested(**changes: Any) -> Any:
    """As vLLM 0.33 takes it from transformers."""
    return DeepseekV4Config(**THETAS, rope_scaling={**YARN, **changes}, head_dim=512, qk_rope_head_dim=64)


def flat(**changes: Any) -> Any:
    """As the class of vLLM 0.32 has it."""
    return SimpleNamespace(**THETAS, rope_parameters={**YARN, "rope_type": "yarn", **changes})


def test_both_forms_of_deepseek_v4s_rope_are_one() -> None:
    assert "compress" in nested().rope_parameters
    assert rope_of(nested()) == rope_of(flat())
    for changes in ({"factor": 8}, {"beta_fast": 16}, {"original_max_position_embeddings": 4096}):
        assert rope_of(nested(**changes)) == rope_of(flat(**changes)) != rope_of(flat())
    assert rope_of(SimpleNamespace(**{**vars(flat()), "compress_rope_theta": 40000.0})) != rope_of(flat())


class Limited(SimpleNamespace):
    """A configuration of vLLM 0.33, which a drafter limits."""

    def _limit_max_model_len_to_draft(self) -> None:
        self.model_config.max_model_len = min(self.model_config.max_model_len, 4096)


def test_a_model_is_made_by_the_length_that_its_drafter_leaves() -> None:
    """`--max-model-len auto`: LongRoPE takes its short factors where the drafter is that short."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(rope_parameters=rope),
        architecture="Phi3ForCausalLM",
        original_max_model_len=-1,
        max_model_len=3000,
        get_and_verify_max_len={-1: 131072}.__getitem__,
    )
    without, limited = (_rope(made(model_config=model)) for made in (SimpleNamespace, Limited))
    assert '"long_factors": [true]' in without
    assert '"long_factors": [false]' in limited
    assert model.max_model_len == 3000
