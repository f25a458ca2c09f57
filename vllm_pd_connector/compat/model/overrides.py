"""A model's configuration and what `--hf-overrides` makes of it: same weights, other numbers in the caches.

Most of what it says decides numbers (an epsilon, how many experts a token gets, a scale of logits), so all of it has to
be equal on both sides but for what is compared elsewhere, by its effect, and what may well differ: names, where the
model's positions end, and how many modules draft. Its file is read as it lies: what transformers makes of it has other
defaults in each of its releases.

Source: vLLM 0.32, `ModelConfig.__post_init__` (`_apply_dict_overrides`), `transformers_utils/config.py` (`get_config`),
`model_arch_config_convertor.py` (keys of lengths), `rotary_embedding/__init__.py` (which rope goes by the length).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.compat.model.weights import local_files

logger = init_logger(__name__)

MAX_SHOWN: Final = 4096
_COMPARED: Final = frozenset({"architectures", "dtype", "torch_dtype", "rope_parameters", "quantization_config"})
_QUANTIZATION: Final = frozenset({"quantization_config_file", "quantization_config_dict_json"})
_NAMES: Final = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "auto_map"})
_DRAFTED: Final = frozenset({"num_nextn_predict_layers", "n_predict"})
_LENGTHS: Final = frozenset(
    {
        *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
        *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len", "max_model_len"),
    }
)
_FILES: Final = ("config.json", "params.json")
_MISTRALS: Final = "consolidated*.safetensors"
_OF_MEDIA: Final = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
_FREE_IN_FILES: Final = frozenset(
    {
        *("rope_scaling", "rope_theta", "compression_config"),  # compared as rope_parameters and quantization_config
        *("use_cache", "processor_class", "chat_template"),
    }
)
_TOKENS: Final = frozenset({"bos_token_id", "eos_token_id", "pad_token_id"})
_HASHED: Final = ("ngram_size", "emb_neighbor_num")
"""Keys of models that embed hashes of the latest tokens, too: none before the end of a text.

Source: vLLM 0.32, `longcat_flash_ngram.py`, `qwen4_exp/nvidia/ngram_embedding.py`.
"""
_BY_LENGTH: Final = ("dynamic", "longrope")
"""Kinds of rope that make their frequencies or scales of the length."""
_TEXT: Final = ("text_config", "llm_config", "language_config", "thinker_config", "decoder", "generator")
"""Where a configuration of several parts has that of the language model, whose rope is compared."""


def options_of(model: Any, *, any_quantization: bool) -> str:
    """Every option of a ModelConfig by which its caches hold other numbers, as it is told behind the architecture;
    empty if there is none. What makes media into embeddings is not in vLLM's names of media if an option says it.

    Source: vLLM 0.32, `ProcessorInputs.get_mm_hashes` (a request's own `mm_processor_kwargs` alone).
    """
    told: dict[str, object] = {"--model-class-overrides": getattr(model, "model_class_overrides", None)}
    if (media := model.multimodal_config) is not None:
        told["--mm-processor-kwargs"] = _kept(media.mm_processor_kwargs or {}, frozenset({"device"}))
        told["--video-pruning-method"] = media.get_video_pruning_spec()
        told["--mm-encoder-attn-dtype"] = None if any_quantization else media.mm_encoder_attn_dtype
    texts = {"--hf-overrides": overrides_of(model, any_quantization=any_quantization)}
    texts |= {option: _json(value) for option, value in told.items() if value}
    return "".join(f" with {option} {text}" for option, text in texts.items() if text)


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
    if (file := kept.get("quantization_config_file")) is not None:
        kept["quantization_config_file"] = _content(str(file))
    text = _json(kept)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}… ({_digest(text)})"


def configuration_of(model: Any) -> str:
    """Of each file that says how a ModelConfig's weights are computed with, or how its media become embeddings, what it
    is and 16 hex digits; empty if there are none that can be read here."""
    free = _COMPARED | _NAMES | _DRAFTED | _FREE_IN_FILES
    free |= frozenset() if any(getattr(model.hf_text_config, key, None) for key in _HASHED) else _TOKENS
    free |= frozenset() if _goes_by_length(model) else _LENGTHS
    try:
        own = local_files(str(model.model), model.revision, None)
        pinned = getattr(model, "_hf_config_revision", None) or model.revision
        named = local_files(str(model.hf_config_path), pinned, None) if model.hf_config_path else own
        stated = _stated(named, getattr(model, "config_format", "auto")) if named is not None else []
        found = [("config", file) for file in stated]
        if model.multimodal_config is not None and own is not None:
            found += [(name, file) for name in _OF_MEDIA if (file := own / name).is_file()]
        return " ".join(f"{name}={_digest(_json(_kept(_read(file), free)))}" for name, file in found)
    except (OSError, ValueError) as error:
        logger.warning("the configuration of %s cannot be read here, and is not compared: %s", model.model, error)
        return ""


def _stated(directory: Path, form: str) -> list[Path]:
    """The file that vLLM reads there, if there is one: of two Mistral's, beside weights in its form.

    Source: vLLM 0.32, `get_config` (auto), `is_mistral_model_repo`.
    """
    mistral = form == "mistral" or (form == "auto" and any(directory.glob(_MISTRALS)))
    names = reversed(_FILES) if mistral else _FILES
    return [file for name in names if (file := directory / name).is_file()][:1]


def _read(file: Path) -> Mapping[Any, Any]:
    read = json.loads(file.read_bytes())
    if not isinstance(read, Mapping):
        raise ValueError(f"{file}: no object")
    return read


def _content(file: str) -> str:
    """A file by its content; by its path where it cannot be read."""
    try:
        return f"content {_digest(Path(file).read_text(errors='replace'))}"
    except OSError:
        return file


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
