"""A configuration that cannot work is refused when vLLM has read it, and in the process that read it alone."""

from __future__ import annotations

import argparse
import contextlib
import gc
import pickle
import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.libraries

from vllm.config import CacheConfig, ECTransferConfig, KVTransferConfig, MultiModalConfig, ParallelConfig, VllmConfig  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

from vllm_pd_connector.compat.early import RefusedStart, _engines, take_ray_s_address  # noqa: E402
from vllm_pd_connector.config import Config  # noqa: E402
from vllm_pd_connector.errors import InvalidConfig  # noqa: E402
from vllm_pd_connector.plugin import register  # noqa: E402


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (KVTransferConfig, VllmConfig):
        own = getattr(kind.__post_init__, "__wrapped__", kind.__post_init__)
        monkeypatch.setattr(kind, "__post_init__", own)
    register()


def transfer(**extra: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector="PDConnector", kv_role="kv_producer", kv_connector_extra_config=extra)


def test_a_program_that_builds_an_engine_is_told() -> None:
    with pytest.raises(InvalidConfig, match="mode is 'pulll': it must be one of pull, push, auto"):
        transfer(mode="pulll")


def test_a_command_line_fails_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve", usage="vllm serve"))
    text = '{"kv_connector": "PDConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"mod": "push"}}'
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["--kv-transfer-config", text])
    assert end.value.code == 2
    usage, line = capsys.readouterr().err.splitlines()
    assert usage == "usage: vllm serve" and "--kv-transfer-config: PDConnector cannot start: " in line
    assert "'mod' is not a key; did you mean mode?" in line


def test_a_taken_port_is_seen_before_an_engine_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = transfer(side_channel_port=port)
        with pytest.raises(RefusedStart, match=f"cannot listen on host '127.0.0.1' port {port}") as end:
            VllmConfig(kv_transfer_config=config)
        assert isinstance(end.value, SystemExit) and isinstance(end.value, argparse.ArgumentTypeError)
        assert end.value.code == str(end.value), "all that is printed where nobody catches it"
        VllmConfig(kv_transfer_config=config)  # asked once: a later one may be made beside the engine that listens


