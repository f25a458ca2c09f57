"""From the caches that vLLM registered to this worker's manifest.

Which codec a layer gets is decided by its content and by the backend that writes it: a backend whose page form was
checked gets strides, any other gets an opaque page, which still moves between equal instances and is refused with a
reason between unequal ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.compat.memory import byte_strides, segment_of
from vllm_pd_connector.compat.model import backends, facts
from vllm_pd_connector.compat.model.caches import (
    LayerCache,
    LayerStates,
    layer_caches,
    layer_states,
    transfer_groups,
)
from vllm_pd_connector.compat.model.layers import draft_layers
from vllm_pd_connector.compat.model.pages import Form, cpu_attention_is_affine
from vllm_pd_connector.errors import InvalidTopology, UnsupportedCache
from vllm_pd_connector.geometry.layouts import attention
from vllm_pd_connector.geometry.layouts.attention import PageView
from vllm_pd_connector.geometry.layouts.recurrent import StatePage, state_tensors
from vllm_pd_connector.geometry.manifest import (
    MANIFEST_VERSION,
    READS_POWERS,
    Coordinates,
    Group,
    GroupKind,
    Manifest,
    ModelFacts,
    Segment,
    Tensor,
)
from vllm_pd_connector.geometry.sharding import Interval, shard

if TYPE_CHECKING:
    import torch

    from vllm_pd_connector.compat.types import KVCacheConfig, VllmConfig
    from vllm_pd_connector.config import Config

logger = init_logger(__name__)


def build_manifest(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: dict[str, torch.Tensor],
    *,
    incarnation: str,
    config: Config,
    transport: str,
) -> Manifest:
    """This worker's manifest, complete but for the transport's `endpoint`.

    Raises:
        UnsupportedCache: a group or layer that this version cannot move, by name.
        InvalidTopology: head counts that this tensor-parallel size does not divide.
    """
    model = facts.model_facts(vllm_config, config)
    place = facts.coordinates(vllm_config)
    groups = transfer_groups(kv_cache_config, place.share)
    segments: dict[int, Segment] = {}
    tensors: list[Tensor] = []
    for cache in layer_caches(vllm_config, kv_cache_config, kv_caches, model.dtype):
        segment, index = _segment(segments, cache.tensor)
        view = _view(cache, segment, index, groups[cache.group], model, place)
        tensors.extend(_tensors(cache, view, model.dtype))
    for states in layer_states(vllm_config, kv_cache_config, kv_caches, place):
        segment, index = _segment(segments, states.tensor)
        page = _state_page(states, segment, index, groups[states.group])
        tensors.extend(state_tensors(page, states.convolution, states.recurrent))
    return Manifest(
        version=MANIFEST_VERSION,
        engine_id=facts.engine_id(vllm_config),
        incarnation=incarnation,
        software=facts.software(vllm_config, config),
        model=model,
        parallel=place,
        segments=tuple(segments.values()),
        groups=groups,
        tensors=tuple(tensors),
        transport=transport,
        endpoint=b"",
        draft_layers=draft_layers(vllm_config, dict.fromkeys(tensor.layer for tensor in tensors)),
    )


def _segment(segments: dict[int, Segment], tensor: torch.Tensor) -> tuple[Segment, int]:
    """The segment of a cache view and its number; all layers share one storage, so there is mostly one."""
    segment = segment_of(tensor)
    segments.setdefault(segment.address, segment)
    return segment, list(segments).index(segment.address)


def _state_page(states: LayerStates, segment: Segment, index: int, group: Group) -> StatePage:
    blocks, *ones, content = states.tensor.shape
    strides = byte_strides(states.tensor)
    if blocks != group.num_blocks or ones != [1, 1] or strides[3] != 1:
        raise UnsupportedCache(
            f"{states.layer}: raw pages have shape {tuple(states.tensor.shape)} and byte strides {strides}, expected "
            f"({group.num_blocks}, 1, 1, bytes) with contiguous bytes; this version does not know this storage"
        )
    return StatePage(
        layer=states.layer,
        group=states.group,
        segment=index,
        offset=states.tensor.data_ptr() - segment.address,
        pages=blocks,
        page_stride=strides[0],
        size=content,
    )


def _view(
    cache: LayerCache, segment: Segment, index: int, group: Group, model: ModelFacts, place: Coordinates
) -> PageView:
    pages, heads, states, content = cache.tensor.shape
    tokens = states * cache.state_tokens
    per_block, rest = divmod(pages, group.num_blocks)
    ring = group.kind is GroupKind.STATE and per_block == 1
    if rest or tokens % 1 or not (ring or per_block * tokens * group.share.size == group.block_tokens):
        raise UnsupportedCache(
            f"{cache.layer}: {pages} pages of {tokens} tokens do not make up {group.num_blocks} blocks of "
            f"{group.block_tokens} tokens over {group.share.size} ranks; this cache is stored in a way that this "
            "version does not know"
        )
    slots = 2 if cache.page.form is Form.KEY_VALUE_REGIONS else 1  # of the view, for each head
    held, total = _heads(cache, heads // slots, model, place)
    size = cache.tensor.element_size()
    strides = byte_strides(cache.tensor)
    return PageView(
        layer=cache.layer,
        group=cache.group,
        segment=index,
        offset=cache.tensor.data_ptr() - segment.address,
        shape=(pages, heads, states, content * size),
        strides=(strides[0], strides[1], strides[2], strides[3] // size),
        dtype=_elements(cache),
        itemsize=size,
        pages_per_block=per_block,
        heads=held,
        total_heads=total,
        state_tokens=cache.state_tokens,
    )


def _elements(cache: LayerCache) -> str:
    """The elements' type, and by what elements of one byte are multiplied to mean what was computed: pages of fp8 with
    other scales look alike and mean something else. Scales come with the weights, but those may be named by hand."""
    if cache.tensor.element_size() > 1:
        return cache.cache_dtype
    return _scaled(cache) + (READS_POWERS if cache.facts.powers else "")


def _scaled(cache: LayerCache) -> str:
    if cache.facts.per_head:
        return f"{cache.cache_dtype} times a scale of each head ({cache.facts.per_head})"
    if cache.facts.scales == (1.0, 1.0):
        return cache.cache_dtype
    return "{} times {!r} (K) and {!r} (V)".format(cache.cache_dtype, *cache.facts.scales)


def _heads(cache: LayerCache, heads: int, model: ModelFacts, place: Coordinates) -> tuple[Interval, int]:
    """Which KV heads of how many this rank's page holds. A vector per token is one head on every rank."""
    if cache.replicated or (cache.page.form in _VECTORS and heads == 1):
        return Interval(0, heads), heads
    stated = cache.facts.kv_heads or model.num_kv_heads
    try:
        held = shard(stated, place.tp_size, place.tp_rank)
    except InvalidTopology:
        if heads == 1 and cache.page.form is not Form.OPAQUE:
            raise
        held = Interval(0, 0)
    if len(held) == heads:
        return held, stated
    if heads == 1 and place.tp_size > 1 and cache.page.form is Form.OPAQUE:
        return Interval(place.tp_rank, place.tp_rank + 1), place.tp_size  # moves from rank to rank, whatever it is
    if heads == 1 and place.tp_size > 1:
        raise UnsupportedCache(
            f"{cache.layer}: 1 KV head on this rank where {stated} heads over {place.tp_size} ranks make {len(held)}: "
            "how this layer is sharded is not known"
        )
    # A layer with another number of heads than is stated: exact, as a rank with several has no copies.
    return Interval(place.tp_rank * heads, (place.tp_rank + 1) * heads), heads * place.tp_size


