"""What the worker half tells its transport, and that sleep and waking may fail and be asked for again."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.kv_cache_interface import KVQuantMode

from tests.support.geometry.world import instance
from tests.support.worker.decode_instance import D_SIDE, Prefill, set_faults, under_way, until, until_in
from tests.support.worker.prefill_instance import MODEL, P_SIDE, real
from tests.support.worker.writer import Target, Writer, hold_writes
from vllm_pd_connector.config import parse_config
from vllm_pd_connector.errors import PDConnectorError, TransferError
from vllm_pd_connector.metadata import BadParameters, ReceiveRequest, StepMetadata
from vllm_pd_connector.protocol.wire.messages import ChecksumJob
from vllm_pd_connector.sidechannel.bell import ENDED, HERE, LONGEST, RECEIVED, Bell
from vllm_pd_connector.transport import registry
from vllm_pd_connector.transport.base import Use
from vllm_pd_connector.transport.loopback import LoopbackTransport
from vllm_pd_connector.worker import checksum_server, transfer_loop
from vllm_pd_connector.worker import half as half_module
from vllm_pd_connector.worker.half import WorkerHalf
from vllm_pd_connector.worker.push.waves import WaveCount


@pytest.mark.parametrize(
    ("mode", "role", "serves", "posts"),
    [
        ("pull", "kv_producer", True, False),
        ("pull", "kv_consumer", False, True),
        ("pull", "kv_both", True, True),
        ("push", "kv_producer", True, True),
        ("push", "kv_consumer", True, False),
        ("auto", "kv_consumer", True, True),
    ],
)
def test_the_transport_is_told_whether_others_move_its_memory_and_whether_it_moves_theirs(
    monkeypatch: pytest.MonkeyPatch, mode: str, role: str, serves: bool, posts: bool
) -> None:
    told: list[Use] = []
    monkeypatch.setattr(registry, "create", lambda name, options, use: told.append(use))
    roles = SimpleNamespace(is_kv_producer=role != "kv_consumer", is_kv_consumer=role != "kv_producer")
    half = WorkerHalf(parse_config({"mode": mode}), SimpleNamespace(kv_transfer_config=roles), None)
    half._make_transport(SimpleNamespace(segments=[SimpleNamespace(device="cpu", device_id=0)]))
    assert [(use.serves, use.posts, use.memory) for use in told] == [(serves, posts, "cpu")]


@pytest.mark.parametrize(("devices", "memory"), [(("cpu", "cpu"), ("cpu", 0)), (("cpu", "cuda"), ("cuda", 1))])
@pytest.mark.parametrize(("role", "settings"), [("kv_producer", {"route_to": "127.0.0.1"}), ("kv_consumer", {})])
def test_the_transport_is_told_where_the_caches_are_and_where_the_instance_is(
    monkeypatch: pytest.MonkeyPatch,
    devices: tuple[str, ...],
    memory: tuple[str, int],
    role: str,
    settings: dict[str, str],
) -> None:
    told: list[Any] = []
    monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_HOST", raising=False)
    monkeypatch.setattr(half_module, "make_device_current", lambda segments: None)
    monkeypatch.setattr(registry, "create", lambda name, options, use: told.append((options, use)))
    roles = SimpleNamespace(is_kv_producer=role != "kv_consumer", is_kv_consumer=role != "kv_producer")
    half = WorkerHalf(parse_config({"transport": "mooncake"}), SimpleNamespace(kv_transfer_config=roles), None)
    segments = [SimpleNamespace(device=device, device_id=number) for number, device in enumerate(devices)]
    half._make_transport(SimpleNamespace(segments=segments))
    [(options, use)] = told
    assert options == settings and (use.memory, use.device_id) == memory


@pytest.mark.parametrize("microbatches", [False, True])
def test_the_thread_that_only_waits_for_microbatches_is_not_taken_for_the_one_that_launches(
    monkeypatch: pytest.MonkeyPatch, microbatches: bool
) -> None:
    [worker] = instance(MODEL, P_SIDE, "d-0")[:1]
    monkeypatch.setattr(half_module, "build_manifest", lambda *_, **__: real(worker))
    roles = SimpleNamespace(is_kv_producer=False, is_kv_consumer=True)
    engines = SimpleNamespace(data_parallel_index=0, use_ubatching=microbatches)
    vllm_config = SimpleNamespace(kv_transfer_config=roles, parallel_config=engines)
    half = WorkerHalf(parse_config({"transport": "loopback"}), vllm_config, None)
    half.register({})
    half.start_step(StepMetadata(step=1, aborts=["a"]))
    assert half._loop is not None
    seen = half._loop._forwards._ident
    half.shutdown()
    assert seen == (None if microbatches else threading.get_ident())


@pytest.mark.libraries
def test_a_worker_tells_what_its_transport_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    [worker] = instance(MODEL, P_SIDE, "d-0")[:1]
    monkeypatch.setattr(half_module, "build_manifest", lambda *_, **__: real(worker))
    options = {"protocol": "tcp", "address": "127.0.0.1"}
    config = parse_config({"transport": "mooncake", "transport_options": options})
    roles = SimpleNamespace(is_kv_producer=False, is_kv_consumer=True)
    engines = SimpleNamespace(data_parallel_index=0, use_ubatching=False)
    half = WorkerHalf(config, SimpleNamespace(kv_transfer_config=roles, parallel_config=engines), None)
    half.register({})
    stats = half.take_stats()
    half.shutdown()
    assert stats is not None and stats.data["protocols"] == {"tcp": "mooncake"}


def test_a_worker_says_that_it_hears_and_rings_at_every_end() -> None:
    heard: queue.Queue[bytes] = queue.Queue()
    bell = Bell(heard.put)
    half = WorkerHalf(parse_config({}), SimpleNamespace(), None)
    half._outbox.drained("before")  # nobody is told yet
    half._loop = SimpleNamespace(submit=lambda receives, aborts: None)
    for _ in range(2):
        half.start_step(StepMetadata(receives=[object()], bell=bell.address))
    assert heard.get() == HERE + half.token
    half._outbox.finished("d-1", ok=True, quarantined=False, attempt=b"a" * 16)
    assert heard.get() == RECEIVED + half.token + b"a" * 16 + b"d-1"
    half._outbox.finished("d" * LONGEST, ok=True, quarantined=False)
    assert heard.get() == ENDED + half.token, "its name is too long"
    for more in ({"ok": False}, {"ok": True, "quarantined": True}, {"ok": True, "unshareable": {0: 1}}):
        half._outbox.finished("d-1", **{"quarantined": False} | more)
        assert heard.get() == ENDED + half.token, "a report says more of it"
    half._outbox.drained("d-2")
    assert heard.get() == ENDED + half.token
    bell.close()
    assert heard.empty()


# -- sleep ------------------------------------------------------------------------------------------------------------


def take_step(half: WorkerHalf, metadata: StepMetadata) -> None:
    """As vLLM does, also for a step without a forward."""
    half.start_step(metadata)
    half.step_launched()


def test_steps_while_asleep_move_nothing_and_end_nothing(half: WorkerHalf) -> None:
    """A client that gives up while its request waits in the queue makes vLLM take one."""
    take_step(half, StepMetadata(step=1))
    half.unregister()
    receives = [
        ReceiveRequest(name, BadParameters("asleep"), (), 0, 1, spare=name == "spare") for name in ("needed", "spare")
    ]
    take_step(half, StepMetadata(step=2, receives=receives, aborts=["another"]))
    results, report = half.transfer_results(), half.take_report()
    assert (results.finished_recving, results.failed_recving) == ({"needed", "spare"}, {"needed"})
    assert report is not None and report.spared == {"spare"}
    half.restore()
    take_step(half, StepMetadata(step=3))
    assert half._loop is not None and half._loop._push is not None
    assert half._loop._push.clock.done() == 3


def test_layers_of_steps_while_asleep_are_nobody_s(half: WorkerHalf) -> None:
    half._count = WaveCount([("a",), ("b",)])
    half.layer_launched(1, "a")
    half.unregister()
    half.layer_launched(2, "a")
    half.restore()
    assert half._loop is not None and half._loop._push is not None
    assert half._loop._push.clock.ahead() < (2, 0)


def test_sleeping_leaves_no_descriptor_behind(half: WorkerHalf) -> None:
    def cycle() -> int:
        half.unregister()
        half.restore()
        return len(os.listdir("/proc/self/fd"))

    cycle()
    found = cycle()
    until(lambda: cycle() <= found, "as many as before")


def test_a_waking_that_failed_can_be_asked_for_again(half: WorkerHalf, monkeypatch: pytest.MonkeyPatch) -> None:
    half.unregister()
    closed: list[LoopbackTransport] = []

    class Refuses(LoopbackTransport):
        def register(self, segments: Any) -> None:
            raise TransferError("no memory can be pinned")

        def close(self) -> None:
            closed.append(self)
            super().close()

    threads = {thread.name for thread in threading.enumerate()}
    with monkeypatch.context() as patch:
        patch.setattr(registry, "create", lambda *_: Refuses())
        for attempt in range(2):
            with pytest.raises(TransferError, match="no memory can be pinned"):
                half.restore()
            assert len(closed) == attempt + 1, "what it holds is given back"
            assert {thread.name for thread in threading.enumerate()} <= threads
    half.restore()
    assert half._loop is not None and half._loop.runs


def test_a_waking_that_failed_after_its_thread_began_can_be_asked_for_again(
    half: WorkerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    half.unregister()
    with monkeypatch.context() as patch:
        patch.setattr(half_module, "ChecksumServer", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            half.restore()
    assert not [thread for thread in threading.enumerate() if thread.name == "pd-transfer"]
    half.restore()
    assert half._loop is not None and half._loop.runs


class Stuck:
    """Work in one of a worker's threads that does not end."""

    def __init__(self) -> None:
        self.begun, self.ends = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> Any:
        self.begun.set()
        assert self.ends.wait(60)
        return []


