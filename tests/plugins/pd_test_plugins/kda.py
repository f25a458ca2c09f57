"""Kimi Delta Attention, token by token in plain torch.

Per head with state S [V, K], gate g <= 0 per key channel, beta in (0, 1), and q, k of length 1:

    S <- S * exp(g);  S <- S + beta * (v - S k) k^T;  o = S q / sqrt(K)

The functions take the place of vLLM's Triton kernels of the same names and have their signatures and their state
layout [slots, heads, V, K]. Everything is computed in float64, and the state is rounded to the cache's type after every
token, as it is where a step ends. torch's float kernels round differently at other lengths (elements that fill no whole
vector take another path, and which ones depends on the processor); in float64 that is far below what is kept, so a
token's numbers do not depend on its chunk, on other requests or on the vectors' width.

Source: vLLM 0.32, `vllm/models/kimi_k3/nvidia/ops/third_party/kda/` (names, shapes, gate with and without lower bound).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn.functional import softplus

NORM_EPSILON = 1e-6


def gather_initial_states(state: torch.Tensor, indices: torch.Tensor, has_initial_state: torch.Tensor) -> torch.Tensor:
    """Rows of `state` by slot; rows of requests without a state are zero."""
    return torch.where(has_initial_state.view(-1, 1, 1, 1), state[indices.long()], torch.zeros((), dtype=state.dtype))


def chunk_kda_with_fused_gate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    g_bias: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    lower_bound: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill of several requests; q, k, v and raw_g are [1, tokens, heads, channels], raw_beta [1, tokens, heads].

    Returns the output [1, tokens, heads, V] and the final states [requests, heads, V, K].
    """
    gate = _decay(raw_g[0], A_log, g_bias, lower_bound)
    beta = raw_beta[0].double().sigmoid()
    query, keys, values = _unit(q[0]) * q.shape[-1] ** -0.5, _unit(k[0]), v[0].double()
    output = torch.empty_like(values)
    states = initial_state.clone()
    starts = cu_seqlens.tolist()
    for request, (start, stop) in enumerate(itertools.pairwise(starts)):
        for t in range(start, stop):
            output[t] = _step(states[request], query[t], keys[t], values[t], gate[t], beta[t])
    return output.to(v.dtype).unsqueeze(0), states


def fused_recurrent_kda_packed_decode(
    mixed_qkv: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    initial_state: torch.Tensor,
    state_indices: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each request, q, k and v packed in `mixed_qkv` [requests, 3 * heads * channels].

    Updates `initial_state` in place. Slot 0 is vLLM's null block: padding, whose output is zero.
    """
    heads, size = initial_state.shape[1:3]
    q, k, v = (part.view(-1, heads, size) for part in mixed_qkv.chunk(3, dim=-1))
    gate = _decay(raw_g[0], A_log, dt_bias, lower_bound)
    beta = raw_beta[0].double().sigmoid()
    query, keys, values = _unit(q) * size**-0.5, _unit(k), v.double()
    output = torch.zeros_like(values)
    for request, slot in enumerate(state_indices.tolist()):
        if slot > 0:
            output[request] = _step(
                initial_state[slot], query[request], keys[request], values[request], gate[request], beta[request]
            )
    return output.to(mixed_qkv.dtype).unsqueeze(0), initial_state


def _step(
    cached: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Advance the state `cached` [heads, V, K] in place by one token and return its output [heads, V]."""
    state = cached.double() * gate.exp().unsqueeze(1)
    update = beta.unsqueeze(1) * (v - torch.bmm(state, k.unsqueeze(2)).squeeze(2))
    state += update.unsqueeze(2) * k.unsqueeze(1)
    cached.copy_(state)
    return torch.bmm(state, q.unsqueeze(2)).squeeze(2)


def _unit(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + NORM_EPSILON)


def _decay(raw: torch.Tensor, A_log: torch.Tensor, bias: torch.Tensor, lower_bound: float | None) -> torch.Tensor:
    """Gate per key channel, always negative; `raw` is [tokens, heads, K]."""
    rate = A_log.double().exp().view(-1, 1)
    shifted = raw.double() + bias.double().view(raw.shape[1:])
    return -rate * softplus(shifted) if lower_bound is None else lower_bound * (rate * shifted).sigmoid()
