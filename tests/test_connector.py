"""What `PDConnector` refuses of vLLM's own configuration before either half is built."""

from __future__ import annotations

import resource
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.aux_output import AuxOutputConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, UniformTypeKVCacheSpecs

from vllm_pd_connector.compat.base import FOLLOWS_SLEEP
from vllm_pd_connector.compat.model import served
from vllm_pd_connector.connector import PDConnector
from vllm_pd_connector.errors import InvalidConfig


def engine(**model: Any) -> Any:
    transfer = SimpleNamespace(kv_connector_extra_config={}, kv_buffer_device="cpu", is_kv_producer=True)
    return SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(**{"is_diffusion": False, "enable_cumem_allocator": False} | model),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_backend="mp",
            distributed_executor_backend="uni",
        ),
        shutdown_timeout=0,
    )


def test_who_asks_whether_it_can_sleep_hears_yes():
    assert PDConnector.supports_sleep_mode(SimpleNamespace())


@pytest.mark.parametrize("follows", [False, True], ids=["nobody tells", "connectors are told"])
def test_an_engine_whose_caches_go_without_a_word_is_refused(monkeypatch, follows):
    monkeypatch.setattr(served, "FOLLOWS_SLEEP", follows)
    cache: Any = SimpleNamespace()
    asleep = engine(enable_sleep_mode=True)
    for role in () if follows else KVConnectorRole:
        with pytest.raises(InvalidConfig, match="enable_sleep_mode"):
            PDConnector(asleep, role, cache)
    PDConnector(asleep if follows else engine(enable_sleep_mode=False), KVConnectorRole.WORKER, cache).shutdown()


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_caches_in_memory_that_moves_stop_the_engine_by_each_name(monkeypatch, name):
    """vLLM looks at one name of the variable alone; PyTorch takes the first that is set."""
    for each in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "backend:native, expandable_segments: True")
    for role in KVConnectorRole:
        with pytest.raises(InvalidConfig, match=f"{name}: expandable_segments:True"):
            PDConnector(engine(enable_sleep_mode=False), role, SimpleNamespace())
    own_pool = engine(enable_sleep_mode=False, enable_cumem_allocator=True)
    PDConnector(own_pool, KVConnectorRole.WORKER, SimpleNamespace()).shutdown()


@pytest.mark.parametrize(
    ("platform", "buffer", "says"),
    [
        ("cuda", "cpu", "kv_buffer_device is cpu, and the caches are on cuda"),
        ("cpu", "cuda", "kv_buffer_device is cuda, and the caches are on cpu"),
        ("xpu", "cpu", "caches on xpu devices, and PDConnector serves those on cpu and cuda only"),
        ("tpu", "tpu", "caches on tpu devices"),
    ],
)
def test_caches_and_buffers_that_nobody_would_move_stop_the_engine(monkeypatch, platform, buffer, says):
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(device_type=platform))
    made = engine(enable_sleep_mode=False)
    made.kv_transfer_config.kv_buffer_device = buffer
    for role in KVConnectorRole:
        with pytest.raises(InvalidConfig, match=says):
            PDConnector(made, role, SimpleNamespace())


@pytest.mark.parametrize(("pruned", "experts"), [(0.75, False), (None, True)])
def test_what_decode_would_lack_beside_caches_stops_the_engine(pruned, experts):
    """Positions behind a pruned video and the experts of a prompt's tokens are known where it was computed alone."""
    made = engine(enable_sleep_mode=False, uses_mrope=True, multimodal_config=MultiModalConfig(video_pruning_rate=None))
    made.aux_output_config = AuxOutputConfig()
    PDConnector(made, KVConnectorRole.WORKER, SimpleNamespace()).shutdown()
    made.model_config.multimodal_config = MultiModalConfig(video_pruning_rate=pruned)
    made.aux_output_config = AuxOutputConfig(enable_return_routed_experts=experts)
    for role in KVConnectorRole:
        with pytest.raises(InvalidConfig, match="video_pruning_rate is 0.75" if pruned else "return_routed_experts"):
            PDConnector(made, role, SimpleNamespace())


def test_a_model_whose_prefills_go_on_behind_the_prompt_stops_the_engine():
    """DiffusionGemma denoises a canvas of tokens at once, by which its windows move on."""
    for role in KVConnectorRole:
        with pytest.raises(InvalidConfig, match="a diffusion model computes a whole canvas behind its prompt"):
            PDConnector(engine(enable_sleep_mode=False, is_diffusion=True), role, SimpleNamespace())


def test_an_engine_that_outlives_a_failed_step_is_stopped():
    """What such a step was to tell the workers is lost, and no report would ever free the blocks of its receives."""
    made = engine(enable_sleep_mode=False)
    made.parallel_config.enable_fault_tolerance = True
    for role in KVConnectorRole:
        with pytest.raises(InvalidConfig, match="enable_fault_tolerance: an engine that goes on"):
            PDConnector(made, role, SimpleNamespace())


@pytest.mark.parametrize(("value", "stops"), [("1", True), ("0", False), ("00", False)])
def test_an_engine_that_makes_no_ids_of_its_own_is_stopped(value, stops, monkeypatch):
    """The two legs of a request, and the prompts of a batch, are known by what it puts behind them."""
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", value)
    made = engine(enable_sleep_mode=False)
    if not stops:
        PDConnector(made, KVConnectorRole.WORKER, SimpleNamespace()).shutdown()
        return
    for role in KVConnectorRole:
        with pytest.raises(InvalidConfig, match="VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is '1': requests of one id"):
            PDConnector(made, role, SimpleNamespace())


