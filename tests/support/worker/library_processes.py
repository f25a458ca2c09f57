"""Instances in processes of their own, over real libraries, that tests stop and kill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.forked import Child

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mooncake": ("mooncake", {"protocol": "tcp", "address": "127.0.0.1"}),
    "nixl-tcp": ("nixl", {"ucx": {"TLS": "tcp"}}),
}

PATIENCE_S = 120.0
"""Ends a test that hangs; how long a busy machine takes decides nothing."""


class Instance(Child):
    """A process that runs `main(pipe, engine_id, transport, options)`; `place` is what it said first."""

    def __init__(self, main: Callable[..., None], variant: str, engine_id: str):
        super().__init__(PATIENCE_S, main, engine_id, *VARIANTS[variant])
        self.place = self.answer()

    def ask(self, question: str) -> Any:
        self._pipe.send(question)
        return self.answer()

    def stop(self) -> None:
        self.freeze()

    def tell_to_end(self) -> None:
        if self._process.is_alive():
            self.thaw()
        self._pipe.close()


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
            instance.join()
