"""The backend for Ray Serve LLM, against Ray's own classes: what replicas are given, and what both legs carry.

`tests/e2e/pairs/test_ray_serve.py` runs the application.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import ray
from fastapi import HTTPException
from ray import serve
from ray.llm._internal.serve.core.configs.llm_config import LLMConfig
from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionRequest, CompletionRequest
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.context import ReplicaContext
from ray.serve.schema import ReplicaRank

from tests.support.handed_over import handed_over
from vllm_pd_connector.config import parse_config
from vllm_pd_connector.errors import InvalidConfig
from vllm_pd_connector.integrations.ray import PDConnectorBackend, build_pd_openai_app, register
from vllm_pd_connector.protocol.params.parse import (
    pairing_name,
    parse_remote_decode,
    parse_remote_prefill,
    parse_remote_push,
)

pytestmark = pytest.mark.ray

NODE = "10.0.0.7"
Replica = Callable[..., PDConnectorBackend]


def config(role: str, extra: dict[str, Any], **engine: Any) -> LLMConfig:
    transfer = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": copy.deepcopy(extra)}
    return LLMConfig(
        model_loading_config={"model_id": "m"},
        accelerator_config={"kind": "cpu"},
        engine_kwargs={"kv_transfer_config": transfer, **engine},
    )


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Replica:
    """A backend as it is in the replica of a rank, set up."""
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: NODE)
    for name in ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"):
        monkeypatch.delenv(name, raising=False)

    def made(role: str = "kv_producer", rank: int = 0, name: str = "r0", **rest: Any) -> PDConnectorBackend:
        context = ReplicaContext(
            replica_id=ReplicaID(unique_id=name, deployment_id=DeploymentID("Prefill:m", "app")),
            servable_object=lambda: None,
            _deployment_config=None,
            rank=ReplicaRank(rank=rank, node_rank=0, local_rank=rank),
            world_size=4,
        )
        monkeypatch.setattr(serve, "get_replica_context", lambda: context)
        backend = PDConnectorBackend(config(role, rest.pop("extra", {}), **rest))
        backend.setup()
        return backend

    return made


def given(backend: PDConnectorBackend) -> tuple[str, str, int]:
    """Engine id and side channel, as the replica's engine is configured."""
    transfer = backend.llm_config.engine_kwargs["kv_transfer_config"]
    return transfer["engine_id"], *parse_config(transfer["kv_connector_extra_config"]).side_channel(0)


def test_no_two_replicas_share_an_address_or_a_name(replica: Replica) -> None:
    replicas = [
        given(replica(role, rank, f"{role}{rank}")) for role in ("kv_producer", "kv_consumer") for rank in range(3)
    ]
    assert len({(host, port) for _, host, port in replicas}) == len({name for name, _, _ in replicas}) == 6
    assert {host for _, host, _ in replicas} == {NODE}
    assert [port for _, _, port in replicas] == [5600, 5601, 5602, 6600, 6601, 6602]


def test_a_replica_that_takes_anothers_place_has_its_port_and_a_name_of_its_own(replica: Replica) -> None:
    (first, *there), (second, *same) = given(replica(rank=1, name="old")), given(replica(rank=1, name="new"))
    assert there == same and (first, second) == ("old", "new")


def test_what_the_application_sets_is_where_the_replicas_begin(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {"side_channel_host": "127.0.0.1", "side_channel_port": 7000}
    assert given(replica(rank=2, extra=extra)) == ("r0", "127.0.0.1", 7002)
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.9.9.9")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "7100")
    assert given(replica(rank=2)) == ("r0", "10.9.9.9", 7102)


def test_data_parallel_replicas_have_ports_for_their_engines(replica: Replica) -> None:
    said = [
        replica(rank=rank, name=f"r{rank}", data_parallel_size=2, data_parallel_rank=rank % 2).replica_metadata()
        for rank in range(4)
    ]
    assert [one["side_channel_port"] for one in said] == ["5600", "5603", "5604", "5607"]
    assert [one["engine_id"] for one in said] == ["r0_dp0", "r1_dp1", "r2_dp0", "r3_dp1"]


def test_a_key_that_does_not_exist_stops_the_replica(replica: Replica) -> None:
    with pytest.raises(InvalidConfig, match="side_chanel_host"):
        replica(extra={"side_chanel_host": "127.0.0.1"})


REQUESTS = {
    "completion": CompletionRequest(
        model="m", prompt=[1, 2, 3], max_tokens=50, min_tokens=4, stream=True, stream_options={"include_usage": True}
    ),
    "chat": ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "P/D"}], max_completion_tokens=50, min_tokens=4, stream=True
    ),
}


class Answer:
    """What Ray takes of a prefill replica's response."""

    def __init__(self, params: object) -> None:
        self.kv_transfer_params = params


@pytest.mark.parametrize("mode", ["pull", "auto", "push"])
@pytest.mark.parametrize("kind", REQUESTS)
def test_the_first_leg_computes_the_prompt_and_keeps_the_cache(kind: str, mode: str, replica: Replica) -> None:
    request = REQUESTS[kind]
    before = request.model_dump()
    leg = replica("kv_consumer", extra={"mode": mode}).prepare_prefill_request(request=request, peer={})
    parse_remote_decode(leg.kv_transfer_params)
    after = leg.model_dump()
    assert {**after, "max_tokens": 1, "min_tokens": 0, "stream": False, "stream_options": None} == after
    assert after.get("max_completion_tokens", 1) == 1
    same = ("prompt", "model") if kind == "completion" else ("messages", "model")
    assert [after[name] for name in same] == [before[name] for name in same]
    leg.to_sampling_params(1, {})  # what the engine makes of it; a minimum above one token is refused there
    assert request.model_dump() == before


