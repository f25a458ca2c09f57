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
    from collections.abc import Iterator, Sequence
    from pathlib import Path

SAMPLE_BYTES = 4096
MAX_SAMPLES = 8192
PARTS = 64
"""Into so many a file is divided whose tensors are not known."""
MAX_HEADER = 1 << 30

INDEX = "model.safetensors.index.json"
CHECKPOINTS = ("model.safetensors", "*.safetensors", "pytorch_model*.bin", "*.bin", "*.pt")
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def checkpoint_digest(path: Path) -> str | None:
    """16 hex digits over the weights in a directory, or of one file; None if there are no files of weights.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not what its name says.
    """
    files = _weight_files(path)
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


def _weight_files(path: Path) -> Sequence[Path]:
    """What vLLM would load: what the index names, else one kind of files. Others may lie beside them."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    if (index := path / INDEX).is_file():
        return [path / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    found: Iterator[Sequence[Path]] = (sorted(path.glob(pattern)) for pattern in CHECKPOINTS)
    return next(filter(None, found), [])


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
