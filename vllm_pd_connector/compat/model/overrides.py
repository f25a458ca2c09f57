"""What `--hf-overrides` makes of a model's configuration: same weights, other numbers in the caches.

Most of what can be overridden decides numbers (an epsilon, how many experts a token gets, a scale of logits), so all of
it has to be equal on both sides but for what is compared elsewhere, by its effect, and what may well differ: names,
where the model's positions end, and how many modules draft.

Source: vLLM 0.32, `ModelConfig.__post_init__` (`_apply_dict_overrides`), `transformers_utils/config.py` (`get_config`),
`model_arch_config_convertor.py` (keys of lengths), `rotary_embedding/__init__.py` (which rope goes by the length).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

MAX_SHOWN: Final = 4096
_COMPARED: Final = frozenset({"architectures", "dtype", "torch_dtype", "rope_parameters", "quantization_config"})
_QUANTIZATION: Final = frozenset({"quantization_config_file", "quantization_config_dict_json"})
_NAMES: Final = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "auto_map"})
_DRAFTED: Final = frozenset({"num_nextn_predict_layers", "n_predict"})
_LENGTHS: Final = frozenset(
    {
        *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
        *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
    }
)
_BY_LENGTH: Final = ("dynamic", "longrope")
"""Kinds of rope that make their frequencies or scales of the length."""
_TEXT: Final = ("text_config", "llm_config", "language_config", "thinker_config", "decoder", "generator")
"""Where a configuration of several parts has that of the language model, whose rope is compared."""


def overrides_of(model: Any, *, any_quantization: bool) -> str:
    """The overrides of a ModelConfig that both sides must share, as JSON; empty if there are none.

    What a function makes of a configuration is told by a digest over the whole result.
    """
    free = _COMPARED | _NAMES | _DRAFTED
    free |= frozenset() if _goes_by_length(model) else _LENGTHS
    free |= _QUANTIZATION if any_quantization else frozenset()
    if callable(model.hf_overrides):
        return f"a function that makes configuration {_digest(_json(_kept(model.hf_config.to_dict(), free)))}"
    if not (kept := _kept(model.hf_overrides or {}, free)):
        return ""
    text = _json(kept)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}… ({_digest(text)})"


def _json(values: object) -> str:
    return json.dumps(values, sort_keys=True, default=str)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _kept(given: Mapping[Any, Any], free: frozenset[str]) -> dict[str, Any]:
    parts = {name: _kept(value, free) for name, value in given.items() if name in _TEXT and isinstance(value, Mapping)}
    rest = {str(name): value for name, value in given.items() if name not in parts and name not in free}
    return rest | {name: part for name, part in parts.items() if part}


def _goes_by_length(model: Any) -> bool:
    rope = getattr(model.hf_text_config, "rope_parameters", None)
    if not isinstance(rope, Mapping):
        return False
    kinds = [one for one in (rope, *rope.values()) if isinstance(one, Mapping)]  # one, or one for each kind of layer
    return any(one.get("rope_type", one.get("type")) in _BY_LENGTH for one in kinds)
