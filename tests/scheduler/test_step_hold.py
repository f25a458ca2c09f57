"""Steps that are held back while only caches are waited for, and idle engines that are asked for one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput

from tests.support.scheduler.halves import EMPTY_STEP, TOKEN, allocate, hand_over, make_half, make_request, until
from vllm_pd_connector.compat.engine import EngineLoop, calling_loop
from vllm_pd_connector.metadata import WorkerReport
from vllm_pd_connector.protocol.wire.messages import FoundConversation
from vllm_pd_connector.scheduler import step_hold as hold_module
from vllm_pd_connector.scheduler.half import SchedulerHalf
from vllm_pd_connector.scheduler.step_hold import LONGEST_S, SHORT_S, StepHold
from vllm_pd_connector.sidechannel.bell import ENDED, HERE, ring

OTHER = b"o" * 16


class Core:
    """As much of an engine core as a loop looks at."""

    def __init__(self, depth: int = 1, **fields: Any) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.batch_queue_size = depth
        self.step_fn: Callable[[], tuple[None, bool]] = lambda: (None, False)
        connector = SimpleNamespace(has_pending_push_work=lambda: False)
        self.scheduler = SimpleNamespace(running=[], requests={"d-1": None}, connector=connector, ec_connector=None)
        vars(self.scheduler).update(fields)


class Loop(EngineLoop):
    """Notes how long each step would have been held, and takes no time; what `meanwhile` does happens in the wait."""

    def __init__(self, core: Core | None = None) -> None:
        super().__init__(core or Core(), "wake")
        self.waits: list[float] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.meanwhile()


@pytest.fixture
def loop() -> Loop:
    return Loop()


def made(loop: EngineLoop, tokens: tuple[bytes, ...] = (TOKEN,), heard: bool = True) -> StepHold:
    """A hold whose workers have all been heard."""
    hold = StepHold(loop)
    hold.listen(tokens)
    for token in tokens if heard else ():
        hold._rung(HERE + token)
    return hold


@pytest.fixture
def hold(loop: Loop) -> Iterator[StepHold]:
    made_hold = made(loop)
    yield made_hold
    made_hold.close()


WAITING: dict[str, Any] = {"computes": False, "tells": False, "waiting": 1}


def test_a_step_in_which_only_caches_are_waited_for_is_held(hold: StepHold, loop: Loop) -> None:
    assert hold.step(**WAITING)
    assert loop.waits == [LONGEST_S]


@pytest.mark.parametrize("change", [{"computes": True}, {"tells": True}, {"waiting": 0}])
def test_a_step_with_something_to_do_is_not_held(hold: StepHold, loop: Loop, change: dict[str, Any]) -> None:
    hold.step(**WAITING | change)
    assert not loop.waits


def test_no_step_is_held_while_a_request_is_computed() -> None:
    """With overlapping batches vLLM schedules nothing while the results of what it computes are out."""
    loop = Loop(Core(running=["r-1"]))
    hold = made(loop)
    assert not hold.step(**WAITING)
    assert not loop.waits
    hold.close()


def test_no_step_is_held_that_other_engines_wait_for() -> None:
    core = Core()
    core.dp_group = object()  # type: ignore[attr-defined]
    loop = Loop(core)
    hold = made(loop)
    assert not hold.step(**WAITING)
    assert not loop.waits
    hold.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"requests": {"d-1": None, "d-2": None}},
        {"connector": SimpleNamespace(has_pending_push_work=lambda: True)},
        {"ec_connector": object()},
    ],
    ids=["another request", "another connector", "an encoder cache"],
)
def test_what_shows_no_sign_is_looked_at_soon(fields: dict[str, Any]) -> None:
    loop = Loop(Core(**fields))
    hold = made(loop)
    hold.step(**WAITING)
    assert loop.waits == [SHORT_S]
    hold.close()


def test_a_worker_that_was_never_heard_is_asked_soon(loop: Loop) -> None:
    hold = made(loop, (TOKEN, OTHER), heard=False)
    hold._rung(HERE + TOKEN)
    hold.step(**WAITING)
    hold._rung(HERE + OTHER)
    hold.step(**WAITING)
    assert loop.waits == [SHORT_S, LONGEST_S]
    hold.close()


def test_a_stranger_rings_in_vain(loop: Loop) -> None:
    hold = made(loop, heard=False)
    hold._rung(ENDED + OTHER)
    assert not hold.asked
    hold.step(**WAITING)
    assert loop.waits == [SHORT_S]
    hold.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nothing_is_held_until_the_results_of_an_end_were_looked_at(depth: int) -> None:
    """With batches that overlap, vLLM looks at a step's results in a later one."""
    loop = Loop(Core(depth))
    hold = made(loop)
    hold._rung(ENDED + TOKEN)
    for _ in range(depth):
        assert not hold.step(**WAITING), "the workers are ready for what follows"
    assert not loop.waits
    assert hold.step(**WAITING)
    assert loop.waits == [LONGEST_S]
    hold.close()


def test_workers_are_ready_for_the_step_after_an_end(hold: StepHold, loop: Loop) -> None:
    loop.meanwhile = lambda: hold._rung(ENDED + TOKEN)
    assert not hold.step(**WAITING)
    assert loop.waits == [LONGEST_S]