@pytest.mark.parametrize("extra", [{}, {"mode": "auto"}, {"mode": "push", "params_secret": "file"}], ids=str)
def test_decode_waits_for_the_answer_where_it_needs_it(extra: dict[str, Any], replica: Replica) -> None:
    decode = replica("kv_consumer", extra=extra)
    assert (decode.requires_peer_binding, decode.concurrent_handoff) == (False, False)
    request = REQUESTS["completion"]
    leg = decode.prepare_decode_request(request=request, peer=None, prefill_response=Answer(handed_over()))
    assert parse_remote_prefill(leg.kv_transfer_params).remote_engine_id == "p-0"
    assert leg.model_dump() == request.model_dump() | {"kv_transfer_params": leg.kv_transfer_params}


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}], ids=str)
def test_a_prefill_that_hands_nothing_over_fails_the_request(params: object, replica: Replica) -> None:
    with pytest.raises(HTTPException) as refused:
        replica("kv_consumer").prepare_decode_request(
            request=REQUESTS["completion"], peer=None, prefill_response=Answer(params)
        )
    assert refused.value.status_code == 502 and "prefill instance answered" in refused.value.detail


def test_in_mode_push_both_legs_run_at_once_and_find_each_other(replica: Replica) -> None:
    extra = {"mode": "push"}
    prefill, decode = replica(name="p7", rank=1, extra=extra), replica("kv_consumer", name="d0", extra=extra)
    assert (decode.requires_peer_binding, decode.concurrent_handoff) == (True, True)
    peer, request = prefill.replica_metadata(), REQUESTS["chat"]
    first = decode.prepare_prefill_request(request=request, peer=peer)
    second = decode.prepare_decode_request(request=request, peer=peer, prefill_response=None)
    told = parse_remote_push(second.kv_transfer_params)
    assert (told.remote_engine_id, told.remote_host, told.remote_port) == ("p7", NODE, 5601)
    names = {pairing_name(leg.kv_transfer_params, f"chatcmpl-{i}") for i, leg in enumerate((first, second))}
    assert names == {request.request_id}


@pytest.mark.parametrize(
    ("extra", "said"), [(None, "says nothing"), ({}, "'serial' \\(mode 'pull'\\)"), ("bad", "without role")]
)
def test_a_prefill_replica_that_does_not_write_is_refused(extra: Any, said: str, replica: Replica) -> None:
    peer = extra if extra is None else {"x": "y"} if extra == "bad" else replica(extra=extra).replica_metadata()
    decode = replica("kv_consumer", extra={"mode": "push"})
    with pytest.raises(HTTPException, match=said) as refused:
        decode.prepare_decode_request(request=REQUESTS["chat"], peer=peer, prefill_response=None)
    assert refused.value.status_code == 502


@pytest.mark.parametrize(
    "changed",
    [
        {"n": 2},
        {"prompt": [[1, 2], [3]]},
        {"use_beam_search": True},
        {"kv_transfer_params": {"do_remote_decode": True}},
    ],
    ids=str,
)
def test_what_one_cache_cannot_serve_is_the_clients_error(changed: dict[str, Any], replica: Replica) -> None:
    request = REQUESTS["completion"].model_copy(update=changed)
    with pytest.raises(HTTPException) as refused:
        replica("kv_consumer").prepare_prefill_request(request=request, peer=None)
    assert refused.value.status_code == 400 and next(iter(changed)) in refused.value.detail


@pytest.fixture
def unregistered() -> Any:
    yield
    KVConnectorBackendFactory.unregister_backend("PDConnector")


@pytest.mark.usefixtures("unregistered")
def test_ray_makes_the_backend_once_it_is_registered() -> None:
    register()
    register()  # an application that is deployed again
    assert isinstance(
        KVConnectorBackendFactory.create_backend("PDConnector", config("kv_consumer", {})), PDConnectorBackend
    )


@pytest.mark.usefixtures("unregistered")
def test_the_builder_for_config_files_is_rays_with_the_backend() -> None:
    arguments = {
        "prefill_config": config("kv_producer", {}, tensor_parallel_size=1),
        "decode_config": config("kv_consumer", {}),
    }
    app = build_pd_openai_app(arguments)
    assert type(app).__name__ == "Application" and KVConnectorBackendFactory.is_registered("PDConnector")


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.usefixtures("unregistered")
def test_beside_other_connectors_the_first_ones_backend_is_used(mode: str, replica: Replica) -> None:
    """Ray's MultiConnector copies the entry of a connector, but not its extra configuration, which must be there."""
    register()
    ours = {"kv_connector": "PDConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"mode": mode}}
    replica()  # a context to be set up in
    llm = config("kv_both", {"connectors": [ours]})
    backend = KVConnectorBackendFactory.create_backend("MultiConnector", llm)
    backend.setup()
    assert backend.concurrent_handoff is (mode == "push")
    [entry] = llm.engine_kwargs["kv_transfer_config"]["kv_connector_extra_config"]["connectors"]
    assert entry["kv_connector_extra_config"] == {
        "mode": mode, "side_channel_host": NODE, "side_channel_port": 6600
    }  # fmt: skip