@pytest.mark.parametrize("alike", [True, False])
def test_conversations_of_a_model_that_looks_at_whole_prompts_stop_the_engine(alike):
    """HRM-Text: what a turn left was computed with no look at what the next prompt says."""
    causal = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32)
    whole = replace(causal, non_causal=True)
    several = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": causal, "b": whole})
    made = engine(enable_sleep_mode=False)
    for spec, conversations, refused in (
        (whole if alike else several, True, True),
        (whole if alike else several, False, False),
        (causal, True, False),
    ):
        made.kv_transfer_config.kv_connector_extra_config = {"conversations": conversations}
        cache = KVCacheConfig(num_blocks=2, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a", "b"], spec)])
        if not refused:
            PDConnector(made, KVConnectorRole.WORKER, cache).shutdown()
            continue
        for role in KVConnectorRole:
            with pytest.raises(InvalidConfig, match=r"conversations: layer [ab] looks at all of a prompt"):
                PDConnector(made, role, cache)


def test_the_release_that_tells_is_known_by_what_it_calls():
    assert hasattr(KVConnectorBase_V1, "restore_kv_caches") == FOLLOWS_SLEEP


def test_it_has_as_many_files_as_the_hard_limit_allows_whoever_started_the_process():
    """Ray's workers, and `vllm serve --headless`, have what shells allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        PDConnector(engine(enable_sleep_mode=False), KVConnectorRole.WORKER, SimpleNamespace()).shutdown()
        most = 65_535 if hard == resource.RLIM_INFINITY else min(hard, 65_535)  # as `vllm serve` allows itself
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("release", "said"), [("0.33", False), ("0.34", True), ("0.33.1.dev2+g1234567", True)])
def test_a_vllm_that_was_not_read_is_in_the_log(monkeypatch, caplog, release, said):
    monkeypatch.setattr("vllm_pd_connector.connector.SchedulerHalf", lambda *made: None)
    monkeypatch.setattr("vllm_pd_connector.connector.facts.vllm_release", lambda: release)
    made = engine(enable_sleep_mode=False)
    vars(made.kv_transfer_config).update(kv_connector_extra_config={}, kv_role="kv_producer", engine_id="p-0")
    PDConnector(made, KVConnectorRole.SCHEDULER, SimpleNamespace())
    assert (f"vLLM {release}: vllm_pd_connector was written by vLLM 0.32 and 0.33" in caplog.text) is said


@pytest.mark.parametrize(
    ("extra", "says"), [({}, 0), ({"allow_unauthenticated_peers": True, "bootstrap_port": 8998}, 2)]
)
def test_what_will_not_be_as_it_may_be_meant_is_in_the_log(monkeypatch, caplog, extra, says):
    """An instance starts with it, and others do not find it."""
    monkeypatch.setattr("vllm_pd_connector.connector.SchedulerHalf", lambda *made: None)
    made = engine(enable_sleep_mode=False)
    vars(made.kv_transfer_config).update(kv_connector_extra_config=extra, kv_role="kv_producer", engine_id="p-0")
    PDConnector(made, KVConnectorRole.SCHEDULER, SimpleNamespace())
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("vllm_pd_connector")]
    starts = ["side_channel_host: other instances are told 127.0.0.1", "bootstrap_port: nobody will answer at 8998"]
    noted = [text for text in ours if text.startswith(tuple(starts))]
    assert [text[: len(start)] for text, start in zip(noted, starts, strict=False)] == starts[:says]
    assert len(noted) == says


@pytest.mark.parametrize(
    ("extra", "vllm_s", "backend", "workers_s", "says"),
    [
        ({}, 0, "mp", None, []),
        ({"shutdown_timeout": 0}, 0, "mp", None, []),
        ({"shutdown_timeout": 35}, 0, "uni", None, ["vLLM's --shutdown-timeout 0"]),
        ({"shutdown_timeout": 35}, 30, "uni", None, ["vLLM's --shutdown-timeout 30"]),
        ({"shutdown_timeout": 35}, 125, "uni", None, []),
        ({"shutdown_timeout": 35}, 125, "mp", None, ["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS 5"]),
        ({"shutdown_timeout": 35}, 125, "mp", "30", ["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS 30"]),
        ({"shutdown_timeout": 35}, 125, "mp", "40", []),
    ],
)
def test_time_for_readers_that_vllm_does_not_give_is_in_the_log(
    monkeypatch, caplog, extra, vllm_s, backend, workers_s, says
):
    """vLLM ends an engine by its own times: a longer one of ours alone has no effect."""
    monkeypatch.delenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", raising=False)
    if workers_s is not None:
        monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", workers_s)
    monkeypatch.setattr("vllm_pd_connector.connector.SchedulerHalf", lambda *made: None)
    made = engine(enable_sleep_mode=False)
    vars(made.kv_transfer_config).update(kv_connector_extra_config=extra, kv_role="kv_producer", engine_id="p-0")
    made.shutdown_timeout, made.parallel_config.distributed_executor_backend = vllm_s, backend
    PDConnector(made, KVConnectorRole.SCHEDULER, SimpleNamespace())
    noted = [text for text in caplog.messages if text.startswith("shutdown_timeout is 35, and ")]
    assert [said in text for said, text in zip(says, noted, strict=True)] == [True] * len(says)
