"""What vLLM's modules and configuration say of each layer beside its cache spec: who writes it, and of how many heads.

The spec counts the heads of one rank. Where a rank has one head it may be a copy, so the model's own count is needed,
and models exist whose layers differ in it (Gemma-4: windows of 16 heads beside full attention of 4).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.compat.model.facts import drafts_with_caches
from vllm_pd_connector.compat.model.weights import kept_as

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """The backend that reads and writes a layer's pages, the KV heads that the model's configuration states for it (0
    if it states none), and by what a K and a V of one byte are multiplied: `per_head` tells scales of single heads from
    others, on every rank alike; `scales` are then those of this rank's largest. `stored` says what elements of one byte
    are where the cache dtype of the model does not; `powers`: scales within pages are read as powers of two."""

    backend: str
    kv_heads: int
    scales: tuple[float, float] = (1.0, 1.0)
    per_head: str = ""
    stored: str = ""
    powers: bool = False


UNKNOWN_LAYER = LayerFacts("unknown", 0)

_LAYER_NUMBER = re.compile(r"\blayers\.(\d+)\b")


def layer_facts(vllm_config: VllmConfig) -> dict[str, LayerFacts]:
    """Of every layer with a cache, by its name.

    Source: vLLM 0.32, `ModelArchitectureConfig.__getitem__` (layers that differ), `mimo_v2.py`
    (`swa_num_key_value_heads`), `set_default_quant_scales` of `layers/attention/attention.py`.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layer_type: Any = AttentionLayerBase
    layers = get_layers_from_vllm_config(vllm_config, layer_type)
    drafted = draft_layers(vllm_config, layers)
    drafter = getattr(vllm_config.speculative_config, "draft_model_config", None) if drafted else None
    own = {name: found for name, layer in layers.items() if (found := _of_heads(layer))}
    ranks = _of_ranks(own) if own else []
    facts = {}
    for name, layer in layers.items():
        heads = _stated_heads((drafter if name in drafted else None) or vllm_config.model_config, name, layer)
        told = scales_of_heads([rank[name] for rank in ranks], heads) if name in own else ""
        backend = _backend(layer)
        stored = _stored(vllm_config, layer, backend, drafts=name in drafted)
        powers = getattr(getattr(layer, "impl", None), "kv_scale_format", None) == "pow2_fp32"
        facts[name] = LayerFacts(backend, heads, _scales(layer), told, stored, powers)
    return facts


_OfHeads = tuple[tuple[float, ...], tuple[float, ...]]
"""By what K and V of each head that a rank has are multiplied."""


