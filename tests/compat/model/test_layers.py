"""What vLLM's modules say of each layer beside its spec."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_pd_connector.compat.model import layers
from vllm_pd_connector.compat.model.layers import layer_facts, scales_of_heads

LAYER = "model.layers.0.self_attn.attn"


def test_scales_of_heads_are_gathered_from_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = SimpleNamespace(quant_config=SimpleNamespace(kv_cache_scheme={"strategy": "attn_head"}))
    layer = SimpleNamespace(quant_method=scheme, _k_scale=torch.tensor([0.5, 0.25]), _v_scale=torch.tensor([1.0, 2.0]))
    monkeypatch.setattr("vllm.config.get_layers_from_vllm_config", lambda *_: {LAYER: layer})
    monkeypatch.setattr(layers, "draft_layers", lambda *_: ())
    monkeypatch.setattr(layers, "_backend", lambda _: "FLASH_ATTN")
    monkeypatch.setattr(layers, "_stated_heads", lambda *_: 4)
    monkeypatch.setattr(layers, "_of_ranks", lambda own: [own, {LAYER: ((3.0, 4.0), (5.0, 6.0))}])
    config: Any = SimpleNamespace(speculative_config=None, model_config=None)
    found = layer_facts(config)[LAYER]
    whole = ((0.5, 0.25, 3.0, 4.0), (1.0, 2.0, 5.0, 6.0))
    assert found.per_head == scales_of_heads([whole], 4) != ""
    scheme.quant_config.kv_cache_scheme["strategy"] = "tensor"
    assert layer_facts(config)[LAYER].per_head == ""
