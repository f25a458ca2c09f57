"""Which weights an instance computes with: the model's own, and how they and its caches are quantized.

Caches of other weights look alike and mean something else, so both are compared before a byte moves, with the facts of
the model (`facts`); a request's adapter (`adapters`) is compared with its prompt (`blocks`).

Source: vLLM 0.32, `config/model.py`, `transformers_utils/model_arch_config_convertor.py` (quantization),
`model_executor/model_loader/default_loader.py`, `model_executor/models/ultravox.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.content import checkpoint_digest

logger = init_logger(__name__)


_ELSEWHERE: Final = ("audio_model_id", "text_model_id")
"""Keys of a configuration that name other repositories of which vLLM loads a part of the model (Ultravox)."""


_FROM_FILES: Final = frozenset(
    {
        *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt"),
        *("runai_streamer", "runai_streamer_sharded", "sharded_state"),
    }
)
"""What --load-format reads of a model's own files. What others take elsewhere (a server, another's memory) may be of
other files than those that are here: who loads so is told from who does not."""


def weights_of(model: Any, load: Any) -> str:
    """Which weights a model has, from vLLM's ModelConfig and LoadConfig: by their content where files can be read here,
    else by --revision; empty if nothing is known but the model's name."""
    form = _configured(load.load_format)
    if form == "dummy":
        return "dummy"
    digest = _digest(str(model.model_weights or model.model), model.revision, form, load.download_dir)
    if digest is None:
        told = f"revision {model.revision}" if model.revision else ""
    else:
        config = getattr(model, "hf_config", None)
        named = [str(name) for key in _ELSEWHERE if (name := getattr(config, key, None))]
        others = (_digest(name, None, form, load.download_dir) or "unknown" for name in named)
        told = " ".join(("content", digest, *others))
    return told if form in _FROM_FILES else f"{told} by {_loader(load)}".lstrip()


def _configured(form: str) -> str:
    """--load-format, where vLLM may have replaced it: an engine that elastic expert parallelism adds is made with
    random weights, and then gets those of its peers. What it was is nowhere; mostly peers have theirs of the files.

    Source: vLLM 0.32, `GPUModelRunner.load_model`, `ElasticEPScalingExecutor.load_model`, `CoreEngineActorManager`.
    """
    added = os.environ.get("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH", "0") != "0"
    return "auto" if added and form == "dummy" else form


def _loader(load: Any) -> str:
    """A load format and, where it says whence it loads, that.

    Source: vLLM 0.32, `EngineArgs.create_load_config` (the model's own path, in any case), `TensorizerConfig` (which is
    of no interest beside a URI).
    """
    extra = load.model_loader_extra_config
    options = dict(extra) if isinstance(extra, Mapping) else {}
    config = options.get("tensorizer_config")
    if isinstance(config, Mapping) and config.get("tensorizer_uri"):
        options["tensorizer_config"] = {name: value for name, value in config.items() if name != "tensorizer_dir"}
    text = json.dumps(options, sort_keys=True, default=str) if options else ""
    told = f" ({hashlib.blake2b(text.encode(), digest_size=4).hexdigest()})" if text else ""
    return f"--load-format {load.load_format}{told}"


def _digest(where: str, revision: str | None, form: str, cache: str | None) -> str | None:
    try:
        found = local_files(where, revision, cache)
        return checkpoint_digest(found, form) if found is not None else None
    except (OSError, ValueError, KeyError) as error:
        logger.warning("the weights of %s cannot be told by their content (%s): they go by --revision", where, error)
        return None


def quantization_of(model: Any) -> str:
    """How the weights of a ModelConfig are quantized, by method and settings; empty if they are not.

    The method is the checkpoint's where it names one: vLLM's own differs by the kernels that a machine has.
    """
    ordered = _ordered(model.quantization)
    if model.quantization is None and not ordered:
        return ""
    stored = model.model_arch_config.quantization_config
    method = (stored or {}).get("quant_method") or model.quantization or "by the environment"
    settings = [stored, model.quantization_config, *([ordered] if ordered else [])]
    text = json.dumps(settings, sort_keys=True, default=str)
    return f"{method} ({hashlib.blake2b(text.encode(), digest_size=4).hexdigest()})"


def orders_keys(model: Any) -> bool:
    """Whether the quantization of a ModelConfig's weights decides in which order its K have their channels, so that it
    must be equal on both sides: K2-Horizon, if rope turns a part of each head. vLLM puts that part in front in weights
    that are not quantized, and keeps the checkpoint's order otherwise. Which it was, a layer's cache does not tell.

    Source: vLLM 0.32, `is_rope_weights_folding_supported` and `apply_partial_rope` of `models/k2_horizon.py`.
    """
    turned = getattr(model.hf_text_config, "rope_head_dim", None)
    return bool(model.architecture == "K2HorizonForCausalLM" and turned and turned != model.get_head_size())


def _ordered(method: str | None) -> dict[str, object]:
    """The variables of the environment, with what they say, by which vLLM quantizes weights while it loads them;
    `method` is that of the flag.

    Source: vLLM 0.32, `HummingConfig.get_quant_config_for_layer`, `envs.maybe_convert_json_str_or_file`; vLLM 0.33,
    `muse_spark/amd/muse_moe_runner.py`.
    """
    from vllm.platforms import current_platform

    read = {
        "VLLM_HUMMING_ONLINE_QUANT_CONFIG": method == "humming",
        "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT": current_platform.is_rocm(),
    }
    return {name: _value(text) for name, counts in read.items() if counts and (text := os.environ.get(name))}


def kept_as(dtype: str, model: str) -> str:
    """What a cache of one of vLLM's dtypes has, by one name where vLLM has two: `auto` is the dtype that the `model`
    computes in, and `fp8` is e4m3, on NVIDIA's, AMD's and other processors. The shorter names are what most instances
    are started with, so one of 0.1.0rc1, which tells the name that was given, still pairs with them.

    Source: vLLM 0.32, `CacheConfig.cache_dtype`, `kv_cache_dtype_str_to_dtype`, `DISPATCH_BY_KV_CACHE_DTYPE` of
    `csrc/quantization/w8a8/fp8/`.
    """
    return {model: "auto", "fp8_e4m3": "fp8"}.get(dtype, dtype)


def _value(text: str) -> object:
    """Of a variable: JSON, a file of it, or a word."""
    if os.path.exists(text):
        text = Path(text).read_text()
    try:
        return json.loads(text)
    except ValueError:
        return text.lower()


def local_files(where: str, revision: str | None, cache: str | None) -> Path | None:
    """Where a model or adapter lies on this machine: a path, or a downloaded repository; None if it does not."""
    if (path := Path(os.path.expanduser(where))).exists():  # as vLLM does: an unknown user's home is no error
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(where, revision=revision, cache_dir=cache, local_files_only=True))
    except (OSError, ValueError):  # not downloaded by this library, or no name of a repository
        return None
