"""Models with recurrent states beside attention: every block is used again and again, and nothing needless moves."""

from __future__ import annotations

import json
import re
from math import prod
from typing import Any

from examples.make_models import MODELS, make
from tests.support.servers.cluster import Cluster
from tests.support.servers.matrix import HYBRIDS, PLAIN_ROWS, ROWS
from tests.support.servers.over import over
from tests.support.servers.workload import SCENARIOS, ask

HYBRID_ROWS = [row for row in ROWS if row.family in HYBRIDS]
EQUAL_ROWS = [
    row
    for row in HYBRID_ROWS
    if row.workers == 2 and row.mode == "pull" and not (row.chunked or row.p_conv or row.d_conv)
]
RECEIVED = re.compile(r"^vllm:pd_received_bytes_total\{[^}]*\} (\S+)$", re.MULTILINE)

ROUNDS = 15
MOST_RATIO = 1.02
KERNEL_BLOCK_TOKENS = 16
"""MLA on the CPU: blocks are divided into pages of so many tokens."""


@over(EQUAL_ROWS, quick=())
def test_hundreds_of_requests_in_a_row_that_use_every_block_again_are_answered_as_the_first(pair: Cluster) -> None:
    asked = SCENARIOS["again and again"]
    assert ROUNDS * len(asked) >= 300
    # A request takes a block of each of the three state groups and at least one of attention.
    assert ROUNDS * len(asked) * 4 > 2 * pair.num_blocks
    for _ in range(ROUNDS):
        pair.forget_prefixes()
        pair.check(asked, past_ties=True)
        pair.settle()
        pair.check_digests()


@over(HYBRID_ROWS)
def test_what_moves_is_what_the_request_holds(pair: Cluster) -> None:
    asked = SCENARIOS["moved"]
    pair.forget_prefixes()
    for prompt in asked:
        before = received_bytes(pair)
        pair.check([prompt])
        moved, own = received_bytes(pair) - before, own_bytes(pair, len(prompt) - 1)
        print(f"{pair.row.id}: {len(prompt)} tokens: moved {moved:.0f} bytes of {own}, ratio {moved / own:.4f}")
        assert moved / own <= MOST_RATIO
        assert moved >= own_bytes(pair, len(prompt) - 1, page=1), "less than the request's tokens and states"


def received_bytes(pair: Cluster) -> float:
    """Bytes that the decode side has read so far, over all of its ranks."""
    # An engine step takes the workers' counts to the page.
    ask(pair.decode.url, pair.body((0,), max_tokens=1))
    return sum(map(float, RECEIVED.findall(pair.metrics(pair.decode))))


def own_bytes(pair: Cluster, tokens: int, page: int = 0) -> int:
    """What the pages and states of a request of so many computed tokens hold, over all ranks of the decode side.

    From the model's own configuration, by the formulas of docs/design/state-caches.md. The last page counts whole;
    `page` tokens make a page, by default as many as the attention backend has.
    """
    config = json.loads((make(MODELS[pair.row.family]) / "config.json").read_text())
    states, token_bytes, page_tokens = FORMULAS[config["model_type"]](config, pair)
    page = page or page_tokens
    return states + -(-tokens // page) * page * token_bytes


def _kimi(config: dict[str, Any], pair: Cluster) -> tuple[int, int, int]:
    """Bytes of all states, bytes of a token in all attention layers, and tokens per page; over all ranks."""
    linear = config["linear_attn_config"]
    heads, size, taps = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"] - 1
    state = 3 * heads * size * taps * 4 + heads * size * size * 4
    latent = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    # Every rank holds the whole latent.
    token = latent * 4 * pair.row.d_tp
    return state * len(linear["kda_layers"]), token * len(linear["full_attn_layers"]), KERNEL_BLOCK_TOKENS


def _qwen3next(config: dict[str, Any], pair: Cluster) -> tuple[int, int, int]:
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    convolution = (2 * key + value) * (config["linear_conv_kernel_dim"] - 1) * 2
    recurrent = config["linear_num_value_heads"] * config["linear_key_head_dim"] * config["linear_value_head_dim"] * 4
    return _with_heads(config, pair, convolution + recurrent, item=2)


def _granite(config: dict[str, Any], pair: Cluster) -> tuple[int, int, int]:
    inner = (config["mamba_n_heads"], config["mamba_d_head"], config["mamba_d_state"])
    # Groups of B and C that are fewer than ranks are held by every rank.
    groups = max(config["mamba_n_groups"], pair.row.d_tp)
    channels = inner[0] * inner[1] + 2 * groups * inner[2]
    return _with_heads(config, pair, channels * (config["mamba_d_conv"] - 1) * 4 + prod(inner) * 4, item=4)


def _with_heads(config: dict[str, Any], pair: Cluster, state: int, item: int) -> tuple[int, int, int]:
    kinds = config["layer_types"]
    attention = kinds.count("full_attention") + kinds.count("attention")
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token = 2 * config["num_key_value_heads"] * size * item
    return state * (len(kinds) - attention), token * attention, pair.block_tokens


FORMULAS = {"kimi_linear": _kimi, "qwen3_next": _qwen3next, "granitemoehybrid": _granite}


assert {row.family for row in PLAIN_ROWS} >= set(HYBRIDS)
