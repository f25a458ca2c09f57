"""LoRA adapters of engines without workers: files that nobody computes with, loaded as vLLM's API server does it."""

from __future__ import annotations

from pathlib import Path

import msgspec
from vllm.lora.request import LoRARequest

from tests.support.scheduler.cores import Core


def written(directory: Path, content: bytes) -> Path:
    """An adapter's files, or others in their place."""
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text('{"r": 8}')
    (directory / "adapter_model.safetensors").write_bytes(content)
    return directory


def lora(path: Path, number: int = 1, *, in_place: bool = False, name: str = "sql") -> LoRARequest:
    return LoRARequest(name, number, str(path), load_inplace=in_place)


def load(core: Core, path: Path, number: int = 1, *, in_place: bool = True) -> LoRARequest:
    """Have a core load an adapter, by a call as it comes out of the queue: decoded, without its type. Returns what the
    API server gives requests from now on."""
    found = lora(path, number, in_place=in_place)
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(found))
    assert core.add_lora(*core._convert_msgspec_args(core.add_lora, [plain]))
    return found
