"""Processes of tests, forked from a server that has imported what is slow to import.

The server has neither a thread of Python's nor an agent of a transport, so a child begins as a fresh process would.
Mooncake is not among the imports: it chooses its version of IP when it is imported.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

PROCESSES = multiprocessing.get_context("forkserver")
# The server is one for the whole test process. pytest is what a child imports because its parent's main module did.
PROCESSES.set_forkserver_preload(["msgspec", "nixl", "numpy", "pytest", "zmq.auth.thread"])


def _begin(main: Callable[..., None], *arguments: Any) -> None:
    faulthandler.enable()  # for one that does not answer: see `Child.answer`
    main(*arguments)


class Child:
    """A process that runs `main(pipe, *arguments)`, and our end of the pipe.

    Args:
        patience_s: how long an answer may take; it ends a test that hangs.
    """

    def __init__(self, patience_s: float, main: Callable[..., None], *arguments: Any) -> None:
        self._patience_s = patience_s
        self._pipe, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=_begin, args=(main, theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def answer(self) -> Any:
        if not self._pipe.poll(self._patience_s):
            self._signal(signal.SIGABRT)
            raise AssertionError("the process does not answer; the stacks of its threads are in this run's stderr")
        return self._pipe.recv()

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)
        while self._state() != "T":
            time.sleep(0.001)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def join(self) -> None:
        """Wait until it has ended by itself, or was killed."""
        self._process.join(self._patience_s)
        assert self._process.exitcode in (0, -signal.SIGKILL), f"the process ended with {self._process.exitcode}"

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def _state(self) -> str:
        with open(f"/proc/{self._process.pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
