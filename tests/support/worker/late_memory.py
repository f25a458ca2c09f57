"""A GPU that shows what network devices wrote into it only when it is told to: transfers by loopback land in a queue,
and `Copier.arrived` puts them where they belong."""

from __future__ import annotations

import ctypes
from collections import deque
from types import SimpleNamespace

import pytest

from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.transport import loopback
from vllm_pd_connector.worker.staging.copiers import CpuCopier


class LateMemory:
    """See the module. Loopback and the CPU's copier are of that kind while `monkeypatch` holds. `refuses`: the next
    call is an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._landed: deque[tuple[int, bytes]] = deque()
        self.calls = 0
        self.refuses = False
        monkeypatch.setattr(loopback, "ctypes", SimpleNamespace(memmove=self._land))
        monkeypatch.setattr(CpuCopier, "arrived", lambda copier: self._show())

    def _land(self, destination: int, source: int, length: int) -> None:
        self._landed.append((destination, ctypes.string_at(source, length)))

    def _show(self) -> None:
        self.calls += 1
        if self.refuses:
            self.refuses = False
            raise TransferError("the device does not wait")
        while self._landed:
            destination, content = self._landed.popleft()
            ctypes.memmove(destination, content, len(content))
