"""A torch with GPUs that are not there: what runs for them runs at once, over arrays of this machine's memory.

`stand_in` gives this process that many GPUs; the environment variable of that name gives them to processes that call
`prepare`, as all of the acceptance kit's and its tests' do. Tensors of `cuda:N` are tensors of the CPU. A stream runs
what it is given at once. An event has passed when it was asked for as often as `Gpus.looks` says, so that who uses
memory before it was told so is seen by `Gpus.pending`. Triton interprets kernels, over the same addresses. NIXL takes
the memory as a machine's, and Mooncake, whose build without CUDA refuses GPUs, is not offered.

Source of what is replaced: the calls of torch.cuda in the package, in `tests/gpu` and in `tests/support/transport`.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

VARIABLE = "PD_TEST_STAND_IN_GPUS"
MEMORY_BYTES = 1 << 30
_MAKERS = ("empty", "zeros", "tensor", "randint", "as_tensor", "arange")


@dataclass(eq=False)
class Gpus:
    """What happened on them. `current`: the stream that each launch goes to; `launches`: how many went to each, by
    stream. `looks`: how often an event is asked for in vain. `free`: bytes of each."""

    count: int
    looks: int = 0
    free: int = MEMORY_BYTES
    current: Any = None
    launches: Counter[Any] = field(default_factory=Counter)
    synchronized: int = 0
    events: list[Any] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Events that have not passed for whoever asked."""
        return sum(not event.passed for event in self.events)


class _Stream:
    def __init__(self, gpus: Gpus, device: Any) -> None:
        self._gpus, self.device = gpus, device

    def synchronize(self) -> None:
        self._gpus.synchronized += 1


class _Event:
    def __init__(self, gpus: Gpus) -> None:
        self._gpus, self._asked, self.passed = gpus, 0, False

    def record(self, stream: Any = None) -> None:
        self._gpus.events.append(self)

    def query(self) -> bool:
        self._asked += 1
        self.passed = self.passed or self._asked > self._gpus.looks
        return self.passed

    def synchronize(self) -> None:
        self.passed = True

    def elapsed_time(self, _: Any) -> float:
        return 1.0


def prepare() -> None:
    """Give this process the GPUs that its environment asks for; nothing where it asks for none."""
    if VARIABLE in os.environ and "torch" in sys.modules and hasattr(sys.modules["torch"], "stand_in"):
        return
    if VARIABLE in os.environ:
        _install(pytest.MonkeyPatch(), Gpus(int(os.environ[VARIABLE])))


@contextmanager
def stand_in(count: int = 1) -> Iterator[Gpus]:
    """This process has `count` GPUs."""
    gpus = Gpus(count)
    with pytest.MonkeyPatch.context() as patch:
        _install(patch, gpus)
        yield gpus


def _install(patch: pytest.MonkeyPatch, gpus: Gpus) -> None:
    patch.setenv("TRITON_INTERPRET", "1")
    import torch

    patch.setattr(torch, "stand_in", gpus, raising=False)
    for name in _MAKERS:
        patch.setattr(torch, name, _maker(gpus, getattr(torch, name)))
    to = torch.Tensor.to
    patch.setattr(torch.Tensor, "to", lambda self, device, **more: _launched(gpus, to(self, _host(device), **more)))
    patch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    for name in ("copy_", "zero_"):
        patch.setattr(torch.Tensor, name, _counted(gpus, getattr(torch.Tensor, name)))
    for name, value in _cuda(gpus).items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    _nixl(patch)


def _cuda(gpus: Gpus) -> dict[str, Any]:
    def properties(device: Any = 0) -> Any:
        return SimpleNamespace(name="stand-in", total_memory=MEMORY_BYTES, major=9, minor=0, multi_processor_count=1)

    class Stream(_Stream):  # types, as torch's are: others name them in annotations
        def __init__(self, device: Any = None) -> None:
            super().__init__(gpus, device)

    class Event(_Event):
        def __init__(self, *, blocking: bool = False) -> None:
            super().__init__(gpus)

    @contextmanager
    def stream(one: Any) -> Iterator[None]:
        before, gpus.current = gpus.current, one
        try:
            yield
        finally:
            gpus.current = before

    return {
        "is_available": lambda: gpus.count > 0,
        "device_count": lambda: gpus.count,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "get_device_name": lambda device=0: "stand-in",
        "get_device_properties": properties,
        "mem_get_info": lambda device=None: (gpus.free, MEMORY_BYTES),
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
    }


def _host(device: Any) -> Any:
    return "cpu" if str(device).startswith("cuda") else device


def _maker(gpus: Gpus, make: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def made(*values: Any, device: Any = None, **more: Any) -> Any:
        on_gpu = str(device).startswith("cuda")
        if on_gpu and make.__name__ == "empty" and values[0] > gpus.free:
            raise torch.OutOfMemoryError(f"{values[0]} bytes")
        if on_gpu and hasattr(values[0], "__cuda_array_interface__") and not isinstance(values[0], torch.Tensor):
            return torch.from_numpy(np.asarray(values[0]))
        return make(*values, device=_host(device), **more)

    return made


def _counted(gpus: Gpus, method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *values, **more: _launched(gpus, method(self, *values, **more))


def _launched(gpus: Gpus, result: Any) -> Any:
    gpus.launches[gpus.current] += 1
    return result


def _nixl(patch: pytest.MonkeyPatch) -> None:
    from vllm_pd_connector.transport.nixl import bindings

    try:
        library = bindings.bindings()
    except Exception:  # an environment without NIXL
        return
    patch.setattr(library, "VRAM_SEG", library.DRAM_SEG)