_VECTORS = (Form.ROWS, Form.VALUES_THEN_SCALES)


def _tensors(cache: LayerCache, view: PageView, model_dtype: str) -> tuple[Tensor, ...]:
    page, reason = cache.page, cache.page.reason
    match page.form:
        case Form.ROWS:
            return attention.latent(view, view.shape[3] // view.itemsize, page.role)
        case Form.VALUES_THEN_SCALES:
            return attention.values_then_scales(view, page.values, page.scales, page.role)
        case Form.KEY_VALUE_SCALED:
            return attention.key_value_scaled(view, page.values, page.scales)
        case Form.KEY_VALUE_REGIONS:
            return attention.key_value_regions(view, page.values, page.scales)
        case Form.RING:
            return attention.ring(view, page.role)
        case Form.KEY_VALUE:
            if cache.facts.backend != backends.CPU:
                return attention.key_value(view, cache.head_size, cache.head_size_v)
            if cache.head_size == cache.head_size_v and cpu_attention_is_affine(
                cache.head_size, model_dtype, view.shape[2]
            ):
                return attention.cpu_attention(view, cache.head_size)
            reason = f"the writer of {cache.facts.backend} was not read"
    logger.warning_once(
        "%s: pages of backend %s (%s) are moved as opaque bytes (%s): only to an instance with the same backend, "
        "kind of device, vLLM, layout, block size and, where ranks hold shares of them, tensor-parallel size",
        cache.layer,
        cache.facts.backend,
        cache.spec_name,
        reason,
    )
    # An axis of one element has a stride that nobody uses, and layouts differ in it; how far planes are apart goes by
    # the number of blocks.
    apart = 2 if attention.in_planes(view) else 1
    strides = "planes " * (apart - 1) + "x".join(
        str(stride) if size > 1 else "-" for size, stride in zip(view.shape[apart:], view.strides[apart:], strict=True)
    )
    known = page.form is Form.OPAQUE and page.anywhere
    writer = (
        f"{cache.facts.backend} {cache.spec_name} {cache.cache_dtype}{'' if known else f' on {cache.surroundings}'}"
    )
    return attention.opaque(view, f"{writer} strides {strides}")
