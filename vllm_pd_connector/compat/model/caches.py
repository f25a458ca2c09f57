"""What vLLM hands over in `register_kv_caches`, as plain values.

Since 0.32 every layer's cache is a view `[B, H, N, C]` of one allocation: B manager or kernel blocks, H head slots,
N stored states (tokens), C the content, K and V side by side. This module reads vLLM's spec classes and answers, per
layer: which transfer group, what kind of content, which backend writes it. It decides nothing about bytes.

Source: vLLM 0.32, `vllm/v1/kv_cache_interface.py`, `vllm/v1/worker/utils.py` (allocate_kv_cache).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_pd_connector.compat.blocks import computes_itself
from vllm_pd_connector.compat.model import backends
from vllm_pd_connector.compat.model.layers import UNKNOWN_LAYER, LayerFacts, draft_layers, layer_facts
from vllm_pd_connector.compat.model.pages import (
    INDEX_SCALES,
    INDEX_VALUES,
    Page,
    fp8_of_half_value,
    index_scales,
    nvfp4_in_order,
    page_of,
    shuffled,
    surroundings,
)
from vllm_pd_connector.compat.model.recurrent import representative, state_block_tokens, states_of
from vllm_pd_connector.compat.model.weights import kept_as
from vllm_pd_connector.errors import InvalidConfig, ProtocolError, UnsupportedCache
from vllm_pd_connector.geometry.manifest import WHOLE, Coordinates, Group, GroupKind, TokenShare

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from fractions import Fraction

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.request import Request

    from vllm_pd_connector.geometry.layouts.recurrent import Convolution, Recurrent


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache as vLLM gives it.

    `tensor` has shape [B, H, N, C]; `group` indexes the transfer groups; `head_size` and `head_size_v` are elements,
    `state_tokens` how many tokens one of the N stored states stands for, less than one where a token has several.
    `facts.kv_heads` are those of all ranks.
    `replicated`: every tensor-parallel rank holds all of it, however many heads the model has (MLA and its indexers).
    `surroundings` are what its pages may depend on where nobody has read who writes them.
    """

    layer: str
    group: int
    page: Page
    facts: LayerFacts
    head_size: int
    head_size_v: int
    replicated: bool
    cache_dtype: str
    spec_name: str
    surroundings: str
    state_tokens: int | Fraction
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerStates:
    """One recurrent layer's cache: `tensor` is the raw page view [B, 1, 1, C] of bytes."""

    layer: str
    group: int
    convolution: Convolution | None
    recurrent: Recurrent | None
    tensor: torch.Tensor


# Spec classes whose block tables and pages this version reads; subclasses with other rules are refused by name.
_GROUP_KINDS: dict[str, GroupKind] = {
    "FullAttentionSpec": GroupKind.FULL,
    "MLAAttentionSpec": GroupKind.FULL,
    "SlidingWindowSpec": GroupKind.SLIDING_WINDOW,
    "SlidingWindowMLASpec": GroupKind.SLIDING_WINDOW,
    "ChunkedLocalAttentionSpec": GroupKind.CHUNKED_LOCAL,
    "MambaSpec": GroupKind.STATE,
    # A ring of a request's latest tokens, in one block for as long as the request lives.
    "CircularBufferSpec": GroupKind.STATE,
}


