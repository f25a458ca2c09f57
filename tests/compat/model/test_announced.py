"""Which layers' pages are final when vLLM announces them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention.static_sink_attention import StaticSinkAttention
from vllm.model_executor.layers.mamba.short_conv import ShortConv

from vllm_pd_connector.compat.model.announced import announced_layers, states_settled


def layer(kind: type, **attributes: object) -> Any:
    made = kind.__new__(kind)
    vars(made).update({"_modules": {}, "_parameters": {}, "_buffers": {}, **attributes})
    return made


def config(modules: dict[str, object], **changes: object) -> Any:
    others = {"cache_config": SimpleNamespace(), "parallel_config": SimpleNamespace(use_ubatching=False)}
    settings = {"speculative_config": None} | others | changes
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=modules), **settings)


class OwnForward(MLAAttention):
    """As DeepSeek-V3.2's, which calls its kernels itself."""

    def forward(self, *_: Any) -> Any: ...


LAYERS = {
    "0.attn": layer(Attention, attn_type="decoder", kv_sharing_target_layer_name=None),
    "0.indexer": object(),
    "1.attn": layer(MLAAttention),
    "2.attn": layer(Attention, attn_type="decoder", kv_sharing_target_layer_name="0.attn"),
    "3.attn": layer(Attention, attn_type="encoder_only", kv_sharing_target_layer_name=None),
    "own.attn": layer(OwnForward),
    "sink.attn": layer(StaticSinkAttention, attn_type="decoder", kv_sharing_target_layer_name=None),
    "4.attn": layer(Attention, attn_type="decoder", kv_sharing_target_layer_name=None),
}


def test_layers_with_pages_of_their_own_in_the_order_of_the_forward() -> None:
    assert announced_layers(config(LAYERS), LAYERS) == (("0.attn", "1.attn", "sink.attn", "4.attn"), "")
    assert announced_layers(config(LAYERS), ["4.attn", "0.attn"]) == (("0.attn", "4.attn"), "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"speculative_config": SimpleNamespace(method="eagle")}, "drafter"),
        ({"parallel_config": SimpleNamespace(use_ubatching=True)}, "microbatches"),
    ],
)
def test_where_pages_are_written_again_no_layer_is(changes: dict[str, object], reason: str) -> None:
    layers, said = announced_layers(config(LAYERS, **changes), LAYERS)
    assert layers == () and reason in said


def test_drafts_from_the_tokens_alone_write_nothing() -> None:
    assert announced_layers(config(LAYERS, speculative_config=SimpleNamespace(method="ngram")), LAYERS)[0]


@pytest.mark.parametrize("silent", ["0.indexer", "own.attn"])
def test_where_no_layer_is_announced_it_is_said(silent: str) -> None:
    said = "no layer of this worker announces its pages"
    assert announced_layers(config({silent: LAYERS[silent]}), LAYERS) == ((), said)


def test_the_attention_of_deepseek_v32_announces_nothing() -> None:
    from vllm.models.deepseek_v32.attention import DeepseekV32Attention

    assert announced_layers(config({"0.attn": layer(DeepseekV32Attention)}), LAYERS)[0] == ()


HYBRID = {
    **{f"model.layers.{i}.mixer": layer(ShortConv) for i in (0, 1, 3, 4)},
    "model.layers.1.attn": LAYERS["0.attn"],  # beside a state in one layer: which comes first is not known
    "model.layers.2.attn": LAYERS["0.attn"],
}
ANNOUNCED = ("model.layers.1.attn", "model.layers.2.attn")


def test_a_state_is_written_when_the_first_announced_layer_behind_its_own_is() -> None:
    assert states_settled(config(HYBRID), HYBRID, ANNOUNCED) == {
        "model.layers.0.mixer": "model.layers.1.attn",
        "model.layers.1.mixer": "model.layers.2.attn",
    }
    assert states_settled(config(HYBRID), ["model.layers.1.mixer"], ANNOUNCED) == {
        "model.layers.1.mixer": "model.layers.2.attn"
    }


@pytest.mark.parametrize(
    ("changes", "announced"),
    [
        ({"speculative_config": SimpleNamespace(method="ngram")}, ANNOUNCED),
        ({}, ANNOUNCED[::-1]),
        ({}, ("model.layers.1.attn", "sink.attn")),
    ],
    ids=["copied after the forward", "in another order", "without a number"],
)
def test_no_state_is_where_the_order_is_not_known(changes: dict[str, object], announced: tuple[str, ...]) -> None:
    assert states_settled(config(HYBRID, **changes), HYBRID, announced) == {}
