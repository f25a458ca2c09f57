"""Tiny drafters with caches of their own, whose drafts are often right without training: EAGLE, EAGLE-3 and MTP.

A drafter reads the embedding of the next token beside the target's hidden state of the last. These have the target's
own layers and ignore the hidden state: each is the target that has not seen the first token of the prompt. Then its
drafts are right by what its caches hold, and wrong where a page of theirs is stale.

The targets' embeddings have length 1 per dimension, as norms make them, so that the norms that drafters have before
their first layer, or lack, do nothing to them. What norm stands behind the last layer changes no order of logits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.make_models import DEFAULT_DIR, MODELS, Model, common, latent, made, make

HEADS, KV_HEADS, HEAD_SIZE = 8, 4, 64
SELF = 20.0
"""Length of each pair of dimensions of a query and a key that see nothing but their own position: see `make_eagle3`."""


def _unit_length(network: Any) -> Any:
    tokens = network.model.embed_tokens.weight.data
    tokens.div_(tokens.square().mean(dim=1, keepdim=True).sqrt())
    return network


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 3, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    return _unit_length(LlamaForCausalLM(LlamaConfig(head_dim=HEAD_SIZE, **sizes, **common())))


EAGLE_TARGET = Model("llama", "GQA, for EAGLE heads", _llama, made_by=Path(__file__))


def _one_layer() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    return Qwen3ForCausalLM(Qwen3Config(head_dim=HEAD_SIZE, **sizes, **common()))


ONE_LAYER = Model("one-layer", "GQA, a draft model of one layer", _one_layer, made_by=Path(__file__))
"""vLLM wants all of a drafter's layers in one group, and beside a model with windows it makes small ones."""


def _eagle(name: str, write: Any, directory: Path) -> Path:
    """`write(weights, config)` makes of the target's the head's weights and changes the configuration."""
    base = make(EAGLE_TARGET, directory)

    def into(partial: Path) -> None:
        from safetensors.torch import load_file, save_file

        config = json.loads((base / "config.json").read_text())
        save_file(write(load_file(base / "model.safetensors"), config), partial / "model.safetensors", {"format": "pt"})
        (partial / "config.json").write_text(json.dumps(config, indent=1))

    return made(directory / f"{EAGLE_TARGET.name}-{name}", into, Path(__file__))


def make_eagle(directory: Path = DEFAULT_DIR) -> Path:
    """Write an EAGLE head for EAGLE_TARGET unless this file wrote it already, and return its path."""

    def write(weights: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        import torch

        kept = {name.removeprefix("model."): value for name, value in weights.items() if ".layers." in name}
        del kept["layers.0.input_layernorm.weight"]  # vLLM's has no norm there
        hidden = config["hidden_size"]
        return kept | {"fc.weight": torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)}

    return _eagle("eagle", write, directory)


