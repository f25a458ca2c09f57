"""A step is marked when everything that it writes was launched, whichever of vLLM's runners calls, and only then.

The calls are those of the installed vLLM: what its runners do between them (launch a forward, draft) is played here,
and all of runner V2 of vLLM 0.33. Runner V1 computes on the CPU and on GPUs, runner V2 on GPUs; the order in
`sample_tokens` is that of `gpu_model_runner.py` and `gpu/model_runner.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorMetadata
from vllm.model_executor.layers.attention import attention
from vllm.model_executor.layers.attention import kv_transfer_utils as operators
from vllm.v1.worker import kv_connector_model_runner_mixin as v1
from vllm.v1.worker.gpu import kv_connector as v2

from vllm_pd_connector.connector import PDConnector
from vllm_pd_connector.metadata import StepMetadata
from vllm_pd_connector.worker import half as half_module
from vllm_pd_connector.worker.push.step_clock import StepClock
from vllm_pd_connector.worker.push.waves import MAX_WAVES, waves_of

STEP = 7


@dataclass
class Device:
    """What was launched on it, and how much of that it has done."""

    launched: list[str] = field(default_factory=list)
    done: int = 0

    def mark(self) -> Mark:
        return Mark(self, len(self.launched))


@dataclass
class Mark:
    device: Device
    behind: int

    def query(self) -> bool:
        return self.device.done >= self.behind

    def synchronize(self) -> None:
        self.device.done = max(self.device.done, self.behind)


class Loop:
    """The transfer thread, as far as it is told of steps."""

    scratch, life = None, None

    def __init__(self, *_: Any, **__: Any) -> None:
        self.steps: list[tuple[int, Callable[[], bool]]] = []
        self.waves: list[tuple[int, int, Callable[[], bool]]] = []

    def start(self) -> bytes:
        return b""

    def step_launched(self, step: int, is_done: Callable[[], bool], waves: int | None = None) -> None:
        if waves is None:
            self.steps.append((step, is_done))
        else:
            self.waves.append((step, waves, is_done))


class Sibling:
    """A connector beside ours: it takes whatever it is called with."""

    def __getattr__(self, name: str) -> Any:
        found: dict[str, Any] = {
            "get_transfer_results": lambda _: SimpleNamespace(
                finished_sending=set(), finished_recving=set(), failed_recving=set()
            ),
            "get_block_ids_with_load_errors": set,
        }
        return found.get(name, lambda *_, **__: None)


@dataclass
class Worker:
    """Our connector in a worker, and what vLLM's runners are to find there."""

    connector: PDConnector
    group: Any
    device: Device

    @property
    def marks(self) -> list[tuple[int, Callable[[], bool]]]:
        loop: Any = self.connector.worker._loop
        return list(loop.steps)

    @property
    def waves(self) -> list[tuple[int, int, Callable[[], bool]]]:
        loop: Any = self.connector.worker._loop
        return list(loop.waves)

    def output(self, sibling: str, ends_prefill: bool) -> Any:
        metadata: Any = StepMetadata(step=STEP, ends_prefill=ends_prefill)
        if self.group is not self.connector:
            metadata = MultiKVConnectorMetadata((metadata, None))
        sync_loads = sibling == "synchronous"
        return SimpleNamespace(kv_connector_metadata=metadata, has_sync_kv_loads=sync_loads, finished_req_ids=set())


Runner = Callable[[Worker, Any, bool, bool], None]
"""Called with the worker, the step's SchedulerOutput, whether the instance drafts, and whether this rank is the last
pipeline stage."""


def runner_v1(worker: Worker, output: Any, drafts: bool, last: bool) -> None:
    """`GPUModelRunner.execute_model` and `sample_tokens`, which the CPU's runner inherits."""
    mixin = v1.KVConnectorModelRunnerMixin
    with mixin.maybe_get_kv_connector_output(output, defer_finalize=drafts):
        worker.device.launched.append("forward")
    if not last:
        return
    if drafts:
        worker.device.launched.append("drafts")
        mixin.finalize_kv_connector()


