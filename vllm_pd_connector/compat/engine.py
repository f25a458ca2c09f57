"""The loop of the engine core, as its scheduler half needs to see it: whether only caches are waited for, whether
somebody asks it for something, and how to make it take a step.

vLLM's engine core steps about a thousand times a second while a request waits for its caches, and sleeps in its input
queue when it has no request at all. It passes itself to nobody, so it is looked for among the callers when it builds
its scheduler. Where it is not found, or runs inside its caller's thread without a queue, there is no `EngineLoop`: such
an engine steps as vLLM has it step.

Source: vLLM 0.32 and 0.33, `v1/engine/core.py` (`EngineCoreProc._process_input_queue`, `_process_engine_step`,
`step_fn`, `post_step`, `_reject_add_in_shutdown`, `run_engine_core`), `v1/core/sched/scheduler.py` (`has_requests`,
`_update_from_kv_xfer_finished`).
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.compat.refused import pass_on_unprepared

if TYPE_CHECKING:
    import queue
    from collections.abc import Callable
    from types import FrameType

logger = init_logger(__name__)


class EngineLoop:
    """One engine core that runs in this process, with a queue that other threads put requests into.

    Args:
        core: vLLM's `EngineCoreProc`; `scheduler` and `batch_queue` are set when its construction has ended.
        wakeup: the item of its queue that asks for nothing.
    """

    def __init__(self, core: Any, wakeup: object) -> None:
        self._core = core
        self._queue: queue.Queue[Any] = core.input_queue
        self._wakeup = wakeup
        self._input: Callable[[], None] | None = None
        self._step: Callable[[], tuple[Any, bool]] | None = None
        self._post_step: Callable[[bool], None] | None = None
        self._computed = self._at_once = False

    @property
    def depth(self) -> int:
        """Steps after which the results of one have been looked at: more than 1 with batches that overlap."""
        return int(getattr(self._core, "batch_queue_size", 1))

    def computes(self) -> bool:
        """Whether a request is being computed, or others wait for this engine's steps: engines of a mixture of experts
        with data parallelism step in time with each other."""
        return hasattr(self._core, "dp_group") or bool(self._core.scheduler.running)

    def idles(self) -> bool:
        """Whether no request is being computed, nor by those that step in time with this engine."""
        return not (self._core.scheduler.running or self._core.engines_running)

    def ends(self) -> bool:
        """Whether it was told to: it does what it has, and then no more."""
        return not self._core.is_running()

    def has_others(self, waiting: int) -> bool:
        """Whether the scheduler has requests besides `waiting` ones, another connector has work, or the engine is
        ending: it may abort all between two steps, and what the workers are to be told of that shows no sign."""
        scheduler = self._core.scheduler
        if len(scheduler.requests) != waiting or getattr(scheduler, "ec_connector", None) is not None:
            return True
        return self.ends() or bool(scheduler.connector.has_pending_push_work())

    def wait(self, seconds: float) -> None:
        """Return when the queue holds something, at the latest after `seconds`. For the engine core's thread."""
        until = time.monotonic() + seconds
        with self._queue.not_empty:
            while not self._queue.queue and (left := until - time.monotonic()) > 0:
                self._queue.not_empty.wait(left)

    def wake(self) -> None:
        """Make `wait` return, or an idle engine look whether it has something to do. Callable from any thread."""
        self._queue.put_nowait((self._wakeup, None))

    def between_steps(self, act: Callable[[], None]) -> None:
        """Have `act` called in the engine core's thread between two steps: what the last one brought has been looked at
        and sent, and what has come into the queue since was not taken. Once."""
        assert self._input is None
        self._input = self._core._process_input_queue

        def acts_and_takes() -> None:
            act()
            assert self._input is not None
            self._input()

        self._core._process_input_queue = acts_and_takes

    def received(self, request_ids: set[str]) -> None:
        """These requests' caches have come: vLLM's scheduler is told as a worker's report would, before the next step
        is scheduled. For the engine core's thread, between two steps."""
        self._core.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving=set(request_ids)))

    def go_on(self) -> None:
        """Have the next step follow the running one at once, though that computes nothing: vLLM would sleep for a
        millisecond, which is for engines whose steps nobody holds. From its second call on; for the engine core's
        thread."""
        self._at_once = True
        if self._step is None:
            self._step, self._core.step_fn = self._core.step_fn, self._stepped
            self._post_step, self._core.post_step = self._core.post_step, self._after_step

    def _stepped(self) -> tuple[Any, bool]:
        """A step as vLLM takes it. What is said of whether it computed decides of that sleep alone."""
        assert self._step is not None
        outputs, self._computed = self._step()
        at_once, self._at_once = self._at_once, False
        return outputs, self._computed or at_once

    def _after_step(self, _: bool) -> None:
        """After a step that computed vLLM may ask the workers for drafts. After others it must not: they would answer
        with old ones, and be ready for the next step."""
        assert self._post_step is not None
        self._post_step(self._computed)

    def on_refusal(self, tell: Callable[[Any], None]) -> None:
        """Have `tell` called with every request that reaches this engine when it ends, and that its scheduler never
        sees; marked as aborted, and as those that vLLM's API server refuses (`compat.blocks.was_refused`). For its own
        thread. What the input thread refuses comes to the scheduler (`refused.pass_on_unprepared`)."""
        refuses = self._core._reject_add_in_shutdown

        def refuses_and_tells(request: Any) -> bool:
            refused = bool(refuses(request))
            if refused:
                request.abort_immediately, request.status = True, RequestStatus.FINISHED_ABORTED
                tell(request)
            return refused

        self._core._reject_add_in_shutdown = refuses_and_tells
        pass_on_unprepared(self._core)


def calling_loop() -> EngineLoop | None:
    """The engine core that is being built further up in this thread, None if there is none with a queue."""
    core = caller("vllm.v1.engine.core", "EngineCoreProc")
    if core is None:
        logger.debug("no engine core with an input queue was found: its steps are vLLM's own")
        return None
    return EngineLoop(core, EngineCoreRequestType.WAKEUP)


def caller(module: str, name: str) -> Any:
    """The object of that class of vLLM's whose method is the nearest of the callers; None if there is none."""
    kind = getattr(sys.modules.get(module), name, None)
    frame: FrameType | None = sys._getframe(1)
    while kind is not None and frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, kind):
            return found
        frame = frame.f_back
    return None
