"""Instances in processes of their own, over real libraries, that tests stop and kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.forked import PROCESSES
from tests.support.worker.decode_instance import until

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mooncake": ("mooncake", {"protocol": "tcp", "address": "127.0.0.1"}),
    "nixl-tcp": ("nixl", {"ucx": {"TLS": "tcp"}}),
}

PATIENCE_S = 600.0
"""Ends a test that hangs; how long a busy machine takes decides nothing."""


class Instance:
    """A process that runs `main(pipe, engine_id, transport, options)`; `place` is what it said first."""

    def __init__(self, main: Callable[..., None], variant: str, engine_id: str):
        self._pipe, child = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=main, args=(child, engine_id, *VARIANTS[variant]), daemon=True)
        self._process.start()
        child.close()
        self.place = self._answer()

    def ask(self, question: str) -> Any:
        self._pipe.send(question)
        return self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "the process does not answer"
        return self._pipe.recv()

    def stop(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        until(lambda: self._state() == "T", "the process to stop")

    def go_on(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def tell_to_end(self) -> None:
        if self._process.is_alive():
            self.go_on()
        self._pipe.close()

    def close(self) -> None:
        self._process.join(PATIENCE_S)
        assert self._process.exitcode in (0, -signal.SIGKILL)

    def _state(self) -> str:
        with open(f"/proc/{self._process.pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]


@contextmanager
def instances(main: Callable[..., None], variant: str) -> Iterator[Callable[[str], Instance]]:
    """Starts instances by engine id; all of them have ended afterwards."""
    made: list[Instance] = []

    def start(engine_id: str) -> Instance:
        made.append(Instance(main, variant, engine_id))
        return made[-1]

    try:
        yield start
    finally:
        for instance in made:
            instance.tell_to_end()
        for instance in made:
            instance.close()