def runner_v2(worker: Worker, output: Any, drafts: bool, last: bool) -> None:
    active = _active(worker)
    active.pre_forward(output)
    worker.device.launched.append("forward")
    active.finish_forward()
    if drafts and last:
        worker.device.launched.append("drafts")
    active.post_forward(output.finished_req_ids)


def runner_v2_of_0_33(worker: Worker, output: Any, drafts: bool, last: bool) -> None:
    """The same in vLLM 0.33, which takes the results before it drafts."""
    group = worker.group
    group.bind_connector_metadata(output.kv_connector_metadata)
    if output.has_sync_kv_loads:
        group.start_load_kv(None)
    worker.device.launched.append("forward")
    group.finish_forward()
    if not output.has_sync_kv_loads:
        group.start_load_kv(None)
    if not (drafts and last):
        group.wait_for_save()
    group.get_transfer_results(output.finished_req_ids)
    group.build_connector_worker_meta()
    if drafts and last:
        worker.device.launched.append("drafts")
        group.wait_for_save()
    group.clear_connector_metadata()


def nothing_v1(worker: Worker, output: Any, drafts: bool, last: bool) -> None:
    """A step without a forward."""
    v1.KVConnectorModelRunnerMixin.kv_connector_no_forward(output, None)


def nothing_v2(worker: Worker, output: Any, drafts: bool, last: bool) -> None:
    _active(worker).no_forward(output)


def _active(worker: Worker) -> v2.ActiveKVConnector:
    active = v2.ActiveKVConnector.__new__(v2.ActiveKVConnector)
    active.kv_connector, active.vllm_config = worker.group, None
    active._pending_load_kwargs, active._disabled = None, False
    return active


def make_worker(
    monkeypatch: pytest.MonkeyPatch, *, mode: str, drafts: bool, last: bool, beside: bool, push_when: str = "steps"
) -> Worker:
    device = Device()
    place = SimpleNamespace(pp_rank=1 if last else 0, pp_size=2, number=0, workers=1)
    model = SimpleNamespace(speculative='{"method": "eagle"}' if drafts else "")
    manifest = SimpleNamespace(parallel=place, model=model, segments=(), tensors=())
    monkeypatch.setattr(half_module, "build_manifest", lambda *_, **__: manifest)
    monkeypatch.setattr(half_module, "validate", lambda _: None)
    monkeypatch.setattr(half_module, "marker", lambda _: device.mark)
    monkeypatch.setattr(half_module, "TransferLoop", Loop)
    monkeypatch.setattr(half_module.msgspec.structs, "replace", lambda given, **_: given)
    extra = {"mode": mode, "push_when": push_when}
    transfer = SimpleNamespace(
        kv_connector_extra_config=extra, is_kv_producer=True, is_kv_consumer=False, kv_buffer_device="cpu"
    )
    config: Any = SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(enable_sleep_mode=False, enable_cumem_allocator=False, is_diffusion=False),
        parallel_config=SimpleNamespace(
            data_parallel_index=0,
            use_ubatching=False,
            data_parallel_backend="mp",
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
    )
    connector = PDConnector(config, KVConnectorRole.WORKER, None)
    connector.register_kv_caches({})
    group: Any = connector
    if beside:
        group = MultiConnector.__new__(MultiConnector)
        group._connectors, group._extra_async_saves, group._connector_metadata = [connector, Sibling()], {}, None
    for module in (v1, v2):
        monkeypatch.setattr(module, "get_forward_context", lambda: None)
        monkeypatch.setattr(module, "set_forward_context", lambda *_, **__: contextlib.nullcontext())
        monkeypatch.setattr(module, "get_kv_transfer_group", lambda: group)
        monkeypatch.setattr(module, "has_kv_transfer_group", lambda: True)
    return Worker(connector, group, device)


SIBLINGS = ("alone", "asynchronous", "synchronous")
RUNNERS: list[Runner] = [runner_v1, runner_v2, runner_v2_of_0_33, nothing_v1, nothing_v2]
CASES = [
    pytest.param(
        runner, drafts, last, sibling,
        id="-".join((runner.__name__, *("drafts",) * drafts, "last" if last else "first", sibling)),
    )
    for runner, drafts, last, sibling in product(RUNNERS, (False, True), (False, True), SIBLINGS)
]  # fmt: skip
over_cases = pytest.mark.parametrize(("runner", "drafts", "last", "sibling"), CASES)


