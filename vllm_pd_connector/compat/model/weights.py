"""Which weights an instance computes with: the model's own, how they are quantized, and a request's adapter.

Caches of other weights look alike and mean something else, so all three are compared before a byte moves: the first two
with the facts of the model (`facts`), the adapter with the prompt of each request (`blocks`).

Source: vLLM 0.32, `config/model.py`, `transformers_utils/model_arch_config_convertor.py` (quantization),
`model_executor/model_loader/default_loader.py`, `lora/utils.py` (`get_adapter_absolute_path`), `lora/worker_manager.py`
(`add_adapter`).
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.content import adapter_digest, adapter_files, checkpoint_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.request import Request

logger = init_logger(__name__)

ADAPTERS_KNOWN = 4096
"""Adapters whose content is remembered; one that is forgotten is read again."""


def weights_of(model: Any, load: Any) -> str:
    """Which weights a model has, from vLLM's ModelConfig and LoadConfig: by their content where files can be read here,
    else by --revision; empty if nothing is known but the model's name."""
    if load.load_format == "dummy":
        return "dummy"
    where = str(model.model_weights or model.model)
    try:
        found = _local(where, model.revision, load.download_dir)
        digest = checkpoint_digest(found) if found is not None else None
    except (OSError, ValueError, KeyError) as error:
        logger.warning("the weights of %s cannot be told by their content (%s): they go by --revision", where, error)
        digest = None
    if digest is not None:
        return f"content {digest}"
    return f"revision {model.revision}" if model.revision else ""


def quantization_of(model: Any) -> str:
    """How the weights of a ModelConfig are quantized, by method and settings; empty if they are not.

    The method is the checkpoint's where it names one: vLLM's own differs by the kernels that a machine has.
    """
    if model.quantization is None:
        return ""
    stored = model.model_arch_config.quantization_config
    method = (stored or {}).get("quant_method") or model.quantization
    settings = json.dumps([stored, model.quantization_config], sort_keys=True, default=str)
    return f"{method} ({hashlib.blake2b(settings.encode(), digest_size=4).hexdigest()})"


def adapter_of(request: Request, ids: Mapping[str, str]) -> str:
    """The adapter that a request computes with: its name, and its id in `ids`, or else the content of its files; empty
    if there is none.

    An adapter is read once, as it is loaded; one that vLLM loads in place is read again when its files have changed.
    """
    lora = request.lora_request
    if lora is None:
        return ""
    name, path = str(lora.lora_name), str(lora.lora_path)
    if name in ids:
        return repr((name, "id", ids[name]))
    return repr((name, *_adapter(name, path, lora.lora_int_id, _stamp(path) if lora.load_inplace else ())))


@lru_cache(ADAPTERS_KNOWN)
def _adapter(name: str, path: str, number: int, stamp: tuple[Any, ...]) -> tuple[str, str]:
    try:
        found = _local(path, None, None)
        digest = adapter_digest(found) if found is not None else None
    except OSError as error:
        logger.warning("adapter %s: %s: %s", name, path, error)
        digest = None
    if digest is None:
        logger.warning(
            "adapter %s: no files of it can be read here at %s, so it goes by that path: use one path on both sides, "
            "or name it in adapter_ids",
            name,
            path,
        )
        return "path", path
    logger.info("adapter %s (id %d) at %s has the content %s", name, number, path, digest)
    return "content", digest


def _stamp(path: str) -> tuple[Any, ...]:
    """Changes with the files of an adapter; empty if they are not here."""
    found = _local(path, None, None)
    stats = [(file.name, file.stat()) for file in adapter_files(found)] if found is not None else []
    return tuple((name, stat.st_ino, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


def _local(where: str, revision: str | None, cache: str | None) -> Path | None:
    """Where a model or adapter lies on this machine: a path, or a downloaded repository; None if it does not."""
    if (path := Path(where).expanduser()).exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(where, revision=revision, cache_dir=cache, local_files_only=True))
    except (OSError, ValueError):  # not downloaded by this library, or no name of a repository
        return None
