"""What the worker half tells its transport."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.geometry.world import instance
from tests.support.worker.prefill_instance import MODEL, P_SIDE, real
from vllm_pd_connector.config import parse_config
from vllm_pd_connector.metadata import StepMetadata
from vllm_pd_connector.sidechannel.bell import Bell
from vllm_pd_connector.transport import registry
from vllm_pd_connector.transport.base import Use
from vllm_pd_connector.worker import half as half_module
from vllm_pd_connector.worker.half import WorkerHalf


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


@pytest.mark.libraries
def test_a_worker_tells_what_its_transport_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    [worker] = instance(MODEL, P_SIDE, "d-0")[:1]
    monkeypatch.setattr(half_module, "build_manifest", lambda *_, **__: real(worker))
    options = {"protocol": "tcp", "address": "127.0.0.1"}
    config = parse_config({"transport": "mooncake", "transport_options": options, "huge_pages": False})
    roles = SimpleNamespace(is_kv_producer=False, is_kv_consumer=True)
    engines = SimpleNamespace(data_parallel_index=0)
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
    assert heard.get() == half.token
    half._outbox.finished("d-1", ok=True, quarantined=False)
    assert heard.get() == half.token
    half._outbox.drained("d-2")
    assert heard.get() == half.token
    bell.close()
    assert heard.empty()