@over_cases
def test_a_push_waits_for_everything_that_the_step_writes(
    monkeypatch: pytest.MonkeyPatch, runner: Runner, drafts: bool, last: bool, sibling: str
) -> None:
    worker = make_worker(monkeypatch, mode="push", drafts=drafts, last=last, beside=sibling != "alone")
    runner(worker, worker.output(sibling, ends_prefill=False), drafts, last)
    [(step, is_done)] = worker.marks
    assert step == STEP
    device = worker.device
    while device.done < len(device.launched):
        assert not is_done(), f"done when of {device.launched} the first {device.done} were"
        device.done += 1
    assert is_done()


@pytest.mark.parametrize("ends_prefill", [True, False])
@pytest.mark.parametrize("mode", ["pull", "push"])
@over_cases
def test_a_prefill_with_drafts_is_answered_when_they_are_written(
    monkeypatch: pytest.MonkeyPatch,
    runner: Runner,
    drafts: bool,
    last: bool,
    sibling: str,
    mode: str,
    ends_prefill: bool,
) -> None:
    """Decode may read as soon as it has the answer. Without a drafter the answer itself tells that the step is done."""
    worker = make_worker(monkeypatch, mode=mode, drafts=drafts, last=last, beside=sibling != "alone")
    runner(worker, worker.output(sibling, ends_prefill), drafts, last)
    waited = drafts and last and ends_prefill
    assert worker.device.done == (len(worker.device.launched) if waited else 0)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("push_when", ["steps", "layers"])
def test_a_wave_is_marked_behind_its_last_layer_where_the_operator_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, push_when: str, beside: bool
) -> None:
    """The layers are called as vLLM's attention operators are."""
    names = tuple(f"model.layers.{i}.self_attn.attn" for i in range(20))
    monkeypatch.setattr(half_module, "announced_layers", lambda *_: (names, ""))
    monkeypatch.setattr(half_module, "states_settled", lambda *_: {})
    options = {"mode": "push", "push_when": push_when}
    worker = make_worker(monkeypatch, drafts=False, last=True, beside=beside, **options)

    monkeypatch.setattr(operators, "get_kv_transfer_group", lambda: worker.group)
    monkeypatch.setattr(operators, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(operators, "is_v1_kv_transfer_group", lambda: True)
    monkeypatch.setattr(attention, "get_attention_context", lambda _: (object(), None, None, None))

    @operators.maybe_transfer_kv_layer
    def attend(query: object, layer_name: str) -> None:
        worker.device.launched.append(layer_name)

    with v1.KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(worker.output("asynchronous", False)):
        for name in names:
            attend(None, name)
    if push_when == "steps":
        assert worker.waves == []
        return
    assert [(step, waves) for step, waves, _ in worker.waves] == [(STEP, i + 1) for i in range(MAX_WAVES)]
    ends = [names.index(wave[-1]) + 1 for wave in waves_of(names)]
    for end, (_, _, is_done) in zip(ends, worker.waves, strict=True):
        worker.device.done = end - 1
        assert not is_done()
        worker.device.done = end
        assert is_done()


def test_a_step_that_vllm_never_finished_is_done_with_the_next() -> None:
    """As when a runner raises between its forward and the end of the step."""
    clock = StepClock()
    assert clock.pause(STEP) is None
    clock.launched(STEP + 1, lambda: True)
    assert clock.done() >= STEP


def test_a_step_that_a_device_computes_is_looked_at_by_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing moves before it has ended, and each look takes the interpreter from the thread that launches the next."""
    clock, now = StepClock(), [10.0]
    monkeypatch.setattr("vllm_pd_connector.worker.push.step_clock.time", SimpleNamespace(monotonic=lambda: now[0]))
    clock.launched(STEP, lambda: False)
    for age, least in ((0.02, 0.0003), (0.1, 0.0015), (1.0, 0.002)):
        now[0] = 10.0 + age
        assert least <= (clock.pause(STEP) or 0.0) <= 0.01