def in_transfers(half: WorkerHalf, stuck: Stuck, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transfer_loop, "SHUTDOWN_S", 0.05)
    assert half._loop is not None
    patch.setattr(half._loop, "_turn", stuck)
    half._loop.submit([], [])


def in_sums(half: WorkerHalf, stuck: Stuck, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checksum_server, "_CLOSE_S", 0.05)
    patch.setattr(checksum_server, "checksums", stuck)
    assert half._checksums is not None
    patch.setattr(half._checksums, "_ask", lambda *_: ChecksumJob(1, (), (), 1))
    half._checksums._wake.set()


@pytest.mark.parametrize(("where", "thread"), [(in_transfers, "pd-transfer"), (in_sums, "pd-sums")])
def test_the_memory_does_not_go_while_a_thread_may_touch_it(
    half: WorkerHalf,
    monkeypatch: pytest.MonkeyPatch,
    where: Callable[[WorkerHalf, Stuck, pytest.MonkeyPatch], None],
    thread: str,
) -> None:
    """Nor is it registered again beside that thread. When that has ended, sleep and waking can be asked for again."""
    stuck = Stuck()
    with monkeypatch.context() as patch:
        where(half, stuck, patch)
        assert stuck.begun.wait(60)
        for call in (half.unregister, half.unregister, half.restore):
            with pytest.raises(PDConnectorError, match=f"{thread} .* restart the instance"):
                call()
        take_step(half, StepMetadata(step=2, receives=[ReceiveRequest("late", BadParameters("asleep"), (), 0, 1)]))
        assert half.transfer_results().failed_recving == {"late"}, "nobody would take it"
        stuck.ends.set()
    half.restore()
    assert half._loop is not None and half._loop.runs