def make_eagle3(directory: Path = DEFAULT_DIR) -> Path:
    """The same for an EAGLE-3 head.

    Its first layer alone sees the embedding, and its residual begins with the normed hidden state, which the norm makes
    zero. So that layer attends to its own position and brings the embedding there: rotary position embedding turns a
    query and a key that are equal everywhere by their distance, and their product is largest where that is none. The
    target's layers follow.
    """

    def write(weights: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        import torch

        hidden, inner = config["hidden_size"], config["intermediate_size"]
        queries, keys = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
        first = {
            "self_attn.q_proj.weight": torch.zeros(queries, 2 * hidden),
            "self_attn.k_proj.weight": torch.zeros(keys, 2 * hidden),
            "self_attn.v_proj.weight": torch.eye(keys, 2 * hidden) * (torch.arange(keys) < hidden)[:, None],
            "self_attn.o_proj.weight": torch.zeros(hidden, queries),
            "mlp.gate_proj.weight": torch.zeros(inner, hidden),
            "mlp.up_proj.weight": torch.zeros(inner, hidden),
            "mlp.down_proj.weight": torch.zeros(hidden, inner),
        }
        for part in range(0, hidden, HEAD_SIZE):  # KV head by KV head, by the first of the query heads that share it
            head = part // HEAD_SIZE * (HEADS // KV_HEADS)
            size = min(HEAD_SIZE, hidden - part)
            first["self_attn.o_proj.weight"][part : part + size, head * HEAD_SIZE :][:, :size] = torch.eye(size)
        for norm, weight in (("input_layernorm", 1.0), ("hidden_norm", 0.0), ("post_attention_layernorm", 1.0)):
            first[f"{norm}.weight"] = torch.full((hidden,), weight)
        kept = {f"layers.0.{name}": value for name, value in first.items()}
        for name, value in weights.items():
            if ".layers." in name:
                _, _, number, rest = name.split(".", 3)
                kept[f"layers.{int(number) + 1}.{rest}"] = value
        alike = torch.cat((torch.full((HEAD_SIZE // 2,), SELF), torch.zeros(HEAD_SIZE // 2)))
        config |= {
            "num_hidden_layers": config["num_hidden_layers"] + 1,
            "attention_bias": True,
            "norm_before_residual": True,
        }
        for layer in range(config["num_hidden_layers"]):
            for name, size in (("q", queries), ("k", keys), ("v", keys), ("o", hidden)):
                bias = alike.repeat(size // HEAD_SIZE) if not layer and name in "qk" else torch.zeros(size)
                kept[f"layers.{layer}.self_attn.{name}_proj.bias"] = bias
        kept["fc.weight"] = torch.zeros(hidden, 3 * hidden)
        return kept | {"norm.weight": weights["model.norm.weight"], "lm_head.weight": weights["lm_head.weight"]}

    return _eagle("eagle3", write, directory)


class _Predicts:
    """A network of transformers' with one layer, and behind it one that predicts the token after the next, which
    transformers does not know: a copy of the first, and what joins a token's embedding and a hidden state before it."""

    def __init__(
        self,
        network: Any,
        architecture: str,
        layer: str,
        joins: str,
        norms: tuple[str, ...],
        first: bool,
        shared: Mapping[str, str],
    ):
        """`layer` is the prediction layer's prefix and `joins` its projection of both, in which the embedding comes
        `first` or second; what it has in common with the model is told again where it has names for it."""
        self._network, self._architecture, self._layer = _unit_length(network), architecture, layer
        self._joins, self._norms, self._first, self._shared = joins, norms, first, shared

    def to(self, dtype: Any) -> _Predicts:
        self._network.to(dtype)
        return self

    def save_pretrained(self, directory: Path) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        self._network.save_pretrained(directory)
        file, settings = directory / "model.safetensors", directory / "config.json"
        weights, config = load_file(file), json.loads(settings.read_text())
        hidden = config["hidden_size"]
        kept, left_out = torch.eye(hidden), torch.zeros(hidden, hidden)
        own = {self._joins: torch.cat((kept, left_out) if self._first else (left_out, kept), dim=1)}
        own |= {norm: torch.ones(hidden) for norm in self._norms}
        own |= {name: weights[f"{source}.weight"].clone() for name, source in self._shared.items()}
        for name in [name for name in weights if ".layers.0." in name]:
            weights[name.replace("model.layers.0.", self._layer)] = weights[name].clone()
        weights |= {f"{self._layer}{name}.weight": value for name, value in own.items()}
        save_file(weights, file, metadata={"format": "pt"})
        config |= {"architectures": [self._architecture], "num_nextn_predict_layers": 1}
        settings.write_text(json.dumps(config, indent=1))


def _mimo() -> _Predicts:
    """Source: vLLM 0.32, `mimo_mtp.py`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    network = Qwen2ForCausalLM(Qwen2Config(**sizes, **common()))
    return _Predicts(network, "MiMoForCausalLM", "model.mtp_layers.0.", "input_proj", norms, False, {})


def _deepseek() -> _Predicts:
    """Source: vLLM 0.32, `deepseek_mtp.py`."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    norms = ("enorm", "hnorm", "shared_head.norm")
    shared = {"shared_head.head": "lm_head", "embed_tokens": "model.embed_tokens"}
    network = DeepseekV3ForCausalLM(DeepseekV3Config(num_hidden_layers=1, first_k_dense_replace=2, **latent()))
    return _Predicts(network, "DeepseekV3ForCausalLM", "model.layers.1.", "eh_proj", norms, True, shared)


MIMO = Model("mimo", "GQA, with an MTP layer", _mimo, made_by=Path(__file__))
# Prompts of more than one step are computed right by the plugin's MLA alone, on the CPU.
DEEPSEEK = Model(
    "deepseek",
    "MLA, with an MTP layer",
    _deepseek,
    flags=MODELS["mla"].flags,
    block_size=16,
    environment={"PD_TEST_KIMI": "1"},
    made_by=Path(__file__),
)