def layer_specs(spec: KVCacheSpec, layers: Iterable[str]) -> dict[str, KVCacheSpec]:
    """The spec of each layer of a group; groups of one type but different sizes carry one spec per layer."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {layer: spec.kv_cache_specs[layer] for layer in layers}
    return dict.fromkeys(layers, spec)


def transfer_groups(config: KVCacheConfig, share: TokenShare = WHOLE) -> tuple[Group, ...]:
    """The groups whose blocks are transferred, in the order of the block ids that vLLM hands out. `share` is what this
    worker holds of those whose tokens decode-context parallel ranks hold in turns.

    Raises:
        UnsupportedCache: a group of a kind that this version cannot move; names the kind and its layers.
    """
    groups = []
    for group in config.transfer_groups:
        spec = representative(group.kv_cache_spec)
        kind = _GROUP_KINDS.get(type(spec).__name__)
        each = layer_specs(group.kv_cache_spec, group.layer_names).values()
        other = next((type(one).__name__ for one in each if type(one).__name__ not in _GROUP_KINDS), None)
        if kind is None or other is not None or group.host_resident:
            raise UnsupportedCache(
                f"KV-cache groups of kind {other or type(spec).__name__} (layers {', '.join(group.layer_names[:3])}…) "
                f"are not supported; supported kinds: {', '.join(_GROUP_KINDS)}. Serve this model without PDConnector"
            )
        if any(getattr(one, "bounded_replay", False) for one in (spec, *each)):
            raise UnsupportedCache(
                f"layers {', '.join(group.layer_names[:3])}… compute the window before a hit again instead of keeping "
                "it (bounded replay), which this version does not know. Serve with --no-swa-bounded-replay"
            )
        held = share if spec.dcp_sharded else WHOLE
        slots = _block_slots(spec, kind)
        groups.append(Group(kind, slots * held.size, config.num_blocks, _window(spec), held))
    return tuple(groups)


def _block_slots(spec: KVCacheSpec, kind: GroupKind) -> int:
    if isinstance(spec, MambaSpec):
        return state_block_tokens(spec)
    return 0 if kind is GroupKind.STATE else int(spec.block_size)


def group_block_tokens(config: KVCacheConfig, dcp_size: int) -> tuple[int, ...]:
    """Tokens per logical block of each transfer group, in their order, on all decode-context parallel ranks together;
    without meaning for states in mode none and for rings.

    Source: vLLM 0.32, `resolve_dcp_kv_block_size` of `v1/core/kv_cache_utils.py`.
    """
    specs = (representative(group.kv_cache_spec) for group in config.transfer_groups)
    return tuple(int(spec.block_size) * (dcp_size if spec.dcp_sharded else 1) for spec in specs)


def leased_blocks(config: KVCacheConfig, dcp_size: int, num_tokens: int) -> int:
    """Blocks of all transfer groups that hold what a decode instance needs of a prompt, at most: whole prompts, what a
    window looks back on, one state or ring."""
    total = 0
    for group, tokens in zip(config.transfer_groups, group_block_tokens(config, dcp_size), strict=True):
        spec = representative(group.kv_cache_spec)
        if isinstance(spec, MambaSpec | CircularBufferSpec):
            total += 1
            continue
        window = _window(spec)
        # A window of w tokens lies in up to ceil((w - 1) / block) + 1 blocks.
        total += min(-(-num_tokens // tokens), -(-(window - 1) // tokens) + 1 if window else num_tokens)
    return total


def require_causal(config: KVCacheConfig) -> None:
    """Refuse conversations with a model whose prompts are no prefixes of longer ones: where its layers look at all of a
    prompt (prefix LM), what a turn left is not what the next one's prompt has there.

    Raises:
        InvalidConfig: there is such a layer; names it.

    Source: vLLM 0.32, `PrefillPrefixLMAttention`; `EngineCore._initialize_kv_caches` has no prefix cache there either.
    """
    for group in config.transfer_groups:
        for layer, spec in layer_specs(group.kv_cache_spec, group.layer_names).items():
            if getattr(spec, "non_causal", False):
                raise InvalidConfig(
                    f"conversations: layer {layer} looks at all of a prompt, so what is cached of one is no beginning "
                    "of a longer one; serve this model without conversations"
                )


def group_kinds(config: KVCacheConfig) -> tuple[GroupKind | None, ...]:
    """The kind of each transfer group, in their order; None for what `transfer_groups` refuses."""
    specs = (representative(group.kv_cache_spec) for group in config.transfer_groups)
    return tuple(_GROUP_KINDS.get(type(spec).__name__) for spec in specs)


def group_windows(config: KVCacheConfig) -> tuple[int, ...]:
    """How many tokens each transfer group looks back, in their order; 0 for all, and for states."""
    return tuple(_window(representative(group.kv_cache_spec)) for group in config.transfer_groups)


def prefill_backoff(vllm_config: VllmConfig, config: KVCacheConfig) -> int:
    """Trailing prompt tokens that the prefill side must leave to the decode side.

    Decode computes the last prompt token itself. With full attention it finds all it needs in the blocks of the whole
    prompt. A recurrent state can only be advanced, so the state before that token is what decode needs; and a window
    (or chunk) that ends with the prompt has let go of a token that the last one still attends to. Multi-module
    drafters must not see tokens past the prompt either.

    Source: vLLM 0.32, `SlidingWindowManager.get_num_skipped_tokens`, `VllmConfig.num_prefill_lookahead_tokens`,
    nixl/base_scheduler.py (prefill backoff, for recurrent states only).
    """
    return max(_backoff(group_kinds(config)), int(vllm_config.num_prefill_lookahead_tokens) - 1)


def decode_backoff(vllm_config: VllmConfig, config: KVCacheConfig) -> int:
    """How many of these the decode side needs left to it, however it and the prefill side draft: what the model's own
    groups need. A drafter's caches decide which drafts are right and no token of an answer, those of its trailing
    modules and of its own windows alike.

    Source: vLLM 0.32, `Scheduler._reserve_prefill_lookahead` (what the lookahead is for), `MultiModuleMTPSpeculator`.
    """
    drafted = set(draft_layers(vllm_config, (name for group in config.transfer_groups for name in group.layer_names)))
    kinds = zip(config.transfer_groups, group_kinds(config), strict=True)
    return _backoff(kind for group, kind in kinds if not drafted or not drafted.issuperset(group.layer_names))


def _backoff(kinds: Iterable[GroupKind | None]) -> int:
    return 0 if set(kinds) <= {GroupKind.FULL} else 1


_POSITIONS_BY_RANGE = frozenset({
    "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration", "BailingMoeV3VLForConditionalGeneration",
    "CohereCompassForConditionalGeneration",
})  # fmt: skip
"""Models that make the positions of an image from where it begins, whether or not all of it is there."""


def takes_media_whole(vllm_config: VllmConfig) -> bool:
    """Whether an image or another medium must not be cut: its tokens are computed in one step, because they look at
    each other in both directions or vLLM was told so, and vLLM 0.33 never schedules a part. Or the model looks for its
    last token when it makes positions, and without it gives all of the prompt others, or ends its worker.

    Source: vLLM 0.32 and 0.33, `Scheduler._try_schedule_encoder_inputs`, `compute_mm_prefix_ranges`; `minicpmv4_7.py`
    (`build_image_bounds`), `transformers/multimodal.py` (`get_mrope_input_positions`).
    """
    model = vllm_config.model_config
    if vllm_config.scheduler_config.disable_chunked_mm_input or model.is_mm_prefix_lm:
        return True
    return bool(model.uses_mrope and model.architecture not in _POSITIONS_BY_RANGE)


def stop_short(request: Request, tokens: int, media_whole: bool) -> None:
    """Have a new request compute all of its prompt but the last `tokens`, and end after one output token: a state or a
    window that went on with further ones would not be that of the prompt any more.

    Of a prompt that is not longer its first token is left. One that vLLM computes whatever was cached stays whole.

    Raises:
        ProtocolError: the prompt ends within a medium that is computed in one piece (`takes_media_whole`), or within a
            video, whose last frame some models look for to its end when they make positions; a worker that does not
            find it ends its engine. Or it comes in parts (`AsyncLLM.generate` with a generator): what is cut off the
            first would be missing before the second, and nobody knows yet where the prompt ends.

    Source: vLLM 0.32, `Qwen3VLForConditionalGeneration._iter_mm_grid_hw` (also of Qwen3.5, whose states need this),
    `Scheduler._update_request_as_session`.
    """
    if request.resumable:
        raise ProtocolError(
            "kv_transfer_params: do_remote_decode: the prompt comes in parts (streaming input), so a prefill does not "
            "know where it ends; send it whole to the prefill instance"
        )
    if tokens == 0:
        return
    request.max_tokens = 1
    tokens = min(tokens, request.num_prompt_tokens - 1)
    if tokens <= 0 or computes_itself(request):
        return
    left = request.num_prompt_tokens - tokens
    for medium in request.mm_features or ():
        place = medium.mm_position
        if (media_whole or medium.modality == "video") and place.offset + place.length > left:
            raise ProtocolError(
                f"prompt: ends within a medium of kind {medium.modality} ({place.length} tokens from {place.offset} "
                f"on, {request.num_prompt_tokens} in all) that this model computes in one piece, and a prefill leaves "
                f"the last {tokens} token(s) to decode: have text follow it"
            )
    # A chat may have all three: embeddings in the midst of its tokens, and a mask that tells them apart. The list
    # of ids is also its caller's, and other choices', where the engine core runs in the caller's process.
    if request.prompt_token_ids is not None:
        request.prompt_token_ids = request.prompt_token_ids[:-tokens]
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-tokens]
    if request.prompt_is_token_ids is not None:
        request.prompt_is_token_ids = request.prompt_is_token_ids[:-tokens]
    del request._all_token_ids[-tokens:]
    request.num_prompt_tokens -= tokens


def _window(spec: KVCacheSpec) -> int:
    """Tokens that attention looks back; 0 for all of them. A full spec may carry a window when groups were merged."""
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return 0


def layer_caches(
    vllm_config: VllmConfig, config: KVCacheConfig, kv_caches: dict[str, torch.Tensor], model_dtype: str
) -> list[LayerCache]:
    """Describe every transferable attention layer. Layers without a spec share another layer's and are left out.
    `model_dtype` is what the model computes in.

    Raises:
        UnsupportedCache: a layer of a transfer group was not handed over.
    """
    facts = layer_facts(vllm_config)
    rocm, in_order, fnuz = torch.version.hip is not None, nvfp4_in_order(), fp8_of_half_value()
    around, scales, inside = surroundings(), index_scales(), shuffled()
    caches = []
    for index, layer, spec, tensor in _layers(config, kv_caches):
        if not isinstance(spec, AttentionSpec):
            continue
        known = facts.get(layer, UNKNOWN_LAYER)
        caches.append(
            LayerCache(
                layer=layer,
                group=index,
                page=page_of(spec, known.backend, rocm=rocm, nvfp4_in_order=in_order, shuffled=inside),
                facts=known,
                head_size=spec.head_size,
                head_size_v=spec.head_size_v,
                replicated=_is_replicated(spec),
                cache_dtype=_elements(spec, known, model_dtype, fnuz=fnuz, scales=scales),
                spec_name=type(spec).__name__,
                surroundings=around,
                state_tokens=spec.tokens_per_state,
                tensor=tensor,
            )
        )
    return caches


def _elements(spec: AttentionSpec, known: LayerFacts, model: str, *, fnuz: bool, scales: str) -> str:
    """The elements of a cache by name; those of one byte are fp8, but where the cache says that they are integers.
    `scales` are in which form an indexer's fp8 keys have theirs, if in another than elsewhere."""
    name, told = str(spec.dtype).removeprefix("torch."), getattr(spec, "cache_dtype_str", None)
    if told is not None:
        name = kept_as(str(told), model)
    elif known.stored and spec.dtype.itemsize == 1:
        name = f"{name} ({known.stored})"
    if spec.dtype.itemsize > 1 or spec.kv_quant_mode in _INTEGERS:
        return name
    indexer = known.backend in backends.FP8_INDEXERS and spec.state_content_size_bytes == INDEX_VALUES + INDEX_SCALES
    return f"{name}{' (fp8: fnuz)' if fnuz else ''}{f' (scales: {scales})' if scales and indexer else ''}"