def scales_of_heads(ranks: Sequence[_OfHeads], heads: int) -> str:
    """What tells a layer's scales of single heads from others, however many tensor-parallel ranks have them; where
    there are more ranks than heads, several in a row have copies of one."""
    copies = max(sum(len(keys) for keys, _ in ranks) // max(heads, 1), 1)
    whole = [[scale for rank in ranks[::copies] for scale in rank[kind]] for kind in (0, 1)]
    return hashlib.blake2b(repr(whole).encode(), digest_size=8).hexdigest()


def _of_heads(layer: Any) -> _OfHeads | None:
    """Source: vLLM 0.32, `CompressedTensorsKVCacheMethod` (strategy attn_head)."""
    scheme = getattr(getattr(getattr(layer, "quant_method", None), "quant_config", None), "kv_cache_scheme", None)
    if not scheme or scheme.get("strategy") != "attn_head":
        return None
    keys, values = (tuple(map(float, getattr(layer, name).flatten().tolist())) for name in ("_k_scale", "_v_scale"))
    return keys, values


def _of_ranks(own: dict[str, _OfHeads]) -> list[dict[str, _OfHeads]]:
    """What every tensor-parallel rank has, in the order of the ranks. Each of them must call it."""
    from torch.distributed import all_gather_object
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    given = [own] * group.world_size
    all_gather_object(given, own, group=group.cpu_group)
    return given


_DRAFTERS = frozenset({"draft_model", "mtp", "mtp_block", "transformer_block", "eagle_layers"})
"""Parts of names that only a drafter's layers have. Some drafters number their layers from 0, as the model does."""


def draft_layers(vllm_config: VllmConfig, cached: Iterable[str]) -> tuple[str, ...]:
    """Those of these layers that a drafter has: vLLM marks what loading the drafter added. Model runner V1 of 0.32 does
    not; there they are numbered behind the model's, or named as a drafter's.

    A drafter's that are known by neither stay the model's: who drafts then pairs with who drafts, too.

    Source: vLLM 0.32, `AttentionLayerBase.is_draft_layer`, `DraftModelSpeculator.load_model`;
    `llama_eagle.py` (`start_layer_id`), `deepseek_mtp.py`, `v1/spec_decode/draft_model.py`,
    `qwen3_5_mtp.py`, `exaone_moe_mtp.py` and `mimo_v2_mtp.py` (mtp), `minicpm_eagle.py`, `models/inkling` (mtp).
    """
    if not drafts_with_caches(vllm_config):
        return ()
    names, modules = tuple(cached), vllm_config.compilation_config.static_forward_context
    if marked := tuple(name for name in names if getattr(modules.get(name), "is_draft_layer", False)):
        return marked
    first = vllm_config.model_config.get_total_num_hidden_layers()
    return tuple(name for name in names if not _DRAFTERS.isdisjoint(name.split(".")) or _number(name) >= first)


_FORMS = {"_soa_store": "in planes", "_use_interleaved_v_cache": "with V interleaved"}
"""Flags of a backend that has two forms of pages of one size under one name, and what is said of the other one.

Source: vLLM 0.32, `TurboQuantAttentionImpl`, by a library that may be there; 0.33, `RocmAttentionImpl`, by whether the
model is compiled (`QkNormRopeKvCacheFusionPass`), as it is before caches are registered.
"""


def _backend(layer: Any) -> str:
    """The backend's name, and which of its forms it keeps."""
    impl = getattr(layer, "impl", None)
    return " ".join((
        str(layer.get_attn_backend().get_name()),
        *(form for flag, form in _FORMS.items() if getattr(impl, flag, False)),
    ))  # fmt: skip


def _stored(vllm_config: VllmConfig, layer: Any, backend: str, *, drafts: bool) -> str:
    """What a layer's elements are that vLLM's spec has as bytes. A drafter may have another dtype than the model, which
    0.1.0rc1 does not tell, so all of its layers say theirs.

    Whose e5m2 it is says the backend: Triton's stores e4m3 under that name, FlashInfer's and the CPU's do not.

    Source: vLLM 0.32, `SpeculativeConfig.kv_cache_dtype`, `TritonAttentionImpl.do_kv_cache_update` (`fp8_dtype`).
    """
    own = getattr(layer, "kv_cache_dtype", None)
    if own is None:
        return ""
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    told = kept_as(str(own), dtype)
    if told == "fp8_e5m2":
        return f"{told} of {backend}"
    return told if drafts or told != kept_as(str(vllm_config.cache_config.cache_dtype), dtype) else ""


def settle_scales(vllm_config: VllmConfig, kv_caches: dict[str, torch.Tensor]) -> None:
    """Have scales that lie in the pages set to 1 now, before anything is received.

    A backend that keeps them there sets all of them when a layer runs for the first time: what a decode instance had
    received until then would mean something else. vLLM runs layers before it serves, but not with `--enforce-eager`.

    Source: vLLM 0.32 and 0.33, `TritonAttentionImpl._ensure_scale_caches`, `VllmConfig.__post_init__`
    (`enable_jit_warmup`), `Worker.compile_or_warm_up_model`.
    """
    for name, cache in kv_caches.items():
        impl: Any = getattr(vllm_config.compilation_config.static_forward_context.get(name), "impl", None)
        if getattr(impl, "_is_per_token_head_quant", False):
            impl._ensure_scale_caches(cache)


def _number(name: str) -> int:
    """A layer's number in its model, -1 if its name has none."""
    found = _LAYER_NUMBER.search(name)
    return int(found[1]) if found is not None else -1


def _scales(layer: Any) -> tuple[float, float]:
    key, value = (getattr(layer, name, None) for name in ("_k_scale_float", "_v_scale_float"))
    return float(key or 1.0), float(value or 1.0)


def _stated_heads(model: Any, name: str, layer: Any) -> int:
    """By the module where it says so, else by the configuration of the model or of the drafter whose layer it is.

    Source: vLLM 0.32, `InklingAttention`, whose windows are not where others have them; `nemotron_nas.py`
    (`n_heads_in_group`): what vLLM states is the count of the first block; `step3p5.py` (`attention_other_setting`).
    """
    if own := getattr(layer, "num_total_kv_heads", 0):
        return int(own)
    stated, other = model.model_arch_config, getattr(model.hf_text_config, "attention_other_setting", None)
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    if other and 0 <= (number := _number(name)) < len(kinds) and kinds[number] == other["attention_type"]:
        return int(other["num_attention_groups"])
    of_windows = getattr(model.hf_text_config, "swa_num_key_value_heads", None)
    if of_windows is not None and getattr(layer, "sliding_window", None) is not None:
        return int(of_windows)
    if 0 <= (number := _number(name)) < stated.total_num_hidden_layers:
        blocks = getattr(model.hf_text_config, "block_configs", None) or ()
        attention = getattr(blocks[number], "attention", None) if number < len(blocks) else None
        if group := getattr(attention, "n_heads_in_group", None):
            return int(model.hf_text_config.num_attention_heads // group)
        stated = stated[number]
    return int(stated.total_num_kv_heads)
