"""Which weights files hold, told by their content: equal wherever equal weights lie, another for other numbers.

Names say too little. A path is the same on two hosts that hold two versions of a model, a hub's branch moves on, and an
adapter is loaded under any name. A checkpoint is told by its tensors, however they are spread over files: the names,
types and shapes of all, and some bytes out of the middle of each (of MAX_SAMPLES at most, evenly chosen by name), so
that a start reads megabytes and no terabyte. An adapter is small and told by all its bytes. Training, merging and
quantization change every tensor that they touch, and are found; a change of a few elements of a checkpoint is not.
This finds accidents and resists nobody: each instance tells its own.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SAMPLE_BYTES = 4096
MAX_SAMPLES = 8192
PARTS = 64
"""Into so many a file is divided whose tensors are not known."""
MAX_HEADER = 1 << 30

INDEX = "model.safetensors.index.json"
MISTRALS = "consolidated*.safetensors"
MISTRALS_INDEX = "consolidated.safetensors.index.json"
CHECKPOINTS = {
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "safetensors": ("*.safetensors",),
    "mistral": (MISTRALS,),
    "npcache": ("*.bin", "*.pt"),
    "pt": ("*.pt",),
}
"""By vLLM's --load-format, what it loads: the first of these kinds of files that there are. Other formats are read as
"hf" is, of two forms under "auto" Mistral's."""
OTHERS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def checkpoint_digest(path: Path, load_format: str = "auto") -> str | None:
    """16 hex digits over the weights in a directory, or of one file; None if there are no files of weights.

    Args:
        load_format: by which vLLM chooses among files of several kinds.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not what its name says.
    """
    files = _weight_files(path, load_format)
    if not files:
        return None
    digest = hashlib.blake2b(digest_size=8)
    with ExitStack() as opened:
        pieces = []
        for file in files:
            number = opened.enter_context(file.open("rb")).fileno()
            pieces += [(what, number, start, stop) for what, start, stop in _pieces(file, number)]
        pieces.sort(key=lambda piece: piece[0])
        apart = -(-len(pieces) // MAX_SAMPLES)
        for i, (what, number, start, stop) in enumerate(pieces):
            digest.update(what.encode())
            if i % apart == 0:
                first = max(start, (start + stop - SAMPLE_BYTES) // 2)
                digest.update(os.pread(number, min(SAMPLE_BYTES, stop - first), first))
    return digest.hexdigest()


def adapter_digest(directory: Path) -> str | None:
    """16 hex digits over a LoRA adapter in PEFT's form; None if there is none.

    Raises:
        OSError: a file cannot be read.
    """
    files = adapter_files(directory)
    if not files:
        return None
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        with file.open("rb") as opened:
            content = hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16))
        digest.update(file.name.encode() + content.digest())
    return digest.hexdigest()


def adapter_files(directory: Path) -> list[Path]:
    """The files of an adapter that decide its numbers, those that are there."""
    return [file for name in ADAPTERS if (file := directory / name).is_file()]


def _weight_files(path: Path, load_format: str) -> Sequence[Path]:
    """What vLLM would load: one kind of files, of safetensors those that their index names. Others may lie beside them.

    Source: vLLM 0.32, `DefaultModelLoader._prepare_weights`, `filter_files_not_needed_for_inference`.
    """
    if not path.is_dir():
        return [path] if path.is_file() else []
    if load_format == "auto" and any(path.glob(MISTRALS)):
        load_format = "mistral"
    kinds = CHECKPOINTS.get(load_format, CHECKPOINTS["hf"])
    files: Sequence[Path] = next(filter(None, (sorted(path.glob(kind)) for kind in kinds)), [])
    index = path / (MISTRALS_INDEX if load_format == "mistral" else INDEX)
    if files and files[0].suffix == ".safetensors" and index.is_file():
        return [path / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    return [file for file in files if not file.name.endswith(OTHERS)]


def _pieces(file: Path, number: int) -> list[tuple[str, int, int]]:
    """What an open file consists of: (description, first byte, last byte + 1)."""
    size = os.fstat(number).st_size
    if file.suffix != ".safetensors":
        return [(f"{file.name} {size} {i}", size * i // PARTS, size * (i + 1) // PARTS) for i in range(PARTS)]
    header = int.from_bytes(os.pread(number, 8, 0), "little")
    if header > min(size, MAX_HEADER):
        raise ValueError(f"{file}: a header of {header} bytes in a file of {size}")
    try:
        described = json.loads(os.pread(number, header, 8))
        described.pop("__metadata__", None)
        found = []
        for name, one in described.items():
            start, stop = (8 + header + int(offset) for offset in one["data_offsets"])
            found.append((f"{name} {one['dtype']} {one['shape']}", start, stop))
        return found
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{file}: its header describes no tensors: {error}") from error
