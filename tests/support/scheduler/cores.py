"""vLLM's engine core around an engine of `engines`, without its processes: what operators and trainers call.

`Core` is vLLM's own class, with its own pause, reset, weights and sleep; its constructor alone is ours, because that
starts a model. `Workers` is vLLM's executor without workers: it notes what they are asked.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.executor.abstract import Executor

from tests.support.scheduler.engines import Engine
from tests.support.scheduler.halves import TOKEN, until
from vllm_pd_connector.connector import EncodedManifest

METADATA = EncodedManifest(b"manifest", TOKEN)


class Workers(Executor):  # type: ignore[misc]  # vLLM ships no types
    """See the module. `asked` are the methods' names; those in `fails` fail."""

    def __init__(self) -> None:
        self.sleeping_tags: set[str] = set()
        self.asked: list[str] = []
        self.fails: set[str] = set()

    def _init_executor(self) -> None:
        raise AssertionError("there are none")

    def check_health(self) -> None:
        """Always good."""

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        self.asked.append(method)
        if method == "get_kv_connector_handshake_metadata":
            return [{(0, 0): METADATA}]
        if method in self.fails:
            raise RuntimeError(f"{method} failed")
        return [True if method == "add_lora" else None]


class Core(EngineCoreProc):  # type: ignore[misc]  # vLLM ships no types
    """See the module. `make` builds the engine, as the constructor of vLLM's does."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        self.model_executor = Workers()
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self._weight_version = "default"
        self._idle_state_callbacks: list[Any] = []
        self.engines_running, self.mm_receiver_cache = False, None
        self.shutdown_state = EngineShutdownState.RUNNING
        self.engine = make()
        self.scheduler, self.vllm_config = self.engine.scheduler, self.engine.scheduler.vllm_config
        self.step_fn = self.engine.step

    @property
    def batch_queue(self) -> list[Any]:
        """Steps that compute and whose results were not looked at: with one of them, an engine is not idle."""
        return self.engine.in_flight

    def wait(self, future: Future[Any] | None, step: Callable[[], object] | None = None) -> None:
        """Step as the core's loop does until a pause or a sleep has come about.

        Raises:
            RuntimeError: what came of it.
        """

        def over() -> bool:
            if self.has_work():
                (step or self.engine.step)()
            else:
                self._notify_idle_state_callbacks()
            return future is None or future.done()

        until(over, "a pause that comes about")
        if future is not None:
            future.result()


def wake(core: Core) -> None:
    """As vLLM 0.33 does it: the memory is there again, and the workers' metadata is handed over."""
    core.wake_up()
    core.engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): METADATA})