@pytest.mark.parametrize("requests", [0, 1])
def test_workers_stay_calm_where_nobody_waits_for_what_ended(requests: int) -> None:
    """A lease that was read: an idle engine takes a step, and another only if a request wants its blocks."""
    loop = Loop(Core(requests=dict.fromkeys(range(requests))))
    hold = made(loop)
    hold.ask()
    assert hold.step(computes=False, tells=False, waiting=0) is not bool(requests)
    hold.close()


def test_a_worker_that_says_only_that_it_is_there_has_nothing_to_take_up(loop: Loop) -> None:
    hold = made(loop)
    assert not hold.asked
    assert hold.step(**WAITING)
    assert loop.waits == [LONGEST_S]
    hold.close()


@pytest.mark.parametrize(
    ("step", "slept"),
    [(WAITING, 0), (WAITING | {"tells": True}, 0), (WAITING | {"waiting": 0}, 1), (WAITING | {"computes": True}, 1)],
    ids=["waits", "begins to wait", "has something else", "computes"],
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


def test_an_engine_that_is_not_known_steps_as_it_likes() -> None:
    hold = StepHold(None)
    hold.listen([TOKEN])
    hold.ask()
    assert not hold.step(**WAITING)
    assert not hold.asked
    assert hold.bell == ""
    hold.close()


def test_several_ends_wake_the_engine_once(hold: StepHold, loop: Loop) -> None:
    for _ in range(3):
        hold.ask()
    assert loop._queue.qsize() == 1
    assert hold.asked
    hold.step(**WAITING)
    assert not hold.asked


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


def test_a_bell_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold_module, "LONGEST_S", 600.0)
    loop = EngineLoop(Core(), "wake")
    hold = made(loop)
    thread = threading.Thread(target=hold.step, kwargs=WAITING)
    thread.start()
    ring(hold.bell, ENDED + TOKEN)
    thread.join()
    hold.close()


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
    hold = StepHold(EngineLoop(loop, EngineCoreRequestType.WAKEUP))
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
    hold.step(computes=False, tells=False, waiting=0)
    assert not core.has_work()


# The scheduler half


@pytest.fixture
def producer() -> tuple[SchedulerHalf, Any, Loop]:
    half, pool = make_half("kv_producer", kv_lease_duration=600.0)
    half.hold = StepHold(loop := Loop())
    half.producer._ended = half.hold.ask
    half.serve([b"manifest"], [TOKEN])
    return half, pool, loop


def test_an_idle_engine_is_asked_to_give_back_what_was_read(producer: tuple[SchedulerHalf, Any, Loop]) -> None:
    half, pool, loop = producer
    free = pool.get_num_free_blocks()
    hand_over(half)
    assert pool.get_num_free_blocks() < free
    assert not half.hold.asked
    half.producer._server.drop("p-1")
    until(lambda: half.hold.asked, "the engine is asked for a step")
    assert loop._queue.get() == ("wake", None)
    half.build_metadata(EMPTY_STEP)
    stats = half.stats()
    assert pool.get_num_free_blocks() == free
    assert stats is not None
    assert stats.data["gauges"] | {"leases": 0, "free blocks": free} == stats.data["gauges"]


def test_a_turn_that_asks_for_its_conversation_is_waited_for_as_a_receive_is(monkeypatch: pytest.MonkeyPatch) -> None:
    half, _ = make_half("kv_producer", conversations=True)
    loop = Loop()
    half.hold = StepHold(loop)
    half.consumer.turns._wake = half.hold.ask
    half.serve([b"manifest"], [TOKEN])
    half.hold._rung(HERE + TOKEN)
    half.build_metadata(EMPTY_STEP)
    asked: list[Callable[[object], None]] = []
    monkeypatch.setattr(half.consumer.turns._renewer, "find", lambda where, name, heard: asked.append(heard))
    where = {"remote_engine_id": "d", "remote_host": "127.0.0.1", "remote_port": 5, "remote_request_id": "d-1"}
    turn = make_request("p-2", {"do_remote_decode": True, "do_remote_prefill": False, **where})
    half.on_new_request(turn)
    half.build_metadata(EMPTY_STEP)
    assert half.num_matched_tokens(turn, 0) == (None, False)
    half.build_metadata(EMPTY_STEP)
    assert loop.waits == [LONGEST_S] * len(loop.waits) != []
    asked[0](FoundConversation(b""))
    assert half.hold.asked
    assert half.num_matched_tokens(turn, 0) == (0, False)
    half.shutdown()


def test_a_decode_instance_holds_its_steps_from_the_order_to_the_report(
    producer: tuple[SchedulerHalf, Any, Loop],
) -> None:
    half, pool = make_half("kv_consumer")
    loop = Loop()
    half.hold = StepHold(loop)
    half.serve([], [TOKEN])
    half.hold._rung(HERE + TOKEN)
    half.build_metadata(EMPTY_STEP)
    request = make_request("d-1", hand_over(producer[0]))
    half.on_new_request(request)
    half.build_metadata(EMPTY_STEP)
    allocate(half, pool, request)
    ordered = half.build_metadata(EMPTY_STEP)
    assert ordered.receives
    assert ordered.bell == half.hold.bell
    assert ordered.calm
    assert not loop.waits
    waiting = half.build_metadata(EMPTY_STEP)
    assert waiting.calm
    assert loop.waits == [LONGEST_S]
    half.update_output(KVConnectorOutput(kv_connector_worker_meta=WorkerReport(), finished_recving={"d-1"}))
    half.build_metadata(EMPTY_STEP)
    assert loop.waits == [LONGEST_S]
