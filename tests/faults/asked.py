"""Requests and how they end: everything that a client of the instances under attack can see."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any

Params = dict[str, Any]
KEEP: Params = {"do_remote_decode": True, "do_remote_prefill": False}
FETCH: Params = {"do_remote_decode": False, "do_remote_prefill": True}


class End(Enum):
    """How a request ended. Everything but RIGHT, REFUSED and ABORTED is a defect, unless its own server was killed
    (BROKEN)."""

    RIGHT = "right"
    REFUSED = "refused"
    ABORTED = "aborted"
    BROKEN = "broken off"
    WRONG = "wrong tokens"
    EMPTY = "empty 200"
    STUCK = "no end"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`asked` is the name of the instance that was asked, where that matters."""

    end: End
    detail: str = ""
    params: Params | None = None
    asked: str = ""


@dataclass(frozen=True, slots=True)
class Struck:
    """What a fault led to: how requests ended, and how many messages, processes, ports or requests it did touch.

    A fault that touched nothing has shown nothing, so it is not counted.
    """

    outcomes: list[Outcome]
    touched: int


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def begin(run: Callable[[], Outcome]) -> Future[Outcome]:
    """Run a request in a thread of its own."""
    future: Future[Outcome] = Future()

    def body() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, daemon=True).start()
    return future


def settled(futures: list[Future[Outcome]], seconds: float = 120.0) -> list[Outcome]:
    return [future.result(seconds) for future in futures]
