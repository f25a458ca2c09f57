"""What vLLM hands over for recurrent layers (KDA, GDN, Mamba1, Mamba2, short convolutions), as plain values.

Such a layer's cache arrives as raw pages [B, 1, 1, C]; what lies in a page follows from the layer's `MambaSpec`, from
the process-wide order of the convolution state, and for Mamba2 from the layer's own group count. Kinds that are not
known here are refused by name.

Source: docs/design/state-caches.md, which cites vLLM 0.32 by line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import CircularBufferSpec, MambaSpec, UniformTypeKVCacheSpecs

from vllm_pd_connector.errors import UnsupportedCache
from vllm_pd_connector.geometry.layouts.recurrent import Convolution, Projection, Recurrent
from vllm_pd_connector.geometry.manifest import AxisName, Coordinates, Role
from vllm_pd_connector.geometry.sharding import Interval, shard

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


@dataclass(frozen=True, slots=True)
class StateGroup:
    """How a state group's block list is read: `scratch` blocks for draft tokens end it, the state is before them.

    `block_tokens` is 0 where the list has one state block (mamba_cache_mode none); with prefix caching (align) the
    state after n tokens is entry (n - 1) // block_tokens. Entries before it, a checkpoint that a prefill left for the
    prefix cache among them, are states of shorter prefixes.
    """

    scratch: int
    block_tokens: int

    def state_block(self, ids: list[int], num_tokens: int) -> int:
        """Id of the block that holds the state after `num_tokens` tokens; 0 if there is none."""
        kept = ids[: len(ids) - self.scratch] if self.scratch else ids
        entry = (num_tokens - 1) // self.block_tokens if self.block_tokens else 0
        return kept[entry] if 0 <= entry < len(kept) else 0

    def mistaken_entry(self, num_received: int, num_prompt: int) -> int | None:
        """The entry that vLLM may take for the state after a whole block, of a prompt of `num_prompt` that received
        the state after `num_received` of them, where that lies inside the block; None if there is none.

        Where a layer can leave a checkpoint, vLLM computes to the end of a prompt in one go and does not stop at this
        block's end: the entry keeps the state that was received, and is cached as that of all of the block's tokens. A
        request that decodes from there on brings it to the block's end, token by token.

        Source: vLLM 0.32, `Scheduler._mamba_block_aligned_split` (`use_internal_checkpoint`),
        `MambaManager.cache_blocks`; its own hits inside a block have the same.
        """
        if not self.block_tokens or not num_received % self.block_tokens:
            return None
        entry = num_received // self.block_tokens
        return entry if num_prompt > (entry + 1) * self.block_tokens else None


def representative(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec that says how a group's blocks are read; groups of one type but different sizes carry one per layer."""
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def state_groups(config: KVCacheConfig) -> dict[int, StateGroup]:
    """The state groups among the transfer groups, by their index there."""
    return {
        index: _state_group(spec)
        for index, group in enumerate(config.transfer_groups)
        if isinstance(spec := representative(group.kv_cache_spec), MambaSpec | CircularBufferSpec)
    }


def advanced_by_drafts(vllm_config: VllmConfig, config: KVCacheConfig) -> bool:
    """Whether a finished request's state may stand behind its last token, which its numbers do not tell: workers take
    every draft that was right into it, and know nothing of where the answer is cut. Scratch blocks are no sign, since
    RecoverSSM has none. In a ring later tokens leave those before them.

    Source: vLLM 0.33, `Scheduler._update_request_with_output` (which also counts back what it cut; 0.32 does not),
    `RecoverSSMState.commit_step`.
    """
    specs = [representative(group.kv_cache_spec) for group in config.transfer_groups]
    return vllm_config.speculative_config is not None and any(isinstance(spec, MambaSpec) for spec in specs)


def _state_group(spec: MambaSpec | CircularBufferSpec) -> StateGroup:
    if isinstance(spec, CircularBufferSpec):  # one block, in which a request's latest tokens take turns
        return StateGroup(0, 0)
    return StateGroup(spec.num_speculative_blocks, state_block_tokens(spec))


def state_block_tokens(spec: MambaSpec) -> int:
    """Tokens per block in align mode, 0 in mode none, where vLLM's number means nothing.

    Raises:
        UnsupportedCache: another mode.
    """
    if spec.mamba_cache_mode not in ("none", "align"):
        raise UnsupportedCache(
            f"mamba_cache_mode {spec.mamba_cache_mode} is not supported; leave --mamba-cache-mode out: vLLM takes "
            "align with prefix caching and none without"
        )
    return int(spec.block_size) if spec.mamba_cache_mode == "align" else 0


