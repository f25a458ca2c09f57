"""vLLM's own loop of the engine core, as its scheduler half sees it and has it step."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.scheduler.halves import until
from tests.support.scheduler.loops import WAITING, Core, Loop, made, take_step
from vllm_pd_connector.compat.engine import EngineLoop, calling_loop
from vllm_pd_connector.scheduler.step_hold import LONGEST_S, SHORT_S, StepHold


@pytest.mark.parametrize(
    ("step", "slept"),
    [(WAITING, 0), (WAITING | {"waiting": False}, 1), (WAITING | {"computes": True}, 1)],
    ids=["waits", "has something else", "computes"],
)
def test_vllm_does_not_sleep_between_steps_that_wait_here(
    monkeypatch: pytest.MonkeyPatch, step: dict[str, Any], slept: int
) -> None:
    """vLLM's own loop, with nothing but what it looks at."""
    from vllm.v1.engine import core as engine_core

    sleeps: list[float] = []
    monkeypatch.setattr(engine_core, "time", SimpleNamespace(sleep=sleeps.append))
    core = engine_core.EngineCoreProc.__new__(engine_core.EngineCoreProc)
    for name, value in vars(Core()).items():
        setattr(core, name, value)
    core.scheduler.has_requests = lambda: True
    core.post_step = lambda computed: None
    hold = made(Loop(core))

    def take_step() -> tuple[None, bool]:
        hold.step(**step)
        return None, False

    core.step_fn = take_step
    core._process_engine_step()  # in its first step the hold gets hold of them
    sleeps.clear()
    core._process_engine_step()
    assert len(sleeps) == slept
    hold.close()


def test_workers_are_not_asked_for_drafts_after_a_step_that_computed_nothing() -> None:
    """vLLM's own loop. They would answer with old ones, and the question would end their rest."""
    from vllm.v1.engine import core as engine_core

    core = engine_core.EngineCoreProc.__new__(engine_core.EngineCoreProc)
    for name, value in vars(Core()).items():
        if name != "post_step":
            setattr(core, name, value)
    asked: list[None] = []
    core.scheduler.has_requests = lambda: True
    core.check_for_draft_tokens, core.async_scheduling = True, False
    core.model_executor = SimpleNamespace(take_draft_token_ids=lambda: asked.append(None))
    hold, computes = made(Loop(core)), False

    def take_step() -> tuple[None, bool]:
        hold.step(**WAITING | {"computes": computes})
        return None, computes

    core.step_fn = take_step
    for _ in range(3):
        core._process_engine_step()
    assert not asked
    computes = True
    core._process_engine_step()
    assert len(asked) == 1
    hold.close()


def test_the_engine_is_held_when_a_step_is_over_and_before_its_queue_is_looked_at() -> None:
    """By the name that vLLM's loop calls between two steps."""
    core, order = Core(), []
    core._process_input_queue = lambda: order.append("input")
    hold = made(loop := Loop(core))
    loop.meanwhile = lambda: order.append("held")
    hold.step(**WAITING)
    assert not order
    core._process_input_queue()
    assert order == ["held", "input"]
    hold.close()


def wait_in_a_thread(loop: EngineLoop) -> threading.Thread:
    thread = threading.Thread(target=loop.wait, args=(600.0,))
    thread.start()
    return thread


def test_whatever_comes_into_the_engines_queue_ends_the_wait() -> None:
    core = Core()
    loop = EngineLoop(core, "wake")
    thread = wait_in_a_thread(loop)
    core.input_queue.put_nowait(("add", "a request"))
    thread.join()
    assert core.input_queue.qsize() == 1
    core.input_queue.get()
    thread = wait_in_a_thread(loop)
    loop.wake()
    thread.join()
    assert core.input_queue.get() == ("wake", None)


def test_the_engine_core_that_builds_the_connector_is_found() -> None:
    from vllm.v1.engine.core import EngineCoreProc

    class Built(EngineCoreProc):  # type: ignore[misc]
        def __init__(self) -> None:
            self.input_queue = queue.Queue()
            self.loop = (lambda: calling_loop())()

    built = Built()
    assert built.loop is not None
    built.loop.wake()
    request_type, _ = built.input_queue.get()
    assert request_type.name == "WAKEUP"
    assert calling_loop() is None


def test_vllms_idle_engine_leaves_its_queue_to_step_when_it_is_asked() -> None:
    """vLLM's own loop and its own question whether there is work, with nothing but what they look at."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

    core = EngineCoreProc.__new__(EngineCoreProc)
    loop = Core()
    core.input_queue, core.aborts_queue, core._idle_state_callbacks = loop.input_queue, queue.Queue(), []
    core.engines_running, core.batch_queue, core.process_input_queue_block = False, None, True
    core.shutdown_state = EngineShutdownState.RUNNING
    hold = StepHold(EngineLoop(loop, EngineCoreRequestType.WAKEUP), lambda: 0, lambda *load: False, set().update)
    core.scheduler = SimpleNamespace(
        has_unfinished_requests=lambda: False,
        has_finished_requests=lambda: False,
        connector=SimpleNamespace(has_pending_push_work=lambda: hold.asked),
        ec_connector=None,
    )
    core.scheduler.has_requests = lambda: Scheduler.has_requests(core.scheduler)
    thread = threading.Thread(target=core._process_input_queue)
    thread.start()
    hold._loop.wake()  # for nothing: it goes on sleeping
    until(loop.input_queue.empty, "the engine to look")
    assert thread.is_alive()
    hold.ask()
    thread.join()
    assert core.has_work()
    hold.step(computes=False, waiting=False)
    assert not core.has_work()


def test_no_step_is_held_that_other_engines_wait_for() -> None:
    core = Core(requests={})
    core.dp_group = object()  # type: ignore[attr-defined]
    loop = Loop(core)
    hold = made(loop)
    assert not take_step(hold)
    assert not loop.waits
    hold.ask()
    assert take_step(hold, waiting=False), "a lease ended, and nobody computes"
    core.engines_running = True
    assert not take_step(hold, waiting=False), "the others do"
    hold.close()


def test_an_engine_that_ends_is_not_held_for_long() -> None:
    """It aborts what loads between two steps, and the workers are told with the next."""
    core = Core()
    loop = Loop(core)
    hold = made(loop)
    take_step(hold)
    core.is_running = lambda: False
    take_step(hold)
    assert loop.waits == [LONGEST_S, SHORT_S]
    hold.close()
