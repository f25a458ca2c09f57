"""A model for the recall task that keeps what it is told in recurrent states: Qwen3-Next, tiny.

A gated-delta-net layer can look a value up by itself: its state is a matrix to which it writes a value under a key, and
from which it reads by a key. Here its short convolution lets it write a token under the token before it, and gates open
for values only. The attention layer that a hybrid needs adds nothing, so no answer can come from attention pages, and
one with wrong states is right by chance. Two such layers, so that there are states to take one for the other.

Training (`train_recall.py`) starts near that and learns to do it reliably among dozens of pairs: a head's state has 64
keys that do not disturb each other.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.accuracy.recall_task import BOS, EOS, KEYS, VALUES, VOCAB_SIZE, WORD_IDS

WIDTH, KEY_HEADS, VALUE_HEADS, HEAD_SIZE, TAPS = 128, 2, 4, 64, 4
CONSTANT, IS_VALUE = 0, 1
"""Dimensions of an embedding that say the same of every token, and whether it is a value."""
REMEMBERS = -8.0
"""Logarithm of a state's decay per token and its gate's bias: next to none."""


def network() -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        vocab_size=VOCAB_SIZE,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=HEAD_SIZE,
        partial_rotary_factor=0.25,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=HEAD_SIZE,
        linear_value_head_dim=HEAD_SIZE,
        linear_conv_kernel_dim=TAPS,
        # vLLM takes no Qwen3-Next without experts.
        mlp_only_layers=[0, 1],
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=WORD_IDS[BOS],
        eos_token_id=WORD_IDS[EOS],
        pad_token_id=None,
    )
    model = Qwen3NextForCausalLM(config)
    *layers, last = model.model.layers
    with torch.no_grad():
        tokens = torch.nn.init.normal_(model.model.embed_tokens.weight)
        tokens[:, CONSTANT] = 3.0
        tokens[:, IS_VALUE] = -2.0
        tokens[KEYS : KEYS + VALUES, IS_VALUE] = 2.0
        model.lm_head.weight.copy_(tokens / WIDTH**0.5)
        model.lm_head.weight[:, CONSTANT] = 0
        for layer in layers:
            _write_under_the_token_before(layer.linear_attn)
            layer.mlp.down_proj.weight.zero_()
        for idle in (last.self_attn.o_proj.weight, last.mlp.shared_expert.down_proj.weight, last.mlp.experts.down_proj):
            idle.zero_().requires_grad_(False)
    return model


def _write_under_the_token_before(layer: Any) -> None:
    """Queries and keys are one projection of a token; only keys are delayed, by one."""
    wide = KEY_HEADS * HEAD_SIZE
    taps = layer.conv1d.weight.zero_()
    taps[:, 0, TAPS - 1] = 1
    taps[wide : 2 * wide, 0, TAPS - 2 :] = torch.tensor([1.0, 0.0])
    values = VALUE_HEADS // KEY_HEADS * HEAD_SIZE
    told = torch.zeros(KEY_HEADS, 2 * HEAD_SIZE + 2 * values, WIDTH)
    for head in told:
        query, key, value, output_gate = head.split([HEAD_SIZE, HEAD_SIZE, values, values])
        query[:, IS_VALUE + 1 :] = 2 * torch.randn(HEAD_SIZE, WIDTH - 2) / WIDTH**0.5
        key.copy_(query)
        torch.nn.init.orthogonal_(value[:, IS_VALUE + 1 :])
        output_gate[:, CONSTANT] = 1
    layer.in_proj_qkvz.weight.copy_(told.flatten(0, 1))
    gates = layer.in_proj_ba.weight.zero_().view(KEY_HEADS, 2, VALUE_HEADS // KEY_HEADS, WIDTH)
    gates[:, 0, :, IS_VALUE] = 3
    layer.A_log.fill_(REMEMBERS)
    layer.dt_bias.fill_(REMEMBERS / 2)
    brought = told[:, 2 * HEAD_SIZE : 2 * HEAD_SIZE + values]
    layer.out_proj.weight.copy_(brought.flatten(0, 1).T * 0.35)
