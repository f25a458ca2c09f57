"""NIXL's agents as tests make them fail or wait."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tests.support.transport.ends import End
from tests.support.transport.variants import MIB

SIZE = 32 * MIB
OPTIONS = {"ucx": {"TLS": "tcp"}, "batch_bytes": 4 * MIB}


class Agent:
    """NIXL's agent, with some of its calls replaced; `released` are the handles that were given back."""

    def __init__(self, agent: Any, **calls: Callable[..., Any]) -> None:
        self._agent, self._calls = agent, calls
        self.released: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return self._calls.get(name) or getattr(self._agent, name)

    def releaseXferReq(self, handle: int) -> Any:
        self.released.append(handle)
        return self._agent.releaseXferReq(handle)


def error(kind: str) -> Exception:
    made: Exception = getattr(importlib.import_module("nixl")._bindings, kind)("who knows")
    return made


def raises(kind: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        raise error(kind)

    return call


def instead(end: End, poster: Any = None, /, **calls: Callable[..., Any]) -> Agent:
    """An agent with these calls in the place of the one that posts, or of a former one."""
    poster = poster or end.transport._posting()
    poster.library = Agent(poster.library, **calls)
    made: Agent = poster.library
    return made
