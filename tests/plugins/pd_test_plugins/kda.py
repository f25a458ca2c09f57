"""Kimi Delta Attention, token by token in plain torch.

Per head with state S [V, K], gate g <= 0 per key channel, beta in (0, 1), and q, k of length 1:

    S <- S * exp(g);  S <- S + beta * (v - S k) k^T;  o = S q / sqrt(K)

The functions take the place of vLLM's Triton kernels of the same names and have their signatures and their state
layout [slots, heads, V, K]. Prefill and decode run the same step, so they agree to the last bit that the inputs do.

Source: vLLM 0.32, `vllm/models/kimi_k3/nvidia/ops/third_party/kda/` (names, shapes, gate with and without lower bound).
"""

from __future__ import annotations

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
    beta = raw_beta[0].float().sigmoid()
    query, keys = _unit(q[0]) * q.shape[-1] ** -0.5, _unit(k[0])
    output = torch.empty_like(v[0], dtype=torch.float32)
    states = initial_state.float().clone()
    starts = cu_seqlens.tolist()
    for request, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        for t in range(start, stop):
            output[t] = _step(states[request], query[t], keys[t], v[0, t].float(), gate[t], beta[t])
    return output.to(v.dtype).unsqueeze(0), states.to(initial_state.dtype)


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
    beta = raw_beta[0].float().sigmoid()
    query, keys = _unit(q) * size**-0.5, _unit(k)
    output = torch.zeros_like(v, dtype=torch.float32)
    for request, slot in enumerate(state_indices.tolist()):
        if slot > 0:
            state = initial_state[slot].float()
            output[request] = _step(
                state, query[request], keys[request], v[request].float(), gate[request], beta[request]
            )
            initial_state[slot] = state.to(initial_state.dtype)
    return output.to(mixed_qkv.dtype).unsqueeze(0), initial_state


def _step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Advance `state` [heads, V, K] in place by one token and return its output [heads, V]."""
    state *= gate.exp().unsqueeze(1)
    update = beta.unsqueeze(1) * (v - torch.bmm(state, k.unsqueeze(2)).squeeze(2))
    state += update.unsqueeze(2) * k.unsqueeze(1)
    return torch.bmm(state, q.unsqueeze(2)).squeeze(2)


def _unit(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + NORM_EPSILON)


def _decay(raw: torch.Tensor, A_log: torch.Tensor, bias: torch.Tensor, lower_bound: float | None) -> torch.Tensor:
    """Gate per key channel, always negative; `raw` is [tokens, heads, K]."""
    rate = A_log.float().exp().view(-1, 1)
    shifted = raw.float() + bias.float().view(raw.shape[1:])
    return -rate * softplus(shifted) if lower_bound is None else lower_bound * (rate * shifted).sigmoid()
