"""An engine core's loop without an engine, and the hold of its steps."""

from __future__ import annotations

import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.support.scheduler.halves import TOKEN
from vllm_pd_connector.compat.engine import EngineLoop
from vllm_pd_connector.scheduler.half import SchedulerHalf
from vllm_pd_connector.scheduler.step_hold import StepHold
from vllm_pd_connector.sidechannel.bell import HERE

ATTEMPT = b"a" * 16
WAITING: dict[str, Any] = {"computes": False, "waiting": True}


class Core:
    """As much of an engine core as a loop looks at."""

    def __init__(self, depth: int = 1, **fields: Any) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self._process_input_queue: Callable[[], None] = lambda: None
        self.batch_queue_size = depth
        self.step_fn: Callable[[], tuple[None, bool]] = lambda: (None, False)
        self.post_step: Callable[[bool], None] = lambda computed: None
        self.is_running: Callable[[], bool] = lambda: True
        self.engines_running = False
        connector = SimpleNamespace(has_pending_push_work=lambda: False)
        self.scheduler = SimpleNamespace(running=[], requests={"d-1": None}, connector=connector, ec_connector=None)
        vars(self.scheduler).update(fields)


class Loop(EngineLoop):
    """Notes how long it would have been held, and takes no time; what `meanwhile` does happens in the wait. `told` are
    the requests whose caches vLLM was told of."""

    def __init__(self, core: Core | None = None) -> None:
        super().__init__(core or Core(), "wake")
        self.waits: list[float] = []
        self.told: list[set[str]] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.meanwhile()

    def received(self, request_ids: set[str]) -> None:
        self.told.append(request_ids)


def hold_steps(half: SchedulerHalf, core: Core | None = None) -> Loop:
    """Give a half the loop of an engine; it is told between two steps what vLLM is told then."""
    half._loop = loop = Loop(core)
    half.hold = StepHold(loop, half._num_waiting, half.consumer.loads, half._received)
    return loop


def made(loop: EngineLoop, tokens: tuple[bytes, ...] = (TOKEN,), heard: bool = True) -> StepHold:
    """A hold whose workers have all been heard, while d-1 and d-2 load."""
    hold = StepHold(loop, lambda: 1, lambda name, attempt: name in ("d-1", "d-2") and attempt == ATTEMPT, loop.received)
    hold.listen(tokens)
    for token in tokens if heard else ():
        hold._rung(HERE + token)
    return hold


def take_step(hold: StepHold, **changes: bool) -> bool:
    """A step, and what comes between it and the next; whether workers may rest."""
    calm = hold.step(**WAITING | changes)
    hold._between()
    return calm
