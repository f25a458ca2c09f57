"""Importing vLLM's GPU backends where there is no GPU: the modules that they need and never call here.

What is recorded is what classes say of themselves: specs, block sizes, layouts. None of it computes. So a library that
is not installed is a module of names, and the device's compute capability is a number that a context sets. To be used
in a process of its own.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock, patch

ABSENT = ("flashinfer", "torchvision", "deep_gemm", "cutlass", "cuda", "vllm.vllm_flash_attn", "quack")


class _Names(ModuleType):
    __path__: ClassVar[list[str]] = []  # any submodule is one of these, too

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if any(name == absent or name.startswith(f"{absent}.") for absent in ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Have imports of what is not installed succeed, from now on in this process."""
    import torch
    import vllm.model_executor.models.deepseek_v2  # what asks whether a library is there has asked after this
    import vllm.v1.core.kv_cache_utils
    import vllm.v1.worker.utils  # noqa: F401

    sys.meta_path.append(_Finder())
    torch.cuda.get_device_properties = lambda *_: MagicMock(multi_processor_count=132)  # type: ignore[assignment]
    from vllm.v1.attention.backends import fa_utils

    for name in ("flash_attn_varlen_func", "get_scheduler_metadata", "reshape_and_cache_flash"):
        if not hasattr(fa_utils, name):
            setattr(fa_utils, name, MagicMock())


@contextmanager
def no_device() -> Iterator[None]:
    """What a module allocates on a device as it is imported is allocated nowhere."""
    import torch

    made = torch.empty

    def empty(*size: Any, device: Any = None, **given: Any) -> Any:
        return made(*size, device="meta" if str(device).startswith("cuda") else device, **given)

    with patch.object(torch, "empty", empty):
        yield


@contextmanager
def device(capability: int) -> Iterator[None]:
    """vLLM's platform says that it is CUDA with this compute capability (90 for 9.0)."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    kind = type(current_platform)
    told = DeviceCapability(*divmod(capability, 10))
    with (
        patch.object(kind, "get_device_capability", classmethod(lambda *_, **__: told)),
        patch.object(kind, "is_cuda", lambda _: True),
        patch.object(kind, "is_cpu", lambda _: False),
        patch.object(kind, "is_cuda_alike", lambda _: True),
    ):
        yield