def states_of(
    vllm_config: VllmConfig, layer: str, spec: MambaSpec, place: Coordinates, device: torch.device
) -> tuple[Convolution | None, Recurrent | None]:
    """The states in one page of a layer, in page order.

    Raises:
        UnsupportedCache: a kind of layer, or a set of states, that this version does not know; names both.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    kind = spec.mamba_type.name
    expected = {"GDN_ATTN": 2, "MAMBA2": 2, "MAMBA1": 2, "SHORT_CONV": 1, "LINEAR": 1}.get(kind)
    if expected != len(spec.shapes) or (spec.tp_replicated and kind != "SHORT_CONV"):
        replicated = ", replicated over tensor-parallel ranks" if spec.tp_replicated else ""
        raise UnsupportedCache(
            f"{layer}: recurrent layers of kind {kind} with {len(spec.shapes)} states{replicated} are not supported; "
            "serve this model without PDConnector"
        )
    if kind == "LINEAR":
        return None, _recurrent(kind, spec, 0, place, None, device)
    dim_first = is_conv_state_dim_first()
    channels, taps = spec.shapes[0] if dim_first else reversed(spec.shapes[0])
    module = vllm_config.compilation_config.static_forward_context.get(layer)
    convolution = Convolution(
        projections=_projections(layer, kind, spec, channels, place, module),
        taps=taps,
        dim_first=dim_first,
        dtype=_name(spec.dtypes[0]),
        itemsize=spec.dtypes[0].itemsize,
    )
    if len(spec.shapes) == 1:
        return convolution, None
    return convolution, _recurrent(kind, spec, 1, place, module, device)


def _recurrent(
    kind: str, spec: MambaSpec, state: int, place: Coordinates, module: Any, device: torch.device
) -> Recurrent:
    heads, *inner = spec.shapes[state]
    return Recurrent(
        heads=_shares(heads, place),
        total_heads=heads * place.tp_size,
        axes=_matrix(kind, inner, module, device),
        dtype=_name(spec.dtypes[state]),
        itemsize=spec.dtypes[state].itemsize,
    )


def _projections(
    layer: str, kind: str, spec: MambaSpec, channels: int, place: Coordinates, module: Any
) -> tuple[Projection, ...]:
    if spec.tp_replicated:  # Qwen4-Exp: each rank computes all of it
        return (Projection(Role.CONV_X, Interval(0, channels), channels),)
    if kind in ("MAMBA1", "SHORT_CONV"):
        return (_whole_shares(Role.CONV_X, channels, place),)
    main = spec.shapes[1][0] * spec.shapes[1][1]
    side, odd = divmod(channels - main, 2)
    if odd or side < 1:
        raise UnsupportedCache(
            f"{layer}: {channels} convolution channels are not {main} and two equal parts; this {kind} layer has a "
            "form that this version does not know"
        )
    if kind == "GDN_ATTN":
        return (
            _whole_shares(Role.CONV_Q, side, place),
            _whole_shares(Role.CONV_K, side, place),
            _whole_shares(Role.CONV_V, main, place),
        )
    state = spec.shapes[1][2]
    # The count before vLLM extends it so that every rank has a group.
    groups = int(module.norm.n_groups)
    held = shard(groups, place.tp_size, place.tp_rank)
    if len(held) * state != side:
        raise UnsupportedCache(
            f"{layer}: rank {place.tp_rank} of {place.tp_size} holds {side} channels of B, but {groups} groups of "
            f"{state} make {len(held) * state}"
        )
    shares = Interval(held.start * state, held.stop * state)
    return (
        _whole_shares(Role.CONV_X, main, place),
        Projection(Role.CONV_B, shares, groups * state),
        Projection(Role.CONV_C, shares, groups * state),
    )


def _shares(size: int, place: Coordinates) -> Interval:
    return Interval(place.tp_rank * size, (place.tp_rank + 1) * size)


def _whole_shares(role: Role, channels: int, place: Coordinates) -> Projection:
    """A projection that vLLM divides evenly over the ranks, by whole heads in rank order."""
    return Projection(role, _shares(channels, place), channels * place.tp_size)


def _matrix(kind: str, inner: list[int], module: Any, device: torch.device) -> tuple[tuple[AxisName, int], ...]:
    """Axes of the recurrent state inside a head, as they are stored."""
    if kind == "MAMBA1":
        return ((AxisName.DK, inner[0]),)
    if kind == "LINEAR":  # `layers/mamba/linear/`: one square matrix per head, K by V
        return ((AxisName.DK, inner[0]), (AxisName.DV, inner[1]))
    value, key = (AxisName.DV, inner[0]), (AxisName.DK, inner[1])
    half = str(getattr(getattr(module, "model_config", None), "dtype", "")) == "torch.float16"
    if device.type == "cpu" and type(module).__name__ == "QwenGatedDeltaNetAttention" and not half:
        # The CPU kernels store the transpose of what the spec declares (layers/mamba/ops/cpu/gdn_attention.py); in
        # float16 vLLM 0.33 takes those of GPUs.
        return ((AxisName.DK, inner[1]), (AxisName.DV, inner[0]))
    return (value, key)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