_INTEGERS = (KVQuantMode.INT8_PER_TOKEN_HEAD, KVQuantMode.INT4_PER_TOKEN_HEAD)


def _is_replicated(spec: AttentionSpec) -> bool:
    """Whether each tensor-parallel rank holds all of a cache. An indexer's keys are one head, computed by every rank;
    not every spec of one says so."""
    if isinstance(spec, MLAAttentionSpec | CircularBufferSpec) and spec.max_tp_shards is None:
        return isinstance(spec, CircularBufferSpec) or spec.cache_role.value == "indexer"
    return bool(spec.max_tp_shards == 1)


def layer_states(
    vllm_config: VllmConfig, config: KVCacheConfig, kv_caches: dict[str, torch.Tensor], place: Coordinates
) -> list[LayerStates]:
    """Describe every transferable recurrent layer.

    Raises:
        UnsupportedCache: a layer of a transfer group was not handed over, or is of an unknown kind.
    """
    return [
        LayerStates(layer, index, *states_of(vllm_config, layer, spec, place, tensor.device), tensor)
        for index, layer, spec, tensor in _layers(config, kv_caches)
        if isinstance(spec, MambaSpec)
    ]


def _layers(
    config: KVCacheConfig, kv_caches: dict[str, torch.Tensor]
) -> Iterator[tuple[int, str, KVCacheSpec, torch.Tensor]]:
    for index, group in enumerate(config.transfer_groups):
        for layer, spec in layer_specs(group.kv_cache_spec, group.layer_names).items():
            if layer not in kv_caches:
                raise UnsupportedCache(f"vLLM registered no cache for layer {layer} of transfer group {index}")
            yield index, layer, spec, kv_caches[layer]
