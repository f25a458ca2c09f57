"""The layout that the connector asks vLLM for, through vLLM's own resolution."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_pd_connector.connector import PDConnector

ANY = ["LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)


def resolved(monkeypatch: pytest.MonkeyPatch, supported: list[str], *, use_mla: bool = False) -> str:
    monkeypatch.setattr(KVConnectorFactory, "get_connector_class", lambda _: PDConnector)
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_layout=None),
        kv_transfer_config=object(),
        model_config=SimpleNamespace(use_mla=use_mla),
    )
    return resolve_kv_cache_layout(config, [supported], [SPEC]).name


def test_pages_have_their_heads_one_after_the_other_where_nobody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    assert resolved(monkeypatch, ANY) == "LBHNC"
    assert resolved(monkeypatch, ANY, use_mla=True) == "LBNHC"  # vLLM's own choice: a latent has one head
    assert resolved(monkeypatch, ["BLNHC", "BLHNC"]) == "BLNHC"  # what the backends can read comes first


@pytest.mark.parametrize(("asked", "given"), [("NHD", "LBNHC"), ("BLNHC", "BLNHC")])
def test_the_operator_s_layout_is_taken(asked: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", asked)
    assert resolved(monkeypatch, ANY) == given


def test_amd_s_shuffled_pages_keep_the_planes_that_their_kernels_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """With K and V of a block side by side the first decode ends the engine (`rocm_aiter_fa.py`: "dense planes")."""
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
    assert resolved(monkeypatch, ["LHBNC", "LBHNC"]) == "LBHNC", "the variable is AMD's"
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda _: True)
    assert resolved(monkeypatch, ["LHBNC", "LBHNC"]) == "LHBNC"


def test_nothing_is_asked_for_without_a_model() -> None:
    config: Any = SimpleNamespace(model_config=None)
    assert PDConnector.get_required_kvcache_layout(config) is None