@pytest.mark.parametrize("ours", [True, False])
def test_what_cannot_be_served_is_told_before_an_engine_starts(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker would say it when its weights are there."""
    monkeypatch.setattr(VllmConfig, "__post_init__", lambda made: None)
    monkeypatch.setattr(KVTransferConfig, "__post_init__", KVTransferConfig.__post_init__.__wrapped__)
    register()
    name = "PDConnector" if ours else "NixlConnector"
    for said, words in [
        ({"kv_buffer_device": "cuda"}, "kv_buffer_device is cuda, and the caches are on cpu"),
        ({"kv_connector_extra_config": {"verify": "all"}}, "2 decode-context parallel ranks hold the tokens in turns"),
    ]:
        config = KVTransferConfig(kv_connector=name, kv_role="kv_both", **said)
        parallel = SimpleNamespace(
            decode_context_parallel_size=2, data_parallel_index=0, data_parallel_size_local=0,
            data_parallel_backend="mp", node_rank_within_dp=0, enable_fault_tolerance=False,
            distributed_executor_backend="mp",
        )  # fmt: skip
        facts = {"enable_sleep_mode": False, "is_diffusion": False, "multimodal_config": None}
        made: Any = SimpleNamespace(
            kv_transfer_config=config, parallel_config=parallel, model_config=SimpleNamespace(**facts),
            ec_transfer_config=None, aux_output_config=None,
        )  # fmt: skip
        with pytest.raises(RefusedStart, match=words) if ours else contextlib.nullcontext():
            VllmConfig.__post_init__(made)
    made.kv_transfer_config = beside = several({"kv_role": "kv_both"})
    beside.kv_buffer_device = "cuda"  # which no connector of several is given
    VllmConfig.__post_init__(made)
    made.kv_transfer_config = several({"kv_role": "kv_both"}) if ours else KVTransferConfig()
    made.model_config.is_diffusion = True
    with pytest.raises(RefusedStart, match="a diffusion model") if ours else contextlib.nullcontext():
        VllmConfig.__post_init__(made)


def test_a_name_that_messages_cannot_hold_is_refused() -> None:
    with pytest.raises(RefusedStart, match="engine_id has 501 characters: it must be a string of 1 to 500"):
        KVTransferConfig(kv_connector="PDConnector", kv_role="kv_both", engine_id="x" * 501)
    with pytest.raises(RefusedStart, match=r"engine_id is '\$\(POD_NAME\)': nothing was put in the place"):
        KVTransferConfig(kv_connector="PDConnector", kv_role="kv_both", engine_id="$(POD_NAME)")
    for named in ("x" * 500, f"{'x' * 500}_dp17"):  # as vLLM names the engines of data parallelism
        KVTransferConfig(kv_connector="PDConnector", kv_role="kv_both", engine_id=named)
    KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both", engine_id="x" * 501)


def test_a_process_that_was_given_its_configuration_asks_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = pickle.loads(pickle.dumps(transfer(side_channel_port=taken.getsockname()[1])))
        VllmConfig(kv_transfer_config=config)


def test_it_is_the_ports_of_the_engines_that_are_started() -> None:
    assert _engines(ParallelConfig()) == range(1)
    assert _engines(ParallelConfig(data_parallel_size=4, data_parallel_size_local=2, data_parallel_rank=2)) == range(
        2, 4
    )


def test_a_node_that_runs_workers_alone_has_no_ports() -> None:
    assert _engines(ParallelConfig(tensor_parallel_size=2, nnodes=2, node_rank=0)) == range(1)
    assert _engines(ParallelConfig(tensor_parallel_size=2, nnodes=2, node_rank=1)) == range(0)


def several(child: dict[str, Any]) -> KVTransferConfig:
    extra = {"connectors": [{"kv_connector": "PDConnector", **child}]}
    return KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra)


def test_one_beside_other_connectors_is_checked_in_its_own_role() -> None:
    elsewhere = {"side_channel_host": "203.0.113.9"}
    VllmConfig(kv_transfer_config=several({"kv_role": "kv_consumer", "kv_connector_extra_config": elsewhere}))
    with pytest.raises(RefusedStart, match="side_channel_keys is not set"):
        several({"kv_role": "kv_producer", "kv_connector_extra_config": elsewhere})


def test_a_taken_port_is_seen_beside_other_connectors() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        extra = {"side_channel_port": taken.getsockname()[1]}
        config = several({"kv_role": "kv_producer", "kv_connector_extra_config": extra})
        several({"kv_role": "kv_producer"})  # vLLM makes more of them while it looks at this one
        with pytest.raises(RefusedStart, match=f"cannot listen on host '127.0.0.1' port {extra['side_channel_port']}"):
            VllmConfig(kv_transfer_config=config)


@pytest.mark.parametrize("multi", [False, True])
def test_offloading_that_takes_the_connectors_place_is_refused(multi: bool) -> None:
    """vLLM would start without this connector: it has one of its own for `--kv-offloading-size`."""
    config = several({"kv_role": "kv_consumer"}) if multi else transfer()
    place = "MultiConnector" if multi else "PDConnector"
    with pytest.raises(RefusedStart, match=rf"puts OffloadingConnector in the place of {place}, .* behind PDConnector"):
        VllmConfig(kv_transfer_config=config, cache_config=CacheConfig(kv_offloading_size=1.0))


def test_offloading_without_the_connector_is_left_alone() -> None:
    others = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    for config in (others, None):
        made = VllmConfig(kv_transfer_config=config, cache_config=CacheConfig(kv_offloading_size=1.0))
        assert made.kv_transfer_config.kv_connector == "OffloadingConnector"


def test_a_configuration_without_a_connector_is_made_after_one_with_it_is_gone() -> None:
    transfer()  # and nobody keeps it
    gc.collect()
    VllmConfig()


@pytest.mark.parametrize(
    ("connector", "ec_role", "may"),
    [("PDConnector", None, False), ("PDConnector", "ec_consumer", True), ("NixlConnector", None, True)],
)
def test_embeddings_of_media_may_be_left_out_only_where_something_brings_them(
    monkeypatch: pytest.MonkeyPatch, connector: str, ec_role: Any, may: bool
) -> None:
    """vLLM allows it to every consumer of caches; decode that computes such a prompt ends. What vLLM makes of a model's
    configuration is put right also in a process that was given the rest of it."""
    encoded = ECTransferConfig(ec_connector="ECExampleConnector", ec_role=ec_role) if ec_role else None
    received = pickle.loads(pickle.dumps(KVTransferConfig(kv_connector=connector, kv_role="kv_consumer")))
    media = MultiModalConfig()
    made: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=media), ec_transfer_config=encoded, kv_transfer_config=received
    )
    monkeypatch.setattr(KVTransferConfig, "__post_init__", KVTransferConfig.__post_init__.__wrapped__)
    monkeypatch.setattr(VllmConfig, "__post_init__", VllmConfig._resolve_mm_embedding_inputs)
    register()
    VllmConfig.__post_init__(made)
    assert media.allow_missing_mm_embeddings is may


@pytest.mark.parametrize("multi", [False, True])
@pytest.mark.parametrize(
    ("executor", "data_parallel", "told"), [("ray", "mp", True), ("mp", "mp", False), ("ray", "ray", False)]
)
def test_ray_s_workers_are_told_where_their_instance_listens(
    monkeypatch: pytest.MonkeyPatch, executor: str, data_parallel: str, told: bool, multi: bool
) -> None:
    """They get the environment without the variable that says it."""
    from vllm.v1.executor.ray_utils import WORKER_SPECIFIC_ENV_VARS

    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in WORKER_SPECIFIC_ENV_VARS
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.7")
    given: dict[str, Any] = {"kv_connector": "PDConnector", "kv_role": "kv_consumer"}
    own = {
        "kv_connector": "PDConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"side_channel_host": "::1"},
    }
    parsed = KVTransferConfig(**given)
    if multi:
        parsed = KVTransferConfig(
            kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": [given, own]}
        )
    parallel = SimpleNamespace(
        distributed_executor_backend=executor, data_parallel_backend=data_parallel, data_parallel_index=0,
        data_parallel_size_local=0, node_rank_within_dp=0,
    )  # fmt: skip
    monkeypatch.setattr(VllmConfig, "__post_init__", lambda made: None)
    register()
    monkeypatch.setattr(KVTransferConfig, "__post_init__", KVTransferConfig.__post_init__.__wrapped__)
    register()
    made: Any = SimpleNamespace(
        kv_transfer_config=parsed, parallel_config=parallel, model_config=None, ec_transfer_config=None
    )
    VllmConfig.__post_init__(made)
    extra = parsed.kv_connector_extra_config
    extras = [one["kv_connector_extra_config"] for one in extra["connectors"]] if multi else [extra]
    assert [one.get("side_channel_host") for one in extras] == (["10.0.0.7" if told else None, "::1"][: len(extras)])


@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_workers_of_an_engine_that_ray_places_take_its_address_for_the_side_channel(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's executor withholds the variable from them, in which vLLM's engine has it."""
    node = SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7"))
    monkeypatch.setitem(sys.modules, "ray", node)
    made: Any = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_backend=backend))
    none: dict[str, str] = {}
    own = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.9.0.1"}
    for environ in (none, own):
        take_ray_s_address(made, environ)
    assert Config().side_channel(0, none)[0] == ("10.0.0.7" if backend == "ray" else "127.0.0.1")
    assert own == {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.9.0.1"}


def test_a_key_that_is_no_text_is_refused_as_one() -> None:
    with pytest.raises(RefusedStart, match="'5' is not a key"):
        several({"kv_role": "kv_producer", "kv_connector_extra_config": {5: "pull"}})


def test_other_connectors_are_left_alone() -> None:
    KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both", kv_connector_extra_config={"backends": ["UCX"]})
    KVTransferConfig()
    KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": 5})
