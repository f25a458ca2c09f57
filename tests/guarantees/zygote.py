"""Run tests of the suite against the package with one line changed: a child process for each change.

    python tests/guarantees/zygote.py < changes.json > results.json

A change is {"module": dotted name, "source": its changed source, "test": node, "seconds": limit}; its result is 100
when the test failed, pytest's exit code when it did not, or -1 when the child had to be ended. What takes long to
import is imported before the first child is made, the package itself in each child, with the changed module's source
in place of its file's. Tests that are to fail mostly wait for what does not come, and all do so for less long than
usual: one that is only slow here must fail without a change, too.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.metadata
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

AT_ONCE = 6
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--assert=plain")
"""Nobody reads what a test says, so its assertions need not be rewritten, which takes longer than most tests."""
NOTICED = 100


class _Noticed:
    """Whether a test failed in its own code, and not already when it was collected or set up."""

    failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed and report.when == "call"


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module, with other source."""

    def __init__(self, module: str, source: str):
        self._module, self._source = module, source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self._module else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, f"<{self._module}, changed>", "exec"), vars(module))


def preload() -> None:
    """Import what no change is in, and take it from the garbage collector, whom pytest calls often."""
    import hypothesis.stateful  # noqa: F401
    import nixl  # noqa: F401
    import numpy  # noqa: F401
    import vllm.distributed.kv_transfer.kv_connector.v1.base
    import vllm.distributed.kv_transfer.kv_connector.v1.multi_connector
    import vllm.v1.core.kv_cache_manager
    import vllm.v1.core.sched.scheduler
    import vllm.v1.outputs
    import vllm.v1.request
    import vllm.v1.worker.gpu.kv_connector
    import vllm.v1.worker.kv_connector_model_runner_mixin  # noqa: F401
    import zmq.auth.thread  # noqa: F401

    for plugin in importlib.metadata.entry_points(group="pytest11"):
        plugin.load()

    for name in [name for name in sys.modules if name.split(".")[0] == "vllm_pd_connector"]:
        del sys.modules[name]  # loaded as vLLM's plugin
    gc.collect()
    gc.freeze()


def begin(change: dict[str, Any], slot: int) -> int:
    """Start the change's test in a child process; its id. Those that run at once have ports of their own."""
    child = os.fork()
    if child:
        return child
    os.setpgid(0, 0)
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    os.environ["PD_TEST_PATIENCE"] = "20"  # see `tests.support.patience`
    os.environ["PYTEST_XDIST_WORKER"] = f"gw{slot}"  # see `tests.support.ports`
    sys.meta_path.insert(0, _Changed(change["module"], change["source"]))
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = tempfile.mkdtemp()
    noticed = _Noticed()
    code = pytest.main([*OPTIONS, change["test"]], plugins=[noticed])
    os._exit(NOTICED if noticed.failed else code)


def run(changes: Sequence[dict[str, Any]]) -> list[int]:
    """The exit codes of the changes' tests. Some run at a time, since most of them wait for what does not come."""
    codes: dict[int, int] = {}
    running: dict[int, tuple[int, float, int]] = {}
    todo = list(enumerate(changes))
    while todo or running:
        while todo and len(running) < AT_ONCE:
            number, change = todo.pop(0)
            slot = min(set(range(AT_ONCE)) - {taken for *_, taken in running.values()})
            running[begin(change, slot)] = number, time.monotonic() + change["seconds"], slot
        for child, (number, until, _) in list(running.items()):
            pid, status = os.waitpid(child, os.WNOHANG)
            if not pid and time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                codes[number] = -1
            elif pid:
                codes[number] = os.waitstatus_to_exitcode(status)
            else:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):  # what its test has started, frozen perhaps
                os.killpg(child, signal.SIGKILL)
            del running[child]
        time.sleep(0.02)
    return [codes[number] for number in range(len(changes))]


def main() -> None:
    changes = json.load(sys.stdin)
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = tempfile.mkdtemp()  # hypothesis is imported here, run in the children
    preload()
    print(json.dumps(run(changes)))


if __name__ == "__main__":
    main()
