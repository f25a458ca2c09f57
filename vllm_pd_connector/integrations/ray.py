"""Ray Serve LLM: the backend by which its P/D application runs `PDConnector` (extra `ray`).

Ray calls `PDConnectorBackend.setup` in each replica before its engine starts, which is where a replica gets what must
differ between replicas: the host and port of its side channel, and its engine id. Decode replicas orchestrate: they
ask the backend for both legs of every request. As behind any router the legs run one after the other where decode
needs the prefill's answer, and at once in mode push without keys (`Config.handoff`). For the latter Ray chooses the
prefill replica first, and the backend is given what that replica says of itself (`replica_metadata`): the labels that
an instance has on `/metrics`.

A Ray Serve config file takes `build_pd_openai_app` from here instead of from Ray; an application in Python calls
`register` before Ray's own builder.

Source: Ray 2.60, `ray/llm/_internal/serve/engines/vllm/kv_transfer/base.py` and
`ray/llm/_internal/serve/serving_patterns/prefill_decode/pd_server.py`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from fastapi import HTTPException
from ray import serve
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import BaseConnectorBackend
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory

from vllm_pd_connector.config import DEFAULT_SIDE_CHANNEL_PORT, parse_config
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.instance_info import EngineInfo, of_labels
from vllm_pd_connector.routing.handoff import check_client_body, decode_body, decode_body_beside, prefill_body

if TYPE_CHECKING:
    from collections.abc import Mapping

CONNECTOR = "PDConnector"
DECODE_PORT = DEFAULT_SIDE_CHANNEL_PORT + 1000
"""First side-channel port of decode replicas unless one is set: behind those of prefill replicas on the same node."""

R = TypeVar("R")


def register() -> None:
    """Make the backend known to every process of the Ray cluster, once; again is no error."""
    if not KVConnectorBackendFactory.is_registered(CONNECTOR):
        KVConnectorBackendFactory.register_backend(CONNECTOR, f"{__name__}:{PDConnectorBackend.__name__}")


def build_pd_openai_app(pd_serving_args: dict[str, Any]) -> Any:
    """Ray's builder of the same name, with the backend registered: for `import_path` of a Ray Serve config file."""
    from ray.serve.llm import build_pd_openai_app as build

    register()
    return build(pd_serving_args)


