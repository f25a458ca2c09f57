"""Workers that are held: their writes wait, and then their steps, while files say so.

With PD_TEST_HOLD=/some/where a worker's writes wait while /some/where.writes exists. Once one waits, the worker's next
step waits as well while /some/where.steps exists. What waits leaves a file whose name ends with the number of its
process, and another when it goes on: /some/where.writes.held.123, /some/where.writes.done.123.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOOK_S = 0.01


class Hold:
    """See the module."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._writes = False

    def create(self, create: Callable[..., Any]) -> Callable[..., Any]:
        """A maker of transports whose writes are held; called where everything of a worker is imported."""

        def create_held(*arguments: Any, **options: Any) -> Any:
            from vllm_pd_connector.worker.half import WorkerHalf

            transport = create(*arguments, **options)
            write, step = transport.write, WorkerHalf.start_step

            def held_write(*words: Any) -> Any:
                if self._path("writes").exists():
                    self._writes = True
                    self._wait("writes")
                return write(*words)

            def held_step(half: Any, metadata: Any) -> None:
                if self._writes:
                    self._wait("steps")
                step(half, metadata)

            transport.write = held_write
            WorkerHalf.start_step = held_step  # type: ignore[method-assign]
            return transport

        create_held.holds = True  # type: ignore[attr-defined]
        return create_held

    def _wait(self, what: str) -> None:
        path, number = self._path(what), os.getpid()
        if path.exists():
            Path(f"{path}.held.{number}").touch()
            while path.exists():
                time.sleep(LOOK_S)
            Path(f"{path}.done.{number}").touch()

    def _path(self, what: str) -> Path:
        return Path(f"{self._where}.{what}")


def hold_workers(where: str) -> None:
    """Hold what every transport that is created from now on writes. May be called again."""
    from vllm_pd_connector.transport import registry

    if not getattr(registry.create, "holds", False):
        registry.create = Hold(where).create(registry.create)