def test_blocks_of_reads_that_sleep_ends_come_back_with_the_waking(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/release_kv_cache_memory` waits for none that was given up."""
    [worker] = instance(MODEL, D_SIDE, "d-0")
    monkeypatch.setattr(half_module, "build_manifest", lambda *_, **__: real(worker))
    roles = SimpleNamespace(is_kv_producer=False, is_kv_consumer=True)
    engines = SimpleNamespace(data_parallel_index=0, use_ubatching=False)
    config = parse_config({"transport": "loopback", "staging_bytes": 0})
    half = WorkerHalf(config, SimpleNamespace(kv_transfer_config=roles, parallel_config=engines), None)
    half.register({})
    set_faults(prefill.transports, frozen=True)
    take_step(half, StepMetadata(step=1, receives=[prefill.request("reads"), prefill.request("given up")]))
    loop = half._loop
    assert loop is not None
    active = loop._receives._active
    until_in(loop, lambda: len(active) == 2 and all(map(under_way, active.values())), "reads")
    take_step(half, StepMetadata(step=2, aborts=["given up"]))
    until_in(loop, lambda: active["given up"].reported, "its report")
    half.unregister()
    half.restore()
    take_step(half, StepMetadata(step=3))
    both = {"reads", "given up"}
    assert half.transfer_results().failed_recving == both
    report = half.take_report()
    half.shutdown()
    assert report is not None and report.quarantined == report.drained == dict.fromkeys(both, 1)


def test_blocks_that_a_prefill_instance_may_still_write_stay_in_quarantine(writer: Writer, target: Target) -> None:
    hold_writes(writer, target)
    target.loop.close()
    assert target.wait_for("d") == [False]
    assert target.quarantined == {"d"} and not target.drained


# -- caches that are written before the first forward ------------------------------------------------------------------


def test_a_first_forward_leaves_the_scales_in_pages_that_were_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's attention sets all scales of a layer to 1 when it first sees the layer's cache; with --enforce-eager
    that is the first step that serves, and a decode instance has received caches by then."""
    [worker] = instance(MODEL, P_SIDE, "d-0")[:1]
    monkeypatch.setattr(half_module, "build_manifest", lambda *_, **__: real(worker))
    backend: Any = object.__new__(TritonAttentionImpl)
    backend._kv_quant_mode, backend._is_per_token_head_quant = KVQuantMode.INT8_PER_TOKEN_HEAD, True
    layers = {"layers.0": SimpleNamespace(impl=backend), "layers.1": SimpleNamespace(impl=object())}
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(is_kv_producer=False, is_kv_consumer=True),
        parallel_config=SimpleNamespace(data_parallel_index=0, use_ubatching=False),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    cache = torch.zeros((4, 2, 16, 2 * (64 + 4)), dtype=torch.int8)
    half = WorkerHalf(parse_config({"transport": "loopback"}), config, None)
    half.register({"layers.0": cache, "layers.1": cache.clone(), "no module of its own": cache.clone()})
    half.shutdown()
    received = cache.random_(1, 100).clone()
    backend._pth_key_value_caches(cache)  # how it begins to write, and to attend
    assert torch.equal(cache, received)