class PDConnectorBackend(BaseConnectorBackend):  # type: ignore[misc]  # Ray's internals are read without types
    """Addresses and names of one replica, and the two legs of its requests."""

    def __init__(self, llm_config: Any) -> None:
        super().__init__(llm_config)
        self._own: EngineInfo | None = None

    # -- a replica -----------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Give this replica a side channel and an engine id of its own, in the configuration that its engine gets.

        `side_channel_port` is the first port; a replica adds its rank among the deployment's replicas. A replica that
        replaces another has that one's port and a new engine id, so nothing of the former is taken for its own.

        Raises:
            InvalidConfig: as `parse_config`, or the port is outside 1..65535.
        """
        transfer = self.kv_transfer_config
        extra: dict[str, Any] = transfer.setdefault("kv_connector_extra_config", {})
        config = parse_config(extra)
        replica = serve.get_replica_context()
        dp_size = self._size("data_parallel_size")
        dp_rank = self.llm_config.engine_kwargs.get("data_parallel_rank") or 0
        extra["side_channel_host"] = (
            config.side_channel_host
            or os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST")
            or ray.util.get_node_ip_address()  # the address by which other nodes reach this one
        )
        first = DECODE_PORT if transfer.get("kv_role") == "kv_consumer" else DEFAULT_SIDE_CHANNEL_PORT
        if config.side_channel_port is not None or "VLLM_NIXL_SIDE_CHANNEL_PORT" in os.environ:
            _, first = config.side_channel(0)
        # An engine adds its data-parallel index, so each replica has as many ports as there are.
        extra["side_channel_port"] = first + replica.rank.rank * dp_size
        name = [transfer["engine_id"]] if transfer.get("engine_id") else []
        transfer["engine_id"] = "-".join([*name, replica.replica_id.unique_id])

        config = parse_config(extra)
        host, port = config.side_channel(dp_rank if dp_size > 1 else 0)
        self._own = EngineInfo(
            role=str(transfer.get("kv_role")),
            mode=config.mode,
            handoff=config.handoff,
            transport=config.transport,
            engine_id=f"{transfer['engine_id']}_dp{dp_rank}" if dp_size > 1 else transfer["engine_id"],
            side_channel_host=host,
            side_channel_port=port,
            tp_size=self._size("tensor_parallel_size"),
            pp_size=self._size("pipeline_parallel_size"),
            dcp_size=self._size("decode_context_parallel_size"),
            dp_size=dp_size,
        )
        of_labels(self._own.labels())  # what no peer would accept fails here

    def replica_metadata(self) -> dict[str, str]:
        """What this replica says of itself, for the decode replica that chose it; empty before `setup`."""
        return {} if self._own is None else self._own.labels()

    def _size(self, name: str) -> int:
        return int(self.llm_config.engine_kwargs.get(name) or 1)

    # -- a request -----------------------------------------------------------------------------------------------------

    @property
    def _together(self) -> bool:
        """Whether both legs run at once. Asked of every replica, and before `setup` by Ray's MultiConnector."""
        if self._own is not None:
            return self._own.handoff == "concurrent"
        return parse_config(self.kv_transfer_config.get("kv_connector_extra_config") or {}).handoff == "concurrent"

    @property
    def requires_peer_binding(self) -> bool:
        return self._together

    @property
    def concurrent_handoff(self) -> bool:
        return self._together

    def prepare_prefill_request(self, *, request: R, peer: Mapping[str, Any] | None) -> R:
        """The first leg: the same prompt, one token, and the cache kept.

        Raises:
            HTTPException: 400, a request that one cache cannot serve.
        """
        fields = type(request).model_fields  # type: ignore[attr-defined]  # a pydantic model of Ray's
        sent = {name: value for name, value in dict(request).items() if name in fields}  # type: ignore[call-overload]
        try:
            check_client_body(sent)
        except ProtocolError as error:
            raise HTTPException(400, str(error)) from error
        leg = prefill_body(sent, _transfer_id(request) if self._together else None)
        left_out = {name: fields[name].get_default(call_default_factory=True) for name in sent.keys() - leg.keys()}
        changed = {name: value for name, value in leg.items() if sent.get(name) is not value}
        return _copy(request, left_out | changed)

    def prepare_decode_request(self, *, request: R, peer: Mapping[str, Any] | None, prefill_response: Any) -> R:
        """The second leg: the client's request, and where its cache is.

        Raises:
            HTTPException: 502, the prefill replica handed nothing over, or is not one that writes.
        """
        try:
            if self._together:
                body = decode_body_beside({}, _writer(peer), _transfer_id(request))
            else:
                body = decode_body({}, {"kv_transfer_params": prefill_response.kv_transfer_params})
        except ProtocolError as error:
            raise HTTPException(502, str(error)) from error
        return _copy(request, body)


def _copy(request: R, changes: Mapping[str, Any]) -> R:
    copied: R = request.model_copy(deep=True, update=dict(changes))  # type: ignore[attr-defined]
    return copied


def _transfer_id(request: Any) -> str:
    """By which the two legs find each other. Ray gives each request an id, unless the client did."""
    return str(request.request_id)


def _writer(peer: Mapping[str, Any] | None) -> EngineInfo:
    """The chosen prefill replica. Raises ProtocolError if it does not say that it takes both legs at once."""
    if not peer:
        raise ProtocolError(
            f"the prefill replica says nothing of itself; give it the connector {CONNECTOR} and register its backend"
        )
    engine = of_labels(peer)
    if engine.handoff != "concurrent":
        raise ProtocolError(
            f"handoff: {engine.handoff!r} (mode {engine.mode!r}) on the prefill replica, 'concurrent' (mode 'push') on "
            "the decode replica; give both the same mode and the same keys"
        )
    return engine
