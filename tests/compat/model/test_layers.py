"""What vLLM's modules say of each layer beside its spec."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_pd_connector.compat.model import layers
from vllm_pd_connector.compat.model.layers import LayerFacts, layer_facts, scales_of_heads

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


@pytest.mark.parametrize(("model_type", "powers"), [("deepseek_v32", True), ("glm_moe_dsa", False)])
def test_a_backend_says_how_it_reads_the_scales_within_pages(
    model_type: str, powers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm120 import _kv_scale_format_for_model

    told = SimpleNamespace(kv_scale_format=_kv_scale_format_for_model(model_type))
    found = {LAYER: SimpleNamespace(impl=told), "other": SimpleNamespace()}
    monkeypatch.setattr("vllm.config.get_layers_from_vllm_config", lambda *_: found)
    monkeypatch.setattr(layers, "_backend", lambda _: "FLASHINFER_MLA_SPARSE_SM120")
    monkeypatch.setattr(layers, "_stated_heads", lambda *_: 1)
    config: Any = SimpleNamespace(speculative_config=None, model_config=None, cache_config=None)
    assert [one.powers for one in layer_facts(config).values()] == [powers, False]


@pytest.mark.parametrize(
    ("window", "name", "heads"),
    [(None, "model.layers.1.self_attn.attn", 4), (128, "model.layers.0.self_attn.attn", 8),
     (None, "model.layers.9.self_attn.attn", 16)],
    ids=["the layer's own", "of windows", "a draft layer: the model's"],
)  # fmt: skip
def test_a_layer_s_heads_are_those_that_the_configuration_states_for_it(
    window: int | None, name: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma-4 states the heads of every layer, MiMo-V2 those of its windows."""
    import vllm.config

    stated = {1: SimpleNamespace(total_num_kv_heads=4), 0: SimpleNamespace(total_num_kv_heads=2)}

    class Arch(SimpleNamespace):
        def __getitem__(self, number: int) -> SimpleNamespace:
            return stated[number]

    backend = SimpleNamespace(get_name=lambda: "B")
    scales = {"_k_scale_float": 0.5, "_v_scale_float": None}
    layer = SimpleNamespace(sliding_window=window, get_attn_backend=lambda: backend, **scales)
    monkeypatch.setattr(vllm.config, "get_layers_from_vllm_config", lambda *_: {name: layer})
    arch = Arch(total_num_hidden_layers=2, total_num_kv_heads=16)
    hf = SimpleNamespace(swa_num_key_value_heads=8)
    model = SimpleNamespace(model_arch_config=arch, hf_text_config=hf)
    config: Any = SimpleNamespace(model_config=model, speculative_config=None)
    assert layer_facts(config) == {name: LayerFacts("B", heads, (0.5, 1.0))}


@pytest.mark.parametrize(("number", "heads"), [(0, 8), (1, 4), (2, 1)])
def test_a_model_whose_blocks_differ_in_heads_has_those_of_each_block(number: int, heads: int) -> None:
    """Nemotron-NAS (Llama-3.1-Nemotron-51B): what vLLM states of the model are the heads of its first block."""
    from vllm.model_executor.models import nemotron_nas
    from vllm.transformers_utils.model_arch_config_convertor import NemotronNasModelArchConfigConvertor as Convertor

    assert "config.num_attention_heads // block_config.attention.n_heads_in_group" in inspect.getsource(nemotron_nas)
    blocks = [SimpleNamespace(attention=SimpleNamespace(no_op=False, n_heads_in_group=group)) for group in (8, 16, 64)]
    text = SimpleNamespace(num_attention_heads=64, block_configs=blocks)
    convertor: Any = SimpleNamespace(hf_text_config=text)
    first = Convertor.get_total_num_kv_heads(convertor)
    assert first == 8

    class Arch(SimpleNamespace):
        def __getitem__(self, _: int) -> Arch:
            return self

    arch = Arch(total_num_hidden_layers=3, total_num_kv_heads=first)
    model = SimpleNamespace(model_arch_config=arch, hf_text_config=text)
    assert layers._stated_heads(model, f"model.layers.{number}.self_attn.attn", SimpleNamespace()) == heads


def test_a_module_that_counts_the_heads_of_all_ranks_is_believed() -> None:
    """Inkling, whose windows may have fewer heads: its attention has no `sliding_window` to tell them by, and engines
    of as many ranks as windows have heads did not start. What has one are the convolutions beside it."""
    model = SimpleNamespace(
        model_arch_config=SimpleNamespace(total_num_hidden_layers=0, total_num_kv_heads=8),
        hf_text_config=SimpleNamespace(swa_num_key_value_heads=4),
    )
    windows, full = (SimpleNamespace(is_local=local, num_total_kv_heads=4 if local else 8) for local in (True, False))
    name = "model.layers.0.attn"
    assert [layers._stated_heads(model, name, one) for one in (windows, full)] == [4, 8]


def test_heads_of_one_kind_of_layers_are_that_kinds() -> None:
    """Where a rank has one head of them it would be taken for a copy of its neighbour's."""
    other = {"attention_type": "sliding_attention", "num_attention_groups": 8}
    kinds = ["full_attention", "sliding_attention"]
    model = SimpleNamespace(
        model_arch_config=SimpleNamespace(total_num_hidden_layers=0, total_num_kv_heads=4),
        hf_text_config=SimpleNamespace(attention_other_setting=other, layer_types=kinds),
    )
    heads = [layers._stated_heads(model, f"model.layers.{i}.self_attn.attn", SimpleNamespace()) for i in range(3)]
    assert heads == [4, 8, 4]
